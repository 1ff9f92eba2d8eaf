"""Test texts that also occur in the training set: exactly, as near-duplicates, or one contained in the other.

**Exact**: the same letters and digits in the same order, ignoring case, whitespace and punctuation.

**Near**: the longest common subsequence of words leaves out at most 3 of the longer text's words, or
15% of them if that is more. The common words must also be more than a template: their information
content, minus `EDIT_NATS` for each word left out, must exceed `CHANCE_NATS`, and so must that of all
common words but the most informative one. It comes from document frequencies in the training set, and
from how often a word follows one of the two words before it in other training texts: "How many X are
there in Y" tells little if many of them begin with "How many" and go on with "are there in". Texts of
fewer than 8 words are compared exactly only: "where do I order a card" and "where do I order a watch"
are not duplicates.

**Contained**: the word bigrams that both texts have cover one of them, in any order of the parts: a
truncated copy, a text with something added before or after it, swapped halves, or the swapped texts of
a pair. Fewer than 8 words must be covered completely, longer texts up to 15% of their words. The
information content must exceed what is expected by chance among so many training texts.

The search for near-duplicates is exhaustive within these bounds (prefix filtering): words are ordered
from rare to frequent, and two texts that differ in at most d words share at least k of their d + k
rarest words, which are looked up. Contained texts are looked up by word trigrams that occur in at most
`MAX_POSTINGS` training texts, and the `CANDIDATES` with the rarest ones are compared.

A data set of short templated texts (banking requests, linguistic minimal pairs) has near-duplicates
across any split. They are reported: the model has seen all but a few words of these texts. Languages
written without spaces are compared by character.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertie.data.normalize import NO_PUNCTUATION, UNSPACED
from bertie.evaluation.intervals import FloatArray, IntArray

Ids = NDArray[np.int32]
Unit = str | tuple[str, int]  # a word, or (word, n) for its n-th occurrence in a text

MAX_EDITS, MAX_EDIT_FRACTION = 3, 0.15  # words that may differ: the larger of the two
MIN_WORDS = 8  # shorter texts are compared exactly only
EDIT_NATS = 4.0  # cost of a differing word
CHANCE_NATS = 6.0  # information that can be shared by chance
BIGRAM_PRIOR = 5.0  # pseudo-count of a word's own frequency, in its frequency after the word before it
MAX_POSTINGS, CANDIDATES = 100, 5  # training texts with a trigram; compared with each test text
RUN_NATS, PARTS_NATS = 1.0, 6.0  # beyond chance: for a complete copy, and for one in parts or with other words
BLOCK = 10_000  # candidates compared at once
TEXT_BLOCK = 5_000  # test texts looked up at once
PRIOR_TEXTS = 100  # pseudo-count of texts without any of the words: in a small set every word would look common


@dataclass(frozen=True, slots=True)
class Leak:
    """A test text and its most similar training text."""

    test_index: int
    train_index: int
    kind: Literal["exact", "near"]
    # Length of the longest common subsequence / words of the longer text; if one text is contained in the other:
    # the shared fraction of its words.
    similarity: float


def find_leaks(train: Sequence[str], test: Sequence[str]) -> list[Leak]:
    """Find at most one leak per test text, in the order of the test texts. Join the texts of a pair by a newline.

    >>> train = ["The quick brown fox jumps over the lazy dog.", "Nothing like it."]
    >>> find_leaks(train, ["the quick brown fox jumps over the LAZY dog", "Something else"])
    [Leak(test_index=0, train_index=0, kind='exact', similarity=1.0)]
    """
    keys: dict[str, int] = {}
    index, shingles = _PrefixIndex(), _ShingleIndex()
    for i, text in enumerate(train):
        words = _words(text)
        # Duplicates within the training set are indexed once.
        if keys.setdefault("".join(words), i) == i:
            index.add(i, words)
            shingles.add(i, words)
    index.build()
    shingles.build()
    leaks: dict[int, Leak] = {}
    others: dict[int, list[str]] = {}
    for i, text in enumerate(test):
        words = _words(text)
        same = keys.get("".join(words))
        if same is not None:
            leaks[i] = Leak(i, same, "exact", 1.0)
        elif (near := index.nearest(words)) is not None:
            leaks[i] = Leak(i, near[0], "near", near[1])
        else:
            others[i] = words
    for i, (row, similarity) in shingles.contained(others).items():
        leaks[i] = Leak(i, row, "near", similarity)
    return [leaks[i] for i in sorted(leaks)]


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
        self._information = self._place_nats(times)
        self._rank = np.argsort(np.argsort(times, kind="stable"))  # the rarest unit is 0
        self._own = np.zeros(len(self._units), dtype=bool)  # scratch: marks the units of the query text
        most = _prefix(self._lengths)
        rarest = [np.sort(self._rank[text])[:count] for text, count in zip(self._texts, most, strict=True)]
        of = np.repeat(np.arange(len(rarest)), [len(prefix) for prefix in rarest])
        ranks = np.concatenate([np.zeros(0, dtype=np.int64), *rarest])
        self._postings = of[np.argsort(ranks, kind="stable")]  # texts, by their rare units
        self._starts = np.searchsorted(np.sort(ranks), np.arange(len(self._units) + 1))

    def _place_nats(self, times: IntArray) -> FloatArray:
        """Information content of each word in its place: less if it often follows one of the two words before it."""
        texts = len(self._texts) + PRIOR_TEXTS
        nats: FloatArray = np.log(texts / times[self._flat])
        words = self._word[self._flat].astype(np.int64)
        of = np.repeat(np.arange(len(self._texts)), self._lengths)
        for gap in (1, 2):  # a template has one word in a place where others have another one
            if len(words) <= gap:
                break
            last = np.flatnonzero(of[gap:] == of[:-gap]) + gap  # of pairs within one text
            first, second = words[last - gap], words[last]
            _, index, pairs = np.unique(first * len(self._units) + second, return_inverse=True, return_counts=True)
            follows, before = pairs[index] - 1, np.bincount(words)[first] - 1  # without the text itself
            prior = BIGRAM_PRIOR * times[self._flat[last]] / texts
            nats[last] = np.minimum(nats[last], np.log((before + BIGRAM_PRIOR) / (follows + prior)))
        return nats

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
        places = np.repeat(self._begin[others] - first, lengths) + np.arange(lengths.sum())
        own = self._own[self._flat[places]]
        shared = np.add.reduceat(own, first, dtype=np.int64)
        information = np.where(own, self._information[places], 0.0)
        nats, largest = np.add.reduceat(information, first), np.maximum.reduceat(information, first)
        longer = np.maximum(lengths, len(text))
        bound, allowed = shared / longer, _max_edits(longer)
        left_out = longer - shared  # a lower bound
        promising = np.flatnonzero(
            (left_out <= allowed) & (nats - EDIT_NATS * left_out > CHANCE_NATS) & (nats - largest > CHANCE_NATS)
        )
        for i in promising[np.argsort(-bound[promising], kind="stable")]:
            if best and bound[i] <= best[1]:
                break
            common = _lcs_length(self._word[self._texts[others[i]]], text)
            missing = longer[i] - common
            near = missing <= allowed[i] and nats[i] * common / shared[i] - EDIT_NATS * missing > CHANCE_NATS
            if near and (best is None or common / longer[i] > best[1]):
                best = self._rows[others[i]], float(common / longer[i])
        return best


class _ShingleIndex:
    """An inverted index of training texts by their word trigrams, to find texts that contain one another."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._rows: list[int] = []
        self._texts: list[Ids] = []

    def add(self, row: int, words: list[str]) -> None:
        """Add a text; one of fewer than three words says too little."""
        if len(words) >= 3:
            known = self._ids
            self._rows.append(row)
            self._texts.append(np.array([known.setdefault(word, len(known)) for word in words], dtype=np.int32))

    def build(self) -> None:
        """Build the index once all texts are added."""
        keys, of = _trigrams(self._texts)
        order = np.argsort(keys, kind="stable")
        self._keys, self._postings = keys[order], of[order]
        times = np.zeros(len(self._ids), dtype=np.int64)
        for text in self._texts:
            times[np.unique(text)] += 1
        self._most = float(np.log(len(self._texts) + PRIOR_TEXTS))  # nats of a word of no training text
        self._information = np.append(self._most - np.log(np.maximum(times, 1)), self._most)  # the last: unknown, -1

    def contained(self, texts: dict[int, list[str]]) -> dict[int, tuple[int, float]]:
        """Row and similarity of a training text that contains the text, or that it contains, by the text's key."""
        found: dict[int, tuple[int, float]] = {}
        if not len(self._keys):
            return found
        places = list(texts)
        for start in range(0, len(places), TEXT_BLOCK):
            block = places[start : start + TEXT_BLOCK]
            ids = [np.array([self._ids.get(word, -1) for word in texts[i]], dtype=np.int32) for i in block]
            for test, train in self._candidates(ids):
                similarity = self._similarity(ids[test], self._texts[train])
                if similarity > found.get(block[test], (0, 0.0))[1]:
                    found[block[test]] = self._rows[train], similarity
        return found

    def _candidates(self, texts: list[Ids]) -> Iterator[tuple[int, int]]:
        """Pairs of a text and a training text with the same rare trigrams, a few per text."""
        keys, of = _trigrams(texts)
        left = np.searchsorted(self._keys, keys, side="left")
        counts = np.searchsorted(self._keys, keys, side="right") - left
        rare = (counts > 0) & (counts <= MAX_POSTINGS)
        left, counts, of = left[rare], counts[rare], of[rare]
        if not len(counts):
            return
        first = np.cumsum(counts) - counts
        train = self._postings[np.repeat(left - first, counts) + np.arange(counts.sum())]
        nats = np.repeat(self._most - np.log(counts), counts)
        pairs, index = np.unique(np.repeat(of, counts) * len(self._texts) + train, return_inverse=True)
        weights = np.bincount(index, nats)
        test, train = np.divmod(pairs, len(self._texts))
        order = np.lexsort((-weights, test))
        test, train = test[order], train[order]
        rank = np.arange(len(test)) - np.searchsorted(test, test, side="left")
        yield from zip(test[rank < CANDIDATES].tolist(), train[rank < CANDIDATES].tolist(), strict=True)

    def _similarity(self, text: Ids, other: Ids) -> float:
        """The shared fraction of the words of the contained text; 0 if neither contains the other."""
        a, b = text.tolist(), other.tolist()
        shared = set(pairwise(a)) & set(pairwise(b))
        covered = [_covered(a, shared), _covered(b, shared)]
        whole = [all(mask) for mask in covered]
        best = 0.0
        for words, mask, longer in ((a, covered[0], b), (b, covered[1], a)):
            n, kept = len(words), sum(mask)
            if n > len(longer) or kept < n - int(MAX_EDIT_FRACTION * n if n >= MIN_WORDS else 0):
                continue
            information = self._information[words]
            nats = float(information[mask].sum())
            if nats < (1 - MAX_EDIT_FRACTION) * float(information.sum()):
                continue
            complete = all(whole) or (kept == n and set(pairwise(words)) <= shared)
            # By chance a run of words has its information content in nats against it, at any place of any text.
            chance = float(np.log(len(self._texts))) + float(np.log(len(longer) / n))
            if nats - EDIT_NATS * (n - kept) > chance + (RUN_NATS if complete else PARTS_NATS):
                best = max(best, kept / n)
        return best


def _covered(words: list[int], shared: set[tuple[int, int]]) -> list[bool]:
    """Which words are part of a shared bigram."""
    pairs = [False, *((pair in shared) for pair in pairwise(words)), False]
    return [before or after for before, after in pairwise(pairs)]


def _trigrams(texts: Sequence[Ids]) -> tuple[NDArray[np.uint64], IntArray]:
    """Hashes of the word trigrams of all texts, and the text of each; those with an unknown word are left out."""
    flat = np.concatenate([np.zeros(0, dtype=np.int32), *texts]).astype(np.int64)
    of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    if len(flat) < 3:
        return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)
    known = flat >= 0
    valid = (of[:-2] == of[2:]) & known[:-2] & known[1:-1] & known[2:]
    words, factor = flat.astype(np.uint64), np.uint64(0x9E3779B97F4A7C15)
    keys = (words[:-2] * factor + words[1:-1]) * factor + words[2:]  # wraps around
    return keys[valid], of[:-2][valid]


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
