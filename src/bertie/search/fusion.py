"""Several rankings of the same things made into one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from bertie.errors import InputError

FLAT = 60  # the constant of Cormack, Clarke and Büttcher (2009): the larger, the less the first places stand out

Thing = TypeVar("Thing", bound=Hashable)


def reciprocal(
    rankings: Sequence[Sequence[Thing]], *, weights: Sequence[float] | None = None, flat: int = FLAT
) -> list[tuple[Thing, float]]:
    """Reciprocal rank fusion: each thing with its score, best first; of equals the one that was named first.

    A thing's score is the sum of weight / (flat + rank) over the rankings that name it, ranks counted from 1. Only
    places count, so that scores of different scales can be put together.

    >>> [thing for thing, _ in reciprocal([["a", "b", "c"], ["c", "a"]])]
    ['a', 'c', 'b']
    """
    if weights is None:
        weights = [1.0] * len(rankings)
    if len(weights) != len(rankings) or any(weight < 0 for weight in weights):
        raise InputError(f"weights={list(weights)} must be {len(rankings)} numbers of at least 0, one a ranking")
    if flat < 0:
        raise InputError(f"flat={flat} must be at least 0")
    scores: dict[Thing, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, thing in enumerate(dict.fromkeys(ranking), 1):
            scores[thing] = scores.get(thing, 0.0) + weight / (flat + rank)
    return sorted(scores.items(), key=lambda one: -one[1])
