"""Isotropy of embeddings, and whitening.

Embeddings of a language model that was not trained to compare texts are anisotropic: they lie in a
narrow cone, any two have a high cosine, and a few directions hold most of the variance. `isotropy`
measures it; `Whitening` removes part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError
from bertie.evaluation.intervals import FloatArray

PAIRS = 100_000  # sampled for the mean cosine


@dataclass(frozen=True, slots=True)
class Isotropy:
    """How evenly embeddings fill their space.

    `mean_cosine` and `std_cosine`: over pairs of different texts; the mean is 0 for isotropic embeddings
    and 1 for a single direction. `partition`: min over max of Z(c) = Σ exp(c · v) over the principal
    directions c and −c (Mu and Viswanath 2018), for embeddings of mean norm 1; 1 is isotropic. `isoscore`:
    the fraction of dimensions used evenly (Rudman et al. 2022), from 0 to 1. `top_variance`: the fraction
    of the variance along the first principal component. `effective_dimension`: exp of the entropy of the
    variance over principal components.
    """

    count: int
    dimension: int
    mean_cosine: float
    std_cosine: float
    partition: float
    isoscore: float
    top_variance: float
    effective_dimension: float


def isotropy(vectors: ArrayLike, *, seed: int = 0) -> Isotropy:
    """Measure the isotropy of embeddings, one per row.

    >>> even = isotropy(np.random.default_rng(0).standard_normal((2000, 8)))
    >>> abs(even.mean_cosine) < 0.02, even.isoscore > 0.95
    (True, True)
    >>> cone = isotropy(np.random.default_rng(0).standard_normal((2000, 8)) + [20, 0, 0, 0, 0, 0, 0, 0])
    >>> cone.mean_cosine > 0.95
    True
    """
    x = _check_vectors(vectors)
    n, width = x.shape
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    rng = np.random.default_rng(seed)
    if n * (n - 1) // 2 <= PAIRS:
        first, second = np.triu_indices(n, 1)
    else:
        first = rng.integers(n, size=PAIRS)
        second = (first + rng.integers(1, n, size=PAIRS)) % n  # never the text itself
    cosines = np.einsum("ij,ij->i", unit[first], unit[second])
    variances, _ = _principal_components(x)
    fractions = variances / variances.sum()
    # Rudman et al.: the distance of the variances, scaled to norm sqrt(width), from a vector of ones.
    scaled = variances * np.sqrt(width) / np.linalg.norm(variances)
    defect = np.linalg.norm(scaled - 1) / np.sqrt(2 * (width - np.sqrt(width))) if width > 1 else 0.0
    used = (width - defect**2 * (width - np.sqrt(width))) ** 2 / width**2
    positive = fractions[fractions > 0]
    return Isotropy(
        count=n,
        dimension=width,
        mean_cosine=float(cosines.mean()),
        std_cosine=float(cosines.std()),
        partition=_partition(x),
        isoscore=float((width * used - 1) / (width - 1)) if width > 1 else 1.0,
        top_variance=float(fractions.max()),
        effective_dimension=float(np.exp(-(positive * np.log(positive)).sum())),
    )


def _partition(x: FloatArray) -> float:
    """Min over max of the partition function over the eigenvectors of XᵀX and their negatives."""
    x = x / max(float(np.linalg.norm(x, axis=1).mean()), 1e-12)
    _, directions = np.linalg.eigh(x.T @ x)  # (D, D), one per column
    projections = x @ directions
    sums = np.concatenate([np.exp(projections).sum(axis=0), np.exp(-projections).sum(axis=0)])
    return float(sums.min() / sums.max())


@dataclass(frozen=True, slots=True, eq=False)
class Whitening:
    """An affine map (PCA whitening) to zero mean and unit variance in every direction.

    Keeping only the first principal components shortens embeddings, and often improves them.
    `bertie.tasks.whitening.whiten` adds the map to an embedder.

    >>> vectors = np.random.default_rng(0).standard_normal((500, 3)) @ [[3, 0, 0], [1, 1, 0], [0, 0, 2]] + 5
    >>> white = Whitening.fit(vectors).apply(vectors)
    >>> np.allclose(np.cov(white.T, bias=True), np.eye(3), atol=1e-6)
    True
    """

    mean: FloatArray  # (D,)
    projection: FloatArray  # (D, d)

    @classmethod
    def fit(cls, vectors: ArrayLike, dimension: int | None = None, *, floor: float = 1e-9) -> Self:
        """Fit to embeddings, one per row; `dimension` is the number of principal components to keep.

        Variances below `floor` times the largest are raised to it, so that noise is not amplified. There
        must be more embeddings than components.
        """
        x = _check_vectors(vectors)
        width = x.shape[1]
        components = width if dimension is None else dimension
        if not 1 <= components <= width:
            raise InputError(f"dimension={dimension} must be between 1 and {width}")
        if len(x) <= components:
            raise InputError(
                f"{len(x)} vectors are too few to whiten {components} dimensions; give more, or a smaller dimension"
            )
        variances, directions = _principal_components(x)
        scale = 1 / np.sqrt(np.maximum(variances[:components], floor * variances[0]))
        return cls(x.mean(axis=0), directions[:, :components] * scale)

    def apply(self, vectors: ArrayLike) -> NDArray[np.float32]:
        """(N, D) -> (N, d)."""
        white = (np.asarray(vectors, dtype=np.float64) - self.mean) @ self.projection
        return np.asarray(white.astype(np.float32))


def _principal_components(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Variances in descending order, and the (D, D) directions, one per column."""
    centred = x - x.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(x))
    if not variances[-1] > 0:
        raise InputError("all vectors are the same; they have no variance")
    return np.maximum(variances[::-1], 0), directions[:, ::-1]


def _check_vectors(vectors: ArrayLike) -> FloatArray:
    x = np.asarray(vectors, dtype=np.float64)
    if x.ndim != 2 or len(x) < 2 or not x.shape[1]:
        raise InputError(f"vectors have the shape {x.shape}; give two or more, one per row")
    if not np.isfinite(x).all():
        raise InputError("some vectors have numbers that are not finite")
    return x
