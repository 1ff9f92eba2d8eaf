"""Bootstrap intervals against plain loops, and significance tests against scipy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics as sk

from bertie.evaluation.intervals import bootstrap, from_sums, mcnemar, resample_counts, wilson_interval
from bertie.evaluation.metrics import classification, multi_label, regression, tagging
from tests.evaluation.metric_data import LABELS, classified, tagged, values


def drawn_rows(n: int, resamples: int, seed: int) -> list[np.ndarray]:
    """The resamples of the vectorized bootstrap, as rows that a plain one would have picked."""
    return [np.repeat(np.arange(n), row.astype(int)) for part in resample_counts(n, resamples, seed) for row in part]


def test_every_draw_is_a_sample_of_the_same_size() -> None:
    rows = drawn_rows(37, 50, 3)
    assert len(rows) == 50
    assert all(len(row) == 37 for row in rows)
    assert len({tuple(row) for row in rows}) == 50


def percentiles(values: list[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def test_intervals_of_classification_are_those_of_a_plain_loop() -> None:
    gold, table = classified(80, LABELS)
    true, output = np.array(gold), np.array([LABELS[i] for i in table.argmax(1)])
    result = classification(gold, table, LABELS, resamples=40, seed=5)
    rows = drawn_rows(80, 40, 5)
    plain = {
        "accuracy": [sk.accuracy_score(true[row], output[row]) for row in rows],
        "macro_f1": [sk.f1_score(true[row], output[row], average="macro") for row in rows],
        "matthews": [sk.matthews_corrcoef(true[row], output[row]) for row in rows],
        "log_loss": [sk.log_loss(true[row], table[row], labels=LABELS) for row in rows],
    }
    for name, loop in plain.items():
        assert (result[name].low, result[name].high) == pytest.approx(percentiles(loop)), name


def test_intervals_of_correlations_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 4, 50).astype(float)
    output = (gold + rng.normal(size=50)).round(1)
    result = regression(gold, output, resamples=150, seed=2)
    rows = drawn_rows(50, 150, 2)
    for name, one in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        loop = percentiles([one(gold[row], output[row]).statistic for row in rows])
        assert (result[name].low, result[name].high) == pytest.approx(loop)
    assert (result["r2"].low, result["r2"].high) == pytest.approx(
        percentiles([sk.r2_score(gold[r], output[r]) for r in rows])
    )


def test_intervals_of_entities_are_those_of_a_plain_loop() -> None:
    gold, output = tagged(["O", "O", "B-X", "I-X"], n=40)
    result = tagging(gold, output, resamples=60, seed=1)["f1"]
    loop = [seqeval.f1_score([gold[i] for i in row], [output[i] for i in row]) for row in drawn_rows(40, 60, 1)]
    assert (result.low, result.high) == pytest.approx(percentiles(loop))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(150):
        right = (rng.random(150) < 0.8).astype(float)
        score = bootstrap(from_sums(right[:, None], lambda sums: {"accuracy": sums[:, 0] / 150}), 150, resamples=300)
        held += score["accuracy"].low <= 0.8 <= score["accuracy"].high
    assert 0.88 <= held / 150 <= 0.99


def test_the_calibration_error_lies_in_its_interval() -> None:
    """Draws have a higher error than what they are drawn from, which a plain interval would show as the truth."""
    rng = np.random.default_rng(0)
    held = 0
    for i in range(40):
        sure = 0.5 + 0.5 * rng.random(400)
        gold = ["a" if one else "b" for one in rng.random(400) < sure - 0.05]
        score = classification(gold, np.stack([sure, 1 - sure], axis=1), ["a", "b"], resamples=200, seed=i)["ece"]
        assert 0 <= score.low <= score.value <= score.high
        held += score.low <= 0.05 <= score.high
    assert held >= 34


def test_rare_labels_do_not_push_the_interval_below_the_value() -> None:
    gold = np.eye(12, dtype=bool)  # each label once, all of them right
    result = multi_label(gold, gold.astype(float), 0.5)["macro_f1"]
    assert (result.value, result.low, result.high) == (1, 1, 1)


def test_seeds() -> None:
    gold, table = classified(50, LABELS)
    assert classification(gold, table, LABELS, seed=1) == classification(gold, table, LABELS, seed=1)
    assert classification(gold, table, LABELS, seed=1) != classification(gold, table, LABELS, seed=2)


def test_no_draws_give_the_values_alone() -> None:
    gold, table = classified(50, LABELS)
    result = classification(gold, table, LABELS, resamples=0)
    assert values(result) == values(classification(gold, table, LABELS))
    assert all(math.isnan(score.low) and math.isnan(score.high) for score in result.values())
    assert re.fullmatch(r"0\.\d{4}", str(result["accuracy"]))


def test_mcnemar_is_the_binomial_test() -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 40, 3000):
        a, b = rng.random(n) < 0.7, rng.random(n) < 0.6
        few, many = int((a & ~b).sum()), int((~a & b).sum())
        expected = stats.binomtest(few, few + many, 0.5).pvalue if few + many else 1.0
        assert mcnemar(a, b) == pytest.approx(expected)


def test_wilson_is_scipys() -> None:
    for right, of in ((0, 5), (5, 5), (70, 100)):
        expected = stats.binomtest(right, of).proportion_ci(method="wilson")
        assert wilson_interval(right, of) == pytest.approx((expected.low, expected.high), abs=1e-4)
