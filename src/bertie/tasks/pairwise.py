"""Similarities of embeddings: of all pairs of two matrices, or of aligned pairs of texts or rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder

_BLOCK = 64  # rows per matrix multiplication


def compare_embeddings(function: str, a: ArrayLike, b: ArrayLike) -> NDArray[np.float32]:
    """(N, D), (M, D) -> (N, M) similarities by a function of sentence-transformers; (D,) adds no axis."""
    first, second = _as_embeddings(a), _as_embeddings(b)
    if first.shape[-1] != second.shape[-1]:
        raise InputError(f"the embeddings have {first.shape[-1]} and {second.shape[-1]} dimensions")
    rows = _similarities(function, np.atleast_2d(first), np.atleast_2d(second))
    rows = rows[0] if first.ndim == 1 else rows
    return rows[..., 0] if second.ndim == 1 else rows


def _as_embeddings(values: ArrayLike) -> NDArray[np.float32]:
    array = np.asarray(values)
    if array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise InputError("compare takes embeddings: arrays of (D,) or (N, D); use similarity(a, b) for texts")
    return array


def _similarities(function: str, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    if function in ("euclidean", "manhattan"):
        power = 2.0 if function == "euclidean" else 1.0
        distances: NDArray[np.float32] = torch.cdist(torch.from_numpy(a), torch.from_numpy(b), p=power).numpy()
        return -distances
    if function == "cosine":
        a, b = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (a, b))
    return a @ b.T


def similarity_pairwise(embedder: Embedder, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
    """(n,) similarities by the checkpoint's similarity function. Each distinct text is embedded once."""
    index = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    vectors = embedder.embed(list(index))
    first, second = (vectors[[index[pair[side]] for pair in pairs]] for side in (0, 1))
    return compare_pairwise(embedder, first, second)


def compare_pairwise(
    embedder: Embedder, first: NDArray[np.float32], second: NDArray[np.float32]
) -> NDArray[np.float32]:
    """(n, D), (n, D) -> (n,): `Embedder.compare` of each row with the row of the same index."""
    blocks = [
        np.diagonal(embedder.compare(first[i : i + _BLOCK], second[i : i + _BLOCK]))
        for i in range(0, len(first), _BLOCK)
    ]
    return np.concatenate([np.empty(0, dtype=np.float32), *blocks])
