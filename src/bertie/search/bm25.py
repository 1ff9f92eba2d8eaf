"""Lexical search: an incremental BM25 index over stemmed terms.

The index stores term frequencies per passage, in immutable segments: passage keys are ascending, so
that new passages form a new segment. Document frequencies and the mean passage length are computed
at query time over all live passages of all segments, so that scores equal those of an index built
from scratch. (The package bm25s precomputes scores at indexing time, and would need all texts again
after each change.)

    lexical/0-262144/    passages with keys above 0 and up to 262144
    lexical/262144-262150/
"""

from __future__ import annotations

import math
import shutil
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.data.progress import Progress
from bertie.errors import CheckpointError
from bertie.search.analyzer import WORD, Analyzer
from bertie.search.array_folder import corrupt_array_file, load_arrays, save_arrays
from bertie.search.records import FloatArray, Keys
from bertie.search.vector_block import top_k
from bertie.search.vector_store import VectorStore

K1, B = 1.2, 0.75  # Lucene's defaults
SEGMENT_PASSAGES = 1 << 18
MAX_DELETED = 0.3  # share of deleted passages above which a segment is rebuilt
ATTEMPTS = 5  # minimum number of attempts to read all passages without a concurrent commit
RETRY_SECONDS = 10.0  # minimum time before giving up
ORPHAN_AGE = 86400  # seconds


class _BM25Segment:
    """An inverted index over a range of passages: one row per passage, in key order.

    `starts[t] : starts[t + 1]` is the postings list of term number t in `rows` and `counts`.
    """

    def __init__(self, vocabulary: dict[str, int], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.vocabulary, self.arrays = vocabulary, arrays
        self.keys, self.lengths = arrays["keys"], arrays["lengths"]  # (n,) passage keys, and term counts

    @classmethod
    def build(cls, texts: Iterable[tuple[int, str]], analyzer: Analyzer) -> _BM25Segment:
        numbers = _TermNumbers(analyzer)
        keys, ends, postings = array("q"), array("q"), array("i")
        for key, text in texts:
            postings.extend(map(numbers.__getitem__, WORD.findall(text)))
            keys.append(key)
            ends.append(len(postings))
        n, terms = len(keys), np.asarray(postings)
        rows = np.repeat(np.arange(n), np.diff(ends, prepend=0))
        rows, terms = rows[terms >= 0], terms[terms >= 0]
        pairs, counts = np.unique(terms * np.int64(n) + rows, return_counts=True)  # sorted by term, then by row
        arrays = {
            "keys": np.array(keys, np.int64),
            "lengths": np.bincount(rows, minlength=n).astype(np.float32),
            "starts": np.searchsorted(pairs, np.arange(len(numbers.vocabulary) + 1) * n),
            "rows": (pairs % max(n, 1)).astype(np.int32),
            "counts": counts.astype(np.float32),
        }
        return cls(numbers.vocabulary, arrays)

    def postings(self, term: str, live: NDArray[np.bool_] | None) -> tuple[NDArray[np.int32], FloatArray]:
        """Return the live rows that contain a term, and its frequency in each."""
        number = self.vocabulary.get(term)
        start, end = (0, 0) if number is None else self.arrays["starts"][number : number + 2]
        rows, counts = self.arrays["rows"][start:end], self.arrays["counts"][start:end]
        return (rows, counts) if live is None else (rows[live[rows]], counts[live[rows]])

    def save(self, folder: Path, index: str) -> None:
        """Write the segment atomically; `index` is the id of its index."""
        save_arrays(folder, self.arrays, index, {"terms.txt": "\n".join(self.vocabulary)})

    @classmethod
    def load(cls, folder: Path, index: str) -> _BM25Segment | None:
        """Read a saved segment; None if it is corrupt, or belongs to another index."""
        try:
            arrays = load_arrays(folder, index)
            terms = [] if arrays is None else (folder / "terms.txt").read_text(encoding="utf-8").split()
            return None if arrays is None else cls({term: number for number, term in enumerate(terms)}, arrays)
        except (OSError, KeyError):  # another process may be removing it
            return None


def verify_bm25(folder: Path, index: str) -> None:
    """Raise an error that names a corrupt file of the saved segments."""
    for segment in sorted(folder.glob("[0-9]*-[0-9]*")):
        if name := corrupt_array_file(segment, index):
            raise CheckpointError(f"{segment / name} is corrupt; the next lexical search rebuilds it")


class _TermNumbers(dict[str, int]):
    """A cache from words to term numbers, assigned in order of appearance; -1 for stop words."""

    def __init__(self, analyzer: Analyzer) -> None:
        self.analyzer, self.vocabulary = analyzer, dict[str, int]()

    def __missing__(self, word: str) -> int:
        term = self.analyzer.term(word)
        self[word] = number = self.vocabulary.setdefault(term, len(self.vocabulary)) if term else -1
        return number


class BM25Index:
    """A BM25 index of passages with Lucene's formula, over the `live` keys of its segments.

    >>> index = BM25Index.build([(3, "Cats eat fish."), (8, "Bread is baked.")], Analyzer())
    >>> index.search("what does a cat eat?", 5)[0].tolist()
    [3]
    """

    def __init__(self, analyzer: Analyzer, segments: Sequence[_BM25Segment], live: Keys | None = None) -> None:
        self.analyzer, self.segments = analyzer, segments
        self.is_saved = False  # whether all segments are on disk
        masks = [None if live is None else np.isin(segment.keys, live, assume_unique=True) for segment in segments]
        self._live = [None if mask is None or mask.all() else mask for mask in masks]
        self._passages, total = 0, 0.0
        for segment, mask in zip(segments, self._live, strict=True):
            lengths = segment.lengths if mask is None else segment.lengths[mask]
            self._passages, total = self._passages + len(lengths), total + float(lengths.sum(dtype=np.float64))
        mean = max(total / max(self._passages, 1), 1e-9)
        # (n,) per segment: the length normalization in BM25's denominator
        self._norms = [(K1 * (1 - B + B * segment.lengths / mean)).astype(np.float32) for segment in segments]

    @classmethod
    def build(cls, texts: Iterable[tuple[int, str]], analyzer: Analyzer) -> BM25Index:
        """Build an index from (key, text) pairs with ascending keys."""
        return cls(analyzer, list(_build_segments(texts, analyzer)))

    def search(self, query: str, k: int, allowed: Keys | None = None) -> tuple[Keys, FloatArray]:
        """Return keys and scores of the k best passages that contain a query term, best first."""
        scores = [np.zeros(len(segment.keys), np.float32) for segment in self.segments]
        for term, frequency in Counter(self.analyzer.terms(query)).items():
            postings = [segment.postings(term, live) for segment, live in zip(self.segments, self._live, strict=True)]
            matches = sum(len(rows) for rows, _ in postings)
            weight = np.float32(frequency * math.log(1 + (self._passages - matches + 0.5) / (matches + 0.5)))
            for segment_scores, (rows, counts), norms in zip(scores, postings, self._norms, strict=True):
                segment_scores[rows] += weight * counts / (counts + norms[rows])
        return rank_positive([segment.keys for segment in self.segments], scores, k, allowed)


def rank_positive(
    keys: Sequence[Keys], scores: Sequence[FloatArray], k: int, allowed: Keys | None = None
) -> tuple[Keys, FloatArray]:
    """Return keys and scores of the k best passages with scores above 0, best first, over segments.

    >>> rank_positive([np.array([1, 2]), np.array([5])], [np.float32([0, 2]), np.float32([3])], 5)[0].tolist()
    [5, 2]
    """
    all_keys, all_scores = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for segment_keys, segment_scores in zip(keys, scores, strict=True):
        if allowed is not None:
            segment_scores[~np.isin(segment_keys, allowed, assume_unique=True)] = 0
        all_keys.append(segment_keys[segment_scores > 0])
        all_scores.append(segment_scores[segment_scores > 0])
    ranked, values = np.concatenate(all_keys), np.concatenate(all_scores)
    if len(ranked) > k:
        best = values >= np.partition(values, -k)[-k]
        ranked, values = ranked[best], values[best]
    return top_k(ranked, values, k)


def _build_segments(texts: Iterable[tuple[int, str]], analyzer: Analyzer) -> Iterator[_BM25Segment]:
    remaining = iter(texts)
    while len((segment := _BM25Segment.build(islice(remaining, SEGMENT_PASSAGES), analyzer)).keys):
        yield segment


def refresh_bm25(
    store: VectorStore,
    analyzer: Analyzer,
    folder: Path | None,
    previous: tuple[int, BM25Index] | None,
    *,
    progress: bool = False,
    save: bool = True,
) -> tuple[int, BM25Index]:
    """Return the generation of the store and a BM25 index of its current passages.

    `previous` is returned if it is still current. Otherwise its segments, or those saved in
    `folder`, are reused, and new passages are added. The generation is -1 if concurrent commits
    prevented a consistent read. `save`: whether to write new segments to `folder`, which may take
    longer than a commit.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    for attempt in count(1):
        previous = _refresh(store, analyzer, folder, previous, progress)
        if previous[0] >= 0 or (attempt >= ATTEMPTS and time.monotonic() > deadline):
            break
    assert previous is not None
    generation, index = previous
    if save and folder is not None and generation >= 0 and not index.is_saved:
        with suppress(OSError):  # disk full, no permission, another process was faster: it can be rebuilt later
            _save_segments(folder, index.segments, store.id)
        index.is_saved = True
    return previous


def _refresh(
    store: VectorStore,
    analyzer: Analyzer,
    folder: Path | None,
    previous: tuple[int, BM25Index] | None,
    progress: bool,
) -> tuple[int, BM25Index]:
    generation = store.generation
    if previous is not None and previous[0] == generation:
        return previous
    live = store.matching_keys(())
    saved = _load_segments(folder, store.id) if previous is None and folder is not None else ()
    known = saved if previous is None else previous[1].segments
    segments = _reusable(known, live)
    after = _last_key(segments)
    texts = store.passage_texts(after)
    for segment in _build_segments(_with_progress(texts, int((live > after).sum())) if progress else texts, analyzer):
        if folder is not None and len(segment.keys) == SEGMENT_PASSAGES:  # if the process is killed, it is not lost
            with suppress(OSError):
                segment.save(folder / f"{_last_key(segments)}-{_last_key([segment])}", store.id)
        segments.append(segment)
    # If another process committed meanwhile, the index may contain part of that commit.
    return generation if store.generation == generation else -1, BM25Index(analyzer, segments, live)


def _save_segments(folder: Path, segments: Sequence[_BM25Segment], index: str) -> None:
    """Write the segments that are not saved yet, and remove those that are no longer used."""
    saved_until = 0
    for segment in segments:
        path = folder / f"{saved_until}-{_last_key([segment])}"
        if not path.exists():
            segment.save(path, index)
        saved_until = _last_key([segment])
    _remove_orphans(folder, segments)


def _last_key(segments: Sequence[_BM25Segment]) -> int:
    return int(segments[-1].keys[-1]) if segments else 0


def _reusable(segments: Sequence[_BM25Segment], live: Keys) -> list[_BM25Segment]:
    """Return the leading segments, up to the first with many deletions or too small to keep.

    A segment is kept as long as it has more passages than all that follow it. This bounds the number of
    segments, and how often a passage is indexed again.
    """
    kept: list[_BM25Segment] = []
    for segment in segments:
        deleted = len(segment.keys) - int(np.isin(segment.keys, live, assume_unique=True).sum())
        following = len(live) - int(np.searchsorted(live, segment.keys[-1], side="right"))
        too_small = len(segment.keys) <= min(following, SEGMENT_PASSAGES - 1)
        if deleted > MAX_DELETED * len(segment.keys) or too_small:
            break
        kept.append(segment)
    return kept


def _load_segments(folder: Path, index: str) -> list[_BM25Segment]:
    """Load the saved segments, each of which must start where the previous one ends."""
    segments: list[_BM25Segment] = []
    ranges = {tuple(map(int, path.name.split("-"))): path for path in folder.glob("[0-9]*-[0-9]*")}
    for (after, _), path in sorted(ranges.items(), key=lambda item: (item[0][0], -item[0][1])):  # the larger first
        if after == _last_key(segments):
            if segment := _BM25Segment.load(path, index):
                segments.append(segment)
            else:
                shutil.rmtree(path, ignore_errors=True)
    return segments


def _remove_orphans(folder: Path, segments: Sequence[_BM25Segment]) -> None:
    """Remove segments that are no longer used."""
    names = {f"{after}-{last}" for after, last in pairwise([0, *(_last_key([segment]) for segment in segments)])}
    for path in folder.iterdir() if folder.is_dir() else ():
        # A hidden folder may be one that another process is writing, unless it is old: then that
        # process was killed.
        stale = path.name[0] != "." or time.time() - path.stat().st_mtime > ORPHAN_AGE
        if path.name not in names and stale:
            shutil.rmtree(path, ignore_errors=True)


def _with_progress(texts: Iterable[tuple[int, str]], total: int) -> Iterator[tuple[int, str]]:
    done = 0
    with Progress("lexical index", lambda: done / max(total, 1)) as progress:
        for pair in texts:
            yield pair
            done += 1
            progress.update(1)
