"""Texts of a test set that are in the training set as well, as they are or lightly edited.

**Exact**: the same letters and digits in the same order, whatever the case, the spaces and the punctuation.

**Near**: the words that two texts share in the same order (their longest common subsequence) leave out at most 3 of the
longer one's words, or 15% of them if that is more. What they share must also be more than a pattern: the information
in the shared words, by how many training texts have each, less `EDIT` nats for each word left out, must exceed
`CHANCE`. Words that all texts have say nothing. Of two texts of fewer than 8 words only the exact are found: "where do
I order a card" and "where do I order a watch" are no copies.

No pair within these bounds is missed: words are ordered from rare to frequent, and two texts that differ in at most d
words share at least k of their rarest d + k, which is what is looked up. There is no sampling and no chance in it.

A set of short texts after a few patterns (requests to a bank, minimal pairs of linguists) has near pairs across any
split that nobody copied. They are reported: the model has seen all but a few words of these texts, however that came.
Languages written without spaces are compared by character. A text that is a part of a much longer one is not found.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertie.text.normalize import NO_PUNCTUATION, UNSPACED

Ids = NDArray[np.int32]
Numbers = NDArray[np.int64]
Unit = str | tuple[str, int]  # a word, or a word with the number of its occurrence if it is not the first

FEW, SHARE = 3, 0.15  # words that may differ: so many, or this share
SHORT = 8  # words; two texts below are compared exactly
EDIT = 4.0  # nats that a differing word costs
CHANCE = 6.0  # nats: less than that can be a coincidence
AT_ONCE = 10_000  # candidates that are looked at together
MORE = 100  # texts that are thought to be there and to have none of the words, or in a few texts all would be common


@dataclass(frozen=True, slots=True)
class Leak:
    """A test text and the training text that is closest to it."""

    test_index: int
    train_index: int
    kind: Literal["exact", "near"]
    similarity: float  # the share of the longer text's words that both have in the same order


def find_leaks(train: Sequence[str], test: Sequence[str]) -> list[Leak]:
    """At most one leak a test text, in the order of the test texts. The texts of a pair are joined by a line break.

    >>> train = ["The quick brown fox jumps over the lazy dog.", "Nothing like it."]
    >>> find_leaks(train, ["the quick brown fox jumps over the LAZY dog", "Something else"])
    [Leak(test_index=0, train_index=0, kind='exact', similarity=1.0)]
    """
    keys: dict[str, int] = {}
    pool = _Pool()
    for i, text in enumerate(train):
        words = _words(text)
        # A training text that is there twice says nothing more the second time.
        if keys.setdefault("".join(words), i) == i:
            pool.add(i, words)
    pool.build()
    found = []
    for i, text in enumerate(test):
        words = _words(text)
        same = keys.get("".join(words))
        if same is not None:
            found.append(Leak(i, same, "exact", 1.0))
        elif (near := pool.nearest(words)) is not None:
            found.append(Leak(i, near[0], "near", near[1]))
    return found


def _words(text: str) -> list[str]:
    """A text's words, freed of case, odd spaces and punctuation; if it is nothing but those, as it is."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = UNSPACED.sub(r" \1 ", plain.translate(NO_PUNCTUATION)).split()
    return words or plain.split()


def _may_differ(words: Numbers) -> Numbers:
    """Words that a text may lack of one that has so many."""
    return np.where(words >= SHORT, np.maximum(FEW, (SHARE * words).astype(np.int64)), 0)


def _looked_up(words: Numbers) -> Numbers:
    """Of the rarest words that are looked up, how many two near texts share at least."""
    return 2 + words // 20


def _prefix(words: Numbers) -> Numbers:
    """How many of a text's rarest words are looked up: as many as a near text may lack, and those that are shared."""
    longer: Numbers = np.maximum(words, SHORT)
    return _may_differ(longer) - (longer - words) + _looked_up(words)


class _Pool:
    """Training texts, by their rarest words.

    A word that is there twice counts as two: a unit is a word with the number of its occurrence in the text, and a text
    is a set of units.
    """

    def __init__(self) -> None:
        self._units: dict[Unit, int] = {}
        self._rows: list[int] = []  # the number that each text was given with
        self._texts: list[Ids] = []  # units in order

    def add(self, row: int, words: list[str]) -> None:
        """Take a text in."""
        if len(words) >= SHORT - FEW:
            known = self._units
            self._rows.append(row)
            self._texts.append(np.array([known.setdefault(u, len(known)) for u in _units(words)], dtype=np.int32))

    def build(self) -> None:
        """Make ready for questions, when all texts are in."""
        self._flat = np.concatenate([np.zeros(0, dtype=np.int32), *self._texts])
        self._lengths = np.array([len(text) for text in self._texts], dtype=np.int64)
        self._begin = np.cumsum(self._lengths) - self._lengths
        times = np.bincount(self._flat, minlength=len(self._units))
        self._word = np.array([self._units[u if isinstance(u, str) else u[0]] for u in self._units], dtype=np.int32)
        self._information = np.log((len(self._texts) + MORE) / np.maximum(times, 1))  # nats
        self._rank = np.argsort(np.argsort(times, kind="stable"))  # the rarest unit is 0
        self._own = np.zeros(len(self._units), dtype=bool)  # scratch: the units of the text that is asked for
        most = _prefix(self._lengths)
        rarest = [np.sort(self._rank[text])[:count] for text, count in zip(self._texts, most, strict=True)]
        of = np.repeat(np.arange(len(rarest)), [len(one) for one in rarest])
        ranks = np.concatenate([np.zeros(0, dtype=np.int64), *rarest])
        self._listed = of[np.argsort(ranks, kind="stable")]  # texts, by their rare units
        self._starts = np.searchsorted(np.sort(ranks), np.arange(len(self._units) + 1))

    def nearest(self, words: list[str]) -> tuple[int, float] | None:
        """The row of the training text that is closest, and how close it is; None if none is near."""
        if len(words) < SHORT - FEW:
            return None
        n = np.array([len(words)])
        units = np.array([self._units.get(unit, -1) for unit in _units(words)], dtype=np.int32)
        known = units[units >= 0]
        foreign = len(units) - len(known)  # words that no training text has: the rarest of all
        ranks = np.sort(self._rank[known])[: max(0, int(_prefix(n)[0]) - foreign)]
        lists = [self._listed[self._starts[rank] : self._starts[rank + 1]] for rank in ranks]
        if not lists:
            return None
        others, shared = np.unique(np.concatenate(lists), return_counts=True)
        lengths = self._lengths[others]
        longer = np.maximum(lengths, n)
        others = others[
            (shared >= np.minimum(_looked_up(n), _looked_up(lengths)))
            & (longer - np.minimum(lengths, n) <= _may_differ(longer))
        ]
        text = np.array([self._units.get(word, -1) for word in words], dtype=np.int32)
        best: tuple[int, float] | None = None
        self._own[known] = True
        for start in range(0, len(others), AT_ONCE):
            best = self._closest(others[start : start + AT_ONCE], text, best)
        self._own[known] = False
        return best

    def _closest(self, others: Numbers, text: Ids, best: tuple[int, float] | None) -> tuple[int, float] | None:
        """The best so far or one of some candidates, each looked at in full: first as sets of units, then in order."""
        lengths = self._lengths[others]
        first = np.cumsum(lengths) - lengths
        units = self._flat[np.repeat(self._begin[others] - first, lengths) + np.arange(lengths.sum())]
        own = self._own[units]
        shared = np.add.reduceat(own, first, dtype=np.int64)
        nats = np.add.reduceat(np.where(own, self._information[units], 0.0), first)
        longer = np.maximum(lengths, len(text))
        bound, allowed = shared / longer, _may_differ(longer)
        left_out = longer - shared  # at least so many
        promising = np.flatnonzero((left_out <= allowed) & (nats - EDIT * left_out > CHANCE))
        for i in promising[np.argsort(-bound[promising], kind="stable")]:
            if best and bound[i] <= best[1]:
                break
            common = _common(self._word[self._texts[others[i]]], text)
            missing = longer[i] - common
            near = missing <= allowed[i] and nats[i] * common / shared[i] - EDIT * missing > CHANCE
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


def _common(a: Ids, b: Ids) -> int:
    """The length of the longest common subsequence, all rows of its table in the bits of one number (Hyyrö, 2004)."""
    places: dict[int, int] = {}
    for i, unit in enumerate(a.tolist()):
        places[unit] = places.get(unit, 0) | 1 << i
    full = row = (1 << len(a)) - 1
    for unit in b.tolist():
        hits = row & places.get(unit, 0)
        row = ((row + hits) | (row - hits)) & full
    return len(a) - row.bit_count()
