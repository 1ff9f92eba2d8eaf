"""Probabilities that mean what they say: temperature, reliability, and when not to answer.

All of this is fitted on held-out data. What is fitted on dev is to be checked on test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import BoolArray, FloatArray, Score, wilson
from bertie.evaluation.scores import BINS, bin_of, macro_f1

COLDEST, HOTTEST = 0.05, 20.0
FEWEST = 20  # answers that a precision is predictions by


# --- temperature ---


def temperature(logits: ArrayLike, gold: ArrayLike) -> float:
    """What to divide logits by, so that their softmax is as likely as can be given the gold labels.

    `logits` is (n, k), `gold` (n,) indices; logarithms of probabilities do as logits. The log of the temperature has a
    normal prior around 0: it weighs as little as one text, and keeps a dev set without errors from asking for
    infinite confidence.

    >>> temperature([[4.0, 0.0]] * 4, [0, 0, 0, 1]) > 2  # sure of itself, and wrong once in four
    True
    """
    z, index = _two_d(logits, "logits"), np.asarray(gold, dtype=np.int64)
    if index.shape != z.shape[:1]:
        raise InputError(f"gold has shape {index.shape}; {len(z)} rows of logits need {z.shape[:1]}")
    if index.min() < 0 or index.max() >= z.shape[1]:
        raise InputError(f"gold must hold indices from 0 to {z.shape[1] - 1}")
    z = z - z.max(axis=1, keepdims=True)
    true = z[np.arange(len(z)), index]
    return _coolest(lambda cold: float((np.log(np.exp(z * cold).sum(axis=1)) - true * cold).sum()))


def temperature_multi(logits: ArrayLike, gold: ArrayLike) -> float:
    """As `temperature`, for independent labels with a sigmoid each: `gold` is (n, k) of truth values."""
    z, true = _two_d(logits, "logits"), np.asarray(gold, dtype=bool)
    if true.shape != z.shape:
        raise InputError(f"gold has shape {true.shape}; it must be that of logits, {z.shape}")
    away = np.where(true, -z, z)  # how far it is on the wrong side
    return _coolest(lambda cold: float(np.logaddexp(0, away * cold).sum()))


def softmax(logits: ArrayLike, temperature: float = 1.0) -> FloatArray:
    """(n, k) logits -> probabilities, at a temperature."""
    z = _two_d(logits, "logits") / temperature
    z = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(z / z.sum(axis=1, keepdims=True))


def _coolest(loss: Callable[[float], float]) -> float:
    """The temperature of the least loss, by golden section on its logarithm."""

    def at(log_heat: float) -> float:
        return loss(math.exp(-log_heat)) + log_heat**2 / 2

    ratio = (math.sqrt(5) - 1) / 2
    low, high = math.log(COLDEST), math.log(HOTTEST)
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = at(left), at(right)
    while high - low > 1e-5:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = at(right)
    return math.exp((low + high) / 2)


# --- reliability ---


@dataclass(frozen=True, slots=True)
class Bin:
    """Answers whose confidence lies above `low` and up to `high`: how sure, and how often right."""

    low: float
    high: float
    count: int
    confidence: float  # their mean; NaN without any
    accuracy: float


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> list[Bin]:
    """Bins of equal width. A calibrated model is right in each as often as it is sure."""
    sure, right = _answers(confidence, correct)
    if bins < 1:
        raise InputError(f"bins={bins} must be at least 1")
    place = bin_of(sure, bins)
    found = []
    for i in range(bins):
        inside = place == i
        count = int(inside.sum())
        means = (float(sure[inside].mean()), float(right[inside].mean())) if count else (math.nan, math.nan)
        found.append(Bin(i / bins, (i + 1) / bins, count, *means))
    return found


def ece(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error: the gap between confidence and accuracy, averaged over answers by their bins.

    >>> round(ece([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]), 4)
    0.15
    """
    table = [one for one in reliability(confidence, correct, bins) if one.count]
    total = sum(one.count for one in table)
    return sum(one.count * abs(one.confidence - one.accuracy) for one in table) / total


# --- when not to answer ---


@dataclass(frozen=True, slots=True)
class Abstention:
    """Answers of at least this confidence are as often right as was wanted."""

    threshold: float
    wanted: float
    precision: Score  # of those answers, where it was fitted
    coverage: float  # the share of texts that get an answer


def abstention(confidence: ArrayLike, correct: ArrayLike, precision: float) -> Abstention | None:
    """The lowest confidence from which answers reach a precision; None if none does.

    The lowest of many thresholds is one that was lucky. So it takes more than the plain precision: Wilson's lower bound
    at one standard error has to reach what is wanted, over at least 20 answers.
    """
    if not 0 < precision < 1:
        raise InputError(f"precision={precision} must be between 0 and 1")
    sure, right = _answers(confidence, correct)
    order = np.argsort(-sure, kind="stable")
    sure, right = sure[order], right[order]
    answered = np.arange(1, len(sure) + 1)
    hits = np.cumsum(right)
    last = np.append(sure[1:] < sure[:-1], True)  # equal confidences are answered together
    for n in answered[last & (answered >= FEWEST)][::-1]:
        k = int(hits[n - 1])
        if wilson(k, int(n), z=1.0)[0] >= precision:
            return Abstention(
                float(sure[n - 1]), precision, kept(sure, right, float(sure[n - 1])), float(n) / len(sure)
            )
    return None


def kept(confidence: ArrayLike, correct: ArrayLike, threshold: float) -> Score:
    """The precision of the answers from a threshold on, with Wilson's interval; not defined if there are none."""
    sure, right = _answers(confidence, correct)
    inside = right[sure >= threshold]
    if not len(inside):
        return Score(math.nan, math.nan, math.nan)
    return Score(float(inside.mean()), *wilson(int(inside.sum()), len(inside)))


def best_threshold(gold: ArrayLike, probabilities: ArrayLike) -> float:
    """The probability from which to give a label, for the best macro-F1: of 0.01, 0.02, … the middle of the best."""
    true, table = np.asarray(gold, dtype=bool), _two_d(probabilities, "probabilities")
    if true.shape != table.shape:
        raise InputError(f"gold has shape {true.shape}; it must be that of probabilities, {table.shape}")
    grid = np.arange(1, 100) / 100
    found = np.empty(len(grid))
    for i, threshold in enumerate(grid):
        given = table >= threshold
        hits, either = (true & given).sum(axis=0), true.sum(axis=0) + given.sum(axis=0)
        found[i] = macro_f1(hits[None].astype(np.float64), either[None].astype(np.float64))[0]
    best = np.flatnonzero(found >= found.max() - 1e-12)
    # Several stretches may be equally good: the one around the first best, so that the middle is one of them.
    run = best[: int(np.argmax(np.append(np.diff(best) > 1, True))) + 1]
    return float(grid[run[len(run) // 2]])


def _answers(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, BoolArray]:
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=bool)
    if sure.ndim != 1 or sure.shape != right.shape or not len(sure):
        raise InputError(f"confidence has shape {sure.shape} and correct {right.shape}; both need one entry an answer")
    if not ((sure >= 0) & (sure <= 1.001)).all():
        raise InputError(f"confidence must be between 0 and 1; it goes from {sure.min():g} to {sure.max():g}")
    return sure, right


def _two_d(values: ArrayLike, name: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise InputError(f"{name} must be (texts, labels) of finite numbers; it has shape {array.shape}")
    return array
