"""Sparse embeddings of many texts as one matrix in compressed sparse rows, without scipy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bertie.data.atomic import atomic_write
from bertie.errors import InputError
from bertie.pipeline.outputs import FloatArray

if TYPE_CHECKING:
    from bertie.tasks.results import SparseEmbeddingResult


@dataclass(frozen=True, slots=True, eq=False)
class SparseMatrix:
    """Compressed sparse rows: the non-zero weights of row i are `data[indptr[i]:indptr[i + 1]]`.

    `scipy.sparse.csr_matrix((m.data, m.indices, m.indptr), m.shape)` is the same matrix, and `scipy.sparse.load_npz`
    reads what `save` writes.

    >>> matrix = SparseMatrix(np.float32([2, 1, 3]), np.int32([0, 4, 4]), np.int64([0, 2, 3]), (2, 5))
    >>> matrix.dot(matrix).tolist()
    [[5.0, 3.0], [3.0, 9.0]]
    """

    data: FloatArray  # (nnz,)
    indices: NDArray[np.int32]  # (nnz,) the column of each weight, ascending in a row
    indptr: NDArray[np.int64]  # (rows + 1,)
    shape: tuple[int, int]

    @classmethod
    def from_results(cls, results: Sequence[SparseEmbeddingResult], vocabulary: int) -> SparseMatrix:
        """One row per result, one column per vocabulary entry."""
        orders = [np.argsort(result.ids) for result in results]
        data = [result.weights[order] for result, order in zip(results, orders, strict=True)]
        indices = [result.ids[order] for result, order in zip(results, orders, strict=True)]
        return cls(
            np.concatenate([np.empty(0, np.float32), *data]),
            np.concatenate([np.empty(0, np.int32), *indices]),
            np.cumsum([0, *map(len, data)], dtype=np.int64),
            (len(results), vocabulary),
        )

    def __len__(self) -> int:
        return self.shape[0]

    def dense(self, row: int) -> FloatArray:
        """(V,) one row with its zeros."""
        start, end = self.indptr[row : row + 2]
        out = np.zeros(self.shape[1], np.float32)
        out[self.indices[start:end]] = self.data[start:end]
        return out

    def dot(self, other: SparseMatrix) -> FloatArray:
        """(N, V), (M, V) -> (N, M) dot products of rows."""
        if self.shape[1] != other.shape[1]:
            raise InputError(f"embeddings over {self.shape[1]} and {other.shape[1]} terms are of different models")
        out = np.zeros((len(self), len(other)), np.float32)
        bounds = list(zip(other.indptr[:-1].tolist(), other.indptr[1:].tolist(), strict=True))
        for i in range(len(self)):
            products = self.dense(i)[other.indices] * other.data
            # Each row by itself: a sum does not depend on the other rows.
            out[i] = [products[start:end].sum() for start, end in bounds]
        return out

    def save(self, path: str | Path) -> None:
        """Write an .npz file in scipy's format."""
        file = BytesIO()
        arrays = {"data": self.data, "indices": self.indices, "indptr": self.indptr}
        np.savez_compressed(file, **arrays, shape=np.array(self.shape), format=np.array(b"csr"))  # type: ignore[arg-type]
        atomic_write(Path(path), file.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> SparseMatrix:
        """Read a file that `save` or scipy wrote."""
        with np.load(path) as file:
            if "format" not in file or file["format"].item() not in (b"csr", "csr"):
                raise InputError(f"{path} does not hold a matrix in compressed sparse rows")
            rows, columns = file["shape"].tolist()
            data, indices, indptr = (file[name] for name in ("data", "indices", "indptr"))
        return cls(data.astype(np.float32), indices.astype(np.int32), indptr.astype(np.int64), (rows, columns))
