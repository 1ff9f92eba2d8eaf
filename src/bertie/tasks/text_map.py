"""A map of texts: a two-dimensional projection of their embeddings, with labelled clusters.

The projection is t-SNE (van der Maaten and Hinton 2008), computed exactly and started from the first two principal
components, so that the same texts have the same map. Clusters are found by k-means over the map, and labelled by the
words that are more frequent in them than in the rest (class-based TF-IDF, as in BERTopic).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder

MAX_TEXTS = 500  # the projection takes time and memory that grow with the square of their number
MAX_CLUSTERS = 12  # that are tried where their number is not given
ITERATIONS, EXAGGERATED = 300, 100  # of t-SNE, and those of them with early exaggeration
LABEL_WORDS = 3
STOP_WORDS = frozenset(
    "a about after all also an and any are as at be been but by can could did do does for from had has have he her "
    "his how i if in into is it its just me more my no not of on one or our out s she so some than that the their "
    "them then there these they this to too up us very was we were what when where which who why will with would "
    "you your t".split()
)
_WORD = re.compile(r"[^\W\d_]{2,}(?:['’-][^\W\d_]+)*")


@dataclass(frozen=True, slots=True, eq=False)
class TextMap:
    """Texts as points of the unit square, each in one of several clusters."""

    points: FloatArray  # (n, 2)
    clusters: tuple[int, ...]  # of each text
    labels: tuple[str, ...]  # of each cluster: its most distinctive words


@explain_arguments
def map_texts(
    texts: Iterable[str], embedder: Embedder | None = None, *, clusters: int | None = None, seed: int = 0
) -> TextMap:
    """Place texts on a map where similar ones are near each other.

    `embedder`: by default the built-in model. `clusters`: their number; by default that with the best silhouette.

    >>> texts = ["The cat sleeps.", "A cat is sleeping.", "A dog sleeps.", "Shares fell.", "Stocks fell.", "Oil fell."]
    >>> map_texts(texts, clusters=2).clusters
    (0, 0, 0, 1, 1, 1)
    """
    texts = list(check_list(texts, "map_texts"))
    check_texts(len(texts), clusters)
    vectors = (embedder or Embedder()).embed(texts)
    return map_vectors(vectors, texts, clusters=clusters, seed=seed)


def check_texts(count: int, clusters: int | None) -> None:
    """Refuse too few or too many texts or clusters."""
    if not 2 <= count <= MAX_TEXTS:
        raise InputError(f"a map takes 2 to {MAX_TEXTS} texts, but got {count:,}")
    if clusters is not None and not 1 <= clusters <= count:
        raise InputError(f"clusters={clusters} must lie between 1 and the number of texts, {count}")


def map_vectors(
    vectors: FloatArray,
    texts: Sequence[str],
    *,
    clusters: int | None = None,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
) -> TextMap:
    """Like `map_texts`, with given embeddings; `check` is called periodically, and may raise an error."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    points = project(unit, check)
    assigned = cluster(points, clusters, seed, check)
    return TextMap(points, tuple(assigned.tolist()), tuple(label_clusters(texts, assigned.tolist())))


# --- projection ---


def project(unit: FloatArray, check: Callable[[], None] = lambda: None) -> FloatArray:
    """(n, D) unit vectors -> (n, 2) points of the unit square, by exact t-SNE from the principal components."""
    n = len(unit)
    centred = (unit - unit.mean(0)).astype(np.float64)
    values, axes = np.linalg.eigh(centred @ centred.T)  # (n,), (n, n): principal components from the Gram matrix
    points = axes[:, :-3:-1] * np.sqrt(np.maximum(values[:-3:-1], 0))
    if n > 3:
        points = _tsne(centred, points * (1e-2 / max(float(points.std()), 1e-12)), check).astype(np.float64)
    points -= points.min(0)
    scale = float(points.max())
    points = points / scale if scale > 0 else points + 0.5
    out: FloatArray = (points + (1 - points.max(0)) / 2).astype(np.float32)  # the shorter side in the middle
    return out


def _tsne(vectors: NDArray[np.float64], points: NDArray[np.float64], check: Callable[[], None]) -> FloatArray:
    n = len(vectors)
    joint = _joint_probabilities(vectors, min(30.0, (n - 1) / 3), check).astype(np.float32)
    y = points.astype(np.float32)
    velocity, gains = np.zeros_like(y), np.ones_like(y)
    affinity, weights = np.empty((2, n, n), np.float32)
    rate = np.float32(min(max(n / 12, 2.0), 8.0))  # the lowest divergence at 16, 60 and 300 sentences
    joint *= 12  # early exaggeration
    for step in range(ITERATIONS):
        check()
        early = step < EXAGGERATED
        joint /= 12 if step == EXAGGERATED else 1
        # Student t with one degree of freedom: 1 / (1 + squared distance). Without BLAS, whose threads would compete
        # with those of a model.
        np.square(np.subtract.outer(y[:, 0], y[:, 0]), out=affinity)
        affinity += np.square(np.subtract.outer(y[:, 1], y[:, 1]), out=weights)
        affinity += 1
        np.reciprocal(affinity, out=affinity)
        np.fill_diagonal(affinity, 0)
        np.multiply(affinity, -1 / affinity.sum(), out=weights)
        weights += joint
        weights *= affinity
        gradient = 4 * (weights.sum(1)[:, None] * y - np.einsum("ij,jk->ik", weights, y))
        gains = np.maximum(np.where(gradient * velocity < 0, gains + 0.2, gains * 0.8), 0.01).astype(np.float32)
        velocity = np.float32(0.5 if early else 0.8) * velocity - rate * gains * gradient
        y += velocity
        y -= y.mean(0)
    return y


def _squared_distances(x: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = (x * x).sum(1)
    distances: NDArray[np.float64] = np.maximum(norms[:, None] + norms[None, :] - 2 * (x @ x.T), 0)
    return distances


def _joint_probabilities(
    vectors: NDArray[np.float64], perplexity: float, check: Callable[[], None]
) -> NDArray[np.float64]:
    """(n, n) the similarities that the map has to show; each row's precision is found by bisection."""
    distances = _squared_distances(vectors)
    np.fill_diagonal(distances, np.inf)
    low, high = np.zeros(len(vectors)), np.full(len(vectors), np.inf)
    precision = np.ones(len(vectors))
    target = log(max(perplexity, 1.01))
    nearest = distances.min(1, keepdims=True)
    for _ in range(30):
        check()
        weights = np.exp(-(distances - nearest) * precision[:, None])
        rows = weights / weights.sum(1, keepdims=True)
        entropy = -(rows * np.log(np.maximum(rows, 1e-300))).sum(1)
        low, high = np.where(entropy > target, precision, low), np.where(entropy > target, high, precision)
        precision = np.where(np.isinf(high), 2 * precision, (low + np.where(np.isinf(high), 0, high)) / 2)
    joint: NDArray[np.float64] = np.maximum((rows + rows.T) / (2 * len(rows)), 1e-12)
    return joint


# --- clusters ---


def cluster(
    points: FloatArray, count: int | None = None, seed: int = 0, check: Callable[[], None] = lambda: None
) -> NDArray[np.int64]:
    """(n,) the cluster of each point (n, 2), by k-means; clusters are numbered by their first point."""
    if count is not None:
        return _renumber(_k_means(points, count, seed, check))
    distances = np.sqrt(_squared_distances(points.astype(np.float64)))
    best, chosen = -np.inf, np.zeros(len(points), np.int64)
    most = min(MAX_CLUSTERS, max(2, round(len(points) ** 0.5)))  # smaller clusters would have no words in common
    for k in range(2, most + 1):
        assigned = _k_means(points, k, seed, check)
        score = _silhouette(distances, assigned)
        if score > best:
            best, chosen = score, assigned
    return _renumber(chosen)


def _k_means(points: FloatArray, k: int, seed: int, check: Callable[[], None]) -> NDArray[np.int64]:
    """The best of several runs, each started by k-means++."""
    draw = np.random.default_rng(seed)
    best, chosen = np.inf, np.zeros(len(points), np.int64)
    for _ in range(8):
        check()
        centres = points[[int(draw.integers(len(points)))]]
        while len(centres) < k:
            far = _to_centres(points, centres).min(1) + 1e-12
            centres = np.concatenate([centres, points[[int(draw.choice(len(points), p=far / far.sum()))]]])
        assigned = np.full(len(points), -1)
        for _ in range(50):
            distances = _to_centres(points, centres)
            nearest = distances.argmin(1)
            if (nearest == assigned).all():
                break
            assigned = nearest
            centres = np.stack([points[own].mean(0) if (own := assigned == j).any() else centres[j] for j in range(k)])
        total = float(distances.min(1).sum())
        if total < best:
            best, chosen = total, assigned
    return chosen


def _to_centres(points: FloatArray, centres: FloatArray) -> NDArray[np.float64]:
    """(n, k) squared distances."""
    distances: NDArray[np.float64] = ((points[:, None] - centres[None]).astype(np.float64) ** 2).sum(-1)
    return distances


def _silhouette(distances: NDArray[np.float64], assigned: NDArray[np.int64]) -> float:
    return float(silhouette_widths(distances, assigned).mean()) if len(np.unique(assigned)) > 1 else -1.0


def silhouette_widths(distances: NDArray[np.float64], assigned: NDArray[np.int64]) -> NDArray[np.float64]:
    """(n,) how much nearer each text is to its own cluster than to the next one, from −1 to 1 (Rousseeuw 1987).

    There must be two clusters or more.
    """
    members = np.eye(int(assigned.max()) + 1)[assigned]  # (n, k)
    sizes = members.sum(0)
    sums = distances @ members
    own = np.take_along_axis(sums, assigned[:, None], 1)[:, 0] / np.maximum(sizes[assigned] - 1, 1)
    means = np.where(sizes > 0, sums / np.maximum(sizes, 1), np.inf)
    np.put_along_axis(means, assigned[:, None], np.inf, 1)
    other = means.min(1)
    widths: NDArray[np.float64] = (other - own) / np.maximum(np.maximum(own, other), 1e-12)
    return np.where(sizes[assigned] > 1, widths, 0.0)


def _renumber(assigned: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers: dict[int, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in assigned.tolist()], np.int64)


def label_clusters(texts: Iterable[str], clusters: Sequence[int]) -> list[str]:
    """Name each cluster by the words that distinguish it.

    Class-based TF-IDF (Grootendorst 2022), times the logarithm of how much more frequent a word is in the cluster than
    in all texts: with few clusters, words that are frequent in all of them would come first.

    >>> label_clusters(["the cat sleeps", "a cat eats", "shares fell", "shares rose"], [0, 0, 1, 1])
    ['cat, sleeps, eats', 'shares, fell, rose']
    """
    counts = [Counter[str]() for _ in range(max(clusters, default=-1) + 1)]
    for text, cluster in zip(texts, clusters, strict=True):
        words = dict.fromkeys(word.lower() for word in _WORD.findall(text))  # each once, in the order of the text
        counts[cluster].update(word for word in words if word not in STOP_WORDS)
    total = sum(counts, Counter[str]())
    average = sum(total.values()) / max(1, len(counts))
    labels = []
    for i, own in enumerate(counts):
        share = sum(own.values()) / max(1, sum(total.values()))
        weights = {
            word: count * log(1 + average / total[word]) * (1e-3 + max(0.0, log(count / total[word] / share)))
            for word, count in own.items()
        }
        best = sorted(weights, key=lambda word: -weights[word])[:LABEL_WORDS]
        labels.append(", ".join(best) or f"cluster {i + 1}")
    return labels
