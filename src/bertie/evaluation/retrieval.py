"""Retrieval metrics of a run against relevance judgments (qrels), with intervals over the queries.

The values are trec_eval's, computed by the package ir-measures. `bertie.evaluation.metrics.ranking`
is for short candidate lists that are judged completely; here a run lists the top documents of a whole
collection, and documents it does not list count as not retrieved.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.intervals import (
    RESAMPLES,
    Difference,
    FloatArray,
    Score,
    Statistic,
    bootstrap,
    from_sums,
    paired_bootstrap,
)

Qrels = Mapping[str, Mapping[str, int]]  # query -> document -> relevance grade (0: not relevant)
Run = Mapping[str, Mapping[str, float]]  # query -> retrieved document -> score

METRICS = {"ndcg_10": "nDCG@10", "map": "AP", "recall_100": "R@100", "mrr": "RR"}


def retrieval(qrels: Qrels, run: Run, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Compute `ndcg_10`, `map`, `recall_100` and `mrr` over the queries with a relevant document; others are left out.

    ndcg_10 uses the relevance grade as the gain. A query that is missing from the run scores 0. Ties are
    ordered by document id, as in trec_eval.

    >>> scores = retrieval({"q": {"a": 1, "b": 1}}, {"q": {"a": 0.9, "c": 0.8, "b": 0.1}})
    >>> round(scores["map"].value, 4), scores["recall_100"].value
    (0.8333, 1.0)
    """
    return mean_scores(per_query_metrics(qrels, run), resamples=resamples, seed=seed)


def paired_retrieval(
    qrels: Qrels, first: Run, second: Run, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """Compare two runs by a paired bootstrap over queries: the difference first - second of each metric.

    >>> qrels = {str(i): {"a": 1} for i in range(20)}
    >>> good, bad = ({query: run for query in qrels} for run in ({"a": 1.0}, {"b": 1.0, "a": 0.5}))
    >>> paired_retrieval(qrels, good, bad)["mrr"].value
    0.5
    """
    ours, theirs = per_query_metrics(qrels, first), per_query_metrics(qrels, second)
    return paired_mean_differences(ours, theirs, resamples=resamples, seed=seed)


def per_query_metrics(qrels: Qrels, run: Run) -> dict[str, FloatArray]:
    """(queries,) values of each metric, for the queries with a relevant document, in the order of `qrels`."""
    judged = {query: dict(grades) for query, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
    if not judged:
        raise InputError("there is nothing to score: no query has a relevant document")
    ir_measures = _import_ir_measures()
    name = {ir_measures.parse_measure(measure): metric for metric, measure in METRICS.items()}
    index = {query: i for i, query in enumerate(judged)}
    values = {metric: np.zeros(len(judged)) for metric in METRICS}
    # trec_eval accepts no empty list, so a query without retrieved documents keeps its zeros.
    retrieved = {query: dict(run[query]) for query in judged if run.get(query)}
    if retrieved:
        for result in ir_measures.iter_calc(list(name), judged, retrieved):
            values[name[result.measure]][index[result.query_id]] = result.value
    return values


def mean_scores(values: Mapping[str, FloatArray], *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Average the per-query values of each metric, with a confidence interval."""
    return bootstrap(*_mean_statistic(values), resamples=resamples, seed=seed)


def paired_mean_differences(
    first: Mapping[str, FloatArray],
    second: Mapping[str, FloatArray],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Difference]:
    """Compare per-query values of two runs, for the same queries in the same order."""
    (statistic, units), (other_statistic, others) = _mean_statistic(first), _mean_statistic(second)
    if units != others:
        raise InputError(f"the first has {units} queries and the second {others}; they must be the same queries")
    return paired_bootstrap(statistic, other_statistic, units, resamples=resamples, seed=seed)


def _mean_statistic(values: Mapping[str, FloatArray]) -> tuple[Statistic, int]:
    columns = np.stack([np.asarray(column, dtype=np.float64) for column in values.values()], axis=1)
    units = len(columns)  # queries
    return from_sums(columns, lambda sums: {name: sums[:, i] / units for i, name in enumerate(values)}), units


def _import_ir_measures() -> Any:
    try:
        return import_module("ir_measures")
    except ImportError:
        raise MissingPackageError(
            "retrieval metrics need the package ir-measures: pip install 'bertie[train]'"
        ) from None
