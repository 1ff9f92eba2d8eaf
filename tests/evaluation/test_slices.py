from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from seqeval.metrics import classification_report
from sklearn.metrics import precision_recall_fscore_support

from bertie.errors import InputError
from bertie.evaluation.intervals import IntArray, Score
from bertie.evaluation.slices import by_label, by_labels, by_length, by_tag


def mean_index(inside: IntArray) -> Score:
    return Score(float(inside.mean()), 0, 0)


def test_lengths_are_parted_into_equal_shares() -> None:
    lengths = np.random.default_rng(0).permutation(1000)
    parts = by_length(lengths, mean_index)
    assert len(parts) == 5
    assert sum(one.count for one in parts) == 1000
    assert all(abs(one.count - 200) <= 1 for one in parts)
    for one in parts:
        inside = np.flatnonzero((lengths >= one.low) & (lengths <= one.high))
        assert one.count == len(inside)
        assert one.score.value == pytest.approx(inside.mean())
    assert all(a.high < b.low for a, b in pairwise(parts))


def test_equal_lengths_stay_together() -> None:
    assert [(one.low, one.high, one.count) for one in by_length([3] * 10, mean_index)] == [(3, 3, 10)]
    parts = by_length([1] * 50 + [2, 9, 9, 9], mean_index)
    assert sum(one.count for one in parts) == 54
    assert parts[0].count == 50
    with pytest.raises(InputError, match="lengths has shape"):
        by_length([], mean_index)


def test_labels_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    labels = ["x", "y", "z"]
    gold = [labels[i] for i in rng.integers(0, 3, 200)]
    output = [one if rng.random() < 0.7 else labels[rng.integers(3)] for one in gold]
    result = by_label(gold, output, labels)
    columns = precision_recall_fscore_support(gold, output, labels=labels)
    for one, *expected in zip(result, *columns, strict=True):
        assert [one.precision.value, one.recall.value, one.f1.value, one.support] == pytest.approx(expected)
        assert one.f1.low < one.f1.value < one.f1.high
        assert one.predicted == output.count(one.label)


def test_labels_that_are_not_there() -> None:
    (_, b, c) = by_label(["a", "b"], ["a", "a"], ["a", "b", "c"])
    assert math.isnan(b.precision.value)
    assert (b.recall.value, b.f1.value) == (0, 0)
    assert math.isnan(c.f1.value)


def test_several_labels() -> None:
    gold, output = [("a", "b"), (), ("b",), ("a",)], [("a",), ("b",), ("b",), ("a", "b")]
    result = {one.label: one for one in by_labels(gold, output, ["a", "b"])}
    assert (result["a"].f1.value, result["a"].support) == (1, 2)
    assert (result["b"].precision.value, result["b"].recall.value) == (pytest.approx(1 / 3), 0.5)


def test_entities_are_seqevals() -> None:
    rng = np.random.default_rng(0)
    tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    gold = [[tags[i] for i in rng.integers(0, 5, 8)] for _ in range(60)]
    output = [[tag if rng.random() < 0.8 else "O" for tag in one] for one in gold]
    expected = classification_report(gold, output, output_dict=True)
    for one in by_tag(gold, output):
        row = expected[one.label]
        assert [one.precision.value, one.recall.value, one.f1.value, one.support] == pytest.approx(
            [row["precision"], row["recall"], row["f1-score"], row["support"]]
        )


def test_plain_tags() -> None:
    result = {one.label: one for one in by_tag([["N", "V"], ["N"]], [["N", "N"], ["N"]])}
    assert (result["N"].support, result["N"].predicted, result["N"].precision.value) == (2, 3, pytest.approx(2 / 3))
    assert result["V"].recall.value == 0
