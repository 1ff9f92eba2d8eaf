"""Hybrid search and reranking with the built-in model: nDCG@10 on four collections that it was not trained on.

    python -m benchmarks.builtin_hybrid MODEL --data FOLDER [--depth 20] [--queries 100] [--json FILE]

Rankings by embeddings, by BM25, by both (reciprocal rank fusion, the default of `bertie search`), and the first
documents of the hybrid ranking reranked by the head `rerank`, with several weights. Differences are paired, with a 95%
bootstrap confidence interval: hybrid against BM25, reranked against hybrid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.builtin_data import SEARCHES, SearchCollection
from benchmarks.builtin_subject import Subject
from bertie.evaluation import retrieval
from bertie.evaluation.intervals import FloatArray
from bertie.search import beir

DEPTH, WEIGHTS = 20, (0.2, 0.5, 1.0)  # documents reranked per query, and weights of the reranker
METRIC = "ndcg_10"


def measure(subject: Subject, collection: SearchCollection, depth: int, most: int | None) -> dict[str, FloatArray]:
    """nDCG@10 of each query by each ranking; of the first `most` queries, if given."""
    queries = dict(list(collection.queries.items())[:most])
    qrels = {query: collection.qrels[query] for query in queries}
    corpus = dict(zip(collection.ids, collection.texts, strict=True))
    dataset = beir.RetrievalDataset(corpus, queries, qrels)
    runs = {"embeddings": beir.dense_run(dataset, subject.embedder), "BM25": beir.bm25_run(dataset)}
    hybrid = runs["hybrid"] = beir.fuse_by_rank(*runs.values())
    if subject.reranker is not None:
        reranked = beir.rerank_run(dataset, subject.reranker, hybrid, depth=depth)
        for weight in WEIGHTS:
            runs[f"reranked, weight {weight:g}"] = beir.interpolate_run(hybrid, reranked, weight, depth=depth)
    return {name: retrieval.per_query_metrics(qrels, run)[METRIC] for name, run in runs.items()}


def row(label: str, values: Mapping[str, FloatArray]) -> dict[str, object]:
    """The means, and the paired differences."""
    result: dict[str, object] = {"collection": label, "queries": len(values["hybrid"])}
    for name, scores in values.items():
        result[name] = round(float(scores.mean()), 4)
        baseline = {"hybrid": "BM25"}.get(name, "hybrid" if name.startswith("reranked") else None)
        if baseline is not None:
            pair = {METRIC: scores}, {METRIC: values[baseline]}
            difference = retrieval.paired_mean_differences(*pair)[METRIC]
            result[f"{name} − {baseline}"] = difference.as_dict()
    return result


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, built-in name or hub id")
    parser.add_argument("--data", required=True, type=Path, help="folder of the data sets")
    parser.add_argument("--depth", type=int, default=DEPTH, help="documents reranked per query (default: %(default)s)")
    parser.add_argument("--queries", type=int, help="at most this many per collection (default: all)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    subject, results = Subject(options.model), []
    for label, (name, split) in SEARCHES.items():
        collection = SearchCollection.read(options.data, name, split)
        results.append(row(label, measure(subject, collection, options.depth, options.queries)))
        print(json.dumps(results[-1], ensure_ascii=False), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
