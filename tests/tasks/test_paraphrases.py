"""Pairs of similar texts."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.tasks.paraphrases import mine_pairs, paraphrase_pairs


def test_each_pair_comes_once_the_most_similar_first() -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(40, 6)).astype(np.float32)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = mine_pairs(vectors, 0.6, 39)
    expected = {
        (i, j): float(unit[i] @ unit[j]) for i in range(40) for j in range(i + 1, 40) if unit[i] @ unit[j] >= 0.6
    }
    assert len(pairs) == len(expected) > 10
    assert [pair.similarity for pair in pairs] == sorted((pair.similarity for pair in pairs), reverse=True)
    for pair in pairs:
        assert pair.similarity == pytest.approx(expected[pair.a, pair.b], abs=1e-5)


def test_top_k_is_of_each_text() -> None:
    """The first is the nearest neighbour of all others, and keeps them all."""
    vectors = np.eye(5, 6, dtype=np.float32) * 0.8
    vectors[:, 5] = 1
    vectors[0] = [0, 0, 0, 0, 0, 1]
    pairs = mine_pairs(vectors, 0.0, 1)
    assert {(pair.a, pair.b) for pair in pairs} == {(0, i) for i in range(1, 5)}


def test_equal_texts_and_limits() -> None:
    assert [(p.a, p.b, p.similarity) for p in mine_pairs(np.ones((2, 4), np.float32))] == [(0, 1, 1.0)]
    assert mine_pairs(np.ones((1, 4), np.float32)) == []
    assert paraphrase_pairs([]) == []
    for arguments, message in (
        ({"threshold": 1.5}, "threshold=1.5 must lie between -1 and 1"),
        ({"top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ({"method": "fast"}, "method='fast' must be one of auto, exact, approximate"),
    ):
        with pytest.raises(InputError, match=message):
            paraphrase_pairs(["a"], **arguments)
