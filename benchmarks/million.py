"""How an index grows: build time by stage, memory, size on disk, and how fast and how well it finds, by its size.

    python -m benchmarks.million FOLDER [--sizes 10000,100000,1000000] [--json FILE] [--plot FILE.svg]

FOLDER holds `passages.txt` (a passage a line), `vectors.npy` (a row a passage, of any length and any type),
`queries.txt` and `queries.npy`, as `bertie embed` writes them: encoding is not what is measured here. For each size an
index is built in a process of its own, as `bertie index` does it: passages and vectors committed, then `optimize`, then
the words. It stays in FOLDER, and is not built again. Then the queries are asked one at a time. Recall is against all
inner products. Beside it: FAISS used directly, on the very graph that the index has, at several efforts, alone and with
its own rescoring by whole vectors: the difference is what the layers above it cost.
"""

from __future__ import annotations

import argparse
import json
import math
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

from benchmarks.serve import _STYLE
from bertie.evaluation.plots import Line, lines
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import refresh_bm25
from bertie.search.local_store import LocalStore
from bertie.search.records import Document, EmbeddedDocument, Passage

AT_ONCE = 16_384
A_DOCUMENT = 16  # passages
K = 10
EFFORTS = (32, 64, 96, 128, 192, 256, 384, 512, 768)


def normalized(rows: Any) -> Any:
    rows = np.asarray(rows, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def entries(texts: list[str], vectors: Any, first: int) -> list[EmbeddedDocument]:
    """Passages as documents of several each."""
    out = []
    for at in range(0, len(texts), A_DOCUMENT):
        some = texts[at : at + A_DOCUMENT]
        name = f"document {first + at}"
        passages, place = [], 0
        for text in some:
            passages.append(Passage(name, place, place + len(text), text))
            place += len(text) + 1
        out.append(EmbeddedDocument(Document(name, "\n".join(some)), passages, vectors[at : at + A_DOCUMENT]))
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


def build(folder: Path, count: int) -> None:
    """Make an index that stays, and write down what it took."""
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    at = folder / f"index-{count}"
    shutil.rmtree(at, ignore_errors=True)
    took = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        took[f"{name}_s"], took[f"{name}_cpu_s"] = time.perf_counter() - began, time.process_time() - cpu

    store = LocalStore.create(at, vectors.shape[1], {"model": "all-MiniLM-L6-v2"})
    with stage("commit"), open(folder / "passages.txt", encoding="utf-8") as file:
        for start in range(0, count, AT_ONCE):
            texts = [line.rstrip("\n") for line in islice(file, min(AT_ONCE, count - start))]
            store.commit(entries(texts, normalized(vectors[start : start + len(texts)]), start))
    with stage("graph"):
        store.optimize(full=True)
    with stage("words"):
        refresh_bm25(store, Analyzer(), at / "lexical", None)
    store.close()
    took["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"built-{count}.json").write_text(json.dumps(took))


def ask(folder: Path, count: int, asked: int) -> dict[str, Any]:
    """Queries to an index that was built, one at a time."""
    faiss: Any = import_module("faiss")
    vectors = np.load(folder / "vectors.npy", mmap_mode="r")
    queries = normalized(np.load(folder / "queries.npy")[:asked])
    row: dict[str, Any] = {"passages": count, "threads": faiss.omp_get_max_threads()}
    row |= json.loads((folder / f"built-{count}.json").read_text())
    at = folder / f"index-{count}"
    began = time.perf_counter()
    with LocalStore.open(at) as store:
        row["open_s"] = time.perf_counter() - began
        row["files_mb"] = {str(file.relative_to(at)): file.stat().st_size / 1e6 for file in at.rglob("*.*")}
        row["disk_mb"] = sum(row["files_mb"].values())
        truth = exact(vectors, queries, count)

        def ours(query: Any) -> Any:
            return store.search(query, K)[0][0]

        one_by_one(ours, queries)  # what is read from the disk now is in memory then
        keys, times = one_by_one(ours, queries)
        row["asking_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        first = next(iter(store.passage_texts()))[0]
        row["recall"] = recall([one - first for one in keys], truth)
        graphs = list(at.rglob("index.faiss"))
        if len(graphs) == 1:
            index = faiss.read_index(str(graphs[0]), faiss.IO_FLAG_MMAP_IFC)
            flat = faiss.IndexFlatIP(vectors.shape[1])
            for start in range(0, count, AT_ONCE):
                flat.add(normalized(vectors[start : min(count, start + AT_ONCE)]))
            both = faiss.IndexRefine(index, flat)
            for effort in EFFORTS:
                own = faiss.SearchParametersHNSW(efSearch=effort)
                ways = {
                    "graph": (index, own),
                    "refined": (both, faiss.IndexRefineSearchParameters(k_factor=4, base_index_params=own)),
                }
                for name, (peer, how) in ways.items():
                    found, took = one_by_one(lambda query: peer.search(query, K, params=how)[1][0], queries)  # noqa: B023
                    said = {"efSearch": effort, "recall": recall(found, truth), **spread(took)}
                    row.setdefault("faiss", {}).setdefault(name, []).append(said)
        row |= spread(times + one_by_one(ours, queries)[1])  # before and after the others, for machines get busy
        row["by_words"] = by_words(store, (folder / "queries.txt").read_text(encoding="utf-8").splitlines()[:asked])
    return row


def by_words(store: LocalStore, queries: list[str]) -> dict[str, float]:
    """How long search by words takes, to open it, to ask it, and to ask it after a document was added."""
    began = time.perf_counter()
    known = refresh_bm25(store, Analyzer(), store.folder / "lexical", None)
    row = {"open_s": time.perf_counter() - began}
    took = []
    for query in queries:
        began = time.perf_counter()
        known[1].search(query, 100)
        took.append(1e3 * (time.perf_counter() - began))
    row |= spread(took)
    one = EmbeddedDocument(
        Document("one more", "A zebra."),
        [Passage("one more", 0, 8, "A zebra.")],
        np.eye(1, store.dimension, dtype=np.float32),
    )
    store.commit([one])
    began = time.perf_counter()
    found = refresh_bm25(store, Analyzer(), store.folder / "lexical", known)[1].search("zebra", 100)
    row["after_one_more_s"] = time.perf_counter() - began
    assert len(found[0])
    store.commit([], ["one more"])
    return row


def at_least(recall: float, peers: list[dict[str, float]]) -> str:
    """The fastest that finds as much, or what comes nearest to that."""
    peer = next((one for one in peers if one["recall"] >= recall), peers[-1])
    return f"{peer['median_ms']:.2f} ms at {peer['recall']:.3f}"


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    out = [
        "| passages | commit, CPU s | graph, CPU s | words, CPU s | memory, MB | disk, MB | recall@10 | median, ms "
        "| 95%, ms | FAISS on this graph | with its rescoring | by words, ms | after one more document, s |",
        "|" + "---|" * 13,
    ]
    for row in rows:
        peers = [at_least(row["recall"], row["faiss"][name]) if "faiss" in row else "" for name in ("graph", "refined")]
        words = row["by_words"]
        out.append(
            f"| {row['passages']:,} | {row['commit_cpu_s']:.0f} | {row['graph_cpu_s']:.0f} | {row['words_cpu_s']:.0f} "
            f"| {row['peak_mb']:,.0f} | {row['disk_mb']:,.0f} | {row['recall']:.4f} | {row['median_ms']:.2f} "
            f"| {row['p95_ms']:.2f} | {peers[0]} | {peers[1]} | {words['median_ms']:.1f} "
            f"| {words['after_one_more_s']:.2f} |"
        )
    return "\n".join(out)


def plot(rows: list[dict[str, Any]]) -> str:
    """Growth as a picture that stands alone: over powers of ten, a line of slope 1 is linear growth."""
    series = [
        Line(name, [(math.log10(row["passages"]), math.log10(of(row))) for row in rows], style, dots=True)
        for name, style, of in (
            ("building, CPU s", "b", lambda row: sum(row[f"{stage}_cpu_s"] for stage in ("commit", "graph", "words"))),
            ("disk, MB", "faint", lambda row: row["disk_mb"]),
            ("a query, ms", "a", lambda row: row["median_ms"]),
        )
    ]
    said = lines("What an index takes, by its size", series, "passages, as a power of ten", "as a power of ten")
    said = said.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return said.replace("</title>", "</title>" + _STYLE, 1) + "\n"


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
    parser.add_argument("--build", action="store_true", help="build, and ask nothing yet")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only", choices=("build", "ask"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, sizes = options.folder, options.sizes
    if options.only == "build":
        build(folder, sizes[0])
        return
    if options.only == "ask":
        print(json.dumps(ask(folder, sizes[0], options.queries)))
        return
    rows = []
    for count in sizes:
        command = [sys.executable, "-m", "benchmarks.million", str(folder), "--sizes", str(count)]
        command += ["--queries", str(options.queries), "--only"]
        if not (folder / f"built-{count}.json").exists():
            subprocess.run([*command, "build"], check=True)
        if options.build:
            continue
        said = subprocess.run([*command, "ask"], check=True, stdout=subprocess.PIPE, text=True).stdout
        rows.append(json.loads(said.splitlines()[-1]))
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
