"""Evaluation of retrieval for `bertie eval --beir`: embeddings, BM25 or both, with or without a reranker."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, built_in_model, check_rerank_weight, model_name, reranker_class, select_device
from bertie.cli.report_output import print_scores, short_name
from bertie.data.progress import Progress

if TYPE_CHECKING:
    from bertie.evaluation.retrieval import Run
    from bertie.search.beir import RetrievalDataset

MODES = ("dense", "lexical", "hybrid")


def evaluate_retrieval(args: argparse.Namespace) -> None:
    """Evaluate retrieval, and print the scores."""
    from bertie.evaluation import retrieval
    from bertie.evaluation.report import Comparison
    from bertie.search import beir

    args.rerank = args.rerank or args.reranker is not None
    mode, split = args.mode or MODES[0], args.split or "test"
    weights = _check_flags(args, mode, split)
    collection = _read(args.beir, split)
    model = None if mode == "lexical" else model_name(args)
    searched, qrels = collection, {}
    if args.tune is not None:
        tuning = _read(args.beir, args.tune)
        # Ids of the two splits may coincide.
        qrels = {f"{args.tune}:{query}": judgments for query, judgments in tuning.qrels.items()}
        queries = {f"{args.tune}:{query}": text for query, text in tuning.queries.items()}
        searched = replace(collection, queries={**collection.queries, **queries})
    lexical = None if mode == "dense" else beir.bm25_run(searched)
    runs = _runs(args, searched, model, args.revision, lexical)
    if qrels:
        weights = beir.tune_weights(qrels, runs)
        listed = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
        print(f"bertie: --weights {listed}", file=sys.stderr)
    values = retrieval.per_query_metrics(collection.qrels, _fuse(runs, weights, args.rerank_weight))
    comparison = None
    if args.baseline is not None:
        baseline_runs = _runs(args, collection, args.baseline, None, lexical)
        baseline = retrieval.per_query_metrics(collection.qrels, _fuse(baseline_runs, weights, args.rerank_weight))
        comparison = Comparison(
            name=short_name(args.baseline),
            split=split,
            scores=retrieval.mean_scores(baseline, resamples=args.resamples),
            differences=retrieval.paired_mean_differences(values, baseline, resamples=args.resamples),
        )
    print_scores(retrieval.mean_scores(values, resamples=args.resamples), comparison, as_json=args.json)


def _check_flags(args: argparse.Namespace, mode: str, split: str) -> Mapping[str, float] | None:
    from bertie.search.fusion import check_weights

    if mode == "lexical" and args.baseline is not None:
        raise UsageError("--mode lexical uses no embeddings, so there is nothing to compare: leave out --baseline")
    check_rerank_weight(args)
    if args.weights is not None and args.tune is not None:
        raise UsageError("--tune finds the weights: leave out --weights")
    if args.tune is not None and args.tune == split:
        raise UsageError(f"--tune {args.tune} must differ from the split that is evaluated")
    weights: Mapping[str, float] | None = args.weights
    if weights is not None:
        stages = ["dense", "lexical"] if mode == "hybrid" else [mode]
        check_weights(weights, [*stages, *(["rerank"] if args.rerank else [])])
    return weights


def _read(folder: str, split: str) -> RetrievalDataset:
    from bertie.search import beir

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        collection = beir.read_beir(folder, split)
    for warning in caught:
        print(f"bertie: {warning.message}", file=sys.stderr)
    return collection


def _runs(
    args: argparse.Namespace, collection: RetrievalDataset, model: str | None, revision: str | None, lexical: Run | None
) -> dict[str, Run]:
    """The requested rankings: by embeddings, by BM25, and by a reranker of the best documents of both."""
    from bertie.search import beir
    from bertie.search.searcher import rerank_weight
    from bertie.tasks import Embedder

    options = {"overflow": args.overflow, "device": select_device(args.device), "precision": args.precision}
    runs = {}
    if model is not None:
        embedder = Embedder.load(model, revision=revision, **options)
        with _progress("embed", len(collection.corpus)) as advance:
            runs["dense"] = beir.dense_run(collection, embedder, advance=advance)
    if lexical is not None:
        runs["lexical"] = lexical
    if args.rerank:
        first = _fuse(runs, None)
        name = args.reranker or built_in_model()
        reranker = reranker_class(name).load(name, **options)
        args.rerank_weight = rerank_weight(reranker, args.rerank_weight)
        pairs = sum(min(len(ranking), beir.RERANK_DEPTH) for ranking in first.values())
        with _progress("rerank", pairs) as advance:
            runs["rerank"] = beir.rerank_run(collection, reranker, first, advance=advance)
    return runs


def _fuse(runs: Mapping[str, Run], weights: Mapping[str, float] | None, rerank_weight: float | None = None) -> Run:
    """Fuse rankings as a search does: by weights, or by rank and then interpolated with the reranker's scores."""
    from bertie.search import beir

    if weights is not None:
        return beir.fuse_by_score(runs, weights)
    if "rerank" in runs:
        first = _fuse({name: run for name, run in runs.items() if name != "rerank"}, None)
        assert rerank_weight is not None
        return runs["rerank"] if rerank_weight == 1 else beir.interpolate_run(first, runs["rerank"], rerank_weight)
    return beir.fuse_by_rank(*runs.values()) if len(runs) > 1 else next(iter(runs.values()))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with Progress(what, lambda: done / max(total, 1)) as progress:

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            progress.update(rows)

        yield advance
