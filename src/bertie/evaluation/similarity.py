"""How well vectors tell what is alike: against what people say, for pairs that mean the same, and for groups.

sts                     correlation with the scores that people gave to pairs
pair_classification     pairs that mean the same, told from others by how alike their vectors are
clustering              groups that k-means finds, beside the labels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation import scores
from bertie.evaluation.intervals import DRAWS, BoolArray, FloatArray, Score, bootstrap, linear

if TYPE_CHECKING:
    from bertie.tasks import Embedder

_ROWS = 64  # compared at a time


def alike(embedder: Embedder, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
    """(n,) how alike the texts of each pair are, by cosine or as the checkpoint says. No text is read twice."""
    place = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    vectors = embedder.embed(list(place))
    one, two = (vectors[[place[pair[side]] for pair in pairs]] for side in (0, 1))
    return row_by_row(embedder, one, two)


def row_by_row(embedder: Embedder, one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float32]:
    """(n, D), (n, D) -> (n,) as `Embedder.compare`, each row with its own partner only."""
    found = [np.diagonal(embedder.compare(one[i : i + _ROWS], two[i : i + _ROWS])) for i in range(0, len(one), _ROWS)]
    return np.concatenate([np.empty(0, dtype=np.float32), *found])


def sts(gold: ArrayLike, predicted: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Spearman and pearson: how far the order, and the values, of what is predicted agree with what people say.

    >>> sts([0.0, 2.5, 3.0, 5.0], [0.1, 0.2, 0.6, 0.9], draws=0)["spearman"].value
    1.0
    """
    found = scores.regression(gold, predicted, draws=draws, seed=seed)
    return {name: found[name] for name in ("spearman", "pearson")}


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From which value on a pair is said to mean the same: best for the F1, and best for the accuracy."""

    f1: float
    accuracy: float

    @classmethod
    def fit(cls, same: ArrayLike, predicted: ArrayLike) -> Thresholds:
        """The best on a development set: halfway between two neighbouring values.

        >>> Thresholds.fit([False, False, True, True], [0.1, 0.4, 0.6, 0.9])
        Thresholds(f1=0.5, accuracy=0.5)
        """
        truth, values = _pairs(same, predicted)
        order = np.argsort(-values, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # where the value changes
        said, hits = ends + 1.0, np.cumsum(truth[order])[ends].astype(np.float64)
        right = hits + (len(truth) - truth.sum()) - (said - hits)
        below = np.append(values[order][ends[:-1] + 1], -np.inf)
        halfway = (values[order][ends] + below) / 2
        return cls(
            f1=float(halfway[np.argmax(2 * hits / (said + truth.sum()))]), accuracy=float(halfway[np.argmax(right)])
        )


def pair_classification(
    same: ArrayLike, predicted: ArrayLike, thresholds: Thresholds, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Score]:
    """Average_precision, which needs no threshold, and f1 and accuracy at thresholds that other pairs have chosen.

    >>> found = pair_classification([True, False, True], [0.9, 0.3, 0.4], Thresholds(0.5, 0.5), draws=0)
    >>> found["average_precision"].value, round(found["accuracy"].value, 4)
    (1.0, 0.6667)
    """
    truth, values = _pairs(same, predicted)
    order = np.argsort(-values, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))
    true = truth[order].astype(np.float64)
    chosen = values >= thresholds.f1
    right = (values >= thresholds.accuracy) == truth
    columns = np.stack([chosen & truth, chosen, truth, right], axis=1).astype(np.float64)

    def measure(drawn: FloatArray) -> dict[str, FloatArray]:
        hits, said, all_true, correct = (drawn @ columns).T
        ordered = drawn[:, order]
        found, seen = np.cumsum(ordered * true, axis=1)[:, ends], np.cumsum(ordered, axis=1)[:, ends]
        new = np.diff(found, axis=1, prepend=0.0)  # right pairs at each value: the step of the recall
        with np.errstate(divide="ignore", invalid="ignore"):
            precision = np.where(seen > 0, found / seen, 0.0)
            average = (precision * new).sum(axis=1) / found[:, -1]
        return {
            "average_precision": average,
            "f1": scores.share(2 * hits, said + all_true),
            "accuracy": correct / len(truth),
        }

    return bootstrap(measure, len(truth), draws=draws, seed=seed)


def clustering(vectors: ArrayLike, labels: Sequence[str], *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """V_measure, homogeneity and completeness of as many clusters as there are labels, found by k-means.

    The interval is that of the texts, for these clusters: what each text tells of its label and its cluster is fixed,
    and the texts are drawn. A share of few texts would otherwise look like knowledge, and every draw beat the value.

    >>> found = clustering([[0.0, 1.0], [0.1, 1.0], [9.0, 0.0], [9.1, 0.0]], ["a", "a", "b", "b"])
    >>> round(found["v_measure"].value, 4)
    1.0
    """
    try:
        kmeans = import_module("sklearn.cluster").KMeans
    except ImportError:
        raise MissingPackageError("clusters need the package scikit-learn: pip install 'bertie[train]'") from None
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(labels):
        raise InputError(f"vectors have shape {rows.shape} and there are {len(labels)} labels; give one row a label")
    names, label = np.unique(np.asarray(labels), return_inverse=True)
    if len(names) < 2:
        raise InputError(f"{len(names)} labels make no groups; there must be at least two")
    cluster = kmeans(n_clusters=len(names), n_init=10, random_state=seed).fit_predict(rows)
    # In nats: what the label of each text is worth, its cluster, and both together.
    label_alone, cluster_alone, both = (_surprise(one) for one in (label, cluster, label * len(names) + cluster))
    columns = np.stack([label_alone + cluster_alone - both, label_alone, cluster_alone], axis=1)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        told, of_label, of_cluster = sums.T
        found = {
            "v_measure": scores.share(2 * told, of_label + of_cluster),
            "homogeneity": scores.share(told, of_label),
            "completeness": scores.share(told, of_cluster),
        }
        return {name: np.clip(one, 0.0, 1.0) for name, one in found.items()}

    return bootstrap(linear(columns, formula), len(rows), draws=draws, seed=seed)


def _surprise(groups: NDArray[np.int64]) -> FloatArray:
    """(n,) minus the logarithm of how large a share has the same group."""
    _, place, count = np.unique(groups, return_inverse=True, return_counts=True)
    found: FloatArray = -np.log(count[place] / len(groups))
    return found


def _pairs(same: ArrayLike, predicted: ArrayLike) -> tuple[BoolArray, FloatArray]:
    truth, values = np.asarray(same).astype(bool), np.asarray(predicted, dtype=np.float64)
    if truth.shape != values.shape or truth.ndim != 1:
        raise InputError(
            f"same has shape {truth.shape} and predicted {values.shape}; they must be two lists of one length"
        )
    if not truth.any() or truth.all():
        raise InputError("there must be pairs that mean the same and pairs that do not")
    return truth, values
