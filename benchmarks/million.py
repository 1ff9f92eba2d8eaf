"""Scaling of an index: build time by stage, memory, disk, latency and recall, by number of passages.

    python -m benchmarks.million FOLDER [--sizes 10000,100000,1000000] [--json FILE] [--plot FILE.svg]

FOLDER contains `passages.txt` (one passage per line), `vectors.npy` (one embedding per passage, of any
norm and type), `queries.txt` and `queries.npy`, as `bertie embed` writes them: encoding is not measured
here. For each size an index is built in a separate process, as `bertie index` does it: commits, then
`optimize`, then BM25. It stays in FOLDER and is reused. Then queries are run one at a time. Recall is
against exhaustive search. For comparison, FAISS is used directly on the same HNSW graph at several
values of efSearch, with and without its own rescoring: the difference is the overhead of Bertie.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve_plot import STYLE
from bertie.evaluation.plots import Line, lines
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import refresh_bm25
from bertie.search.local_store import LocalStore
from bertie.search.records import Document, EmbeddedDocument, Passage

BATCH = 16_384
PASSAGES_PER_DOCUMENT = 16
K = 10
EF_SEARCH = (32, 64, 96, 128, 192, 256, 384, 512, 768)


def normalize(rows: Any) -> Any:
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make_documents(texts: list[str], embeddings: Any, first: int) -> list[EmbeddedDocument]:
    """Group passages into documents."""
    documents = []
    for at in range(0, len(texts), PASSAGES_PER_DOCUMENT):
        group = texts[at : at + PASSAGES_PER_DOCUMENT]
        name = f"document {first + at}"
        passages, place = [], 0
        for text in group:
            passages.append(Passage(name, place, place + len(text), text))
            place += len(text) + 1
        documents.append(
            EmbeddedDocument(Document(name, "\n".join(group)), passages, embeddings[at : at + PASSAGES_PER_DOCUMENT])
        )
    return documents


def time_queries(search: Any, queries: Any) -> tuple[list[Any], list[float]]:
    """Return the result of each query, and its latency in ms."""
    results, latencies = [], []
    for query in queries:
        began = time.perf_counter()
        results.append(search(query[None]))
        latencies.append(1e3 * (time.perf_counter() - began))
    return results, latencies


def recall(retrieved: list[Any], truth: Any) -> float:
    return float(
        np.mean(
            [len(np.intersect1d(rows[:K], exact_rows)) / K for rows, exact_rows in zip(retrieved, truth, strict=True)]
        )
    )


def exhaustive_search(vectors: Any, queries: Any, count: int) -> Any:
    """Return the rows of the largest inner products, (Q, K)."""
    best_scores = np.full((len(queries), K), -np.inf, np.float32)
    best_rows = np.zeros((len(queries), K), np.int64)
    for start in range(0, count, BATCH):
        block = normalize(vectors[start : min(count, start + BATCH)])
        scores = np.concatenate([best_scores, queries @ block.T], 1)
        rows = np.concatenate(
            [best_rows, np.broadcast_to(np.arange(start, start + len(block)), scores[:, K:].shape)], 1
        )
        top = np.argpartition(-scores, K, axis=1)[:, :K]
        best_scores, best_rows = np.take_along_axis(scores, top, 1), np.take_along_axis(rows, top, 1)
    return best_rows


def summarize(latencies: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(latencies), "p95_ms": float(np.quantile(latencies, 0.95))}


def build(folder: Path, count: int) -> None:
    """Build an index, and write its build times to a file."""
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    at = folder / f"index-{count}"
    shutil.rmtree(at, ignore_errors=True)
    timings = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        timings[f"{name}_s"], timings[f"{name}_cpu_s"] = time.perf_counter() - began, time.process_time() - cpu

    store = LocalStore.create(at, vectors.shape[1], {"model": "all-MiniLM-L6-v2"})
    with stage("commit"), open(folder / "passages.txt", encoding="utf-8") as file:
        for start in range(0, count, BATCH):
            texts = [line.rstrip("\n") for line in islice(file, min(BATCH, count - start))]
            store.commit(make_documents(texts, normalize(vectors[start : start + len(texts)]), start))
    with stage("graph"):
        store.optimize(full=True)
    with stage("words"):
        refresh_bm25(store, Analyzer(), at / "lexical", None)
    store.close()
    timings["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"built-{count}.json").write_text(json.dumps(timings))


def measure_search(folder: Path, count: int, limit: int) -> dict[str, Any]:
    """Search an index, one query at a time."""
    faiss: Any = import_module("faiss")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    queries = normalize(np.load(folder / "queries.npy")[:limit])
    row: dict[str, Any] = {"passages": count, "threads": faiss.omp_get_max_threads()}
    row |= json.loads((folder / f"built-{count}.json").read_text())
    at = folder / f"index-{count}"
    began = time.perf_counter()
    with LocalStore.open(at) as store:
        row["open_s"] = time.perf_counter() - began
        row["files_mb"] = {str(file.relative_to(at)): file.stat().st_size / 1e6 for file in at.rglob("*.*")}
        row["disk_mb"] = sum(row["files_mb"].values())
        truth = exhaustive_search(vectors, queries, count)

        def search(query: Any) -> Any:
            return store.search(query, K)[0][0]

        time_queries(search, queries)  # warm up the page cache
        keys, times = time_queries(search, queries)
        row["asking_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        first = next(iter(store.passage_texts()))[0]
        row["recall"] = recall([rows - first for rows in keys], truth)
        graphs = list(at.rglob("index.faiss"))
        if len(graphs) == 1:
            index = faiss.read_index(str(graphs[0]), faiss.IO_FLAG_MMAP_IFC)
            flat = faiss.IndexFlatIP(vectors.shape[1])
            for start in range(0, count, BATCH):
                flat.add(normalize(vectors[start : min(count, start + BATCH)]))
            both = faiss.IndexRefine(index, flat)
            for ef_search in EF_SEARCH:
                own = faiss.SearchParametersHNSW(efSearch=ef_search)
                ways = {
                    "graph": (index, own),
                    "refined": (both, faiss.IndexRefineSearchParameters(k_factor=4, base_index_params=own)),
                }
                for name, (peer, how) in ways.items():
                    neighbours, latencies = time_queries(lambda query: peer.search(query, K, params=how)[1][0], queries)  # noqa: B023
                    measurement = {"efSearch": ef_search, "recall": recall(neighbours, truth), **summarize(latencies)}
                    row.setdefault("faiss", {}).setdefault(name, []).append(measurement)
        row |= summarize(
            times + time_queries(search, queries)[1]
        )  # before and after FAISS, since the load of the machine varies
        row["by_words"] = measure_lexical(
            store, (folder / "queries.txt").read_text(encoding="utf-8").splitlines()[:limit]
        )
    return row


def measure_lexical(store: LocalStore, queries: list[str]) -> dict[str, float]:
    """Measure the time to open the BM25 index, to search it, and to search it after a commit."""
    began = time.perf_counter()
    known = refresh_bm25(store, Analyzer(), store.folder / "lexical", None)
    row = {"open_s": time.perf_counter() - began}
    latencies = []
    for query in queries:
        began = time.perf_counter()
        known[1].search(query, 100)
        latencies.append(1e3 * (time.perf_counter() - began))
    row |= summarize(latencies)
    document = EmbeddedDocument(
        Document("one more", "A zebra."),
        [Passage("one more", 0, 8, "A zebra.")],
        np.eye(1, store.dimension, dtype=np.float32),
    )
    store.commit([document])
    began = time.perf_counter()
    keys, _ = refresh_bm25(store, Analyzer(), store.folder / "lexical", known)[1].search("zebra", 100)
    row["after_one_more_s"] = time.perf_counter() - began
    assert len(keys)
    store.commit([], ["one more"])
    return row


def fastest_at(recall: float, peers: list[dict[str, float]]) -> str:
    """Return the fastest measurement of at least this recall, or the one with the highest."""
    peer = next((peer for peer in peers if peer["recall"] >= recall), peers[-1])
    return f"{peer['median_ms']:.2f} ms at {peer['recall']:.3f}"


def table(rows: list[dict[str, Any]]) -> str:
    """Format a Markdown table."""
    out = [
        "| passages | commit, CPU s | HNSW, CPU s | BM25, CPU s | memory, MB | disk, MB | recall@10 | median, ms "
        "| 95%, ms | FAISS on the same HNSW | with its rescoring | lexical, ms | after a commit, s |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        peers = [
            fastest_at(row["recall"], row["faiss"][name]) if "faiss" in row else "" for name in ("graph", "refined")
        ]
        words = row["by_words"]
        out.append(
            f"| {row['passages']:,} | {row['commit_cpu_s']:.0f} | {row['graph_cpu_s']:.0f} | {row['words_cpu_s']:.0f} "
            f"| {row['peak_mb']:,.0f} | {row['disk_mb']:,.0f} | {row['recall']:.4f} | {row['median_ms']:.2f} "
            f"| {row['p95_ms']:.2f} | {peers[0]} | {peers[1]} | {words['median_ms']:.1f} "
            f"| {words['after_one_more_s']:.2f} |"
        )
    return "\n".join(out)


def plot(rows: list[dict[str, Any]]) -> str:
    """Plot the scaling as an SVG; on logarithmic axes, slope 1 is linear growth."""
    series = [
        Line(name, [(math.log10(row["passages"]), math.log10(value(row))) for row in rows], style, dots=True)
        for name, style, value in (
            ("build, CPU s", "b", lambda row: sum(row[f"{stage}_cpu_s"] for stage in ("commit", "graph", "words"))),
            ("disk, MB", "faint", lambda row: row["disk_mb"]),
            ("query, ms", "a", lambda row: row["median_ms"]),
        )
    ]
    svg = powers_of_ten(lines("Scaling of an index", series, "passages", "seconds, MB, ms"))
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace("</title>", "</title>" + STYLE, 1) + "\n"


def powers_of_ten(svg: str) -> str:
    """Label the ticks of logarithmic axes with the values; those between two powers of ten have none.

    >>> powers_of_ten('<text class="mid" x="1">4</text><text class="mid" x="2">4.5</text><text class="end">-1</text>')
    '<text class="mid" x="1">10,000</text><text class="end">0.1</text>'
    """

    def label(match: re.Match[str]) -> str:
        start, exponent = match.groups()
        value = 10 ** float(exponent)
        short = f"{value / 10**6:,g}M" if value >= 10**6 else f"{value:,g}"  # a long label would be cut off at the edge
        return "" if "." in exponent else f"{start}{short}</text>"

    return re.sub(r'(<text class="(?:mid|end)"[^>]*>)(-?[\d.]+)</text>', label, svg)


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.million", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[10**4, 10**5, 10**6]
    )
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--build", action="store_true", help="build without searching")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=("build", "search"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, sizes = options.folder, options.sizes
    if options.only == "build":
        build(folder, sizes[0])
        return
    if options.only == "search":
        print(json.dumps(measure_search(folder, sizes[0], options.queries)))
        return
    rows = []
    for count in sizes:
        command = [sys.executable, "-m", "benchmarks.million", str(folder), "--sizes", str(count)]
        command += ["--queries", str(options.queries), "--only"]
        if not (folder / f"built-{count}.json").exists():
            subprocess.run([*command, "build"], check=True)
        if options.build:
            continue
        output = subprocess.run([*command, "search"], check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(table(rows[-1:]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.build:
        return
    if options.plot:
        options.plot.write_text(plot(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
