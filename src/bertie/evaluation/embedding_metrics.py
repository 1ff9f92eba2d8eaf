"""Intrinsic evaluation of embeddings.

pair_classification     paraphrases, separated from other pairs by a similarity threshold
clustering              k-means clusters against labels

Semantic textual similarity is `bertie.evaluation.metrics.sts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.intervals import RESAMPLES, BoolArray, FloatArray, Score, bootstrap, from_sums
from bertie.evaluation.metrics.shared import ratio


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Similarities from which on a pair is predicted to be a paraphrase: best for F1 and best for accuracy."""

    f1: float
    accuracy: float

    @classmethod
    def fit(cls, same: ArrayLike, predicted: ArrayLike) -> Thresholds:
        """Choose the best thresholds on a development set: midpoints between neighbouring similarities.

        >>> Thresholds.fit([False, False, True, True], [0.1, 0.4, 0.6, 0.9])
        Thresholds(f1=0.5, accuracy=0.5)
        """
        truth, values = _check_pairs(same, predicted)
        order = np.argsort(-values, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # the last of each group of ties
        predictions, hits = ends + 1.0, np.cumsum(truth[order])[ends].astype(np.float64)
        correct = hits + (len(truth) - truth.sum()) - (predictions - hits)
        below = np.append(values[order][ends[:-1] + 1], -np.inf)
        midpoints = (values[order][ends] + below) / 2
        return cls(
            f1=float(midpoints[np.argmax(2 * hits / (predictions + truth.sum()))]),
            accuracy=float(midpoints[np.argmax(correct)]),
        )


def pair_classification(
    same: ArrayLike, predicted: ArrayLike, thresholds: Thresholds, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `average_precision`, and `f1` and `accuracy` at thresholds fitted on other pairs.

    >>> scores = pair_classification([True, False, True], [0.9, 0.3, 0.4], Thresholds(0.5, 0.5), resamples=0)
    >>> scores["average_precision"].value, round(scores["accuracy"].value, 4)
    (1.0, 0.6667)
    """
    truth, values = _check_pairs(same, predicted)
    order = np.argsort(-values, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))
    ordered_truth = truth[order].astype(np.float64)
    positive = values >= thresholds.f1
    right = (values >= thresholds.accuracy) == truth
    columns = np.stack([positive & truth, positive, truth, right], axis=1).astype(np.float64)

    def statistic(counts: FloatArray) -> dict[str, FloatArray]:
        hits, predictions, support, correct = (counts @ columns).T
        ordered = counts[:, order]
        retrieved, seen = np.cumsum(ordered * ordered_truth, axis=1)[:, ends], np.cumsum(ordered, axis=1)[:, ends]
        step = np.diff(retrieved, axis=1, prepend=0.0)  # of the recall, at each similarity
        with np.errstate(divide="ignore", invalid="ignore"):
            precision = np.where(seen > 0, retrieved / seen, 0.0)
            average_precision = (precision * step).sum(axis=1) / retrieved[:, -1]
        return {
            "average_precision": average_precision,
            "f1": ratio(2 * hits, predictions + support),
            "accuracy": correct / len(truth),
        }

    return bootstrap(statistic, len(truth), resamples=resamples, seed=seed)


def clustering(
    vectors: ArrayLike, labels: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `v_measure`, `homogeneity` and `completeness` of k-means clusters, as many as there are labels.

    The interval is conditional on these clusters: the information content of each text's label and
    cluster is fixed, and texts are resampled. Recomputing frequencies within a resample would bias the
    mutual information upward, so that every resample beat the value.

    >>> scores = clustering([[0.0, 1.0], [0.1, 1.0], [9.0, 0.0], [9.1, 0.0]], ["a", "a", "b", "b"])
    >>> round(scores["v_measure"].value, 4)
    1.0
    """
    try:
        kmeans = import_module("sklearn.cluster").KMeans
    except ImportError:
        raise MissingPackageError("clustering needs the package scikit-learn: pip install 'bertie[train]'") from None
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(labels):
        raise InputError(f"vectors have shape {rows.shape} and there are {len(labels)} labels; give one row per label")
    names, label = np.unique(np.asarray(labels), return_inverse=True)
    if len(names) < 2:
        raise InputError(f"clustering needs at least two different labels, not {len(names)}")
    cluster = kmeans(n_clusters=len(names), n_init=10, random_state=seed).fit_predict(rows)
    label_nats, cluster_nats, joint_nats = (
        _information(groups) for groups in (label, cluster, label * len(names) + cluster)
    )
    columns = np.stack([label_nats + cluster_nats - joint_nats, label_nats, cluster_nats], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        mutual, label_entropy, cluster_entropy = sums.T
        scores = {
            "v_measure": ratio(2 * mutual, label_entropy + cluster_entropy),
            "homogeneity": ratio(mutual, label_entropy),
            "completeness": ratio(mutual, cluster_entropy),
        }
        return {name: np.clip(score, 0.0, 1.0) for name, score in scores.items()}

    return bootstrap(from_sums(columns, formula), len(rows), resamples=resamples, seed=seed)


def _information(groups: NDArray[np.int64]) -> FloatArray:
    """(n,) information content in nats: the negative log frequency of each entry's group."""
    _, index, count = np.unique(groups, return_inverse=True, return_counts=True)
    nats: FloatArray = -np.log(count[index] / len(groups))
    return nats


def _check_pairs(same: ArrayLike, predicted: ArrayLike) -> tuple[BoolArray, FloatArray]:
    truth, values = np.asarray(same).astype(bool), np.asarray(predicted, dtype=np.float64)
    if truth.shape != values.shape or truth.ndim != 1:
        raise InputError(
            f"same has shape {truth.shape} and predicted {values.shape}; they must be two lists of one length"
        )
    if not truth.any() or truth.all():
        raise InputError("there must be both positive and negative pairs")
    return truth, values
