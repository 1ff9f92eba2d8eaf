"""Ranking metrics of fully judged candidate lists, and of one relevant text per query."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, Score, Statistic, bootstrap, from_sums
from bertie.evaluation.metrics.shared import check_values


def ranking(
    queries: Sequence[Hashable], gold: ArrayLike, scores: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `map`, `mrr` and `ndcg_10` over the queries that have a relevant document; others are left out.

    The three arguments have one entry per document: its query, its relevance (relevant above 0; ndcg_10
    uses it as the gain), and its score. Ties keep the given order.

    >>> ranking(["a", "a", "b", "b"], [0, 1, 1, 0], [0.3, 0.2, 0.9, 0.1])["mrr"].value
    0.75
    """
    return bootstrap(*ranking_statistic(queries, gold, scores), resamples=resamples, seed=seed)


def ranking_statistic(queries: Sequence[Hashable], gold: ArrayLike, scores: ArrayLike) -> tuple[Statistic, int]:
    """Return the statistic of `ranking` and the number of scored queries."""
    gains, points = check_values(gold, "gold"), check_values(scores, "scores")
    if not len(queries) == len(gains) == len(points):
        raise InputError(f"queries, gold and scores have lengths {len(queries)}, {len(gains)} and {len(points)}")
    if (gains < 0).any():
        raise InputError(f"gold has {gains.min():g}; a document is relevant above 0, or not at 0")
    rows_of: dict[Hashable, list[int]] = {}
    for i, query in enumerate(queries):
        rows_of.setdefault(query, []).append(i)
    values = [_query_metrics(gains[rows], points[rows]) for rows in rows_of.values() if gains[rows].any()]
    if not values:
        raise InputError("there is nothing to score: no query has a relevant document")
    names, n = ("map", "mrr", "ndcg_10"), len(values)
    return from_sums(np.array(values), lambda sums: {name: sums[:, i] / n for i, name in enumerate(names)}), n


def _query_metrics(gains: FloatArray, points: FloatArray) -> tuple[float, float, float]:
    """Average precision, reciprocal rank and nDCG@10 of one query."""
    gains = gains[np.argsort(-points, kind="stable")]
    ranks = np.flatnonzero(gains > 0) + 1
    precision = np.arange(1, len(ranks) + 1) / ranks
    discount = 1 / np.log2(np.arange(2, 2 + min(10, len(gains))))
    ideal = -np.sort(-gains)
    ndcg = (gains[:10] @ discount) / (ideal[:10] @ discount)
    return float(precision.mean()), float(1 / ranks[0]), float(ndcg)


def retrieval_from_ranks(
    gold: ArrayLike, ranks: ArrayLike, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `recall_1`, `recall_10` and `mrr_10` from the rank of each query's one relevant text.

    `ranks` count from 1, and `gold` is all ones. An optional second column of `ranks` is 1 where the
    relevant text scores above the known negatives; accuracy is its mean.

    >>> scores = retrieval_from_ranks([1, 1, 1, 1], [1, 2, 1, 40])
    >>> scores["recall_1"].value, scores["mrr_10"].value
    (0.5, 0.625)
    """
    return bootstrap(*ranks_statistic(gold, ranks), resamples=resamples, seed=seed)


def ranks_statistic(gold: ArrayLike, ranks: ArrayLike) -> tuple[Statistic, int]:
    """Return the statistic of `retrieval_from_ranks` and the number of queries."""
    table = np.asarray(ranks, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    n, rank = len(table), table[:, 0]
    if not n or len(np.asarray(gold)) != n or rank.min() < 1:
        raise InputError(f"there are {n} ranks for {len(np.asarray(gold))} rows; give one per row, from 1 on")
    columns = np.stack([rank <= 1, rank <= 10, np.where(rank <= 10, 1 / rank, 0), *table.T[1:]], axis=1).astype(float)
    names = ("recall_1", "recall_10", "mrr_10", "accuracy")[: columns.shape[1]]
    return from_sums(columns, lambda sums: {name: sums[:, i] / n for i, name in enumerate(names)}), n
