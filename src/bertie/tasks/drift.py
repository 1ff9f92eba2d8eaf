"""Detect drift between two sets of texts: a permutation test on their embeddings, and the most distinctive texts.

The test statistic is the squared maximum mean discrepancy (Gretton et al. 2012) with a Gaussian kernel, whose width is
the median distance. Its p-value is the share of random divisions of all texts into two sets of these sizes that differ
at least as much. The most distinctive texts are those with the highest and lowest values of the witness function, which
is high where new texts are frequent and old ones are rare.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder
from bertie.tasks.neighbours import to_unit

SAMPLE, PERMUTATIONS, TOP_K = 1000, 1000, 5
_STEP = 250  # permutations per matrix multiplication


@dataclass(frozen=True, slots=True)
class DriftText:
    """A text of one set that is unlike the other set: its index, and the value of the witness function."""

    index: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class DriftResult:
    """How much two sets of texts differ, and their most distinctive texts."""

    mmd: float  # squared maximum mean discrepancy, biased: above 0 also for equal distributions
    expected: float  # its mean over permutations: what equal distributions give
    p_value: float
    old_texts: tuple[DriftText, ...]  # of the old set, unlike the new one
    new_texts: tuple[DriftText, ...]  # of the new set, unlike the old one


@explain_arguments
def detect_drift(
    old: Iterable[str],
    new: Iterable[str],
    embedder: Embedder | None = None,
    *,
    sample: int = SAMPLE,
    permutations: int = PERMUTATIONS,
    top_k: int = TOP_K,
    seed: int = 0,
) -> DriftResult:
    """Test whether two sets of texts have the same distribution.

    Args:
        embedder: by default the built-in model.
        sample: maximum number of texts per set to embed and compare, drawn at random.
        permutations: number of permutations; the smallest p-value is 1 / (permutations + 1).
        top_k: number of distinctive texts to return per set.

    >>> animals = ["The cat sleeps.", "A dog barks.", "The kitten drinks milk.", "My horse is old."]
    >>> money = ["Stocks fell.", "Shares rose sharply.", "The bank lowered its rates.", "Bonds lost value."]
    >>> detect_drift(animals, money).p_value < 0.05
    True
    """
    draw = np.random.default_rng(seed)
    chosen = [sample_texts(check_list(texts, "detect_drift"), sample, draw) for texts in (old, new)]
    check_drift(len(chosen[0]), len(chosen[1]), permutations, top_k)
    texts = [text for part in chosen for _, text in part]
    vectors = (embedder or Embedder()).embed(texts)
    indices = [index for part in chosen for index, _ in part]
    return compare_vectors(vectors, len(chosen[0]), texts, indices, permutations=permutations, top_k=top_k, seed=seed)


def check_drift(old: int, new: int, permutations: int, top_k: int) -> None:
    """Refuse values that are out of range."""
    if min(old, new) < 2:
        raise InputError(f"drift detection needs at least 2 old and 2 new texts, but got {old} and {new}")
    if permutations < 19:
        raise InputError(f"permutations={permutations} must be at least 19: fewer cannot give a p-value of 0.05")
    if top_k < 0:
        raise InputError(f"top_k={top_k} must not be negative")


def sample_texts(texts: Iterable[str], most: int, draw: np.random.Generator) -> list[tuple[int, str]]:
    """Draw a uniform sample of up to `most` texts, with their indices (reservoir sampling)."""
    if most < 2:
        raise InputError(f"sample={most} must be at least 2")
    chosen: list[tuple[int, str]] = []
    for index, text in enumerate(texts):
        if index < most:
            chosen.append((index, text))
        elif (place := int(draw.integers(index + 1))) < most:
            chosen[place] = (index, text)
    return sorted(chosen)


def compare_vectors(
    vectors: FloatArray,
    old: int,
    texts: list[str],
    indices: list[int],
    *,
    permutations: int = PERMUTATIONS,
    top_k: int = TOP_K,
    seed: int = 0,
) -> DriftResult:
    """Like `detect_drift`, for embeddings, of which the first `old` belong to the old set."""
    kernel = _kernel(to_unit(vectors).astype(np.float64))
    new = len(kernel) - old
    weights = np.concatenate([np.full(old, -1 / old), np.full(new, 1 / new)])  # (n,)
    witness = kernel @ weights
    mmd = float(weights @ witness)
    draw = np.random.default_rng(seed)
    others = []
    for start in range(0, permutations, _STEP):
        count = min(_STEP, permutations - start)
        shuffled = draw.permuted(np.tile(weights, (count, 1)), axis=1)  # (count, n)
        others.append(np.einsum("cn,cn->c", shuffled @ kernel, shuffled))
    null = np.concatenate(others)
    # Rounding must not make a permutation that is the division itself smaller than it.
    p_value = (1 + int((null >= mmd - 1e-12).sum())) / (permutations + 1)

    def extreme(rows: NDArray[np.int64], sign: int) -> tuple[DriftText, ...]:
        best = rows[np.argsort(-sign * witness[rows], kind="stable")[:top_k]]
        return tuple(DriftText(indices[row], texts[row], float(sign * witness[row])) for row in best.tolist())

    rows = np.arange(len(kernel))
    return DriftResult(mmd, float(null.mean()), p_value, extreme(rows[:old], -1), extreme(rows[old:], 1))


def _kernel(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, n) Gaussian kernel with the median distance as its width."""
    distances = np.maximum(2 - 2 * unit @ unit.T, 0)  # squared
    median = float(np.median(distances[np.triu_indices(len(unit), 1)]))
    kernel: NDArray[np.float64] = np.exp(-distances / max(median, 1e-12))
    return kernel
