from __future__ import annotations

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.evaluation.label_noise import find_label_issues


def test_planted_errors_are_found() -> None:
    rng = np.random.default_rng(0)
    true = rng.integers(0, 5, 1000)
    table = rng.dirichlet(np.ones(5), 1000) * 0.4
    table[np.arange(1000), true] += 0.6
    gold, wrong = true.copy(), rng.choice(1000, 60, replace=False)
    gold[wrong] = (true[wrong] + rng.integers(1, 5, 60)) % 5
    result = find_label_issues(gold, table, most=60)
    assert {one.index for one in result} <= set(wrong.tolist())
    assert len(result) >= 30  # the half of which the model is surer than it usually is
    for one in result:
        assert one.given == gold[one.index] != one.likely
        assert one.margin == pytest.approx(table[one.index, one.likely] - table[one.index, one.given])
    assert [one.margin for one in result] == sorted((one.margin for one in result), reverse=True)


def test_a_model_that_is_never_sure_of_a_label_does_not_make_it_suspect() -> None:
    """A rare label with low probabilities throughout: a fixed threshold would doubt all of its texts."""
    gold = np.array([0] * 90 + [1] * 10)
    table = np.array([[0.95, 0.05]] * 90 + [[0.6, 0.4]] * 10)
    assert find_label_issues(gold, table) == []


def test_labels_that_no_text_has() -> None:
    result = find_label_issues([0, 0, 0], [[0.9, 0.1, 0.0], [0.8, 0.1, 0.1], [0.1, 0.0, 0.9]])
    assert result == []


def test_most() -> None:
    gold = [0] * 10 + [1] * 10
    table = [[0.9, 0.1]] * 5 + [[0.1, 0.9]] * 5 + [[0.1, 0.9]] * 10
    assert len(find_label_issues(gold, table)) == 5
    assert len(find_label_issues(gold, table, most=2)) == 2


def test_refusals() -> None:
    with pytest.raises(InputError, match="probabilities has shape"):
        find_label_issues([0, 1], [[0.5, 0.5]])
    with pytest.raises(InputError, match="indices from 0 to 1"):
        find_label_issues([2], [[0.5, 0.5]])
