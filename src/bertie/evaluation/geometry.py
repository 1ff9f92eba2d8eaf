"""How vectors lie in their space: whether all directions are used alike, and whitening, which makes it so.

Vectors of a language model that was never trained to compare texts lie in a narrow cone: any two have a high cosine,
and a few directions hold most of what differs. So a cosine says little. `figures` shows it; `Whitening` mends a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder

FloatArray = NDArray[np.float64]

PAIRS = 100_000  # drawn for the mean cosine


@dataclass(frozen=True, slots=True)
class Geometry:
    """How evenly vectors fill their space.

    `cosine`: the mean over pairs of different texts; 0 for vectors that fill it evenly, 1 for one direction. `spread`:
    the standard deviation of these cosines. `partition`: the smallest over the largest of Z(c) = Σ exp(c · v) over the
    principal directions c and −c (Mu and Viswanath 2018), of vectors of mean length 1; 1 is even. `isoscore`: the share
    of directions that are used evenly (Rudman et al. 2022), from 0 to 1. `top`: the share of the variance along the
    strongest direction. `effective`: of how many directions the variance speaks, exp of its entropy.
    """

    count: int
    dimension: int
    cosine: float
    spread: float
    partition: float
    isoscore: float
    top: float
    effective: float


def figures(vectors: ArrayLike, *, seed: int = 0) -> Geometry:
    """Measure vectors, a row each.

    >>> even = figures(np.random.default_rng(0).standard_normal((2000, 8)))
    >>> abs(even.cosine) < 0.02, even.isoscore > 0.95
    (True, True)
    >>> cone = figures(np.random.default_rng(0).standard_normal((2000, 8)) + [20, 0, 0, 0, 0, 0, 0, 0])
    >>> cone.cosine > 0.95
    True
    """
    x = _checked(vectors)
    n, width = x.shape
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    rng = np.random.default_rng(seed)
    if n * (n - 1) // 2 <= PAIRS:
        one, two = np.triu_indices(n, 1)
    else:
        one = rng.integers(n, size=PAIRS)
        two = (one + rng.integers(1, n, size=PAIRS)) % n  # never itself
    cosines = np.einsum("ij,ij->i", unit[one], unit[two])
    variances, _ = _principal(x)
    shares = variances / variances.sum()
    # Rudman et al.: the variances, scaled to the length of a row of ones, and how far they are from it.
    scaled = variances * np.sqrt(width) / np.linalg.norm(variances)
    defect = np.linalg.norm(scaled - 1) / np.sqrt(2 * (width - np.sqrt(width))) if width > 1 else 0.0
    used = (width - defect**2 * (width - np.sqrt(width))) ** 2 / width**2
    positive = shares[shares > 0]
    return Geometry(
        count=n,
        dimension=width,
        cosine=float(cosines.mean()),
        spread=float(cosines.std()),
        partition=_partition(x),
        isoscore=float((width * used - 1) / (width - 1)) if width > 1 else 1.0,
        top=float(shares.max()),
        effective=float(np.exp(-(positive * np.log(positive)).sum())),
    )


def _partition(x: FloatArray) -> float:
    """Z over the eigenvectors of XᵀX, both ways."""
    x = x / max(float(np.linalg.norm(x, axis=1).mean()), 1e-12)
    _, directions = np.linalg.eigh(x.T @ x)  # (D, D) a column each
    products = x @ directions
    sums = np.concatenate([np.exp(products).sum(axis=0), np.exp(-products).sum(axis=0)])
    return float(sums.min() / sums.max())


@dataclass(frozen=True, slots=True, eq=False)
class Whitening:
    """A shift and a turn after which vectors have the mean 0 and, in each direction, the variance 1.

    `dimensions` keeps the strongest directions alone, which makes vectors shorter, and often better.

    >>> vectors = np.random.default_rng(0).standard_normal((500, 3)) @ [[3, 0, 0], [1, 1, 0], [0, 0, 2]] + 5
    >>> white = Whitening.fit(vectors).apply(vectors)
    >>> np.allclose(np.cov(white.T, bias=True), np.eye(3), atol=1e-6)
    True
    """

    mean: FloatArray  # (D,)
    turn: FloatArray  # (D, d)

    @classmethod
    def fit(cls, vectors: ArrayLike, dimensions: int | None = None, *, floor: float = 1e-9) -> Self:
        """Fit it to vectors, a row each. Directions with less than `floor` of the greatest variance are not blown up.

        Without `dimensions` there must be more vectors than they are long, or some directions have no variance.
        """
        x = _checked(vectors)
        width = x.shape[1]
        kept = width if dimensions is None else dimensions
        if not 1 <= kept <= width:
            raise InputError(f"dimensions={dimensions} must lie between 1 and {width}")
        if len(x) <= kept:
            raise InputError(
                f"{len(x)} vectors are too few to whiten {kept} dimensions; give more, or fewer dimensions"
            )
        variances, directions = _principal(x)
        scale = 1 / np.sqrt(np.maximum(variances[:kept], floor * variances[0]))
        return cls(x.mean(axis=0), directions[:, :kept] * scale)

    def apply(self, vectors: ArrayLike) -> NDArray[np.float32]:
        """(N, D) -> (N, d)."""
        out: NDArray[np.float32] = ((np.asarray(vectors, dtype=np.float64) - self.mean) @ self.turn).astype(np.float32)
        return out

    def into(self, embedder: Embedder) -> Embedder:
        """An embedder whose vectors are whitened: a dense layer at its end, and a plain folder when it is saved.

        It must have been fitted to what `embedder.embed` gives. Where that has length 1, so have whitened vectors.

        >>> white = Whitening.fit(embedder.embed(texts)).into(embedder)     # doctest: +SKIP
        >>> white.save("whitened")                                          # doctest: +SKIP
        """
        import torch

        from bertie.nn.sentence_modules import Dense, Normalize
        from bertie.tasks.embed import Embedder

        modules = embedder.modules
        width, out = self.turn.shape
        if width != embedder.dimension or modules.truncate_dim is not None or embedder.dimensions is not None:
            raise InputError(f"the whitening is for whole vectors of {width}; the embedder's have {embedder.dimension}")
        dense = Dense(width, out, activation="Identity")
        with torch.no_grad():
            dense.linear.weight.copy_(torch.from_numpy(self.turn.T))
            dense.linear.bias.copy_(torch.from_numpy(-self.mean @ self.turn))
        dense = dense.to(embedder.model.device)
        ends = bool(len(modules.layers)) and isinstance(modules.layers[-1], Normalize)
        before = [Normalize()] if embedder.normalize and not ends else []
        after = [Normalize()] if embedder.normalize or ends else []
        checkpoint = replace(embedder.checkpoint, sentence=modules.followed_by(*before, dense, *after).eval())
        return Embedder(checkpoint, overflow=embedder.overflow)


def _principal(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The variances along the principal directions, the greatest first, and the directions (D, D), a column each."""
    centred = x - x.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred / len(x))
    if not variances[-1] > 0:
        raise InputError("all vectors are the same; there is no geometry in them")
    return np.maximum(variances[::-1], 0), directions[:, ::-1]


def _checked(vectors: ArrayLike) -> FloatArray:
    x = np.asarray(vectors, dtype=np.float64)
    if x.ndim != 2 or len(x) < 2 or not x.shape[1]:
        raise InputError(f"vectors have the shape {x.shape}; give two or more, a row each")
    if not np.isfinite(x).all():
        raise InputError("some vectors have numbers that are not finite")
    return x
