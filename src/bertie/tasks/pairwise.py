"""Similarity of aligned pairs: texts, or rows of two embedding matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder

_BLOCK = 64  # rows per matrix multiplication


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
