"""Vectors on disk: written once, memory-mapped, searched by a way that fits their number, and scored exactly.

    rows up to `flat`     every vector is compared
    rows up to `graph`    HNSW over vectors of 8 bits a number; or, of binary vectors, all bits are compared
    beyond                inverted lists of product codes (IVF-PQ)

Whatever the way, it only proposes rows. Their scores are inner products with the stored vectors, in float64, so that
a passage has the same score however it was found. A filter takes more proposals until enough of them are allowed, and
compares all allowed rows if that would take too many: its answers are as good as those without it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bertie.data.atomic import fsync
from bertie.errors import CheckpointError, MissingPackageError
from bertie.search.records import FloatArray, Keys

EmbeddingPrecision = Literal["fp32", "int8", "binary"]
Rows = NDArray[np.int64]  # places in a segment
Mask = NDArray[np.bool_]
Sums = Mapping[str, tuple[int, int]]  # of each file, its size and checksum

AT_ONCE = 1 << 14  # rows that are held in memory
STEP = 1 << 11  # rows that are compared at a time: they stay in the processor's cache
SPARE = 16  # proposals beyond k, for what exact scores move
PRICE = 16  # rows that are compared in the time that a proposal takes
MOST = 4096  # proposals, before comparing all that is allowed
TARGET = 0.9  # recall@10 at which effort is enough, of queries that are harder than real ones: see `_effort`
TRIED = 10 + SPARE  # proposals at which that was measured
LEVELS = 127  # of int8 on each side of zero


@dataclass(frozen=True, slots=True)
class IndexThresholds:
    """How many rows are searched in which way."""

    flat: int = 50_000
    graph: int = 4_000_000


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Vectors as they are stored: float32 (n, D), or int8 (n, D) with the scale of each (n,)."""

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None

    @classmethod
    def of(cls, vectors: FloatArray, kind: EmbeddingPrecision) -> VectorBlock:
        """Round vectors to what is stored."""
        if kind == "fp32":
            return cls(np.ascontiguousarray(vectors, dtype=np.float32), None)
        scales = np.maximum(np.abs(vectors).max(axis=1, initial=0) / LEVELS, np.finfo(np.float32).tiny)
        return cls(np.rint(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32))

    @classmethod
    def join(cls, blocks: Sequence[VectorBlock]) -> VectorBlock:
        """One after the other; there must be one."""
        scales = [block.scales for block in blocks if block.scales is not None]
        return cls(np.concatenate([block.codes for block in blocks]), np.concatenate(scales) if scales else None)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> VectorBlock:
        return VectorBlock(self.codes[rows], None if self.scales is None else self.scales[rows])

    def vectors(self) -> FloatArray:
        """(n, D) as they count."""
        plain: FloatArray = np.asarray(self.codes, dtype=np.float32)
        return plain if self.scales is None else plain * self.scales[:, None]

    def estimates(self, queries: FloatArray) -> FloatArray:
        """(Q, D) -> (Q, n) scores, nearly: their last bits depend on the others in the block."""
        plain: FloatArray = queries @ np.asarray(self.codes, dtype=np.float32).T
        return plain if self.scales is None else plain * self.scales

    def scores(self, query: FloatArray) -> FloatArray:
        """(D,) -> (n,) scores, worked out in float64 and rounded once."""
        exact: FloatArray = (self.vectors().astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
        return exact


def best(keys: Keys, scores: FloatArray, k: int) -> tuple[Keys, FloatArray]:
    """The k highest, best first; of equals the lower key."""
    order = np.lexsort((keys, -scores))[:k]
    return keys[order], scores[order]


def scan(block: VectorBlock, queries: FloatArray, k: int, mask: Mask | None) -> list[Rows]:
    """Of each query, the rows that may be among its k nearest, by comparing all that count."""
    rows = np.arange(len(block)) if mask is None else np.flatnonzero(mask)
    found = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
    for start in range(0, len(rows), STEP):
        here = rows[start : start + STEP]
        together = here[-1] - here[0] == len(here) - 1  # then a slice will do, which is not copied
        scores = block[here[0] : here[-1] + 1].estimates(queries) if together else block[here].estimates(queries)
        take = min(k + SPARE, len(here))
        top = np.argpartition(-scores, take - 1, axis=1)[:, :take]
        for number, columns in enumerate(top):
            old, known = found[number]
            found[number] = best(np.append(old, here[columns]), np.append(known, scores[number, columns]), k + SPARE)
    return [each for each, _ in found]


class VectorSegment:
    """A folder of vectors that never changes: `keys` (n,) in order, `block` (n, D), and what finds them."""

    def __init__(self, folder: Path, effort: int, limits: IndexThresholds) -> None:
        self.folder, self.effort, self.limits = folder, effort, limits
        self.keys, self.block = stored(folder)
        bits = folder / "bits.npy"
        self.bits: NDArray[np.uint8] | None = np.load(bits, mmap_mode="r") if bits.exists() else None
        # All is opened at once: the folder may be gone later, when it was joined with others.
        index = folder / "index.faiss"
        self.index = _read(index, lists=len(self.keys) > limits.graph) if index.exists() else None

    def __len__(self) -> int:
        return len(self.keys)

    def rows_of(self, keys: Keys) -> Rows:
        """Where keys lie; those that do not are left out."""
        at = np.searchsorted(self.keys, keys)
        at[at == len(self.keys)] = 0
        found: Rows = at[self.keys[at] == keys]
        return found

    def nearest(self, queries: FloatArray, k: int, mask: Mask | None = None) -> list[tuple[Keys, FloatArray]]:
        """Of each query, keys and scores of its k nearest rows; `mask` (n,) says which count."""
        allowed = len(self) if mask is None else int(mask.sum())
        share = allowed / max(len(self), 1)
        wanted = min(k, allowed)
        if not wanted:
            return [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in queries]
        proposed = self._proposals(queries, wanted, int((wanted + SPARE) * 1.5 / share), allowed, mask)
        return [self._exact(query, rows, wanted) for query, rows in zip(queries, proposed, strict=True)]

    def _proposals(self, queries: FloatArray, wanted: int, many: int, allowed: int, mask: Mask | None) -> list[Rows]:
        """Rows that count: of `many` that the index proposes, or of more; if that takes too many, by comparing all."""
        if (self.index is None and self.bits is None) or many > MOST or allowed <= PRICE * many:
            return scan(self.block, queries, wanted, mask)
        found = self.propose(queries, many, self.effort)
        if mask is not None:
            found = [rows[mask[rows]] for rows in found]
        few = [i for i, rows in enumerate(found) if len(rows) < wanted]
        if few:
            more = self._proposals(queries[few], wanted, 4 * many, allowed, mask)
            for i, rows in zip(few, more, strict=True):
                found[i] = rows
        return found

    def _exact(self, query: FloatArray, rows: Rows, k: int) -> tuple[Keys, FloatArray]:
        """The k nearest of the rows, and how near they are."""
        rows = np.sort(rows)  # disks are read faster in order
        part = self.block[rows]
        if len(rows) > k + SPARE:
            near = np.argpartition(-part.estimates(query[None])[0], k + SPARE)[: k + SPARE]
            rows, part = rows[near], part[near]
        return best(self.keys[rows], part.scores(query), k)

    def propose(self, queries: FloatArray, many: int, effort: int) -> list[Rows]:
        """Of each query, rows that are near, most of them the nearest."""
        faiss, more = _faiss(), min(many * effort, len(self))  # coarse codes need more, for exact scores to choose from
        if self.index is None:
            assert self.bits is not None
            _, found = faiss.knn_hamming(np.packbits(queries > 0, axis=1), self.bits, more)
        elif len(self) > self.limits.graph:
            lists = max(1, effort * many // TRIED)  # the effort was found enough for so many
            _, found = self.index.search(queries, more, params=faiss.SearchParametersIVF(nprobe=lists))
        else:
            width = effort + many
            _, found = self.index.search(queries, many, params=faiss.SearchParametersHNSW(efSearch=width))
        return [rows[rows >= 0] for rows in found]


def stored(folder: Path) -> tuple[Keys, VectorBlock]:
    """Keys and vectors of a segment, without what finds them."""
    scales = folder / "scales.npy"
    codes = np.load(folder / "vectors.npy", mmap_mode="r")
    return np.load(folder / "keys.npy"), VectorBlock(codes, np.load(scales) if scales.exists() else None)


# --- writing ---


def write(
    folder: Path,
    keys: Keys,
    blocks: Iterator[VectorBlock],
    kind: EmbeddingPrecision,
    dimension: int,
    limits: IndexThresholds,
    progress: Callable[[int], None] = lambda rows: None,
) -> tuple[int, Sums]:
    """Make a segment that is on the disk when this returns: its effort, and its files with their checksums.

    `keys` must grow, and `blocks` hold their vectors in that order.
    """
    fresh = folder.with_name(folder.name + ".new")
    fresh.mkdir()
    n = len(keys)
    np.save(fresh / "keys.npy", keys)
    codes = _array(fresh / "vectors.npy", np.float32 if kind == "fp32" else np.int8, n, dimension)
    scales = None if kind == "fp32" else _array(fresh / "scales.npy", np.float32, n)
    bits = _array(fresh / "bits.npy", np.uint8, n, dimension // 8) if kind == "binary" and n <= limits.graph else None
    at = 0
    for block in blocks:
        here = slice(at, at + len(block))
        codes[here] = block.codes
        if scales is not None:
            scales[here] = block.scales
        if bits is not None:
            bits[here] = np.packbits(block.codes > 0, axis=1)
        at += len(block)
    assert at == n
    for array in (codes, scales, bits):
        if array is not None:
            array.flush()
    del codes, scales, bits
    effort = _build(fresh, limits, progress)
    sums = checksums(fresh)
    for file in [*fresh.iterdir(), fresh]:
        fsync(file)
    os.rename(fresh, folder)
    fsync(folder.parent)
    return effort, sums


def _array(file: Path, dtype: Any, *shape: int) -> np.memmap[Any, Any]:
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)


def _build(folder: Path, limits: IndexThresholds, progress: Callable[[int], None]) -> int:
    """Write the index that fits the size, and say how hard it must search."""
    segment = VectorSegment(folder, 1, limits)
    n = len(segment)
    if n <= limits.flat:
        return SPARE if segment.bits is not None else 1
    if segment.bits is None:
        faiss = _faiss()
        index = _graph(faiss, segment) if n <= limits.graph else _lists(faiss, segment)
        for start in range(0, n, AT_ONCE):
            index.add(segment.block[start : start + AT_ONCE].vectors())
            progress(min(start + AT_ONCE, n))
        faiss.write_index(index, str(folder / "index.faiss"))
        segment.index = _read(folder / "index.faiss", lists=n > limits.graph)
    most = n if segment.bits is not None else 1024
    return _effort(segment, most)


def _graph(faiss: Any, segment: VectorSegment) -> Any:
    dimension = segment.block.codes.shape[1]
    index = faiss.IndexHNSWSQ(dimension, faiss.ScalarQuantizer.QT_8bit, 32, faiss.METRIC_INNER_PRODUCT)
    index.train(_sample(segment, 20_000))
    return index


def _lists(faiss: Any, segment: VectorSegment) -> Any:
    dimension, n = segment.block.codes.shape[1], len(segment)
    lists = max(1, min(4 * int(n**0.5), n // 40))
    # A byte for every eight numbers, or as near to that as divides them. `np`: training each polysemous code would
    # take minutes and gain nothing here.
    parts = max(m for m in range(1, max(dimension // 8, 1) + 1) if dimension % m == 0)
    index = faiss.index_factory(dimension, f"IVF{lists},PQ{parts}x8np", faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1  # it warns on standard error
    index.train(_sample(segment, max(40 * lists, 10_000)))
    return index


def _read(file: Path, *, lists: bool) -> Any:
    faiss = _faiss()
    # Either flag leaves most of the file on the disk: one is for inverted lists, one for graphs over codes.
    return faiss.read_index(str(file), faiss.IO_FLAG_MMAP if lists else faiss.IO_FLAG_MMAP_IFC)


def _sample(segment: VectorSegment, many: int) -> FloatArray:
    """Vectors from all over it, the same ones each time."""
    n = len(segment)
    rows = np.arange(n) if n <= many else np.sort(np.random.default_rng(0).choice(n, many, replace=False))
    return segment.block[rows].vectors()


def _effort(segment: VectorSegment, most: int) -> int:
    """The least effort at which queries find their ten nearest.

    A stored vector is too easy a query: its like lie all around it, where the graph was made to lead. Halfway between
    two of them, a query is a little harder than those that people ask.
    """
    one, two = np.split(_sample(segment, 200)[: 2 * (min(200, len(segment)) // 2)], 2)
    queries = one + two
    queries /= np.maximum(np.linalg.norm(queries, axis=1, keepdims=True), 1e-9)

    def nearest(proposed: Sequence[Rows]) -> list[Keys]:
        return [segment._exact(query, rows, 10)[0] for query, rows in zip(queries, proposed, strict=True)]

    truth = nearest(scan(segment.block, queries, 10, None))
    effort = 16
    while effort < most:
        found = nearest(segment.propose(queries, TRIED, effort))
        hits = sum(len(np.intersect1d(one, two)) for one, two in zip(found, truth, strict=True))
        if hits >= TARGET * 10 * len(queries):
            break
        effort *= 2
    return effort


# --- files ---


def checksums(folder: Path) -> Sums:
    """Size and checksum of each file."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    with ThreadPoolExecutor(4) as pool:
        return {file.name: sum for file, sum in zip(files, pool.map(_checksum, files), strict=True)}


def _checksum(file: Path) -> tuple[int, int]:
    size = total = 0
    with file.open("rb") as f:
        while data := f.read(1 << 20):
            size, total = size + len(data), zlib.crc32(data, total)
    return size, total


def damaged(folder: Path, sums: Sums) -> list[str]:
    """The files that are not what they were, or not there."""
    have = checksums(folder) if folder.is_dir() else {}
    return [name for name, sum in sums.items() if have.get(name) != tuple(sum)]


def refuse(folder: Path, names: Sequence[str]) -> CheckpointError:
    """What to say of damaged files."""
    top = folder.parent.parent
    return CheckpointError(
        f"{folder / names[0]} is damaged. The passages are whole: `bertie index --rebuild --out {top}` makes it anew "
        "from them"
    )


def _faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError:
        raise MissingPackageError(
            "an index of this size needs the package faiss: pip install 'bertie[search]'"
        ) from None
