from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import f1_score

from bertie.errors import InputError
from bertie.evaluation.calibration import (
    abstention,
    best_threshold,
    ece,
    no_answer_threshold,
    platt,
    reliability,
    selective_precision,
    softmax,
    temperature,
    temperature_multi,
)


def drawn(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels as likely as the logits say."""
    table = softmax(logits)
    return (table.cumsum(axis=1) > rng.random((len(table), 1))).argmax(axis=1)


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_a_known_temperature_is_found(factor: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6000, 4)) * 2
    gold = drawn(logits, rng)
    assert temperature(logits * factor, gold) == pytest.approx(factor, rel=0.06)
    # Only differences between logits count, and logarithms of probabilities are logits.
    assert temperature(logits * factor + 7, gold) == pytest.approx(temperature(np.log(softmax(logits * factor)), gold))


@pytest.mark.parametrize("factor", [0.4, 1.0, 3.0])
def test_a_known_temperature_of_independent_labels_is_found(factor: float) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3000, 3)) * 2
    gold = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    assert temperature_multi(logits * factor, gold) == pytest.approx(factor, rel=0.06)


def test_temperature_is_the_best_of_a_grid() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(400, 3)) * 4
    gold = rng.integers(0, 3, 400)
    gold[:250] = logits[:250].argmax(axis=1)

    def loss(factor: float) -> float:
        table = softmax(logits, factor)
        return float(-np.log(table[np.arange(400), gold]).sum() + math.log(factor) ** 2 / 2)

    result = temperature(logits, gold)
    assert loss(result) <= min(loss(factor) for factor in np.geomspace(0.05, 20, 400)) + 1e-6


def test_no_errors_are_no_reason_for_infinite_confidence() -> None:
    logits = np.array([[3.0, 0.0]] * 30)
    assert 0.2 < temperature(logits, np.zeros(30)) <= 1
    assert 1 <= temperature(logits, np.ones(30)) <= 20  # all wrong: as hot as can be


def test_extreme_logits() -> None:
    logits = np.array([[1e4, -1e4], [-1e4, 1e4]] * 10)
    assert math.isfinite(temperature(logits, [0, 1] * 10))
    assert math.isfinite(temperature_multi(logits, logits < 0))


def test_reliability_counts_every_answer() -> None:
    rng = np.random.default_rng(0)
    sure = rng.random(1000)
    right = rng.random(1000) < sure
    bins = reliability(sure, right)
    assert sum(one.count for one in bins) == 1000
    for one in bins:
        inside = (sure > one.low) & (sure <= one.high)
        assert one.count == inside.sum()
        assert (one.confidence, one.accuracy) == pytest.approx((sure[inside].mean(), right[inside].mean()))
    assert ece(sure, right) == pytest.approx(sum(b.count * abs(b.confidence - b.accuracy) for b in bins) / 1000)
    assert ece(sure, right) < 0.06
    assert ece(np.full(1000, 0.9), right) == pytest.approx(0.9 - right.mean())


def test_ends_of_bins() -> None:
    bins = reliability([0.0, 0.5, 1.0], [0, 1, 1], bins=2)
    assert [one.count for one in bins] == [2, 1]
    assert math.isnan(reliability([0.9], [1], bins=2)[0].accuracy)


def test_abstention_reaches_what_was_wanted() -> None:
    """On fresh answers of a calibrated model: mostly, and never by much less."""
    rng = np.random.default_rng(0)

    def answers(n: int) -> tuple[np.ndarray, np.ndarray]:
        sure = 0.5 + 0.5 * rng.beta(2, 0.7, n)
        return sure, rng.random(n) < sure

    fresh = answers(20000)
    reached, coverage = [], []
    for _ in range(50):
        result = abstention(*answers(800), 0.95)
        assert result is not None
        reached.append(selective_precision(*fresh, result.threshold).value)
        coverage.append(result.coverage)
    assert np.mean(np.array(reached) >= 0.95) > 0.75
    assert min(reached) > 0.93
    assert np.mean(coverage) > 0.4  # 0.59 could be answered by who knew the truth


def test_abstention_takes_the_lowest_threshold() -> None:
    sure = np.linspace(1, 0.5, 101)
    right = sure >= 0.7
    result = abstention(sure, right, 0.9)
    assert result is not None
    inside = sure >= result.threshold
    assert result.coverage == pytest.approx(inside.mean())
    assert result.precision.value == pytest.approx(right[inside].mean())
    assert result.precision.low < result.precision.value < result.precision.high
    # One standard error under the precision is what has to reach 0.9, so it stops before 0.9 itself.
    assert 0.9 < result.precision.value < 0.95
    assert result.target == 0.9


def test_abstention_that_cannot_be() -> None:
    assert abstention(np.linspace(0.5, 1, 500), np.arange(500) % 2, 0.9) is None
    assert abstention([0.99] * 10, [1] * 10, 0.8) is None  # too few to tell
    assert abstention([0.99] * 40, [1] * 40, 0.99) is None  # 40 of 40 do not prove 99%


def test_equal_confidences_are_answered_together() -> None:
    sure, right = np.array([0.9] * 60 + [0.6] * 40), np.array([1] * 55 + [0] * 5 + [0] * 40)
    result = abstention(sure, right, 0.85)
    assert result is not None
    assert (result.threshold, result.coverage) == (0.9, 0.6)
    assert result.precision.value == pytest.approx(55 / 60)


def test_nothing_kept() -> None:
    assert math.isnan(selective_precision([0.5], [1], 0.9).value)


def test_best_threshold_is_the_best_of_the_grid() -> None:
    rng = np.random.default_rng(0)
    gold = rng.random((400, 4)) < [0.5, 0.2, 0.05, 0.3]
    table = np.clip(0.25 * gold + rng.normal(0.2, 0.1, gold.shape), 0, 1)

    def macro(threshold: float) -> float:
        return float(f1_score(gold, table >= threshold, average="macro", zero_division=0))

    result = best_threshold(gold, table)
    assert macro(result) == pytest.approx(max(macro(i / 100) for i in range(1, 100)))


def test_best_threshold_lies_amid_equals() -> None:
    assert best_threshold([[True], [False]], [[0.8], [0.2]]) == pytest.approx(0.51, abs=0.02)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: temperature([1.0, 2.0], [0]), "logits must be"),
        (lambda: temperature([[1.0, np.nan]], [0]), "finite"),
        (lambda: temperature([[1.0, 2.0]], [2]), "indices from 0 to 1"),
        (lambda: temperature([[1.0, 2.0]], [0, 1]), "gold has shape"),
        (lambda: temperature_multi([[1.0, 2.0]], [[True]]), "gold has shape"),
        (lambda: ece([0.5], [1, 0]), "one entry per prediction"),
        (lambda: ece([1.5], [1]), "between 0 and 1"),
        (lambda: reliability([0.5], [1], bins=0), "bins=0"),
        (lambda: abstention([0.5], [1], 1.0), "precision=1.0"),
        (lambda: best_threshold([[True]], [[0.5, 0.5]]), "gold has shape"),
    ],
)
def test_refusals(call: object, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()


@pytest.mark.parametrize(("scales", "bias"), [((1.5, 0.0), -0.7), ((0.2, 1.0), 3.0)])
def test_a_known_logistic_function_is_found(scales: tuple[float, float], bias: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 2, size=(40_000, 2))
    positive = rng.random(len(values)) < 1 / (1 + np.exp(-(values @ scales + bias)))
    assert platt(values, positive) == (pytest.approx(scales, abs=0.05), pytest.approx(bias, rel=0.05))


def test_platt_scaling_of_separable_reversed_and_constant_values_is_finite() -> None:
    (scale,), bias = platt([[-3.0], [-2.0], [2.0], [3.0]], [False, False, True, True])
    assert 0 < scale < 10
    assert abs(bias) < 1e-6
    assert platt([[1.0], [0.0]], [False, True]) == ([0.0], 0.0)  # no evidence is not used backwards
    rng = np.random.default_rng(0)
    good = rng.normal(size=200)
    positive = good + rng.normal(size=200) > 0
    alone, with_others = platt(good[:, None], positive), platt(np.stack([good, -(good**3), good * 0], 1), positive)
    assert with_others == ([*alone[0], 0.0, 0.0], alone[1])
    with pytest.raises(InputError, match="positive and negative"):
        platt([[1.0], [2.0]], [True, True])


def test_the_threshold_of_no_answer_has_the_best_mean_score() -> None:
    rng = np.random.default_rng(0)
    unanswerable = rng.random(300) < 0.4
    p = np.clip(rng.normal(np.where(unanswerable, 0.7, 0.3), 0.2), 0, 1).round(2)
    score = np.where(unanswerable, 0.0, rng.random(300))

    def mean(threshold: float) -> float:
        return float(np.where(p > threshold, unanswerable, score).mean())

    best = no_answer_threshold(p, score, unanswerable)
    assert mean(best) == pytest.approx(max(map(mean, np.arange(-0.005, 1.01, 0.005))))
    assert no_answer_threshold([0.3, 0.5], [1.0, 1.0], [False, False]) == 1.0
