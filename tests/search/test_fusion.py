"""Reciprocal rank fusion against its formula."""

from __future__ import annotations

import random

import pytest

from bertie.errors import InputError
from bertie.search.fusion import reciprocal


def test_scores_are_the_sums_of_reciprocal_ranks() -> None:
    draw = random.Random(0)
    rankings = [draw.sample(range(50), draw.randrange(1, 40)) for _ in range(3)]
    weights = [1.0, 0.5, 2.0]
    found = reciprocal(rankings, weights=weights, flat=10)
    expected = {
        thing: sum(w / (10 + r.index(thing) + 1) for r, w in zip(rankings, weights, strict=True) if thing in r)
        for thing in {thing for ranking in rankings for thing in ranking}
    }
    assert dict(found) == pytest.approx(expected)
    named = [thing for ranking in rankings for thing in ranking]
    assert found == sorted(found, key=lambda one: (-one[1], named.index(one[0])))


def test_one_ranking_keeps_its_order_and_the_first_of_two_mentions_counts() -> None:
    assert [thing for thing, _ in reciprocal([[5, 3, 9]])] == [5, 3, 9]
    assert reciprocal([[5, 5, 3]]) == reciprocal([[5, 3]])
    assert reciprocal([[], []]) == []


def test_weights_are_checked() -> None:
    for weights in ([1.0], [1.0, -1.0]):
        with pytest.raises(InputError, match="weights="):
            reciprocal([[1], [2]], weights=weights)
    with pytest.raises(InputError, match="flat=-1"):
        reciprocal([[1]], flat=-1)
