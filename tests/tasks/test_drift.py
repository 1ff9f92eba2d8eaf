"""The test for drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.tasks.drift import DriftResult, compare_vectors, detect_drift, sample_texts


def compare(vectors: np.ndarray[Any, Any], old: int, **options: Any) -> DriftResult:
    names = [f"text {i}" for i in range(len(vectors))]
    return compare_vectors(vectors.astype(np.float32), old, names, list(range(len(vectors))), **options)


def test_equal_distributions_have_uniform_p_values() -> None:
    draw = np.random.default_rng(0)
    values = [compare(draw.normal(size=(40, 8)), 15, permutations=99).p_value for _ in range(100)]
    assert 1 <= sum(value <= 0.1 for value in values) <= 22
    assert 0.35 < np.mean(values) < 0.65


def test_new_texts_are_found() -> None:
    draw = np.random.default_rng(0)
    vectors = np.concatenate([draw.normal(size=(60, 8)), draw.normal(size=(50, 8))])
    vectors[90:] = [6, *[0] * 7] + 0.1 * draw.normal(size=(20, 8))  # two fifths of the new ones
    result = compare(vectors, 60, permutations=199, top_k=4)
    assert result.p_value == 1 / 200
    assert result.mmd > 1.5 * result.expected
    assert {item.index for item in result.new_texts} <= set(range(90, 110))
    assert len(result.new_texts) == len(result.old_texts) == 4
    assert all(item.index < 60 for item in result.old_texts)
    assert [item.score for item in result.new_texts] == sorted((i.score for i in result.new_texts), reverse=True)
    assert compare(vectors, 60, permutations=199, top_k=4) == result


def test_samples_are_drawn_evenly() -> None:
    draw = np.random.default_rng(0)
    counts = np.zeros(20)
    for _ in range(2000):
        chosen = sample_texts(map(str, range(20)), 5, draw)
        assert len({index for index, _ in chosen}) == 5
        assert all(text == str(index) for index, text in chosen)
        counts[[index for index, _ in chosen]] += 1
    assert abs(counts / 2000 - 0.25).max() < 0.05
    assert sample_texts(["a", "b"], 5, draw) == [(0, "a"), (1, "b")]


def test_what_is_refused() -> None:
    for old, new, options, message in (
        (["a"], ["b", "c"], {}, "at least 2 old and 2 new texts, but got 1 and 2"),
        (["a", "b"], ["b", "c"], {"permutations": 9}, "permutations=9 must be at least 19"),
        (["a", "b"], ["b", "c"], {"sample": 1}, "sample=1 must be at least 2"),
        (["a", "b"], "c", {}, "takes a list of texts, not str"),
    ):
        with pytest.raises(InputError, match=message):
            detect_drift(old, new, **options)  # type: ignore[arg-type]
