"""Calibration of probabilities: temperature scaling, reliability diagrams, and abstention thresholds.

All of this is fitted on held-out data. What is fitted on dev should be checked on test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import BoolArray, FloatArray, Score, wilson_interval
from bertie.evaluation.metrics.shared import BINS, calibration_bin, macro_f1

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
MIN_ANSWERS = 20  # to estimate the precision at a threshold


# --- temperature scaling ---


def temperature(logits: ArrayLike, gold: ArrayLike) -> float:
    """Fit the temperature that minimizes the negative log-likelihood of softmax(logits / temperature).

    `logits` is (n, k), `gold` (n,) indices; log-probabilities serve as logits. The log of the temperature
    has a standard normal prior. It weighs as much as one text, and keeps a dev set without errors from
    driving the temperature to 0.

    >>> temperature([[4.0, 0.0]] * 4, [0, 0, 0, 1]) > 2  # overconfident: wrong once in four
    True
    """
    z, index = _check_table(logits, "logits"), np.asarray(gold, dtype=np.int64)
    if index.shape != z.shape[:1]:
        raise InputError(f"gold has shape {index.shape}; {len(z)} rows of logits need {z.shape[:1]}")
    if index.min() < 0 or index.max() >= z.shape[1]:
        raise InputError(f"gold must hold indices from 0 to {z.shape[1] - 1}")
    z = z - z.max(axis=1, keepdims=True)
    true = z[np.arange(len(z)), index]
    return _fit_temperature(lambda scale: float((np.log(np.exp(z * scale).sum(axis=1)) - true * scale).sum()))


def temperature_multi(logits: ArrayLike, gold: ArrayLike) -> float:
    """Fit the temperature of independent labels with one sigmoid each: `gold` is a boolean (n, k)."""
    z, true = _check_table(logits, "logits"), np.asarray(gold, dtype=bool)
    if true.shape != z.shape:
        raise InputError(f"gold has shape {true.shape}; it must be that of logits, {z.shape}")
    wrong_side = np.where(true, -z, z)
    return _fit_temperature(lambda scale: float(np.logaddexp(0, wrong_side * scale).sum()))


def temperature_of_predictions(logits: Sequence[ArrayLike], correct: ArrayLike) -> float:
    """Fit the temperature at which the softmax probability of a prediction is the chance that it is correct.

    `logits` has the candidates of each item, as many as it has, the predicted one first; `correct` is a boolean (n,).

    >>> temperature_of_predictions([[9.0, 0.0]] * 4, [True, True, True, False]) > 4
    True
    """
    rows = [np.asarray(row, dtype=np.float64) for row in logits]
    right = np.asarray(correct, dtype=bool)

    def loss(scale: float) -> float:
        total = 0.0
        for row, is_right in zip(rows, right, strict=True):
            others = np.logaddexp.reduce((row[1:] - row[0]) * scale, initial=-69.0)  # against 0 for the prediction
            total += np.logaddexp(0.0, others) - (0.0 if is_right else others)
        return float(total)

    return _fit_temperature(loss)


def platt(values: ArrayLike, positive: ArrayLike) -> tuple[list[float], float]:
    """Fit (scales, bias) so that sigmoid(values @ scales + bias) is the probability that an item is positive.

    `values` is (n, k). With Platt's (1999) smoothed targets, which keep separable data from driving the scales to
    infinity. Scales are at least 0: a column that would have another sign is left out.

    >>> (scale,), bias = platt([[-2.0], [-1.0], [1.0], [2.0]] * 9, [False, False, True, True] * 9)
    >>> scale > 1 and abs(bias) < 1e-6
    True
    """
    x, true = _check_table(values, "values"), np.asarray(positive, dtype=bool)
    count = int(true.sum())
    if x.shape[:1] != true.shape or not 0 < count < len(true):
        raise InputError("Platt scaling needs positive and negative items, with one row of values for each")
    target = np.where(true, (count + 1) / (count + 2), 1 / (len(true) - count + 2))
    used = [k for k in range(x.shape[1]) if x[:, k].std() > 0]
    while used:
        scales, bias = _fit_logistic(x[:, used], target)
        if (scales >= 0).all():
            by_column = dict(zip(used, scales.tolist(), strict=True))
            return [by_column.get(k, 0.0) for k in range(x.shape[1])], bias
        used = [k for k, scale in zip(used, scales, strict=True) if scale >= 0]
    return [0.0] * x.shape[1], math.log(target.mean() / (1 - target.mean()))


def _fit_logistic(x: FloatArray, target: FloatArray) -> tuple[FloatArray, float]:
    """Logistic regression by Newton's method: the scales of the columns, and the bias."""
    center, width = x.mean(axis=0), x.std(axis=0)
    z = np.concatenate([(x - center) / width, np.ones((len(x), 1))], axis=1)  # (n, k + 1)
    weights = np.zeros(z.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(z @ weights, -500, 500)))
        hessian = (z * (p * (1 - p))[:, None]).T @ z + 1e-9 * len(x) * np.eye(z.shape[1])
        step = np.linalg.solve(hessian, z.T @ (p - target))
        step *= min(1.0, 4.0 / max(float(np.abs(step).max()), 1e-12))
        weights -= step
        if np.abs(step).max() < 1e-10:
            break
    scales = weights[:-1] / width
    return scales, float(weights[-1] - scales @ center)


def no_answer_threshold(no_answer: ArrayLike, answered_score: ArrayLike, unanswerable: ArrayLike) -> float:
    """Find the probability of "no answer" up to which to answer, for the best mean score: SQuAD 2's best F1.

    `answered_score` is that of each question's answer if it is given; "no answer" has the score 1 where it is right and
    0 elsewhere. The threshold lies halfway between two probabilities that occur.

    >>> no_answer_threshold([0.125, 0.25, 0.75, 0.875], [1.0, 0.5, 0.0, 0.0], [False, False, True, True])
    0.5
    """
    p, score, none = (np.asarray(a, dtype=np.float64) for a in (no_answer, answered_score, unanswerable))
    order = np.argsort(p, kind="stable")
    p, score, none = p[order], score[order], none[order]
    # Of thresholds between questions i-1 and i, those before are answered.
    totals = np.concatenate([[0.0], np.cumsum(score)]) + np.concatenate([np.cumsum(none[::-1])[::-1], [0.0]])
    edges = np.concatenate([[0.0], (p[1:] + p[:-1]) / 2, [1.0]])
    distinct = np.concatenate([[True], p[1:] > p[:-1], [True]])
    best = np.flatnonzero(distinct & (totals >= totals[distinct].max() - 1e-12))
    return float(edges[best[-1]])


def softmax(logits: ArrayLike, temperature: float = 1.0) -> FloatArray:
    """(n, k) logits -> probabilities, at a temperature."""
    z = _check_table(logits, "logits") / temperature
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(z / z.sum(axis=1, keepdims=True))


def _fit_temperature(loss: Callable[[float], float]) -> float:
    """Minimize the loss, a function of 1 / temperature, by golden-section search on the log temperature."""

    def objective(log_temperature: float) -> float:
        return loss(math.exp(-log_temperature)) + log_temperature**2 / 2

    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = objective(left), objective(right)
    while high - low > 1e-5:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = objective(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = objective(right)
    return math.exp((low + high) / 2)


# --- reliability ---


@dataclass(frozen=True, slots=True)
class Bin:
    """Predictions with a confidence above `low` and up to `high`."""

    low: float
    high: float
    count: int
    confidence: float  # mean; NaN if the bin is empty
    accuracy: float


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> list[Bin]:
    """Compute the equal-width bins of a reliability diagram."""
    sure, right = _check_answers(confidence, correct)
    if bins < 1:
        raise InputError(f"bins={bins} must be at least 1")
    index = calibration_bin(sure, bins)
    table = []
    for i in range(bins):
        inside = index == i
        count = int(inside.sum())
        means = (float(sure[inside].mean()), float(right[inside].mean())) if count else (math.nan, math.nan)
        table.append(Bin(i / bins, (i + 1) / bins, count, *means))
    return table


def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error: the gap between confidence and accuracy, averaged over bins by their count.

    >>> round(ece([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]), 4)
    0.15
    """
    table = [row for row in reliability(confidence, correct, bins) if row.count]
    total = sum(row.count for row in table)
    return sum(row.count * abs(row.confidence - row.accuracy) for row in table) / total


# --- selective prediction ---


@dataclass(frozen=True, slots=True)
class Abstention:
    """A confidence threshold that reaches a target precision."""

    threshold: float
    target: float  # the requested precision
    precision: Score  # of predictions above the threshold, on the data it was fitted on
    coverage: float  # fraction of texts above the threshold


def abstention(confidence: ArrayLike, correct: ArrayLike, precision: float) -> Abstention | None:
    """Find the lowest confidence threshold with the requested precision; None if there is none.

    The lowest of many thresholds is partly luck, so its observed precision is not enough: the Wilson lower
    bound at one standard error must reach the target, over at least 20 predictions.
    """
    if not 0 < precision < 1:
        raise InputError(f"precision={precision} must be between 0 and 1")
    sure, right = _check_answers(confidence, correct)
    order = np.argsort(-sure, kind="stable")
    sure, right = sure[order], right[order]
    answered = np.arange(1, len(sure) + 1)
    hits = np.cumsum(right)
    last_of_ties = np.append(sure[1:] < sure[:-1], True)  # equal confidences are answered together
    for n in answered[last_of_ties & (answered >= MIN_ANSWERS)][::-1]:
        if wilson_interval(int(hits[n - 1]), int(n), z=1.0)[0] >= precision:
            threshold = float(sure[n - 1])
            reached = selective_precision(sure, right, threshold)
            return Abstention(threshold, precision, reached, float(n) / len(sure))
    return None


def selective_precision(confidence: ArrayLike, correct: ArrayLike, threshold: float) -> Score:
    """Precision of the predictions at or above a threshold, with the Wilson interval; NaN if there are none."""
    sure, right = _check_answers(confidence, correct)
    inside = right[sure >= threshold]
    if not len(inside):
        return Score(math.nan, math.nan, math.nan)
    return Score(float(inside.mean()), *wilson_interval(int(inside.sum()), len(inside)))


def best_threshold(gold: ArrayLike, probabilities: ArrayLike) -> float:
    """Probability threshold with the best multi-label macro F1, on a grid of 0.01."""
    grid, scores = _macro_f1_by_threshold(gold, probabilities)
    best = np.flatnonzero(scores >= scores.max() - 1e-12)
    # The best thresholds may form several runs: take the middle of the first run, which is itself a best one.
    run = best[: int(np.argmax(np.append(np.diff(best) > 1, True))) + 1]
    return float(grid[run[len(run) // 2]])


def best_macro_f1(gold: ArrayLike, probabilities: ArrayLike) -> float:
    """Multi-label macro F1 at the best threshold.

    >>> best_macro_f1([[True, False], [False, True]], [[0.3, 0.1], [0.1, 0.4]])
    1.0
    """
    return float(_macro_f1_by_threshold(gold, probabilities)[1].max())


def _macro_f1_by_threshold(gold: ArrayLike, probabilities: ArrayLike) -> tuple[FloatArray, FloatArray]:
    true, table = np.asarray(gold, dtype=bool), _check_table(probabilities, "probabilities")
    if true.shape != table.shape:
        raise InputError(f"gold has shape {true.shape}; it must be that of probabilities, {table.shape}")
    grid = np.arange(1, 100) / 100
    scores = np.empty(len(grid))
    for i, threshold in enumerate(grid):
        predicted = table >= threshold
        hits, total = (true & predicted).sum(axis=0), true.sum(axis=0) + predicted.sum(axis=0)
        scores[i] = macro_f1(hits[None].astype(np.float64), total[None].astype(np.float64))[0]
    return grid, scores


def _check_answers(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, BoolArray]:
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=bool)
    if sure.ndim != 1 or sure.shape != right.shape or not len(sure):
        raise InputError(
            f"confidence has shape {sure.shape} and correct {right.shape}; both need one entry per prediction"
        )
    if not ((sure >= 0) & (sure <= 1.001)).all():
        raise InputError(f"confidence must be between 0 and 1; it ranges from {sure.min():g} to {sure.max():g}")
    return sure, right


def _check_table(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise InputError(f"{name} must be (texts, labels) of finite numbers; it has shape {array.shape}")
    return array
