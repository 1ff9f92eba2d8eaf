"""Ratios, calibration bins and argument checks that several metrics share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import BoolArray, FloatArray, IntArray, Score, calibration_interval

BINS = 15  # of equal width, for the expected calibration error


def ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Divide; 0 where the denominator is 0, like scikit-learn and seqeval."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def macro_f1(true_positives: FloatArray, gold_plus_predicted: FloatArray, absent: int = 0) -> FloatArray:
    """(resamples, k) -> (resamples,): mean F1 of the labels in each resample; `absent` more labels count as 0."""
    present = (gold_plus_predicted > 0).sum(axis=1) + absent
    return ratio(ratio(2 * true_positives, gold_plus_predicted).sum(axis=1), present.astype(np.float64))


def macro_trials(support: FloatArray | IntArray) -> float:
    """Sample size of a mean over labels: that of a proportion with the same variance, which rare labels dominate."""
    present = support[support > 0].astype(np.float64)
    return float(len(present) ** 2 / (1 / present).sum()) if len(present) else 1.0


def calibration_bin(confidence: FloatArray, bins: int = BINS) -> IntArray:
    """Bin index of each confidence; bins have equal width and include their upper end."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def calibration_gaps(confidence: FloatArray, correct: BoolArray) -> FloatArray:
    """(n, BINS): confidence - correctness in the column of its bin. ECE sums the absolute column sums."""
    columns = np.zeros((len(confidence), BINS))
    columns[np.arange(len(confidence)), calibration_bin(confidence)] = confidence - correct
    return columns


def with_calibration_interval(
    score: Score, confidence: FloatArray, correct: BoolArray, resamples: int, seed: int
) -> dict[str, Score]:
    """The expected calibration error with its interval; without resamples, the value alone."""
    if not resamples:
        return {"ece": score}
    bins = calibration_bin(confidence)
    return {"ece": Score(score.value, *calibration_interval(score.value, confidence, correct, bins, seed=seed))}


def check_probabilities(probabilities: ArrayLike, n: int, k: int) -> FloatArray:
    """Return the (n, k) table, or raise an InputError that names the offending text."""
    table = np.asarray(probabilities, dtype=np.float64)
    if not n:
        raise InputError("there is nothing to score: no texts were given")
    if table.shape != (n, k):
        raise InputError(f"probabilities has shape {table.shape}; {n} texts and {k} labels need {(n, k)}")
    if not (np.isfinite(table).all() and table.min() >= 0 and table.max() <= 1.001):
        bad = int(np.flatnonzero(~((table >= 0) & (table <= 1.001)).all(axis=1))[0])
        raise InputError(f"probabilities of text {bad} are not between 0 and 1: {table[bad].tolist()!r:.80}")
    return table


def check_values(values: ArrayLike, name: str) -> FloatArray:
    """Return a one-dimensional array of finite numbers."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise InputError(f"{name} must be a list of finite numbers; it has shape {array.shape}")
    return array


def check_same_length(gold: Sequence[Any], predicted: Sequence[Any]) -> int:
    """Return the common length."""
    if len(gold) != len(predicted):
        raise InputError(f"gold has {len(gold)} entries and predicted {len(predicted)}; they must be of one length")
    if not len(gold):
        raise InputError("there is nothing to score: no texts were given")
    return len(gold)
