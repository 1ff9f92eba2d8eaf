"""Requirements of a billion passages: the tables of docs/scale.md, computed from measured rates.

    python -m benchmarks.scale [--passages 1000000000] [--write docs/scale.md]

Without `--write` the tables are printed.
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
DIMENSIONS = (384, 768, 1024)
DEVICES = (1, 8, 64, 512)
TEXT_BYTES = 550  # of a passage of 117 tokens, the mean of the length distribution that rates were measured on
HNSW_LINK_BYTES = 272  # per embedding, of FAISS's HNSW with 32 neighbours, without the embedding: measured on 20,000
IVF_ID_BYTES = 8  # per embedding, without the code
LISTS_FACTOR = 4  # inverted lists per square root of the number of embeddings
TRAINING_SAMPLE = 40  # embeddings per inverted list
FLOPS = 300e9  # of fp32 GEMM on two Xeon cores, measured
PGVECTOR_BYTES = 230  # per embedding, of pgvector's HNSW with 16 neighbours, without the fp16 embedding: page layout
PRICES = {"GPU": 4.00, "core": 0.05}  # dollars per hour: assumptions


@dataclass(frozen=True)
class Rate:
    """Passages per second of one device."""

    name: str
    device: str  # GPU or core
    rate: float
    system: str
    file: str  # the file of this repository with the measurement


RESULTS = "benchmarks/RESULTS.md"
RATES = (
    Rate("all-MiniLM-L6-v2, fp32, sentences, from file to .npy", "GPU", 4_286, "Bertie", RESULTS),
    Rate("all-MiniLM-L6-v2, bf16, 53 tokens, from text", "GPU", 6_130, "sentence-transformers", RESULTS),
    Rate("all-MiniLM-L6-v2, bf16, 53 tokens, from text", "GPU", 73_400, "Bertie", RESULTS),
    Rate("MiniLM-L6, bf16, 117 tokens, from token ids", "GPU", 145_500, "Bertie", RESULTS),
    Rate("BERT-base, bf16, 117 tokens, from token ids", "GPU", 25_200, "Bertie", RESULTS),
    Rate("BERT-large, bf16, 117 tokens, from token ids", "GPU", 7_610, "Bertie", RESULTS),
    Rate("all-MiniLM-L6-v2, fp32, paragraphs", "core", 23.4, "Bertie", "docs/bertie-small.md"),
    Rate("all-MiniLM-L6-v2, fp32, sentences", "core", 308.9, "Bertie", "docs/bertie-small.md"),
)


def size_table(passages: int) -> str:
    """Storage of the embeddings."""
    bytes_per_embedding = {
        "fp32": lambda dimension: 4 * dimension,
        "fp16": lambda dimension: 2 * dimension,
        "int8 with one scale": lambda dimension: dimension + 4,
        "binary": lambda dimension: dimension // 8,
        "PQ, one byte per eight dimensions": lambda dimension: dimension // 8,
    }
    rows = []
    for name, count in bytes_per_embedding.items():
        rows.append([name, *(f"{count(d):,} B · {format_bytes(count(d) * passages)}" for d in DIMENSIONS)])
    return table(["precision", *(f"dimension {dimension}" for dimension in DIMENSIONS)], rows)


def time_table(passages: int) -> str:
    """Time and cost of embedding."""
    rows = []
    for rate in RATES:
        hours = passages / rate.rate / 3600
        times = [duration(hours / count) for count in DEVICES]
        cost = f"${hours * PRICES[rate.device]:,.0f}"
        rows.append([rate.name, f"{rate.rate:,} per {rate.device}", rate.system, *times, cost])
    devices = [f"{count} device{'s' * (count > 1)}" for count in DEVICES]
    return table(["measurement", "passages/s", "system", *devices, "cost"], rows)


def bandwidth_table() -> str:
    """Bandwidth that disks and network must have."""
    rows = []
    for rate in (4_286, 25_200, 145_500):
        for count in (8, 64):
            total = rate * count
            bandwidths = [f"{format_bytes(total * size)}/s" for size in (TEXT_BYTES, 4 * DIMENSIONS[0])]
            rows.append([f"{count} at {rate:,}/s", *bandwidths, f"{total / ROWS_PER_SHARD:,.0f}"])
    return table(["devices", "text in", "embeddings out, 384 × fp32", "shards/s"], rows)


def index_table() -> str:
    """The index for each number of passages, for dimension 384."""
    dimension, thresholds = DIMENSIONS[0], IndexThresholds()
    rows = []
    for n in (10_000, 1_000_000, 10_000_000, 100_000_000, BILLION):
        lists = int(LISTS_FACTOR * n**0.5)
        codes = n * (dimension // 8 + IVF_ID_BYTES)
        if n <= thresholds.flat:
            kind, memory = "flat (exhaustive)", n * 4 * dimension
        elif n <= thresholds.hnsw:
            kind, memory = "HNSW over int8", n * (dimension + HNSW_LINK_BYTES)
        else:
            kind, memory = f"IVF{lists:,}, PQ{dimension // 8}", codes + lists * 4 * dimension
        disk, pgvector = n * (4 * dimension + TEXT_BYTES), n * (2 * dimension + PGVECTOR_BYTES)
        rows.append([f"{n:,}", kind, *map(format_bytes, (memory, disk, pgvector, codes))])
    return table(
        ["passages", "index in a folder", "memory", "embeddings and texts on disk", "pgvector HNSW", "LanceDB codes"],
        rows,
    )


def build_table(passages: int) -> str:
    """Cost of building IVF."""
    dimension = DIMENSIONS[0]
    rows = []
    for n in (10_000_000, 100_000_000, passages):
        lists = int(LISTS_FACTOR * n**0.5)
        flop = 2.0 * n * lists * dimension
        sample = format_bytes(TRAINING_SAMPLE * lists * 4 * dimension)
        rows.append([f"{n:,}", f"{lists:,}", sample, f"{flop:.1e}", duration(flop / FLOPS / 3600)])
    return table(["passages", "inverted lists", "training sample", "FLOP of the assignment", "on two cores"], rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_bytes(size: float) -> str:
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
        "sizes": size_table(passages),
        "times": time_table(passages),
        "bandwidth": bandwidth_table(),
        "indexes": index_table(),
        "build": build_table(passages),
    }


def fill_tables(page: str, passages: int = BILLION) -> str:
    """Insert each table between its two markers."""
    for name, text in tables(passages).items():
        markers = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, count = re.subn(markers, lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
        assert count == 1, name
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=BILLION)
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the tables into a page, between their markers"
    )
    args = parser.parse_args()
    if args.write is not None:
        args.write.write_text(fill_tables(args.write.read_text("utf-8"), args.passages), "utf-8")
        return
    for name, text in tables(args.passages).items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
