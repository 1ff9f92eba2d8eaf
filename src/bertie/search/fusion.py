"""Several rankings of the same things made into one."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
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


def weighted(scores: Mapping[str, Mapping[Thing, float]], weights: Mapping[str, float]) -> list[tuple[Thing, float]]:
    """Fusion by scores: each thing with its score, best first; of equals the one that was named first.

    Each ranking's scores are stretched to go from 0, its last, to 1, its first, and added up with its weight. Unlike
    ranks they tell a clear first place from a narrow one. What a ranking does not name has 0 from it.

    >>> dense, lexical = {"a": 0.75, "b": 0.5, "c": 0.25}, {"c": 12.0, "b": 10.0, "d": 4.0}
    >>> weighted({"dense": dense, "lexical": lexical}, {"dense": 1, "lexical": 0.5})
    [('a', 1.0), ('b', 0.875), ('c', 0.5), ('d', 0.0)]
    """
    total: dict[Thing, float] = {}
    for name, some in scores.items():
        low, high = min(some.values(), default=0.0), max(some.values(), default=0.0)
        for thing, score in some.items():
            # Where all are equal, all are first.
            share = (score - low) / (high - low) if high > low else 1.0
            total[thing] = total.get(thing, 0.0) + weights[name] * share
    return sorted(total.items(), key=lambda one: -one[1])


def check_weights(weights: Mapping[str, float], names: Collection[str]) -> None:
    """Refuse weights that are not those of these rankings."""
    wrong = set(weights) ^ set(names) or {name for name, one in weights.items() if not 0 <= one < math.inf}
    if wrong or not any(weights.values()):
        wanted = ", ".join(names)
        raise InputError(f"weights={dict(weights)} must give each of {wanted} a number of at least 0, not 0 to all")
