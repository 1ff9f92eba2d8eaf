"""Test texts that also occur in the training set, exactly or as near-duplicates.

**Exact**: the same letters and digits in the same order, ignoring case, whitespace and punctuation.

**Near**: the longest common subsequence of words leaves out at most 3 of the longer text's words, or
15% of them if that is more. The common words must also be more than a template: their information
content (from document frequencies in the training set), minus `EDIT_NATS` for each word left out, must
exceed `CHANCE_NATS`. Words that occur in every text carry no information. Texts of fewer than 8 words
are compared exactly only: "where do I order a card" and "where do I order a watch" are not duplicates.

The search is exhaustive within these bounds (prefix filtering): words are ordered from rare to
frequent, and two texts that differ in at most d words share at least k of their d + k rarest words,
which are looked up. Nothing is sampled.

A data set of short templated texts (banking requests, linguistic minimal pairs) has near-duplicates
across any split. They are reported: the model has seen all but a few words of these texts. Languages
written without spaces are compared by character. A text contained in a much longer one is not found.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertie.data.normalize import NO_PUNCTUATION, UNSPACED
from bertie.evaluation.intervals import IntArray

Ids = NDArray[np.int32]
Unit = str | tuple[str, int]  # a word, or (word, n) for its n-th occurrence in a text

MAX_EDITS, MAX_EDIT_FRACTION = 3, 0.15  # words that may differ: the larger of the two
MIN_WORDS = 8  # shorter texts are compared exactly only
EDIT_NATS = 4.0  # cost of a differing word
CHANCE_NATS = 6.0  # information that can be shared by chance
BLOCK = 10_000  # candidates compared at once
PRIOR_TEXTS = 100  # pseudo-count of texts without any of the words: in a small set every word would look common


@dataclass(frozen=True, slots=True)
class Leak:
    """A test text and its most similar training text."""

    test_index: int
    train_index: int
    kind: Literal["exact", "near"]
    similarity: float  # length of the longest common subsequence / words of the longer text


def find_leaks(train: Sequence[str], test: Sequence[str]) -> list[Leak]:
    """Find at most one leak per test text, in the order of the test texts. Join the texts of a pair by a newline.

    >>> train = ["The quick brown fox jumps over the lazy dog.", "Nothing like it."]
    >>> find_leaks(train, ["the quick brown fox jumps over the LAZY dog", "Something else"])
    [Leak(test_index=0, train_index=0, kind='exact', similarity=1.0)]
    """
    keys: dict[str, int] = {}
    index = _PrefixIndex()
    for i, text in enumerate(train):
        words = _words(text)
        # Duplicates within the training set are indexed once.
        if keys.setdefault("".join(words), i) == i:
            index.add(i, words)
    index.build()
    leaks = []
    for i, text in enumerate(test):
        words = _words(text)
        same = keys.get("".join(words))
        if same is not None:
            leaks.append(Leak(i, same, "exact", 1.0))
        elif (near := index.nearest(words)) is not None:
            leaks.append(Leak(i, near[0], "near", near[1]))
    return leaks


def _words(text: str) -> list[str]:
    """Case-folded words without punctuation; a text of nothing but punctuation keeps it."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = UNSPACED.sub(r" \1 ", plain.translate(NO_PUNCTUATION)).split()
    return words or plain.split()


def _max_edits(words: IntArray) -> IntArray:
    """Number of words by which a near-duplicate of a text of this many words may differ."""
    return np.where(words >= MIN_WORDS, np.maximum(MAX_EDITS, (MAX_EDIT_FRACTION * words).astype(np.int64)), 0)


def _min_overlap(words: IntArray) -> IntArray:
    """Minimum overlap of two near-duplicates within the prefix of rarest words."""
    return 2 + words // 20


def _prefix(words: IntArray) -> IntArray:
    """Length of the prefix of rarest words to look up: the allowed edits plus the minimum overlap."""
    longer: IntArray = np.maximum(words, MIN_WORDS)
    return _max_edits(longer) - (longer - words) + _min_overlap(words)


class _PrefixIndex:
    """An inverted index of training texts by their rarest words.

    Repeated words count: a unit is a word with its occurrence number in the text, and a text is a set of
    units.
    """

    def __init__(self) -> None:
        self._units: dict[Unit, int] = {}
        self._rows: list[int] = []  # row of each text in the training set
        self._texts: list[Ids] = []  # units in order

    def add(self, row: int, words: list[str]) -> None:
        """Add a text."""
        if len(words) >= MIN_WORDS - MAX_EDITS:
            known = self._units
            self._rows.append(row)
            self._texts.append(np.array([known.setdefault(u, len(known)) for u in _units(words)], dtype=np.int32))

    def build(self) -> None:
        """Build the index once all texts are added."""
        self._flat = np.concatenate([np.zeros(0, dtype=np.int32), *self._texts])
        self._lengths = np.array([len(text) for text in self._texts], dtype=np.int64)
        self._begin = np.cumsum(self._lengths) - self._lengths
        times = np.bincount(self._flat, minlength=len(self._units))
        self._word = np.array([self._units[u if isinstance(u, str) else u[0]] for u in self._units], dtype=np.int32)
        self._information = np.log((len(self._texts) + PRIOR_TEXTS) / np.maximum(times, 1))  # nats
        self._rank = np.argsort(np.argsort(times, kind="stable"))  # the rarest unit is 0
        self._own = np.zeros(len(self._units), dtype=bool)  # scratch: marks the units of the query text
        most = _prefix(self._lengths)
        rarest = [np.sort(self._rank[text])[:count] for text, count in zip(self._texts, most, strict=True)]
        of = np.repeat(np.arange(len(rarest)), [len(prefix) for prefix in rarest])
        ranks = np.concatenate([np.zeros(0, dtype=np.int64), *rarest])
        self._postings = of[np.argsort(ranks, kind="stable")]  # texts, by their rare units
        self._starts = np.searchsorted(np.sort(ranks), np.arange(len(self._units) + 1))

    def nearest(self, words: list[str]) -> tuple[int, float] | None:
        """Row and similarity of the most similar training text; None if there is no near-duplicate."""
        if len(words) < MIN_WORDS - MAX_EDITS:
            return None
        n = np.array([len(words)])
        units = np.array([self._units.get(unit, -1) for unit in _units(words)], dtype=np.int32)
        known = units[units >= 0]
        unknown = len(units) - len(known)  # words of no training text: the rarest of all
        ranks = np.sort(self._rank[known])[: max(0, int(_prefix(n)[0]) - unknown)]
        lists = [self._postings[self._starts[rank] : self._starts[rank + 1]] for rank in ranks]
        if not lists:
            return None
        others, shared = np.unique(np.concatenate(lists), return_counts=True)
        lengths = self._lengths[others]
        longer = np.maximum(lengths, n)
        others = others[
            (shared >= np.minimum(_min_overlap(n), _min_overlap(lengths)))
            & (longer - np.minimum(lengths, n) <= _max_edits(longer))
        ]
        text = np.array([self._units.get(word, -1) for word in words], dtype=np.int32)
        best: tuple[int, float] | None = None
        self._own[known] = True
        for start in range(0, len(others), BLOCK):
            best = self._closest(others[start : start + BLOCK], text, best)
        self._own[known] = False
        return best

    def _closest(self, others: IntArray, text: Ids, best: tuple[int, float] | None) -> tuple[int, float] | None:
        """The best match so far, updated with these candidates: compared as sets first, then as sequences."""
        lengths = self._lengths[others]
        first = np.cumsum(lengths) - lengths
        units = self._flat[np.repeat(self._begin[others] - first, lengths) + np.arange(lengths.sum())]
        own = self._own[units]
        shared = np.add.reduceat(own, first, dtype=np.int64)
        nats = np.add.reduceat(np.where(own, self._information[units], 0.0), first)
        longer = np.maximum(lengths, len(text))
        bound, allowed = shared / longer, _max_edits(longer)
        left_out = longer - shared  # a lower bound
        promising = np.flatnonzero((left_out <= allowed) & (nats - EDIT_NATS * left_out > CHANCE_NATS))
        for i in promising[np.argsort(-bound[promising], kind="stable")]:
            if best and bound[i] <= best[1]:
                break
            common = _lcs_length(self._word[self._texts[others[i]]], text)
            missing = longer[i] - common
            near = missing <= allowed[i] and nats[i] * common / shared[i] - EDIT_NATS * missing > CHANCE_NATS
            if near and (best is None or common / longer[i] > best[1]):
                best = self._rows[others[i]], float(common / longer[i])
        return best


def _units(words: Iterable[str]) -> list[Unit]:
    seen: dict[str, int] = {}
    units: list[Unit] = []
    for word in words:
        seen[word] = times = seen.get(word, 0) + 1
        units.append(word if times == 1 else (word, times))
    return units


def _lcs_length(a: Ids, b: Ids) -> int:
    """Length of the longest common subsequence, by bit-parallel dynamic programming (Hyyrö, 2004)."""
    places: dict[int, int] = {}
    for i, unit in enumerate(a.tolist()):
        places[unit] = places.get(unit, 0) | 1 << i
    full = row = (1 << len(a)) - 1
    for unit in b.tolist():
        hits = row & places.get(unit, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()
