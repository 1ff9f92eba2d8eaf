"""Immutable, memory-mapped segments of embeddings, searched with FAISS and rescored exactly.

    up to `flat` rows     exhaustive scan
    up to `hnsw` rows     HNSW over 8-bit scalar-quantized embeddings; for binary precision, Hamming distance
    above                 IVF-PQ

Each method only proposes candidate rows. These are rescored by the inner product with the stored
embeddings in float64, so that the score of a passage does not depend on the method. With a filter,
more candidates are requested until enough of them pass; when that would take too many, the passing
rows are scanned: recall is as high as without a filter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bertie.data.atomic import fsync
from bertie.errors import BertieError, CheckpointError, MissingPackageError
from bertie.search.checksums import Checksums, compute_checksums
from bertie.search.records import FloatArray, Keys
from bertie.search.vector_block import MARGIN, EmbeddingPrecision, Mask, Rows, VectorBlock, scan, top_k

BUILD_ROWS = 1 << 14  # rows held in memory while a segment is built
CANDIDATE_COST = 16  # rows scanned in the time that one candidate takes
MAX_CANDIDATES = 4096  # beyond this, an exhaustive scan of the allowed rows is cheaper
TARGET_RECALL = 0.9  # recall@10 to reach on the harder-than-real queries of `_tune_effort`
TUNING_CANDIDATES = 10 + MARGIN  # candidates per query while tuning
MAX_EFFORT = 1024  # efSearch or nprobe


@dataclass(frozen=True, slots=True)
class IndexThresholds:
    """The largest number of rows for an exhaustive scan, and for HNSW."""

    flat: int = 50_000
    hnsw: int = 4_000_000


class VectorSegment:
    """An immutable folder of embeddings: `keys` (n,) ascending, `block` (n, D), a FAISS index.

    `effort` is efSearch of HNSW, nprobe of IVF, or the oversampling factor of binary codes.
    """

    def __init__(self, folder: Path, effort: int, thresholds: IndexThresholds) -> None:
        self.folder, self.effort, self.thresholds = folder, effort, thresholds
        self.keys, self.block = load_vectors(folder)
        bits = folder / "bits.npy"
        self.bits: NDArray[np.uint8] | None = np.load(bits, mmap_mode="r") if bits.exists() else None
        # All files are opened now: the folder may be removed later by a compaction.
        index = folder / "index.faiss"
        self.index = _read_faiss(index, ivf=len(self.keys) > thresholds.hnsw) if index.exists() else None

    def __len__(self) -> int:
        return len(self.keys)

    def rows_of(self, keys: Keys) -> Rows:
        """Return the rows of those keys that are in this segment."""
        rows = np.searchsorted(self.keys, keys)
        rows[rows == len(self.keys)] = 0
        present: Rows = rows[self.keys[rows] == keys]
        return present

    def search(self, queries: FloatArray, k: int, mask: Mask | None = None) -> list[tuple[Keys, FloatArray]]:
        """Return keys and scores of the k nearest rows of each query in `mask` (n,)."""
        allowed = len(self) if mask is None else int(mask.sum())
        k = min(k, allowed)
        if not k:
            return [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in queries]
        count = int((k + MARGIN) * 1.5 / (allowed / len(self)))
        candidates = self._filtered_candidates(queries, k, count, allowed, mask)
        return [self.rescore(query, rows, k) for query, rows in zip(queries, candidates, strict=True)]

    def _filtered_candidates(
        self, queries: FloatArray, k: int, count: int, allowed: int, mask: Mask | None
    ) -> list[Rows]:
        """Return at least k allowed rows per query, from candidates or an exhaustive scan."""
        has_index = self.index is not None or self.bits is not None
        if not has_index or count > MAX_CANDIDATES or allowed <= CANDIDATE_COST * count:
            return scan(self.block, queries, k, mask)
        candidates = self.candidates(queries, count, self.effort)
        if mask is not None:
            candidates = [rows[mask[rows]] for rows in candidates]
        short = [i for i, rows in enumerate(candidates) if len(rows) < k]
        if short:
            retried = self._filtered_candidates(queries[short], k, 4 * count, allowed, mask)
            for i, rows in zip(short, retried, strict=True):
                candidates[i] = rows
        return candidates

    def rescore(self, query: FloatArray, rows: Rows, k: int) -> tuple[Keys, FloatArray]:
        """Return keys and exact scores of the k nearest of the candidate rows."""
        rows = np.sort(rows)  # sequential reads are faster
        block = self.block[rows]
        if len(rows) > k + MARGIN:
            nearest = np.argpartition(-block.approximate_scores(query[None])[0], k + MARGIN)[: k + MARGIN]
            rows, block = rows[nearest], block[nearest]
        return top_k(self.keys[rows], block.exact_scores(query), k)

    def candidates(self, queries: FloatArray, count: int, effort: int) -> list[Rows]:
        """Return approximate nearest rows of each query."""
        faiss, oversampled = _faiss(), min(count * effort, len(self))  # coarse codes need more candidates to rescore
        if self.index is None:
            assert self.bits is not None
            _, neighbours = faiss.knn_hamming(np.packbits(queries > 0, axis=1), self.bits, oversampled)
        elif len(self) > self.thresholds.hnsw:
            nprobe = max(1, effort * count // TUNING_CANDIDATES)  # the effort was tuned for that many candidates
            parameters = faiss.SearchParametersIVF(nprobe=nprobe)
            _, neighbours = self.index.search(queries, oversampled, params=parameters)
        else:
            parameters = faiss.SearchParametersHNSW(efSearch=effort + count)
            _, neighbours = self.index.search(queries, count, params=parameters)
        return [rows[rows >= 0] for rows in neighbours]


def load_vectors(folder: Path) -> tuple[Keys, VectorBlock]:
    """Return keys and embeddings of a segment, without its FAISS index."""
    scales = folder / "scales.npy"
    codes = np.load(folder / "vectors.npy", mmap_mode="r")
    return np.load(folder / "keys.npy"), VectorBlock(codes, np.load(scales) if scales.exists() else None)


# --- writing ---


def write_segment(
    folder: Path,
    keys: Keys,
    blocks: Iterator[VectorBlock],
    precision: EmbeddingPrecision,
    dimension: int,
    thresholds: IndexThresholds,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[int, Checksums]:
    """Write a segment durably and return its search effort and the checksums of its files.

    `keys` must be ascending, and `blocks` yield their embeddings in that order.
    """
    temporary = folder.with_name(folder.name + ".new")
    try:
        temporary.mkdir()
        has_bits = precision == "binary" and len(keys) <= thresholds.hnsw
        _write_arrays(temporary, keys, blocks, precision, dimension, has_bits)
        effort = _build_faiss(temporary, thresholds, progress)
        checksums = compute_checksums(temporary)
        for file in [*temporary.iterdir(), temporary]:
            fsync(file)
        os.rename(temporary, folder)
        fsync(folder.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):  # disk full
            raise BertieError(
                f"{temporary}: {error.strerror or error}; everything that was committed is safe"
            ) from None
        raise
    return effort, checksums


def _write_arrays(
    folder: Path,
    keys: Keys,
    blocks: Iterator[VectorBlock],
    precision: EmbeddingPrecision,
    dimension: int,
    has_bits: bool,
) -> None:
    """Write keys and embeddings; not to memory maps, where a full disk kills the process."""
    n = len(keys)
    with ExitStack() as stack:

        def create(name: str, dtype: Any, *shape: int) -> BinaryIO:
            file = stack.enter_context((folder / name).open("wb"))
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            return file

        create("keys.npy", np.int64, n).write(np.ascontiguousarray(keys, np.int64).data)
        is_fp32 = precision == "fp32"
        codes = create("vectors.npy", np.float32 if is_fp32 else np.int8, n, dimension)
        scales = None if is_fp32 else create("scales.npy", np.float32, n)
        bits = create("bits.npy", np.uint8, n, dimension // 8) if has_bits else None
        end = 0
        for block in blocks:
            codes.write(np.ascontiguousarray(block.codes).data)
            if scales is not None and block.scales is not None:
                scales.write(np.ascontiguousarray(block.scales).data)
            if bits is not None:
                bits.write(np.packbits(block.codes > 0, axis=1).data)
            end += len(block)
        assert end == n


def _build_faiss(folder: Path, thresholds: IndexThresholds, progress: Callable[[int], None]) -> int:
    """Write the FAISS index that suits the number of rows, and return the effort it needs."""
    segment = VectorSegment(folder, 1, thresholds)
    n = len(segment)
    if n <= thresholds.flat:
        return MARGIN if segment.bits is not None else 1
    if segment.bits is None:
        faiss = _faiss()
        index = _hnsw(faiss, segment) if n <= thresholds.hnsw else _ivf_pq(faiss, segment)
        for start in range(0, n, BUILD_ROWS):
            index.add(segment.block[start : start + BUILD_ROWS].dequantize())
            progress(min(start + BUILD_ROWS, n))
        _write_faiss(faiss, index, folder / "index.faiss")
        segment.index = _read_faiss(folder / "index.faiss", ivf=n > thresholds.hnsw)
    return _tune_effort(segment, n if segment.bits is not None else MAX_EFFORT)


def _hnsw(faiss: Any, segment: VectorSegment) -> Any:
    dimension = segment.block.codes.shape[1]
    index = faiss.IndexHNSWSQ(dimension, faiss.ScalarQuantizer.QT_8bit, 32, faiss.METRIC_INNER_PRODUCT)
    index.train(_sample(segment, 20_000))
    return index


def _ivf_pq(faiss: Any, segment: VectorSegment) -> Any:
    dimension, n = segment.block.codes.shape[1], len(segment)
    lists = max(1, min(4 * int(n**0.5), n // 40))
    # One byte per eight dimensions, or the nearest divisor. `np`: no polysemous training, which
    # would take minutes and gain nothing here.
    subquantizers = max(m for m in range(1, max(dimension // 8, 1) + 1) if dimension % m == 0)
    index = faiss.index_factory(dimension, f"IVF{lists},PQ{subquantizers}x8np", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1  # avoids warnings on standard error
    index.train(_sample(segment, max(40 * lists, 10_000)))
    return index


def _write_faiss(faiss: Any, index: Any, file: Path) -> None:
    with file.open("wb") as stream:  # errors of writing are Python's
        faiss.write_index(index, faiss.PyCallbackIOWriter(stream.write))


def _read_faiss(file: Path, *, ivf: bool) -> Any:
    faiss = _faiss()
    # Both flags memory-map most of the file: one is for inverted lists, the other for HNSW over
    # scalar codes.
    return faiss.read_index(str(file), faiss.IO_FLAG_MMAP if ivf else faiss.IO_FLAG_MMAP_IFC)


def _sample(segment: VectorSegment, count: int) -> FloatArray:
    """Return a deterministic random sample of the embeddings."""
    n = len(segment)
    rows = np.arange(n) if n <= count else np.sort(np.random.default_rng(0).choice(n, count, replace=False))
    return segment.block[rows].dequantize()


def _tune_effort(segment: VectorSegment, maximum: int) -> int:
    """Return the smallest effort (in powers of two) that reaches the target recall@10.

    A stored embedding is too easy a query, since the graph was built to lead to it. The midpoint
    between two of them is slightly harder than real queries.
    """
    left, right = np.split(_sample(segment, 200)[: 2 * (min(200, len(segment)) // 2)], 2)
    queries = left + right
    queries /= np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-9)

    def nearest(candidates: Sequence[Rows]) -> list[Keys]:
        return [segment.rescore(query, rows, 10)[0] for query, rows in zip(queries, candidates, strict=True)]

    truth = nearest(scan(segment.block, queries, 10, None))
    effort = 16
    while effort < maximum:
        retrieved = nearest(segment.candidates(queries, TUNING_CANDIDATES, effort))
        hits = sum(len(np.intersect1d(keys, exact)) for keys, exact in zip(retrieved, truth, strict=True))
        if hits >= TARGET_RECALL * 10 * len(queries):
            break
        effort *= 2
    return effort


def corruption_error(folder: Path, names: Sequence[str]) -> CheckpointError:
    """Return the error for corrupt files of a segment."""
    index = folder.parent.parent
    return CheckpointError(
        f"{folder / names[0]} is corrupt. The passages are intact: `bertie index --rebuild -o {index}` rebuilds it "
        "from them"
    )


def _faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError:
        raise MissingPackageError(
            "an index of this size needs the package faiss: pip install 'bertie[search]'"
        ) from None
