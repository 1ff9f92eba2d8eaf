"""Metrics of text classification: single-label and multi-label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, IntArray, Score, Statistic, bootstrap, from_sums
from bertie.evaluation.metrics.shared import (
    BINS,
    calibration_gaps,
    check_probabilities,
    macro_f1,
    macro_trials,
    ratio,
    with_calibration_interval,
)


def classification(
    gold: Sequence[str], probabilities: ArrayLike, labels: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `accuracy`, `macro_f1`, `matthews`, `ece` and `log_loss`; binary also `f1`, `precision` and `recall`.

    `probabilities` is (n, k), one column per label; with two labels the second is the positive class. As
    in scikit-learn, macro_f1 leaves out labels that neither occur nor are predicted, and matthews is 0
    where undefined. `ece` is the expected calibration error of the top label over 15 equal-width bins. A gold
    label that is not among `labels` is never predicted: it counts as an error of an additional label.

    >>> scores = classification(["no", "yes", "yes"], [[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], ["no", "yes"])
    >>> round(scores["accuracy"].value, 4), round(scores["recall"].value, 4)
    (0.6667, 0.5)
    """
    statistic, n = classification_statistic(gold, probabilities, labels)
    table = np.asarray(probabilities, dtype=np.float64)
    labels = _with_unseen(gold, labels)
    index = _label_indices(gold, labels)
    predicted = table.argmax(axis=1)
    correct = predicted == index
    support, predictions = (np.bincount(values, minlength=len(labels)) for values in (index, predicted))
    trials = dict.fromkeys(("macro_f1", "matthews"), macro_trials(support))
    if len(labels) == 2:
        trials |= {"precision": predictions[1], "recall": support[1], "f1": (support[1] + predictions[1]) / 2}
    scores = bootstrap(statistic, n, trials=trials, resamples=resamples, seed=seed)
    return scores | with_calibration_interval(scores["ece"], table.max(axis=1), correct, resamples, seed)


def classification_statistic(
    gold: Sequence[str], probabilities: ArrayLike, labels: Sequence[str]
) -> tuple[Statistic, int]:
    """Return the statistic of `classification` and the number of texts."""
    table = np.asarray(probabilities)
    n, k = len(gold), len(labels)
    epsilon = float(np.finfo(table.dtype if table.dtype.kind == "f" else np.float64).eps)  # as in scikit-learn
    table = check_probabilities(table, n, k)
    if n and np.abs(table.sum(axis=1) - 1).max() > 0.01:
        worst = int(np.abs(table.sum(axis=1) - 1).argmax())
        raise InputError(f"probabilities of text {worst} add up to {table[worst].sum():.4g}; they must add up to 1")
    labels = _with_unseen(gold, labels)
    table, k = np.pad(table, ((0, 0), (0, len(labels) - k))), len(labels)
    gold_index = _label_indices(gold, labels)
    predicted = table.argmax(axis=1) if n else gold_index
    correct = gold_index == predicted
    loss = -np.log(np.clip(table[np.arange(n), gold_index], epsilon, 1 - epsilon))
    one_hot = np.eye(k)
    columns = np.concatenate(
        [
            one_hot[gold_index] * correct[:, None],
            one_hot[gold_index],
            one_hot[predicted],
            calibration_gaps(table.max(axis=1), correct),
            loss[:, None],
        ],
        axis=1,
    )

    def formula(sums: FloatArray) -> dict[str, FloatArray]:  # (resamples, 3k + BINS + 1)
        hits, support, predictions = sums[:, :k], sums[:, k : 2 * k], sums[:, 2 * k : 3 * k]
        scores = {
            "accuracy": hits.sum(axis=1) / n,
            "macro_f1": macro_f1(hits, support + predictions),
            "matthews": _matthews(hits.sum(axis=1), support, predictions, n),
            "ece": np.abs(sums[:, 3 * k : -1]).sum(axis=1) / n,
            "log_loss": sums[:, -1] / n,
        }
        if k == 2:
            scores |= {
                "f1": ratio(2 * hits[:, 1], support[:, 1] + predictions[:, 1]),
                "precision": ratio(hits[:, 1], predictions[:, 1]),
                "recall": ratio(hits[:, 1], support[:, 1]),
            }
        return scores

    return from_sums(columns, formula), n


def multi_label(
    gold: ArrayLike, probabilities: ArrayLike, threshold: float, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute multi-label `micro_f1`, `macro_f1`, `exact` (all labels of a text correct) and `ece`.

    `gold` is a boolean (n, k), `probabilities` (n, k); labels with at least `threshold` are predicted. As
    in scikit-learn, a label that neither occurs nor is predicted anywhere counts as 0 in macro_f1; one
    that is missing from a resample only is left out of it. `ece` pools all n x k probabilities.
    """
    statistic, n = multi_label_statistic(gold, probabilities, threshold)
    trials = {"macro_f1": macro_trials(np.asarray(gold, dtype=np.int64).sum(axis=0))}
    scores = bootstrap(statistic, n, trials=trials, resamples=resamples, seed=seed)
    table, truth = np.asarray(probabilities, dtype=np.float64), np.asarray(gold, dtype=bool)
    return scores | with_calibration_interval(scores["ece"], table, truth, resamples, seed)


def multi_label_statistic(gold: ArrayLike, probabilities: ArrayLike, threshold: float) -> tuple[Statistic, int]:
    """Return the statistic of `multi_label` and the number of texts."""
    truth = np.asarray(gold, dtype=bool)
    if truth.ndim != 2:
        raise InputError(f"gold has shape {truth.shape}; it must be (texts, labels)")
    n, k = truth.shape
    table = check_probabilities(probabilities, n, k)
    predicted = table >= threshold
    gaps = calibration_gaps(table.ravel(), truth.ravel()).reshape(n, k, BINS).sum(axis=1)
    exact = (predicted == truth).all(axis=1)
    gold_plus_predicted = truth.astype(np.float64) + predicted
    columns = np.concatenate([truth & predicted, gold_plus_predicted, gaps, exact[:, None]], axis=1)
    absent = int((gold_plus_predicted.sum(axis=0) == 0).sum())

    def formula(sums: FloatArray) -> dict[str, FloatArray]:  # (resamples, 2k + BINS + 1)
        hits, total = sums[:, :k], sums[:, k : 2 * k]
        return {
            "micro_f1": ratio(2 * hits.sum(axis=1), total.sum(axis=1)),
            "macro_f1": macro_f1(hits, total, absent),
            "exact": sums[:, -1] / n,
            "ece": np.abs(sums[:, 2 * k : -1]).sum(axis=1) / (n * k),
        }

    return from_sums(columns, formula), n


def _matthews(hits: FloatArray, support: FloatArray, predictions: FloatArray, n: int) -> FloatArray:
    square = float(n * n)
    variance = (square - (support**2).sum(axis=1)) * (square - (predictions**2).sum(axis=1))
    return ratio(hits * n - (support * predictions).sum(axis=1), np.sqrt(np.maximum(variance, 0)))


def _with_unseen(gold: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The labels of the model, then those that occur in `gold` only."""
    unseen = sorted(set(gold) - set(labels))
    if gold and len(unseen) == len(set(gold)):
        raise InputError(f"gold has the label {gold[0]!r}, and none that is among {list(labels)!r:.200}")
    return [*labels, *unseen]


def _label_indices(gold: Sequence[str], labels: Sequence[str]) -> IntArray:
    index = {label: i for i, label in enumerate(labels)}
    if len(index) < len(labels):
        raise InputError(f"labels={list(labels)!r:.80} must be different")
    return np.array([index[label] for label in gold], dtype=np.int64)
