"""What a billion passages take: the tables of docs/scale.md, computed from measured rates.

    python -m benchmarks.scale [--passages 1000000000] [--write docs/scale.md]

Without `--write` the tables are printed. Where a rate comes from stands beside it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertie.cluster import ROWS_PER_SHARD
from bertie.search.segments import IndexThresholds

BILLION = 1_000_000_000
WIDTHS = (384, 768, 1024)
DEVICES = (1, 8, 64, 512)
TEXT = 550  # bytes of a passage of 117 tokens, the mean of the length mix that rates were measured on
LINKS = 272  # bytes a vector of FAISS's HNSW with 32 neighbours, beside the vector: measured on 20,000
NUMBER = 8  # bytes a vector of an inverted list, beside the code
LISTS = 4  # times the square root of the vectors: inverted lists
SAMPLE = 40  # vectors a list to train on
FLOPS = 300e9  # fp32 products on two Xeon cores, measured
PAGES = 230  # bytes a vector of pgvector's HNSW with 16 neighbours, beside the halved vector: by its page layout
PRICES = {"GPU": 4.00, "core": 0.05}  # dollars an hour: assumed, not measured; put your own


@dataclass(frozen=True)
class Rate:
    """Passages a second of one device."""

    what: str
    device: str  # GPU or core
    rate: float
    whose: str
    where: str | None = None  # the file of this repository that says so


RATES = (
    Rate("Bertie, all-MiniLM-L6-v2, fp32, sentences, file to .npy", "GPU", 4286, "ours", "benchmarks/RESULTS.md"),
    Rate("sentence-transformers, all-MiniLM-L6-v2, 53 tokens, end to end", "GPU", 8_100, "a peer's"),
    Rate("packed prototype, MiniLM-L6, bf16, 117 tokens, the model alone", "GPU", 93_000, "a prototype's"),
    Rate("packed prototype, BERT-base, bf16, 117 tokens, the model alone", "GPU", 20_500, "a prototype's"),
    Rate("packed prototype, BERT-large, bf16, 117 tokens, the model alone", "GPU", 6_500, "a prototype's"),
    Rate("Bertie, all-MiniLM-L6-v2, fp32, paragraphs", "core", 23.4, "ours", "docs/bertie-small.md"),
    Rate("Bertie, all-MiniLM-L6-v2, fp32, sentences", "core", 308.9, "ours", "docs/bertie-small.md"),
)


def sizes(passages: int) -> str:
    """Bytes of the vectors alone."""
    kinds = {
        "fp32": lambda width: 4 * width,
        "fp16": lambda width: 2 * width,
        "int8, with a scale": lambda width: width + 4,
        "binary, a bit a number": lambda width: width // 8,
        "PQ, a byte for eight numbers": lambda width: width // 8,
    }
    rows = [[name, *(f"{of(w):,} B · {large(of(w) * passages)}" for w in WIDTHS)] for name, of in kinds.items()]
    return table(["kept as", *(f"{w} numbers" for w in WIDTHS)], rows)


def hours(passages: int) -> str:
    """How long, and for how much."""
    rows = []
    for one in RATES:
        alone = passages / one.rate / 3600
        cells = [duration(alone / count) for count in DEVICES]
        rows.append(
            [one.what, f"{one.rate:,} a {one.device}", one.whose, *cells, f"${alone * PRICES[one.device]:,.0f}"]
        )
    return table(
        ["what was measured", "passages/s", "whose rate", *(f"{n} device{'s' * (n > 1)}" for n in DEVICES), "cost"],
        rows,
    )


def flow() -> str:
    """What the disks and the network must carry while that goes on."""
    rows = []
    for rate in (4_286, 20_500, 93_000):
        for count in (8, 64):
            total = rate * count
            carried = [f"{large(total * size)}/s" for size in (TEXT, 4 * WIDTHS[0])]
            rows.append([f"{count} at {rate:,}/s", *carried, f"{total / ROWS_PER_SHARD:,.0f}"])
    return table(["devices", "text in", "vectors out, 384 × fp32", "shards a second"], rows)


def indexes() -> str:
    """Which index at which size, with vectors of 384 numbers."""
    width, limits = WIDTHS[0], IndexThresholds()
    rows = []
    for n in (10_000, 1_000_000, 10_000_000, 100_000_000, BILLION):
        stored = n * (4 * width + TEXT)
        lists = int(LISTS * n**0.5)
        if n <= limits.flat:
            kind, hot = "flat, exact", n * 4 * width
        elif n <= limits.graph:
            kind, hot = "HNSW over int8", n * (width + LINKS)
        else:
            kind, hot = f"IVF{lists:,}, PQ{width // 8}", n * (width // 8 + NUMBER) + lists * 4 * width
        rows.append(
            [
                f"{n:,}",
                kind,
                large(hot),
                large(stored),
                large(n * (2 * width + PAGES)),
                large(n * (width // 8 + NUMBER)),
            ]
        )
    titles = ["passages", "embedded index", "searched in memory", "vectors and texts on disk"]
    return table([*titles, "pgvector's graph", "LanceDB's codes"], rows)


def building(passages: int) -> str:
    """What inverted lists cost to make."""
    width = WIDTHS[0]
    rows = []
    for n in (10_000_000, 100_000_000, passages):
        lists = int(LISTS * n**0.5)
        products = 2.0 * n * lists * width
        sample, hours = large(SAMPLE * lists * 4 * width), products / FLOPS / 3600
        rows.append([f"{n:,}", f"{lists:,}", sample, f"{products:.1e}", duration(hours)])
    return table(["passages", "lists", "training sample", "products to assign all", "on two cores"], rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def large(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
        size /= 1000
    raise AssertionError


def duration(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.0f} min" if hours * 60 >= 1 else f"{hours * 3600:.0f} s"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:,.0f} days"


def tables(passages: int = BILLION) -> dict[str, str]:
    return {
        "sizes": sizes(passages),
        "hours": hours(passages),
        "flow": flow(),
        "indexes": indexes(),
        "building": building(passages),
    }


def filled(page: str, passages: int = BILLION) -> str:
    """The page with each table between its two marks."""
    for name, text in tables(passages).items():
        marks = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(marks, lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)
        assert count == 1, name
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=BILLION)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into a page, between their marks")
    args = parser.parse_args()
    if args.write is not None:
        args.write.write_text(filled(args.write.read_text("utf-8"), args.passages), "utf-8")
        return
    for name, text in tables(args.passages).items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
