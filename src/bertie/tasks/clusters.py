"""Cluster any number of texts, and choose the number of clusters.

The embeddings are reduced by principal component analysis and clustered by k-means over unit vectors. The number of
clusters is the smallest whose mean silhouette is within one standard error of the best one. Both steps run on a sample;
then every text is assigned to the nearest centre.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.evaluation.intervals import Score
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder
from bertie.tasks.neighbours import to_unit
from bertie.tasks.selection import cluster, unit_rows
from bertie.tasks.text_map import MAX_TEXTS, label_clusters, project, silhouette_widths

COMPONENTS = 30
SAMPLE, SILHOUETTE_SAMPLE = 10_000, 1_000  # maximum number of texts for k-means and for the silhouette
COUNTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20, 24, 28, 34, 40, 48, 56, 68, 80, 100)  # numbers of clusters to try
MEMBERS = 8  # minimum texts per cluster, on average, if the number of clusters is not given
EXAMPLES = 3  # texts per cluster, nearest to the centre
BLOCK = 8192


@dataclass(frozen=True, slots=True)
class TextCluster:
    """A cluster of texts."""

    label: str  # the words that distinguish it
    size: int
    examples: tuple[int, ...]  # the texts nearest to its centre


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Clusters, the largest first, and the texts in them."""

    clusters: tuple[TextCluster, ...]
    assigned: NDArray[np.int64]  # (n,) the cluster of each text
    similarity: FloatArray  # (n,) of each text with the centre of its cluster: cosine of the principal components
    silhouette: Score  # mean of a sample, with its 95% interval; not defined for one cluster


@explain_arguments
def cluster_texts(
    texts: Iterable[str], embedder: Embedder | None = None, *, clusters: int | None = None, seed: int = 0
) -> Clustering:
    """Cluster texts by their embeddings, and name each cluster by the words that distinguish it.

    `embedder`: by default the built-in model. `clusters`: the number of clusters; by default chosen, up to 100.

    >>> texts = ["The cat sleeps.", "A kitten sleeps.", "Shares fell today.", "Stocks fell sharply."]
    >>> cluster_texts(texts, clusters=2).assigned.tolist()
    [0, 0, 1, 1]
    """
    texts = list(check_list(texts, "cluster_texts"))
    check_clusters(len(texts), clusters)
    return cluster_vectors((embedder or Embedder()).embed(texts), texts, clusters=clusters, seed=seed)


def check_clusters(count: int, clusters: int | None) -> None:
    """Refuse too few texts, or too many clusters."""
    if count < 2:
        raise InputError(f"clustering needs at least 2 texts, but got {count}")
    if clusters is not None and not 1 <= clusters <= count:
        raise InputError(f"clusters={clusters} must lie between 1 and the number of texts, {count}")


def cluster_vectors(
    vectors: FloatArray, texts: Iterable[str], *, clusters: int | None = None, seed: int = 0
) -> Clustering:
    """Like `cluster_texts`, with given embeddings, which may be memory-mapped; texts are iterated once."""
    check_clusters(len(vectors), clusters)
    draw = np.random.default_rng(seed)
    chosen = np.sort(draw.permutation(len(vectors))[:SAMPLE])
    sample = to_unit(vectors[chosen]).astype(np.float64)
    mean, axes = _principal_components(sample)
    rows = unit_rows((sample - mean) @ axes)
    measured = np.sort(draw.permutation(len(rows))[:SILHOUETTE_SAMPLE])
    members, silhouette = _choose(rows, measured, clusters, seed)
    members.sort(key=lambda own: (-len(own), int(own[0])))
    centres = unit_rows(np.stack([rows[own].sum(0) for own in members]))

    assigned, similarity = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), BLOCK):
        block = to_unit(vectors[start : start + BLOCK]).astype(np.float64)
        scores = unit_rows((block - mean) @ axes) @ centres.T
        assigned[start : start + BLOCK] = scores.argmax(1)
        similarity[start : start + BLOCK] = scores.max(1)
    sizes = np.bincount(assigned, minlength=len(centres))
    order = [int(i) for i in np.argsort(-sizes, kind="stable") if sizes[i]]
    number = np.zeros(len(centres), np.int64)
    number[order] = np.arange(len(order))
    assigned = number[assigned]
    labels = label_clusters(texts, assigned.tolist())
    examples = _examples(assigned, similarity, len(order))
    described = (TextCluster(labels[i], int(sizes[order[i]]), examples[i]) for i in range(len(order)))
    return Clustering(tuple(described), assigned, similarity, silhouette)


def _principal_components(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The mean (D,), and the first axes (D, components)."""
    mean = rows.mean(0)
    _, axes = np.linalg.eigh((rows - mean).T @ (rows - mean))
    return mean, axes[:, ::-1][:, : min(COMPONENTS, len(rows) - 1)]


def _choose(
    rows: NDArray[np.float64], measured: NDArray[np.int64], clusters: int | None, seed: int
) -> tuple[list[NDArray[np.int64]], Score]:
    """The members of each cluster, and the mean silhouette of the measured rows."""
    weights = np.ones(len(rows))
    distances = 1 - rows[measured] @ rows[measured].T
    most = min(len(rows) - 1, max(len(rows) // MEMBERS, round(len(rows) ** 0.5)))
    counts: Sequence[int] = [k for k in COUNTS if k <= most] or [1]
    results = []
    for k in counts if clusters is None else [clusters]:
        members = cluster(rows, min(k, len(rows)), weights, seed)
        results.append((members, _mean_silhouette(distances, members, measured, len(rows))))
    defined = [result for result in results if np.isfinite(result[1].low)]
    if not defined:  # one cluster, or equal texts
        return results[0]
    best = max((score for _, score in defined), key=lambda score: score.value)
    enough = best.value - (best.high - best.value) / 1.96  # one standard error below
    return next(result for result in defined if result[1].value >= enough)


def _mean_silhouette(
    distances: NDArray[np.float64], members: list[NDArray[np.int64]], measured: NDArray[np.int64], count: int
) -> Score:
    owner = np.zeros(count, np.int64)
    for i, own in enumerate(members):
        owner[own] = i
    present = owner[measured]
    if len(np.unique(present)) < 2:
        return Score(float("nan"), float("nan"), float("nan"))
    widths = silhouette_widths(distances, present)
    mean, error = float(widths.mean()), float(widths.std() / len(widths) ** 0.5)
    return Score(mean, mean - 1.96 * error, mean + 1.96 * error)


def _examples(assigned: NDArray[np.int64], similarity: FloatArray, count: int) -> list[tuple[int, ...]]:
    """The texts nearest to the centre of each cluster; of equally near ones, as two alone are, the first."""
    order = np.lexsort((-similarity.round(5), assigned))
    starts = np.searchsorted(assigned[order], np.arange(count))
    ends = np.searchsorted(assigned[order], np.arange(count), "right")
    return [tuple(order[s : min(s + EXAMPLES, e)].tolist()) for s, e in zip(starts, ends, strict=True)]


def map_sample(vectors: FloatArray, seed: int = 0) -> tuple[NDArray[np.int64], FloatArray]:
    """The rows of up to 500 texts for a map, in order, and their points (n, 2) in the unit square."""
    rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:MAX_TEXTS])
    return rows, project(to_unit(vectors[rows]))


def texts_at(texts: Iterable[str], rows: Iterable[int]) -> Iterator[tuple[int, str]]:
    """The texts of the given rows."""
    wanted = set(rows)
    return ((number, text) for number, text in enumerate(texts) if number in wanted)
