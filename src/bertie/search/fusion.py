"""Fusion of several rankings of the same items into one."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

from bertie.errors import InputError

RANK_CONSTANT = 60  # from Cormack, Clarke and Büttcher (2009): the larger, the less the top ranks dominate

# Weight of a reranking head in the final score, see `interpolate`. On four collections that the built-in head was not
# trained on, it improves hybrid search, on three of them significantly; large weights make one of them worse
# (docs/search.md).
RERANK_WEIGHT = 0.2

Item = TypeVar("Item", bound=Hashable)


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Item]],
    *,
    weights: Sequence[float] | None = None,
    rank_constant: int = RANK_CONSTANT,
) -> list[tuple[Item, float]]:
    """Fuse rankings by reciprocal rank into (item, score) pairs, best first; ties keep their order.

    The score of an item is the sum of weight / (rank_constant + rank) over the rankings that
    contain it, with ranks from 1. Since only ranks matter, rankings with scores on different scales
    can be combined.

    >>> [item for item, _ in reciprocal_rank_fusion([["a", "b", "c"], ["c", "a"]])]
    ['a', 'c', 'b']
    """
    if weights is None:
        weights = [1.0] * len(rankings)
    if len(weights) != len(rankings) or any(weight < 0 for weight in weights):
        raise InputError(f"weights={list(weights)} must be {len(rankings)} numbers of at least 0, one per ranking")
    if rank_constant < 0:
        raise InputError(f"rank_constant={rank_constant} must be at least 0")
    scores: dict[Item, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, item in enumerate(dict.fromkeys(ranking), 1):
            scores[item] = scores.get(item, 0.0) + weight / (rank_constant + rank)
    return sorted(scores.items(), key=lambda pair: -pair[1])


def weighted_score_fusion(
    scores: Mapping[str, Mapping[Item, float]], weights: Mapping[str, float]
) -> list[tuple[Item, float]]:
    """Fuse rankings by a weighted sum of min-max normalized scores into (item, score) pairs.

    The scores of each ranking are scaled to [0, 1], from its last item to its first. Unlike ranks, they
    preserve the margins between items. An item missing from a ranking gets 0 from it.

    >>> dense, lexical = {"a": 0.75, "b": 0.5, "c": 0.25}, {"c": 12.0, "b": 10.0, "d": 4.0}
    >>> weighted_score_fusion({"dense": dense, "lexical": lexical}, {"dense": 1, "lexical": 0.5})
    [('a', 1.0), ('b', 0.875), ('c', 0.5), ('d', 0.0)]
    """
    fused: dict[Item, float] = {}
    for name, ranking in scores.items():
        low, high = min(ranking.values(), default=0.0), max(ranking.values(), default=0.0)
        for item, score in ranking.items():
            normalized = (score - low) / (high - low) if high > low else 1.0  # if all are equal, all are first
            fused[item] = fused.get(item, 0.0) + weights[name] * normalized
    return sorted(fused.items(), key=lambda pair: -pair[1])


def interpolate(first: Mapping[Item, float], rerank: Mapping[Item, float], weight: float) -> list[tuple[Item, float]]:
    """Interpolate the scores of a reranker with the retrieval scores into (item, score) pairs, best first.

    Only reranked items are returned. Both scores are min-max normalized over these; the reranker's score has the
    weight `weight`, the retrieval score `1 - weight`.

    >>> interpolate({"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.0}, {"a": -1.0, "b": 4.0, "c": 0.0}, 0.5)
    [('b', 0.75), ('a', 0.5), ('c', 0.1)]
    """
    candidates = {item: first[item] for item in rerank}
    return weighted_score_fusion({"first": candidates, "rerank": rerank}, {"first": 1 - weight, "rerank": weight})


def check_weights(weights: Mapping[str, float], names: Collection[str]) -> None:
    """Reject weights that are invalid or not exactly those of the rankings `names`."""
    invalid = set(weights) ^ set(names) or {name for name, weight in weights.items() if not 0 <= weight < math.inf}
    if invalid or not any(weights.values()):
        raise InputError(
            f"weights={dict(weights)} must be numbers of at least 0 for each of {', '.join(names)}, and not all 0"
        )
