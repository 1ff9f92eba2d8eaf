"""How well a search finds what it should, each metric with its interval over the queries.

The values are trec_eval's, through the package ir-measures. `bertie.evaluation.scores.ranking` is for short lists whose
documents are all qrels; here a run names the best documents of a whole collection, and what it does not name counts
as not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.intervals import (
    DRAWS,
    Difference,
    FloatArray,
    Measure,
    Score,
    bootstrap,
    linear,
    paired_bootstrap,
)

Qrels = Mapping[str, Mapping[str, int]]  # of each query, how relevant a document is: not at 0, and more the higher
Run = Mapping[str, Mapping[str, float]]  # of each query, the score of each document that was found

METRICS = {"ndcg_10": "nDCG@10", "map": "AP", "recall_100": "R@100", "mrr": "RR"}


def retrieval(qrels: Qrels, run: Run, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Ndcg_10, map, recall_100 and mrr over the queries that have a relevant document; the others are left out.

    Only the first 100 documents count for recall_100, and the first 10 for ndcg_10, which takes the judgement as the
    gain. A query that the run does not know has found nothing. Documents of one score are ordered by name, as
    trec_eval does it.

    >>> found = retrieval({"q": {"a": 1, "b": 1}}, {"q": {"a": 0.9, "c": 0.8, "b": 0.1}})
    >>> round(found["map"].value, 4), found["recall_100"].value
    (0.8333, 1.0)
    """
    return by_query(each_query(qrels, run), draws=draws, seed=seed)


def paired_retrieval(
    qrels: Qrels, first: Run, second: Run, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """By how much each metric of the first run is above the second's, the same queries drawn for both.

    >>> qrels = {str(i): {"a": 1} for i in range(20)}
    >>> good, bad = ({query: run for query in qrels} for run in ({"a": 1.0}, {"b": 1.0, "a": 0.5}))
    >>> paired_retrieval(qrels, good, bad)["mrr"].value
    0.5
    """
    return paired_by_query(each_query(qrels, first), each_query(qrels, second), draws=draws, seed=seed)


def each_query(qrels: Qrels, run: Run) -> dict[str, FloatArray]:
    """(queries,) each metric of each query that has a relevant document, in the order of `qrels`."""
    asked = {query: dict(one) for query, one in qrels.items() if any(grade > 0 for grade in one.values())}
    if not asked:
        raise InputError("there is nothing to score: no query has a relevant document")
    package = _package()
    name = {package.parse_measure(one): metric for metric, one in METRICS.items()}
    place = {query: i for i, query in enumerate(asked)}
    found = {metric: np.zeros(len(asked)) for metric in METRICS}
    # A query without documents is left out: it has found nothing, and trec_eval knows no empty list.
    known = {query: dict(run[query]) for query in asked if run.get(query)}
    if known:
        for one in package.iter_calc(list(name), asked, known):
            found[name[one.measure]][place[one.query_id]] = one.value
    return found


def by_query(values: Mapping[str, FloatArray], *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """The mean of what `each_query` found, with its interval."""
    return bootstrap(*_means(values), draws=draws, seed=seed)


def paired_by_query(
    first: Mapping[str, FloatArray], second: Mapping[str, FloatArray], *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """By how much the mean of the one is above that of the other, of the same queries in the same order."""
    (measure, units), (other_measure, others) = _means(first), _means(second)
    if units != others:
        raise InputError(f"the first has {units} queries and the second {others}; they must be the same queries")
    return paired_bootstrap(measure, other_measure, units, draws=draws, seed=seed)


def _means(values: Mapping[str, FloatArray]) -> tuple[Measure, int]:
    columns = np.stack([np.asarray(one, dtype=np.float64) for one in values.values()], axis=1)  # (queries, metrics)
    units = len(columns)
    return linear(columns, lambda sums: {name: sums[:, i] / units for i, name in enumerate(values)}), units


def _package() -> Any:
    try:
        return import_module("ir_measures")
    except ImportError:
        raise MissingPackageError(
            "scores of a search need the package ir-measures: pip install 'bertie[train]'"
        ) from None
