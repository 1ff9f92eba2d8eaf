"""Intervals: resamples against plain loops, coverage by simulation, and significance tests against scipy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics as sk

from bertie.evaluation.intervals import (
    Score,
    bootstrap,
    from_sums,
    mcnemar,
    resample,
    resample_counts,
    wilson_interval,
)
from bertie.evaluation.metrics import classification, multi_label, sts
from bertie.evaluation.metrics.labels import classification_statistic
from bertie.evaluation.metrics.shared import ratio
from bertie.evaluation.metrics.tags import tag_statistic
from bertie.evaluation.metrics.values import regression_statistic
from bertie.evaluation.slices import by_label
from tests.evaluation.metric_data import LABELS, classified, tagged, values


def drawn_rows(n: int, resamples: int, seed: int) -> list[np.ndarray]:
    """The resamples of the vectorized bootstrap, as rows that a plain one would have picked."""
    return [np.repeat(np.arange(n), row.astype(int)) for part in resample_counts(n, resamples, seed) for row in part]


def test_every_draw_is_a_sample_of_the_same_size() -> None:
    rows = drawn_rows(37, 50, 3)
    assert len(rows) == 50
    assert all(len(row) == 37 for row in rows)
    assert len({tuple(row) for row in rows}) == 50


def test_resamples_of_classification_are_those_of_a_plain_loop() -> None:
    gold, table = classified(80, LABELS)
    true, output = np.array(gold), np.array([LABELS[i] for i in table.argmax(1)])
    statistic, n = classification_statistic(gold, table, LABELS)
    (result,) = resample([statistic], n, 40, 5)
    rows = drawn_rows(80, 40, 5)
    plain = {
        "accuracy": [sk.accuracy_score(true[row], output[row]) for row in rows],
        "macro_f1": [sk.f1_score(true[row], output[row], average="macro") for row in rows],
        "matthews": [sk.matthews_corrcoef(true[row], output[row]) for row in rows],
        "log_loss": [sk.log_loss(true[row], table[row], labels=LABELS) for row in rows],
    }
    for name, loop in plain.items():
        assert result[name] == pytest.approx(loop), name


def test_resamples_of_correlations_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 4, 50).astype(float)
    output = (gold + rng.normal(size=50)).round(1)
    statistic, n = regression_statistic(gold, output)
    (result,) = resample([statistic], n, 150, 2)
    rows = drawn_rows(50, 150, 2)
    for name, one in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        assert result[name] == pytest.approx([one(gold[row], output[row]).statistic for row in rows])
    assert result["r2"] == pytest.approx([sk.r2_score(gold[row], output[row]) for row in rows])


def test_resamples_of_entities_are_those_of_a_plain_loop() -> None:
    gold, output = tagged(["O", "O", "B-X", "I-X"], n=40)
    (result,) = resample([tag_statistic(gold, output)[0]], 40, 60, 1)
    loop = [seqeval.f1_score([gold[i] for i in row], [output[i] for i in row]) for row in drawn_rows(40, 60, 1)]
    assert result["f1"] == pytest.approx(loop)


def test_the_interval_of_a_loss_is_scipys_bca() -> None:
    rng = np.random.default_rng(0)
    losses = rng.exponential(size=80)
    score = bootstrap(from_sums(losses[:, None], lambda sums: {"loss": sums[:, 0] / 80}), 80, resamples=4000)["loss"]
    other = stats.bootstrap((losses,), np.mean, method="BCa", n_resamples=4000, rng=1).confidence_interval
    assert (score.low, score.high) == pytest.approx((other.low, other.high), abs=0.02)


# --- coverage: how often a 95% interval holds the truth ---


def mean_score(outcomes: np.ndarray, name: str = "accuracy", resamples: int = 100) -> Score:
    n = len(outcomes)
    return bootstrap(from_sums(outcomes[:, None], lambda sums: {name: sums[:, 0] / n}), n, resamples=resamples)[name]


@pytest.mark.parametrize("n", [30, 60, 200, 1000])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.98])
def test_coverage_of_proportions(n: int, p: float) -> None:
    """Exact: the interval depends on the number of successes alone, whose probabilities are binomial."""
    successes = np.arange(n + 1)
    probable = stats.binom.pmf(successes, n, p)
    held = 0.0
    for k in successes[probable > 1e-4].tolist():
        score = mean_score((np.arange(n) < k).astype(float), resamples=3)
        assert score.low < score.high
        assert (score.low, score.high) == pytest.approx(wilson_interval(k, n))
        held += probable[k] * (score.low <= p <= score.high)
    assert held > 0.93


@pytest.mark.parametrize(("n", "p"), [(30, 0.5), (30, 0.98), (60, 0.9), (60, 0.98), (200, 0.9), (200, 0.98)])
def test_coverage_of_f1(n: int, p: float) -> None:
    """Binary F1 with 30% positives; percentiles of the bootstrap cover 0.455 (n = 30) and 0.71 (60) at p = 0.98."""
    rng, held, runs = np.random.default_rng(n), 0, 250
    true = 2 * 0.3 * p / (0.3 + 0.3 * p + 0.7 * (1 - p))
    for _ in range(runs):
        gold = rng.random(n) < 0.3
        output = gold ^ (rng.random(n) > p)
        columns = np.stack([2 * (gold & output), gold.astype(int) + output], axis=1).astype(float)
        statistic = from_sums(columns, lambda sums: {"f1": ratio(sums[:, 0], sums[:, 1])})
        score = bootstrap(statistic, n, trials={"f1": columns[:, 1].sum() / 2}, resamples=100)["f1"]
        assert score.low < score.high
        held += score.low <= true <= score.high
    assert held / runs > 0.93 - 0.02  # two standard errors of the simulation are 0.028


@pytest.mark.parametrize(("n", "rho"), [(30, 0.5), (30, 0.9), (60, 0.9), (200, 0.5)])
def test_coverage_of_correlations(n: int, rho: float) -> None:
    rng, runs = np.random.default_rng(n), 200
    spearman = 6 / math.pi * math.asin(rho / 2)
    held = np.zeros(2)
    for _ in range(runs):
        x = rng.normal(size=n)
        y = rho * x + math.sqrt(1 - rho**2) * rng.normal(size=n)
        scores = sts(x, y, resamples=100)
        held += [score.low <= true <= score.high for score, true in zip(scores.values(), (spearman, rho), strict=True)]
    assert (held / runs > 0.93 - 0.02).all(), held / runs


@pytest.mark.parametrize(("n", "gap"), [(30, 0.0), (60, 0.05), (200, 0.0), (200, 0.1), (1000, 0.0), (1000, 0.05)])
def test_coverage_of_the_calibration_error(n: int, gap: float) -> None:
    """The error of a calibrated model is above 0 in every sample, but 0 is in the interval."""
    rng, held, runs = np.random.default_rng(n), 0, 150
    for i in range(runs):
        sure = 0.55 + 0.44 * rng.random(n)
        gold = np.where(rng.random(n) < sure - gap, "a", "b").tolist()
        score = classification(gold, np.stack([sure, 1 - sure], axis=1), ["a", "b"], resamples=1, seed=i)["ece"]
        assert 0 <= score.low <= score.value <= score.high
        assert score.low < score.high
        held += score.low - 1e-9 <= gap <= score.high
    assert held / runs > 0.93 - 0.03


def test_perfect_scores_have_a_width() -> None:
    gold, table = ["a", "b", "b"] * 20, [[0.9, 0.1], [0.2, 0.8], [0.1, 0.9]] * 20
    scores = classification(gold, table, ["a", "b"])
    for name, most in {"accuracy": 0.96, "f1": 0.95, "recall": 0.95, "macro_f1": 0.95, "matthews": 0.95}.items():
        assert 0.8 < scores[name].low < most
        assert (scores[name].value, scores[name].high) == (1, 1)
    assert scores["recall"].low < scores["accuracy"].low  # 40 texts of that label, not 60
    assert sts([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7])["spearman"].low < 0.99
    rare = by_label(["a"] * 997 + ["b"] * 3, ["a"] * 997 + ["b"] * 3, ["a", "b"])
    assert rare[1].recall.low == pytest.approx(wilson_interval(3, 3)[0])


def test_rare_labels_do_not_push_the_interval_below_the_value() -> None:
    gold = np.eye(12, dtype=bool)  # each label once, all of them right
    result = multi_label(gold, gold.astype(float), 0.5)["macro_f1"]
    assert (result.value, result.high) == (1, 1)
    assert result.low == pytest.approx(wilson_interval(12, 12)[0])


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
