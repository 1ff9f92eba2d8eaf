"""Paraphrase mining: the pairs of texts with the most similar embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder
from bertie.tasks.neighbours import METHODS, SearchMethod, neighbours, unit_rows

THRESHOLD, TOP_K = 0.8, 10


@dataclass(frozen=True, slots=True)
class ParaphrasePair:
    """The indices of two similar texts, and the cosine similarity of their embeddings."""

    a: int
    b: int
    similarity: float


@explain_arguments
def paraphrase_pairs(
    texts: Iterable[str],
    threshold: float = THRESHOLD,
    top_k: int = TOP_K,
    *,
    method: SearchMethod = "auto",
    embedder: Embedder | None = None,
) -> list[ParaphrasePair]:
    """Find pairs of similar texts, the most similar first.

    Args:
        threshold: the minimum cosine similarity.
        top_k: number of nearest neighbours of each text to consider.
        method: "exact" compares all pairs; "approximate" searches a FAISS index, which may miss pairs; "auto" is
            exact for up to 100,000 texts.
        embedder: by default the built-in model.

    >>> texts = ["How do I reset my password?", "Where is my order?", "How can I reset the password?"]
    >>> [(pair.a, pair.b) for pair in paraphrase_pairs(texts)]
    [(0, 2)]
    """
    check_options(threshold, top_k, method)
    texts = list(check_list(texts, "paraphrase_pairs"))
    return mine_pairs((embedder or Embedder()).embed(texts), threshold, top_k, method=method) if texts else []


def check_options(threshold: float, top_k: int, method: str) -> None:
    """Refuse values that are out of range."""
    if not -1 <= threshold <= 1:
        raise InputError(f"threshold={threshold} must lie between -1 and 1")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise InputError(f"top_k={top_k!r} must be a whole number of at least 1")
    if method not in METHODS:
        raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")


def mine_pairs(
    vectors: FloatArray,
    threshold: float = THRESHOLD,
    top_k: int = TOP_K,
    *,
    method: SearchMethod = "auto",
    progress: Callable[[int], None] = lambda rows: None,
) -> list[ParaphrasePair]:
    """Like `paraphrase_pairs`, for embeddings."""
    unit = unit_rows(vectors)
    parts = []
    for block in neighbours(unit, top_k, threshold, method, progress):
        first, second = np.minimum(block.rows, block.others), np.maximum(block.rows, block.others)
        parts.append((first * len(unit) + second, block.scores))
    if not parts:
        return []
    keys, at = np.unique(np.concatenate([keys for keys, _ in parts]), return_index=True)
    scores = np.concatenate([scores for _, scores in parts])[at]
    order = np.lexsort((keys, -scores))
    return [
        ParaphrasePair(int(key) // len(unit), int(key) % len(unit), min(1.0, float(score)))
        for key, score in zip(keys[order].tolist(), scores[order].tolist(), strict=True)
    ]
