"""Active learning: choose texts to label by model uncertainty and diversity, with numpy only.

The embeddings are clustered, weighted by uncertainty, and each cluster contributes one text: a typical one that the
model is uncertain about. So near-duplicates are not chosen together, and outliers are not chosen at all. Both ideas are
established, for many labels (Zhdanov, "Diverse mini-batch active learning", 2019) and for few (Hacohen et al., "Active
learning on a budget", 2022). Labelled texts take part in the clustering, and their clusters come last.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MOST = 20_000  # rows that are clustered; of more, the most uncertain ones, or a sample
_SHARE, _MOST_KNOWN = 5, 500  # clusters for labelled rows: at most a fifth of the others, and no more than this
_ROUNDS, _TRIES = 20, 4  # of k-means; rows that are tried for each of its first centres
_NEIGHBOURS = 20  # nearest neighbours that determine how typical a row is
_SAMPLE = 1000  # of a large cluster, among which to look for neighbours
_CHUNK = 2**22  # similarities per block


class Choice(NamedTuple):
    """A chosen row, and how many rows its cluster has."""

    row: int
    size: int


def choose(
    embeddings: FloatArray,
    k: int,
    *,
    uncertainty: FloatArray | None = None,
    labelled: FloatArray | None = None,
    seed: int = 0,
) -> list[Choice]:
    """Choose up to k rows, the most useful first; `uncertainty` is between 0 and 1.

    >>> embeddings = np.array([[1, 0], [1, 0.01], [1, 0.02], [0, 1], [0.01, 1], [-1, 0]])
    >>> [choice.size for choice in choose(embeddings, 3)]
    [3, 2, 1]
    """
    count = len(embeddings)
    weights = np.ones(count) if uncertainty is None else np.sqrt(np.clip(uncertainty, 1e-6, 1.0))
    draw = np.random.default_rng(seed)
    order = draw.permutation(count) if uncertainty is None else np.argsort(-weights, kind="stable")
    pool = np.sort(order[:MOST])
    rows, weights = unit_rows(embeddings[pool]), weights[pool]
    known = rows[:0] if labelled is None else unit_rows(labelled[-MOST:])
    every = np.concatenate([weights, np.full(len(known), weights.mean())])
    spare = min(len(known), max(len(rows) // _SHARE, k), _MOST_KNOWN)
    clusters = cluster(np.concatenate([rows, known]), min(k + spare, len(every)), every, seed)
    fresh = [members for members in clusters if members[-1] < len(rows)]
    mixed = [members[members < len(rows)] for members in clusters if members[-1] >= len(rows)]
    choices: list[Choice] = []
    for group in (fresh, mixed):
        for members in sorted(group, key=lambda members: -weights[members].sum()):
            if len(members) and len(choices) < k:
                best = int(np.argmax(_typicality(rows[members]) * weights[members]))
                choices.append(Choice(int(pool[members[best]]), len(members)))
    return choices


def cluster(rows: FloatArray, k: int, weights: FloatArray, seed: int = 0) -> list[IntArray]:
    """The rows of each cluster, in order, by k-means over unit vectors from k-means++; none is empty."""
    draw = np.random.default_rng(seed)
    centres = np.empty((k, rows.shape[1]))
    distances = np.full(len(rows), 4.0)  # squared, to the nearest centre
    for i in range(k):
        chances = np.maximum(distances, 0) * weights
        if chances.sum() <= 1e-9:  # all rows are centres
            centres = centres[:i]
            break
        tries = draw.choice(len(rows), _TRIES, p=chances / chances.sum())
        apart = np.minimum(distances, 2 - 2 * rows[tries] @ rows.T)  # (tries, rows)
        best = int(np.argmin(apart @ weights))
        centres[i], distances = rows[tries[best]], apart[best]
    owner = np.full(len(rows), -1)
    for _ in range(_ROUNDS):
        nearest = _nearest(rows, centres)
        if (nearest == owner).all():
            break
        owner = nearest
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, rows * weights[:, None])
        filled = np.bincount(owner, minlength=len(centres)) > 0
        centres = np.where(filled[:, None], unit_rows(sums), centres)
    return [members for i in range(len(centres)) if len(members := np.flatnonzero(owner == i))]


def unit_rows(rows: FloatArray) -> FloatArray:
    """Scale rows to unit length."""
    scaled: FloatArray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return scaled


def _nearest(rows: FloatArray, centres: FloatArray) -> IntArray:
    step = max(1, _CHUNK // len(centres))
    return np.concatenate([(rows[i : i + step] @ centres.T).argmax(1) for i in range(0, len(rows), step)])


def _typicality(rows: FloatArray) -> FloatArray:
    """The mean similarity of each row to its nearest neighbours, rounded: two rows are equally typical of each other,
    and which of them is chosen must not depend on the last bits of a CPU."""
    others = rows[:: len(rows) // _SAMPLE + 1]
    similarities = np.sort(rows @ others.T, axis=1)[:, ::-1]
    mean: FloatArray = similarities[:, : _NEIGHBOURS + 1].mean(1)
    return np.maximum(mean.round(9), 1e-6)
