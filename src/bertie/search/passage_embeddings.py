"""Sparse and token embeddings of an index's passages, in immutable segments beside the dense ones.

They are derived from the passages: each refresh embeds those that have none yet, in segments of a thousand passages
that are written one by one, so that an interrupted refresh continues where it stopped. Small segments are merged; a
passage is never embedded twice.

    sparse/1-1024/     of the passages with keys from 1 to 1024: postings lists by term
    tokens/1-1024/     of the same: token embeddings, one after the other
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bertie.data.progress import Progress
from bertie.errors import CheckpointError
from bertie.search.array_folder import Arrays, corrupt_array_file, load_arrays, save_arrays
from bertie.search.bm25 import rank_positive
from bertie.search.records import FloatArray, Keys
from bertie.search.vector_store import VectorStore
from bertie.tasks.late_interaction import maxsim
from bertie.tasks.results import SparseEmbeddingResult

SEGMENT_PASSAGES = 1024  # embedded and written at once
MAX_SEGMENTS = 16  # segments below the largest size, before they are merged
MAX_DELETED = 0.3  # share of deleted passages above which a segment is rewritten


class EmbeddedSegment(ABC):
    """The embeddings of some passages: one row per passage, in the order of keys."""

    largest: int  # passages of a segment that is not merged any more

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.keys: Keys = arrays["keys"]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{int(self.keys[0])}-{int(self.keys[-1])}"

    @classmethod
    @abstractmethod
    def merge(cls, segments: Sequence[Self], live: Keys) -> Self:
        """One segment of the live rows of several with ascending keys."""


class SparseSegment(EmbeddedSegment):
    """Postings lists: `rows[starts[t] : starts[t + 1]]` have the term t, with `weights`."""

    largest = 1 << 18

    @classmethod
    def build(cls, keys: Keys, results: Sequence[SparseEmbeddingResult], vocabulary: int) -> SparseSegment:
        """Invert the embeddings of passages."""
        terms = np.concatenate([np.empty(0, np.int32), *(result.ids for result in results)])
        rows = np.repeat(np.arange(len(keys)), [len(result) for result in results])
        weights = np.concatenate([np.empty(0, np.float32), *(result.weights for result in results)])
        return cls._invert(keys, terms, rows, weights, vocabulary)

    @classmethod
    def _invert(
        cls, keys: Keys, terms: NDArray[Any], rows: NDArray[Any], weights: FloatArray, vocabulary: int
    ) -> SparseSegment:
        order = np.lexsort((rows, terms))
        starts = np.searchsorted(terms[order], np.arange(vocabulary + 1))
        arrays: Arrays = {"keys": keys, "starts": starts, "rows": rows[order].astype(np.int32)}
        return cls({**arrays, "weights": weights[order]})

    @classmethod
    def merge(cls, segments: Sequence[SparseSegment], live: Keys) -> SparseSegment:
        """One segment of the live rows of several."""
        keys, terms, rows, weights = list[Any](), list[Any](), list[Any](), list[Any]()
        first = 0
        for segment in segments:
            kept = np.isin(segment.keys, live, assume_unique=True)
            number = np.cumsum(kept) - 1 + first  # of each kept row
            postings = kept[segment.arrays["rows"]]
            term = np.repeat(np.arange(len(segment.arrays["starts"]) - 1), np.diff(segment.arrays["starts"]))
            keys.append(segment.keys[kept])
            terms.append(term[postings])
            rows.append(number[segment.arrays["rows"][postings]])
            weights.append(segment.arrays["weights"][postings])
            first += int(kept.sum())
        arrays = (np.concatenate(keys), np.concatenate(terms), np.concatenate(rows), np.concatenate(weights))
        return cls._invert(*arrays, len(segments[0].arrays["starts"]) - 1)

    def score(self, query: SparseEmbeddingResult, live: NDArray[np.bool_]) -> FloatArray:
        """(n,) dot products with a query; 0 for deleted passages."""
        scores = np.zeros(len(self), np.float32)
        starts = self.arrays["starts"]
        for term, weight in zip(query.ids.tolist(), query.weights, strict=True):
            postings = slice(int(starts[term]), int(starts[term + 1]))
            scores[self.arrays["rows"][postings]] += weight * self.arrays["weights"][postings]
        return np.where(live, scores, np.float32(0))


class TokenSegment(EmbeddedSegment):
    """Token embeddings in half precision: those of row i are `vectors[starts[i] : starts[i + 1]]`."""

    largest = 1 << 13

    @classmethod
    def build(cls, keys: Keys, vectors: Sequence[NDArray[Any]]) -> TokenSegment:
        """Concatenate the token embeddings of passages."""
        starts = np.cumsum([0, *map(len, vectors)])
        return cls({"keys": keys, "starts": starts, "vectors": np.concatenate(vectors).astype(np.float16)})

    @classmethod
    def merge(cls, segments: Sequence[TokenSegment], live: Keys) -> TokenSegment:
        """One segment of the live rows of several."""
        keys, vectors = list[int](), list[NDArray[Any]]()
        for segment in segments:
            for row in np.flatnonzero(np.isin(segment.keys, live, assume_unique=True)).tolist():
                keys.append(int(segment.keys[row]))
                vectors.append(segment.vectors(row))
        return cls.build(np.array(keys, np.int64), vectors)

    def vectors(self, row: int) -> NDArray[Any]:
        """(n, dimension) the token embeddings of a row."""
        start, end = self.arrays["starts"][row : row + 2]
        rows: NDArray[Any] = self.arrays["vectors"][start:end]
        return rows


Segment = TypeVar("Segment", bound=EmbeddedSegment)


class PassageEmbeddings(Generic[Segment]):
    """The embeddings of all passages of a store by one model, kept in a folder.

    `owner` identifies the store and the model; files of others are replaced. `build` embeds passages.
    """

    def __init__(
        self, folder: Path, owner: str, kind: type[Segment], build: Callable[[Keys, Sequence[str]], Segment], label: str
    ) -> None:
        self.folder, self.owner, self.kind, self.build, self.label = folder, owner, kind, build, label
        self.segments: list[Segment] = []
        self.live: Keys = np.empty(0, np.int64)
        self._generation = -1

    def refresh(self, store: VectorStore, *, progress: bool = False) -> None:
        """Embed new passages, and drop deleted ones."""
        generation = store.generation
        if generation == self._generation:
            return
        if not self.segments:
            self.segments = self._load()
        self.live = store.matching_keys(())
        known = np.concatenate([np.empty(0, np.int64), *(segment.keys for segment in self.segments)])
        missing = np.setdiff1d(self.live, known, assume_unique=True)
        new = list(self._embed(store, missing, progress))
        self.segments = sorted([*self.segments, *new], key=lambda segment: int(segment.keys[0]))
        self._merge()
        self._generation = generation if store.generation == generation else -1

    def _embed(self, store: VectorStore, missing: Keys, progress: bool) -> Iterator[Segment]:
        """Segments of passages that have no embeddings yet, each on disk before the next one is computed."""
        done = 0
        with Progress(self.label, lambda: done / max(1, len(missing)), show=progress and len(missing) > 0) as bar:
            for chunk in self._chunks(missing):
                stored = store.fetch(chunk.tolist())
                if stored:  # others were deleted meanwhile
                    keys = np.array([passage.key for passage in stored], np.int64)
                    segment = self.build(keys, [passage.passage.text for passage in stored])
                    with suppress(OSError):  # disk full, no permission: it can be embedded again any time
                        save_arrays(self.folder / segment.name, segment.arrays, self.owner)
                    yield segment
                done += len(stored)
                bar.update(len(stored))

    def _chunks(self, missing: Keys) -> Iterator[Keys]:
        """Keys for one segment each: between the same two existing ones, so that ranges of keys do not overlap."""
        firsts = np.sort([int(segment.keys[0]) for segment in self.segments])
        gaps = np.searchsorted(firsts, missing, side="right")
        for part in np.split(missing, np.flatnonzero(np.diff(gaps)) + 1):
            yield from (part[i : i + SEGMENT_PASSAGES] for i in range(0, len(part), SEGMENT_PASSAGES))

    def _load(self) -> list[Segment]:
        """The saved segments; those that a larger one contains were merged into it."""
        found = list[Segment]()
        paths = {tuple(map(int, path.name.split("-"))): path for path in self.folder.glob("[0-9]*-[0-9]*")}
        for (first, _), path in sorted(paths.items(), key=lambda item: (item[0][0], -item[0][1])):
            arrays = load_arrays(path, self.owner)
            contained = bool(found) and first <= int(found[-1].keys[-1])
            if arrays is None or contained:
                shutil.rmtree(path, ignore_errors=True)
            else:
                found.append(self.kind(arrays))
        return found

    def _merge(self) -> None:
        """Merge small neighbours when there are many, and rewrite segments with many deleted passages."""
        deleted = [1 - np.isin(segment.keys, self.live, assume_unique=True).mean() for segment in self.segments]
        small = [len(segment) < self.kind.largest for segment in self.segments]
        if sum(small) <= MAX_SEGMENTS and max(deleted, default=0.0) <= MAX_DELETED:
            return
        groups = list[list[Segment]]()
        for segment in self.segments:
            if groups and sum(map(len, groups[-1])) + len(segment) <= self.kind.largest:
                groups[-1].append(segment)
            else:
                groups.append([segment])
        merged = list[Segment]()
        for group in groups:
            live = sum(int(np.isin(segment.keys, self.live, assume_unique=True).sum()) for segment in group)
            if not live:
                continue
            changed = len(group) > 1 or live < (1 - MAX_DELETED) * len(group[0])
            merged.append(self.kind.merge(group, self.live) if changed else group[0])
            if changed:
                with suppress(OSError):
                    save_arrays(self.folder / merged[-1].name, merged[-1].arrays, self.owner)
        self.segments = merged
        names = {segment.name for segment in merged}
        for path in self.folder.glob("[0-9]*-[0-9]*"):
            if path.name not in names:
                with suppress(OSError):
                    shutil.rmtree(path)


def verify_embeddings(folder: Path, owner: str) -> None:
    """Raise an error that names a corrupt file."""
    for path in sorted(folder.glob("[0-9]*-[0-9]*")):
        if name := corrupt_array_file(path, owner):
            raise CheckpointError(f"{path / name} is corrupt; the next search embeds its passages again")


def search_sparse(
    embeddings: PassageEmbeddings[SparseSegment], query: SparseEmbeddingResult, k: int, allowed: Keys | None = None
) -> tuple[Keys, FloatArray]:
    """Return keys and dot products of the k best passages that share a term with the query, best first."""
    segments = embeddings.segments
    live = [np.isin(segment.keys, embeddings.live, assume_unique=True) for segment in segments]
    scores = [segment.score(query, mask) for segment, mask in zip(segments, live, strict=True)]
    return rank_positive([segment.keys for segment in segments], scores, k, allowed)


def score_tokens(embeddings: PassageEmbeddings[TokenSegment], query: FloatArray, keys: Sequence[int]) -> list[float]:
    """The MaxSim of a query and each of these passages, whose token embeddings are stored."""
    scores = []
    for key in keys:
        segment = next(s for s in embeddings.segments if s.keys[0] <= key <= s.keys[-1])
        row = int(np.searchsorted(segment.keys, key))
        scores.append(maxsim(query, segment.vectors(row).astype(np.float32)))
    return scores
