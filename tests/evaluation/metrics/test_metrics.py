"""Paired comparisons of all metrics, and invalid input."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.evaluation import intervals, metrics
from bertie.evaluation.intervals import mcnemar
from bertie.evaluation.metrics import answering, classification, multi_label, paired, ranking, regression, tagging
from tests.evaluation.metric_data import LABELS, classified, tagged


def test_a_better_model_is_better() -> None:
    gold, good = classified(400, LABELS)
    bad = np.full_like(good, 0.25)
    result = paired("classify", (gold, good, LABELS), (gold, bad, LABELS), resamples=300)["accuracy"]
    own, other = (classification(gold, table, LABELS, resamples=0)["accuracy"].value for table in (good, bad))
    assert result.value == pytest.approx(own - other)
    assert 0 < result.low < result.value < result.high
    assert result.p < 0.01
    back = paired("classify", (gold, bad, LABELS), (gold, good, LABELS), resamples=300)["accuracy"]
    assert (back.value, back.low, back.high, back.p) == pytest.approx(
        (-result.value, -result.high, -result.low, result.p)
    )


def test_the_same_predictions_do_not_differ() -> None:
    gold, output = tagged(["O", "B-X"], n=20)
    result = paired("tag", (gold, output), (gold, output), resamples=50)["f1"]
    assert (result.value, result.low, result.high, result.p) == (0, 0, 0, 1)


def test_p_is_fair_where_nothing_differs() -> None:
    rng = np.random.default_rng(0)
    result = []
    for _ in range(100):
        gold = rng.normal(size=60)
        one, other = (gold + rng.normal(size=60) for _ in range(2))
        result.append(paired("regress", (gold, one), (gold, other), resamples=200)["mse"].p)
    assert 0 <= np.mean(np.array(result) < 0.05) <= 0.13


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("multi_label", (np.eye(4, dtype=bool), np.eye(4) * 0.8, 0.5)),
        ("answer", ([["a b"], ["c"]], ["a", "c"])),
        ("rerank", (["q", "q"], [0, 1], [0.2, 0.4])),
    ],
)
def test_every_kind_can_be_compared(kind: str, first: tuple[Any, ...]) -> None:
    result = paired(kind, first, first, resamples=20)
    assert metrics.MAIN[kind] in result
    assert {one.value for one in result.values()} == {0}


HALVES = [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: classification(["a"], HALVES, ["a", "b", "c"]), r"shape \(1, 2\); 1 texts and 3 labels"),
        (lambda: classification(["x"], HALVES, ["a", "b"]), "label 'x', and none that is among"),
        (lambda: classification(["a"], [[0.5, 0.9]], ["a", "b"]), "text 0 add up to 1.4"),
        (lambda: classification(["a"], [[np.nan, 1]], ["a", "b"]), "text 0 are not between 0 and 1"),
        (lambda: classification(["a"], HALVES, ["a", "a"]), "must be different"),
        (lambda: classification([], np.zeros((0, 2)), ["a", "b"]), "nothing to score"),
        (lambda: multi_label([True, False], HALVES, 0.5), r"gold has shape \(2,\)"),
        (lambda: regression([1.0, 2.0], [1.0]), "gold has 2 values and predicted 1"),
        (lambda: regression([1.0, np.inf], [1.0, 2.0]), "gold must be a list of finite numbers"),
        (lambda: regression([], []), "nothing to score"),
        (lambda: tagging([["O"]], [["O", "O"]]), "sentence 0 has 1 gold tags and 2 predicted"),
        (lambda: tagging([[]], [[]]), "no sentence has words"),
        (lambda: answering(["text"], ["text"]), "gold of question 0 is a str"),
        (lambda: answering([], []), "nothing to score"),
        (lambda: ranking(["q"], [0], [1.0]), "no query has a relevant document"),
        (lambda: ranking(["q"], [-1], [1.0]), "gold has -1"),
        (lambda: ranking(["q", "r"], [1], [1.0]), "lengths 2, 1 and 1"),
        (lambda: paired("guess", (), ()), "kind='guess' must be one of classify"),
        (lambda: paired("regress", ([1.0], [1.0]), ([2.0], [1.0])), "the same gold"),
        (lambda: paired("regress", ([1.0], [1.0]), ([1.0], [1.0]), resamples=0), "resamples=0"),
        (lambda: mcnemar([1, 0], [1]), "two lists of one length"),
        (lambda: metrics.main_metric("guess", {}), "kind='guess'"),
    ],
)
def test_refusals(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, bertie.evaluation.report, bertie.evaluation.card, bertie.evaluation.leaks\n"
        "print([name for name in ('torch', 'sklearn', 'seqeval', 'scipy', 'pandas') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
    assert intervals.RESAMPLES == 1000
