"""Cleaning of raw text and finding of copies, for corpora of any language.

A document is one text; its lines are paragraphs. Each cleaner is a function from text to text, named in `CLEANERS`.

**Exact** copies have the same words, whatever their case, spaces and punctuation. **Near** ones share four fifths of
their runs of five words (Jaccard), as MinHash estimates it: 128 hashes a document, looked up in 16 bands of 8. Of pairs
that share 80% of their runs 95% are looked at, of those that share 85% 99%, of those that share 50% 6%; the estimate
from the 128 then decides, with a standard error of at most 0.04. The first of several copies is kept.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError
from bertie.text.normalize import NO_PUNCTUATION, UNSPACED

Dedup = Literal["exact", "near", "none"]

# ── cleaning ──

# Control characters but tab and line break, byte order marks, halves of UTF-16 pairs, what Unicode calls no character.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_ODD_SPACE, _SPACES = re.compile(r"[^\S\n ]"), re.compile(" {2,}")


def nfc(text: str) -> str:
    """Characters that can be written in several ways, in one: Unicode's NFC.

    >>> len("e\\u0301"), len(nfc("e\\u0301"))
    (2, 1)
    """
    return unicodedata.normalize("NFC", text)


def no_controls(text: str) -> str:
    """Without control characters and broken ones; those that part words become spaces. Tabs and lines stay.

    >>> no_controls("a\\x00b\\x0cc\\ufeff")
    'ab c'
    """
    return _CONTROLS.sub(lambda found: " " if found[0].isspace() else "", text)


def single_spaces(text: str) -> str:
    """Any white space within a line is one space; none at a line's ends.

    >>> single_spaces(" a \\t b\\u00a0c \\n d")
    'a b c\\nd'
    """
    return "\n".join(line.strip(" ") for line in _SPACES.sub(" ", _ODD_SPACE.sub(" ", text)).split("\n"))


def lines_with_letters(text: str) -> str:
    """Without the lines that hold no letter of any script: rules, page numbers, columns of figures.

    >>> lines_with_letters("One.\\n* * *\\n1984\\n文")
    'One.\\n文'
    """
    return "\n".join(line for line in text.split("\n") if any(map(str.isalpha, line)))


# In the order in which they are applied, whatever the order in which they are asked for.
CLEANERS: dict[str, Callable[[str], str]] = {
    "nfc": nfc,
    "controls": no_controls,
    "spaces": single_spaces,
    "letters": lines_with_letters,
}


def cleaned(text: str, names: Iterable[str]) -> str:
    """The text after the cleaners of these names, without empty lines.

    >>> cleaned("a  b\\n \\n\\x07c", ["spaces", "controls"])
    'a b\\nc'
    """
    wanted = set(names)
    if not wanted <= CLEANERS.keys():
        raise InputError(f"clean={sorted(wanted - CLEANERS.keys())} must be among {', '.join(CLEANERS)}")
    for name, clean in CLEANERS.items():
        if name in wanted:
            text = clean(text)
    return "\n".join(line for line in text.split("\n") if line and not line.isspace())


def long_enough(text: str, characters: int, words: int) -> bool:
    """Whether a text has so many characters and words. Scripts without spaces have a word a character.

    >>> long_enough("two words", 5, 2), long_enough("two words", 5, 3), long_enough("没有空格", 0, 4)
    (True, False, True)
    """
    return len(text) >= characters and (words < 2 or len(UNSPACED.sub(r" \1 ", text).split()) >= words)


def plain(text: str) -> str:
    """A text's words with a space between them, without case and punctuation; if it has nothing else, as it is.

    >>> plain("It's  the LAZY dog.")
    'its the lazy dog'
    """
    # By lines, most of which are ASCII in many languages and then ten times as fast.
    return " ".join(filter(None, map(_plain_line, text.split("\n")))) or " ".join(_folded(text).split())


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _plain_line(line: str) -> str:
    words = _folded(line).translate(NO_PUNCTUATION)
    return " ".join((words if words.isascii() else UNSPACED.sub(r" \1 ", words)).split())


def title_key(title: str) -> str:
    """What titles are compared by: letters and digits alone.

    WikiText spells "Meridian , Mississippi" and "Edson 's Ridge" where Wikipedia has no such spaces.

    >>> title_key("American Beauty ( 1999 film )") == title_key("American Beauty (1999 film)")
    True
    """
    return plain(title).replace(" ", "")


# ── copies ──

HASHES, BANDS = 128, 16
SHINGLE = 5  # words
NEAR = 0.8  # the share of all shingles that two near copies have in common, at least
# Memory that a document takes, as measured: a digest and its entry in a table; besides, its hashes (512 bytes), a key
# and a number for each band (192), and copies of those while they are merged.
EXACT_BYTES, NEAR_BYTES = 160, 1344
BLOCK = 4096  # documents whose keys are looked up in a dict before they are sorted into the rest

_DRAWN = np.random.default_rng(5489)
_FACTORS = _DRAWN.integers(0, 1 << 32, (HASHES, 1), dtype=np.uint32) | np.uint32(1)
_ADDED = _DRAWN.integers(0, 1 << 32, (HASHES, 1), dtype=np.uint32)
_PLACES = _DRAWN.integers(0, 1 << 63, SHINGLE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_ROWS = _DRAWN.integers(0, 1 << 63, (BANDS, HASHES // BANDS), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Copy:
    """A document that is a copy of one that came before it."""

    kind: Literal["exact", "near"]
    of: int  # the number of that one
    similarity: float  # the share of their runs of five words that both have


class Copies:
    """Says of one document after the other whether it is a copy of one that was kept before.

    >>> copies = Copies("exact")
    >>> [copies.check(plain(text), i) for i, text in enumerate(["The dog.", "A cat.", "the DOG"])]
    [None, None, Copy(kind='exact', of=0, similarity=1.0)]

    Memory grows with the documents that are kept: `EXACT_BYTES` or `NEAR_BYTES` for each. Beyond `memory` bytes it is
    an error: no document is passed over in silence.
    """

    def __init__(self, kind: Dedup, memory: int = 4 << 30) -> None:
        self._kind, self._memory = kind, memory
        self._digests: dict[bytes, int] = {}
        self._near = _Near()

    def check(self, words: str, number: int) -> Copy | None:
        """Whether a document, as `plain` has it, is a copy; if it is none, it is kept by its number."""
        if self._kind == "none":
            return None
        data = words.encode("utf-8")
        digest = hashlib.blake2b(data, digest_size=16).digest()
        same = self._digests.get(digest)
        if same is not None:
            return Copy("exact", same, 1.0)
        if self._kind == "near":
            found = self._near.check(data, number)
            if found is not None:
                return found
        self._digests[digest] = number
        each = NEAR_BYTES if self._kind == "near" else EXACT_BYTES
        if len(self._digests) * each > self._memory:
            raise InputError(
                f"to find {self._kind} copies among more than {len(self._digests):,} documents takes over "
                f"{self._memory:,} bytes ({each} a document); allow more memory"
                + (", or look for exact copies only" if self._kind == "near" else "")
            )
        return None


def signature(words: bytes) -> NDArray[np.uint32]:
    """The 128 hashes of a document: two documents agree in as many of them as their runs of five words do.

    >>> signature(b"a b c d e f").shape
    (128,)
    """
    codes = np.fromiter(map(zlib.crc32, words.split()), np.uint64)  # (words,)
    codes = np.pad(codes, (0, max(0, SHINGLE - len(codes))))
    count = len(codes) - SHINGLE + 1
    mixed = np.zeros(count, np.uint64)
    for place, factor in enumerate(_PLACES):
        mixed += codes[place : place + count] * factor
    # The finish of SplitMix64: nearby sums must not give nearby hashes.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    shingles = np.unique(mixed >> np.uint64(32)).astype(np.uint32)
    least = np.full(HASHES, 0xFFFFFFFF, np.uint32)
    for start in range(0, len(shingles), 1024):  # (128, 1024) numbers fit into a core's cache
        np.minimum(least, (shingles[start : start + 1024] * _FACTORS + _ADDED).min(axis=1), out=least)
    return least


class _Near:
    """The hashes of all documents that were kept, and for each band which documents have which.

    Keys of bands lie in a dict while they are fresh, then in sorted arrays. Arrays of like size are merged, so that
    there are few of them and each key is moved few times.
    """

    def __init__(self) -> None:
        self._signatures: list[NDArray[np.uint32]] = []  # in blocks, which never have to be moved
        self._numbers = array("q")
        self._fresh: dict[int, list[int]] = {}
        self._sorted: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = []

    def check(self, words: bytes, number: int) -> Copy | None:
        """The copy that the document is, or None: then it is kept."""
        own = signature(words)
        keys = (own.reshape(BANDS, -1) * _ROWS).sum(axis=1, dtype=np.uint64)  # (16,)
        rows = self._candidates(keys)
        if len(rows):
            shared = (np.stack([self._signature(row) for row in rows.tolist()]) == own).mean(axis=1)
            best = int(shared.argmax())
            if shared[best] >= NEAR:
                return Copy("near", int(self._numbers[rows[best]]), float(shared[best]))
        self._keep(own, keys, number)
        return None

    def _candidates(self, keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
        found = [np.array(self._fresh[key], np.uint32) for key in keys.tolist() if key in self._fresh]
        for known, rows in self._sorted:
            begin, end = np.searchsorted(known, keys, "left"), np.searchsorted(known, keys, "right")
            found += [rows[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True) if e > b]
        # Sorted: of equally near documents the first is named, wherever its keys lie.
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint32)

    def _signature(self, row: int) -> NDArray[np.uint32]:
        found: NDArray[np.uint32] = self._signatures[row // BLOCK][row % BLOCK]
        return found

    def _keep(self, own: NDArray[np.uint32], keys: NDArray[np.uint64], number: int) -> None:
        row = len(self._numbers)
        if row % BLOCK == 0:
            self._signatures.append(np.empty((BLOCK, HASHES), np.uint32))
        self._signatures[-1][row % BLOCK] = own
        self._numbers.append(number)
        for key in keys.tolist():
            self._fresh.setdefault(key, []).append(row)
        if len(self._numbers) % BLOCK == 0:
            self._settle()

    def _settle(self) -> None:
        """Sort the fresh keys into the rest."""
        keys = np.array([key for key, rows in self._fresh.items() for _ in rows], np.uint64)
        rows = np.array([row for rows in self._fresh.values() for row in rows], np.uint32)
        self._fresh = {}
        while True:
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
            if not self._sorted or len(self._sorted[-1][0]) > len(keys):
                break
            before = self._sorted.pop()
            keys, rows = np.concatenate([before[0], keys]), np.concatenate([before[1], rows])
        self._sorted.append((keys, rows))
