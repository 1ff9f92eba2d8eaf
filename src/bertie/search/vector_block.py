"""Stored embeddings in fp32, or int8 with one scale per row; exact scores and top-k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertie.search.records import FloatArray, Keys

EmbeddingPrecision = Literal["fp32", "int8", "binary"]
Rows = NDArray[np.int64]  # row numbers within a block or segment
Mask = NDArray[np.bool_]

SCAN_ROWS = 1 << 11  # rows scored per step of an exact scan: they stay in the CPU cache
MARGIN = 16  # candidates beyond k, since exact scores may reorder them
INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Stored embeddings: float32 (n, D), or int8 (n, D) with one scale per row (n,)."""

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None

    @classmethod
    def quantize(cls, embeddings: FloatArray, precision: EmbeddingPrecision) -> VectorBlock:
        """Round embeddings to their storage precision; "binary" keeps int8 codes for rescoring."""
        if precision == "fp32":
            return cls(np.ascontiguousarray(embeddings, dtype=np.float32), None)
        scales = np.maximum(np.abs(embeddings).max(axis=1, initial=0) / INT8_MAX, np.finfo(np.float32).tiny)
        return cls(np.rint(embeddings / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    @classmethod
    def concatenate(cls, blocks: Sequence[VectorBlock]) -> VectorBlock:
        """Concatenate blocks; there must be at least one."""
        scales = [block.scales for block in blocks if block.scales is not None]
        return cls(np.concatenate([block.codes for block in blocks]), np.concatenate(scales) if scales else None)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> VectorBlock:
        return VectorBlock(self.codes[rows], None if self.scales is None else self.scales[rows])

    def dequantize(self) -> FloatArray:
        """Return the embeddings in float32, (n, D)."""
        codes: FloatArray = np.asarray(self.codes, dtype=np.float32)
        return codes if self.scales is None else codes * self.scales[:, None]

    def approximate_scores(self, queries: FloatArray) -> FloatArray:
        """(Q, D) -> (Q, n) by GEMM, whose last bits depend on the shape of the block."""
        scores: FloatArray = queries @ np.asarray(self.codes, dtype=np.float32).T
        return scores if self.scales is None else scores * self.scales

    def exact_scores(self, query: FloatArray) -> FloatArray:
        """(D,) -> (n,) inner products, computed in float64 and rounded once."""
        scores: FloatArray = (self.dequantize().astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
        return scores


def top_k(keys: Keys, scores: FloatArray, k: int) -> tuple[Keys, FloatArray]:
    """Return the k highest scores, best first; ties are broken by the lower key."""
    order = np.lexsort((keys, -scores))[:k]
    return keys[order], scores[order]


def scan(block: VectorBlock, queries: FloatArray, k: int, mask: Mask | None) -> list[Rows]:
    """Return candidate nearest rows of each query by an exhaustive scan of `mask`."""
    rows = np.arange(len(block)) if mask is None else np.flatnonzero(mask)
    candidates = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
    for start in range(0, len(rows), SCAN_ROWS):
        step = rows[start : start + SCAN_ROWS]
        contiguous = step[-1] - step[0] == len(step) - 1  # a slice is not copied
        scores = (block[step[0] : step[-1] + 1] if contiguous else block[step]).approximate_scores(queries)
        count = min(k + MARGIN, len(step))
        top = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        for query, columns in enumerate(top):
            old_rows, old_scores = candidates[query]
            merged = np.append(old_rows, step[columns]), np.append(old_scores, scores[query, columns])
            candidates[query] = top_k(*merged, k + MARGIN)
    return [candidate_rows for candidate_rows, _ in candidates]
