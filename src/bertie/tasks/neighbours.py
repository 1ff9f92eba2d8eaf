"""Nearest neighbours among many embeddings: exact, by blockwise GEMM, or approximate, by an inverted index of FAISS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bertie.errors import MissingPackageError
from bertie.pipeline.outputs import FloatArray

SearchMethod = Literal["auto", "exact", "approximate"]
METHODS = ("auto", "exact", "approximate")
MAX_EXACT = 100_000  # maximum number of texts for exact search by default
ROWS, TILE = 1024, 16384  # rows and columns of a block of similarities
PROBES = 64  # inverted lists to search (nprobe)
TRAINING = 50  # training texts per inverted list


class Neighbours(NamedTuple):
    """Pairs of rows: each row has at most k neighbours, but may be the neighbour of more rows."""

    rows: NDArray[np.int64]
    others: NDArray[np.int64]
    scores: FloatArray


def to_unit(vectors: FloatArray) -> FloatArray:
    """Scale vectors to unit length, as float32."""
    vectors = np.asarray(vectors, np.float32)
    unit: FloatArray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return unit


class UnitRows:
    """The rows of a memory-mapped array, scaled to unit length as they are read."""

    def __init__(self, vectors: FloatArray) -> None:
        self._vectors = vectors
        self.shape = vectors.shape

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, rows: Any) -> FloatArray:
        return to_unit(self._vectors[rows])


def unit_rows(vectors: FloatArray) -> Any:
    """Scale vectors to unit length; a memory-mapped array is read in blocks and never held in memory."""
    return UnitRows(vectors) if isinstance(vectors, np.memmap) else to_unit(vectors)


def nearest(
    unit: Any,
    k: int,
    method: SearchMethod = "auto",
    queries: Any = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Iterator[tuple[NDArray[np.int64], FloatArray]]:
    """The k nearest rows of `unit` for each query, (b, k) indices and (b, k) cosine similarities, by blocks of queries.

    Without `queries`, the other rows nearest to each row. If an approximate search finds fewer than k, similarities
    are padded with −inf. `unit` and `queries` are arrays, or `UnitRows`.
    """
    approximate = method == "approximate" or (method == "auto" and len(unit) > MAX_EXACT)
    index = _inverted_index(unit) if approximate else None
    rows = unit if queries is None else queries
    for start in range(0, len(rows), ROWS):
        block = rows[start : start + ROWS]
        own = np.arange(start, start + len(block)) if queries is None else np.full(len(block), -1)
        if index is None:
            yield _nearest_exact(unit, block, own, k)
        else:
            _, found = index.search(block, min(2 * k + 1, len(unit)))
            others = found.astype(np.int64)
            scores = np.einsum("nd,nkd->nk", block, unit[np.maximum(others, 0).ravel()].reshape(*others.shape, -1))
            scores[(others < 0) | (others == own[:, None])] = -np.inf
            yield _sorted(others, scores, k)
        progress(len(block))


def _nearest_exact(
    unit: Any, block: FloatArray, own: NDArray[np.int64], k: int
) -> tuple[NDArray[np.int64], FloatArray]:
    best, scores = np.zeros((len(block), 0), np.int64), np.zeros((len(block), 0), np.float32)
    for left in range(0, len(unit), TILE):
        tile = block @ unit[left : left + TILE].T
        inside = np.flatnonzero((own >= left) & (own < left + tile.shape[1]))
        tile[inside, own[inside] - left] = -np.inf  # a text is not its own neighbour
        size = min(k, tile.shape[1])
        top = np.argpartition(-tile, size - 1, axis=1)[:, :size]
        best = np.concatenate([best, top + left], axis=1)
        scores = np.concatenate([scores, np.take_along_axis(tile, top, 1)], axis=1)
        best, scores = _sorted(best, scores, k)
    return best, scores


def _sorted(others: NDArray[np.int64], scores: FloatArray, k: int) -> tuple[NDArray[np.int64], FloatArray]:
    """The k best columns of each row, best first, equal ones by index."""
    order = np.lexsort((others, -scores), axis=1)[:, :k]
    return np.take_along_axis(others, order, 1), np.take_along_axis(scores, order, 1)


def neighbours(
    unit: Any,
    k: int,
    threshold: float,
    method: SearchMethod = "auto",
    progress: Callable[[int], None] = lambda rows: None,
) -> Iterator[Neighbours]:
    """The k nearest other rows of each row with a cosine similarity of at least `threshold`, by blocks of rows."""
    approximate = method == "approximate" or (method == "auto" and len(unit) > MAX_EXACT)
    index = _inverted_index(unit) if approximate else None
    for start in range(0, len(unit), ROWS):
        block = unit[start : start + ROWS]
        yield _search(index, unit, start, k, threshold) if index else exact_neighbours(unit, start, k, threshold)
        progress(len(block))


def exact_neighbours(unit: Any, start: int, k: int, threshold: float) -> Neighbours:
    """The neighbours of one block of rows."""
    block = unit[start : start + ROWS]
    parts = []
    for left in range(0, len(unit), TILE):
        scores = block @ unit[left : left + TILE].T
        own = np.arange(max(start, left), min(start + len(block), left + scores.shape[1]))
        scores[own - start, own - left] = -np.inf  # a text is not its own neighbour
        enough = scores >= threshold
        if np.count_nonzero(enough) > 4 * k * len(block) and k < scores.shape[1]:
            top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            nearest = np.zeros_like(enough)
            np.put_along_axis(nearest, top, True, axis=1)
            enough &= nearest
        rows, others = np.nonzero(enough)
        parts.append(Neighbours(rows + start, others + left, scores[rows, others]))
    return _top(Neighbours(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), k)


def _search(index: Any, unit: Any, start: int, k: int, threshold: float) -> Neighbours:
    """Candidates of the index, compared exactly."""
    block = unit[start : start + ROWS]
    _, found = index.search(block, min(2 * k + 1, len(unit)))
    rows = np.repeat(np.arange(start, start + len(block)), found.shape[1])
    others = found.reshape(-1).astype(np.int64)
    present = (others >= 0) & (others != rows)
    rows, others = rows[present], others[present]
    scores = np.einsum("nd,nd->n", unit[rows], unit[others])
    enough = scores >= threshold
    return _top(Neighbours(rows[enough], others[enough], scores[enough]), k)


def _top(pairs: Neighbours, k: int) -> Neighbours:
    """The k best pairs of each row, in order."""
    order = np.lexsort((pairs.others, -pairs.scores, pairs.rows))
    rows, others, scores = pairs.rows[order], pairs.others[order], pairs.scores[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)  # within the row
    return Neighbours(rows[rank < k], others[rank < k], scores[rank < k])


def _inverted_index(unit: Any) -> Any:
    """An index of FAISS with 8-bit vectors, one byte per dimension; about sqrt(n) lists."""
    try:
        faiss = import_module("faiss")
    except ImportError:
        raise MissingPackageError(
            "an approximate search needs the package faiss: pip install 'bertie[search]'; or pass method='exact'"
        ) from None
    lists = max(1, min(round(4 * len(unit) ** 0.5), len(unit) // 40))
    index = faiss.index_factory(unit.shape[1], f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).permutation(len(unit))[: TRAINING * lists]
    index.train(unit[np.sort(sample)])
    for start in range(0, len(unit), TILE):
        index.add(unit[start : start + TILE])
    index.nprobe = min(PROBES, lists)
    return index
