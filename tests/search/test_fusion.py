"""Fusion by ranks and by scores, each against its formula."""

from __future__ import annotations

import random

import pytest

from bertie.errors import InputError
from bertie.search.fusion import check_weights, reciprocal_rank_fusion, weighted_score_fusion


def test_reciprocal_rank_fusion() -> None:
    draw = random.Random(0)
    rankings = [draw.sample(range(50), draw.randrange(1, 40)) for _ in range(3)]
    weights = [1.0, 0.5, 2.0]
    found = reciprocal_rank_fusion(rankings, weights=weights, rank_constant=10)
    expected = {
        thing: sum(w / (10 + r.index(thing) + 1) for r, w in zip(rankings, weights, strict=True) if thing in r)
        for thing in {thing for ranking in rankings for thing in ranking}
    }
    assert dict(found) == pytest.approx(expected)
    named = [thing for ranking in rankings for thing in ranking]
    assert found == sorted(found, key=lambda one: (-one[1], named.index(one[0])))


def test_single_ranking_and_duplicates() -> None:
    assert [thing for thing, _ in reciprocal_rank_fusion([[5, 3, 9]])] == [5, 3, 9]
    assert reciprocal_rank_fusion([[5, 5, 3]]) == reciprocal_rank_fusion([[5, 3]])
    assert reciprocal_rank_fusion([[], []]) == []


def test_weights_are_checked() -> None:
    for weights in ([1.0], [1.0, -1.0]):
        with pytest.raises(InputError, match="weights="):
            reciprocal_rank_fusion([[1], [2]], weights=weights)
    with pytest.raises(InputError, match="rank_constant=-1"):
        reciprocal_rank_fusion([[1]], rank_constant=-1)


def test_weighted_score_fusion() -> None:
    draw = random.Random(0)
    scores = {
        name: {thing: draw.uniform(-9, 30) for thing in draw.sample(range(50), draw.randrange(2, 40))}
        for name in ("dense", "lexical", "rerank")
    }
    weights = {"dense": 1.0, "lexical": 0.3, "rerank": 2.0}
    expected: dict[int, float] = {}
    for name, some in scores.items():
        low, high = min(some.values()), max(some.values())
        for thing, score in some.items():
            expected[thing] = expected.get(thing, 0.0) + weights[name] * (score - low) / (high - low)
    found = weighted_score_fusion(scores, weights)
    assert dict(found) == pytest.approx(expected)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    assert weighted_score_fusion({"dense": {7: 3.0, 8: 3.0}, "lexical": {}}, weights) == [
        (7, 1.0),
        (8, 1.0),
    ]  # all are first


@pytest.mark.parametrize(
    "weights",
    [{}, {"dense": 1.0}, {"dense": 1.0, "words": 1.0}, {"dense": -1.0, "lexical": 1.0}, {"dense": 0.0, "lexical": 0.0}]
    + [{"dense": one, "lexical": 1.0} for one in (float("nan"), float("inf"))],
)
def test_weights_by_name_are_checked(weights: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"weights=.* must be numbers of at least 0 for each of dense, lexical,"):
        check_weights(weights, ["dense", "lexical"])
