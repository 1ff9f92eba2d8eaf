"""How an index grows: build time by stage, memory, size on disk, and how fast and how well it finds, by its size.

    python -m benchmarks.million FOLDER [--sizes 10000,100000,1000000] [--json FILE] [--plot FILE.svg]

FOLDER holds `passages.txt` (a passage a line), `vectors.npy` (a row a passage, of any length and any type) and
`queries.npy`, as `bertie embed` writes them: encoding is not what is measured here. For each size a fresh index is
built in a process of its own, as `bertie index` does it: passages and vectors committed, then `optimize`. Then the
queries are asked one at a time. Recall is against all inner products. Beside it: FAISS used directly, on the very graph
that the index has, at several efforts: the difference is what the layers above it cost.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bertie.evaluate.plots import Line, lines
from bertie.search.embedded import EmbeddedStore
from bertie.search.lexical import Lexical, Words
from bertie.search.passages import Document, Entry, Passage

AT_ONCE = 16_384
A_DOCUMENT = 16  # passages
K = 10


def normalized(rows: Any) -> Any:
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def entries(texts: list[str], vectors: Any, first: int) -> list[Entry]:
    """Passages as documents of several each."""
    out = []
    for at in range(0, len(texts), A_DOCUMENT):
        some = texts[at : at + A_DOCUMENT]
        name = f"document {first + at}"
        passages, place = [], 0
        for text in some:
            passages.append(Passage(name, place, place + len(text), text))
            place += len(text) + 1
        out.append(Entry(Document(name, "\n".join(some)), passages, vectors[at : at + A_DOCUMENT]))
    return out


def one_by_one(ask: Any, queries: Any) -> tuple[list[Any], list[float]]:
    """What is found for each query, and how long it took, in ms."""
    found, took = [], []
    for query in queries:
        began = time.perf_counter()
        found.append(ask(query[None]))
        took.append(1e3 * (time.perf_counter() - began))
    return found, took


def recall(found: list[Any], truth: Any) -> float:
    return float(np.mean([len(np.intersect1d(one[:K], two)) / K for one, two in zip(found, truth, strict=True)]))


def exact(vectors: Any, queries: Any, count: int) -> Any:
    """(Q, K) the rows of the largest inner products."""
    best_scores = np.full((len(queries), K), -np.inf, np.float32)
    best_rows = np.zeros((len(queries), K), np.int64)
    for start in range(0, count, AT_ONCE):
        block = normalized(vectors[start : min(count, start + AT_ONCE)])
        scores = np.concatenate([best_scores, queries @ block.T], 1)
        rows = np.concatenate(
            [best_rows, np.broadcast_to(np.arange(start, start + len(block)), scores[:, K:].shape)], 1
        )
        top = np.argpartition(-scores, K, axis=1)[:, :K]
        best_scores, best_rows = np.take_along_axis(scores, top, 1), np.take_along_axis(rows, top, 1)
    return best_rows


def spread(took: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(took), "p95_ms": float(np.quantile(took, 0.95))}


def measure(folder: Path, count: int, asked: int, lexical: bool) -> dict[str, Any]:
    """Build and ask one index."""
    import faiss

    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    queries = normalized(np.load(folder / "queries.npy")[:asked])
    row: dict[str, Any] = {"passages": count, "threads": faiss.omp_get_max_threads()}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        at = Path(place, "index")
        store = EmbeddedStore.create(at, vectors.shape[1], {"model": "all-MiniLM-L6-v2"})
        began = time.perf_counter()
        with open(folder / "passages.txt", encoding="utf-8") as file:
            for start in range(0, count, AT_ONCE):
                texts = [line.rstrip("\n") for line in islice(file, min(AT_ONCE, count - start))]
                store.commit(entries(texts, normalized(vectors[start : start + len(texts)]), start))
        row["commit_s"] = time.perf_counter() - began
        began = time.perf_counter()
        store.optimize(whole=True)
        row["optimize_s"] = time.perf_counter() - began
        store.close()
        began = time.perf_counter()
        store = EmbeddedStore.open(at)
        row["open_s"] = time.perf_counter() - began
        row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sizes = {file: file.stat().st_size for file in at.rglob("*") if file.is_file()}
        row["disk_mb"] = sum(sizes.values()) / 1e6
        row["files_mb"] = {}
        for file, size in sizes.items():
            row["files_mb"][file.name] = row["files_mb"].get(file.name, 0) + size / 1e6
        truth = exact(vectors, queries, count)
        store.nearest(queries[:1], K)
        found, took = one_by_one(lambda query: store.nearest(query, K)[0][0], queries)
        first = next(iter(store.texts()))[0]
        row |= spread(took) | {"recall": recall([keys - first for keys in found], truth)}
        graphs = [file for file in sizes if file.name == "index.faiss"]
        if len(graphs) == 1:
            index = faiss.read_index(str(graphs[0]), faiss.IO_FLAG_MMAP_IFC)
            for effort in (16, 32, 64, 128, 256, 512):
                index.hnsw.efSearch = effort
                found, took = one_by_one(lambda query: index.search(query, K)[1][0], queries)
                row.setdefault("faiss", []).append({"efSearch": effort, "recall": recall(found, truth), **spread(took)})
        if lexical:
            began = time.perf_counter()
            Lexical.build(store.texts(), Words())
            row["bm25_s"] = time.perf_counter() - began
        store.close()
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    out = [
        "| passages | commit, s | graph, s | BM25, s | memory, MB | disk, MB | recall@10 | median, ms | 95% | FAISS |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = [one for one in row.get("faiss", []) if one["recall"] >= min(0.95, row["recall"])]
        peer = min(peers, key=lambda one: one["median_ms"], default=None)
        said = "" if peer is None else f"{peer['median_ms']:.2f} ms at recall {peer['recall']:.3f}"
        out.append(
            f"| {row['passages']:,} | {row['commit_s']:.0f} | {row['optimize_s']:.0f} | {row.get('bm25_s', 0):.0f} "
            f"| {row['peak_mb']:,.0f} "
            f"| {row['disk_mb']:,.0f} | {row['recall']:.4f} | {row['median_ms']:.2f} | {row['p95_ms']:.2f} | {said} |"
        )
    return "\n".join(out)


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.million", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[10**4, 10**5, 10**6]
    )
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--lexical", action="store_true", help="time BM25's index, too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.folder, options.only, options.queries, options.lexical)))
        return
    rows = []
    for count in options.sizes:
        command = [sys.executable, "-m", "benchmarks.million", str(options.folder), "--only", str(count)]
        command += ["--queries", str(options.queries), *(["--lexical"] if options.lexical else [])]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout
        rows.append(json.loads(said.splitlines()[-1]))
        print(table(rows[-1:]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        sizes = [float(np.log10(row["passages"])) for row in rows]
        drawn = [
            Line(name, list(zip(sizes, [row[key] / each for row in rows], strict=True)), style, dots=True)
            for name, key, each, style in (
                ("a query, ms", "median_ms", 1, "a"),
                ("building, minutes", "optimize_s", 60, "b"),
                ("disk, GB", "disk_mb", 1000, "faint"),
            )
        ]
        options.plot.write_text(lines("What an index takes, by its size", drawn, "passages, as a power of ten", ""))
    print(table(rows))


if __name__ == "__main__":
    main()
