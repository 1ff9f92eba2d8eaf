"""Deduplication of documents: exact by hash, near-duplicates by MinHash.

**Exact** duplicates have the same words, ignoring case, whitespace and punctuation. **Near**-duplicates
have a Jaccard similarity of at least 0.8, by default, between their sets of five-word shingles, as
estimated by MinHash: 128 hashes per document, looked up by locality-sensitive hashing in 16 bands of 8. Of
pairs with a similarity of 80%, 95% become candidates; of 85%, 99%; of 50%, 6%. Thresholds below 0.8 use 32
bands of 4: of pairs with a similarity of 50%, 87% become candidates; of 60%, 99%. The estimate from the 128
hashes then decides, with a standard error of at most 0.05. The first of several duplicates is kept.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError

Dedup = Literal["exact", "near", "none"]

HASHES = 128
SHINGLE_WORDS = 5  # at most
MIN_SIMILARITY = 0.8  # of near-duplicates: Jaccard similarity of their shingles
LOWEST_SIMILARITY = 0.5  # below which too many pairs would not become candidates
# Measured memory per document: a digest and its dict entry; for near-duplicates also its hashes (512 bytes), a key
# and a row number per band (192 with 16 bands, 384 with 32), and temporary copies while they are merged.
EXACT_BYTES, NEAR_BYTES, MORE_BANDS_BYTES = 160, 1344, 384
BLOCK = 4096  # documents whose keys stay in a dict before they are merged into sorted arrays

_RNG = np.random.default_rng(5489)
_MULTIPLIERS = _RNG.integers(0, 1 << 32, (HASHES, 1), dtype=np.uint32) | np.uint32(1)
_OFFSETS = _RNG.integers(0, 1 << 32, (HASHES, 1), dtype=np.uint32)
_SHINGLE_FACTORS = _RNG.integers(0, 1 << 63, SHINGLE_WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_BAND_FACTORS = _RNG.integers(0, 1 << 63, HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A duplicate of an earlier document."""

    kind: Literal["exact", "near", "semantic"]
    of: int  # number of the earlier document
    similarity: float  # Jaccard similarity of their shingles; of semantic duplicates the cosine of their embeddings


class Deduplicator:
    """Detects duplicates of earlier documents, one document at a time.

    >>> from bertie.data.normalize import normalize_words
    >>> deduplicator = Deduplicator("exact")
    >>> [deduplicator.check(normalize_words(text), i) for i, text in enumerate(["The dog.", "A cat.", "the DOG"])]
    [None, None, Duplicate(kind='exact', of=0, similarity=1.0)]

    Memory grows by `EXACT_BYTES` or `NEAR_BYTES` per unique document. Exceeding `memory` bytes is an error:
    no document is silently skipped.
    """

    def __init__(
        self,
        kind: Dedup,
        memory: int = 4 << 30,
        *,
        min_similarity: float = MIN_SIMILARITY,
        shingle_words: int = SHINGLE_WORDS,
    ) -> None:
        if not LOWEST_SIMILARITY <= min_similarity <= 1:
            raise InputError(f"a Jaccard similarity of {min_similarity} must lie between {LOWEST_SIMILARITY} and 1")
        if not 1 <= shingle_words <= SHINGLE_WORDS:
            raise InputError(f"shingle_words={shingle_words} must lie between 1 and {SHINGLE_WORDS}")
        self._kind, self._memory = kind, memory
        self._digests: dict[bytes, int] = {}
        self._near = _MinHashIndex(min_similarity, shingle_words)

    def check(self, words: str, number: int) -> Duplicate | None:
        """Return the earlier duplicate of a document in normalized words, or None after adding it."""
        if self._kind == "none":
            return None
        data = words.encode("utf-8")
        digest = hashlib.blake2b(data, digest_size=16).digest()
        same = self._digests.get(digest)
        if same is not None:
            return Duplicate("exact", same, 1.0)
        if self._kind == "near":
            duplicate = self._near.check(data, number)
            if duplicate is not None:
                return duplicate
        self._digests[digest] = number
        each = EXACT_BYTES if self._kind == "exact" else NEAR_BYTES + MORE_BANDS_BYTES * (self._near.bands > 16)
        if len(self._digests) * each > self._memory:
            raise InputError(
                f"{self._kind} deduplication of more than {len(self._digests):,} documents takes over "
                f"{self._memory:,} bytes ({each} per document); allow more memory"
                + (", or use exact deduplication" if self._kind == "near" else "")
            )
        return None


def minhash_signature(words: bytes, shingle_words: int = SHINGLE_WORDS) -> NDArray[np.uint32]:
    """MinHash signature: the fraction of equal hashes estimates the Jaccard similarity of two documents.

    >>> minhash_signature(b"a b c d e f").shape
    (128,)
    """
    codes = np.fromiter(map(zlib.crc32, words.split()), np.uint64)  # (words,)
    codes = np.pad(codes, (0, max(0, shingle_words - len(codes))))
    count = len(codes) - shingle_words + 1
    mixed = np.zeros(count, np.uint64)
    for offset, factor in enumerate(_SHINGLE_FACTORS[:shingle_words]):
        mixed += codes[offset : offset + count] * factor
    # SplitMix64's finalizer: nearby sums must not give nearby hashes.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    shingles = np.unique(mixed >> np.uint64(32)).astype(np.uint32)
    minima = np.full(HASHES, 0xFFFFFFFF, np.uint32)
    for start in range(0, len(shingles), 1024):  # (128, 1024) hashes fit into a core's cache
        np.minimum(minima, (shingles[start : start + 1024] * _MULTIPLIERS + _OFFSETS).min(axis=1), out=minima)
    return minima


class _MinHashIndex:
    """Signatures of all unique documents, with an LSH index by band.

    Recent band keys are in a dict, older ones in sorted arrays. Arrays of similar size are merged (as in an
    LSM tree), so that there are few arrays and each key is moved few times.
    """

    def __init__(self, min_similarity: float, shingle_words: int) -> None:
        self._min_similarity, self._shingle_words = min_similarity, shingle_words
        self.bands = 16 if min_similarity >= MIN_SIMILARITY else 32
        self._factors = _BAND_FACTORS.reshape(self.bands, -1)
        self._signatures: list[NDArray[np.uint32]] = []  # in blocks, which are never moved
        self._numbers = array("q")
        self._recent: dict[int, list[int]] = {}
        self._sorted: list[tuple[NDArray[np.uint64], NDArray[np.uint32]]] = []

    def check(self, words: bytes, number: int) -> Duplicate | None:
        """Return the duplicate, or None after adding the document."""
        own = minhash_signature(words, self._shingle_words)
        keys = (own.reshape(self.bands, -1) * self._factors).sum(axis=1, dtype=np.uint64)  # (bands,)
        rows = self._candidates(keys)
        if len(rows):
            shared = (np.stack([self._signature(row) for row in rows.tolist()]) == own).mean(axis=1)
            best = int(shared.argmax())
            if shared[best] >= self._min_similarity:
                return Duplicate("near", int(self._numbers[rows[best]]), float(shared[best]))
        self._add(own, keys, number)
        return None

    def _candidates(self, keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
        candidates = [np.array(self._recent[key], np.uint32) for key in keys.tolist() if key in self._recent]
        for known, rows in self._sorted:
            begin, end = np.searchsorted(known, keys, "left"), np.searchsorted(known, keys, "right")
            candidates += [rows[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True) if e > b]
        # Sorted, so that of equally similar documents the first is reported.
        return np.unique(np.concatenate(candidates)) if candidates else np.zeros(0, np.uint32)

    def _signature(self, row: int) -> NDArray[np.uint32]:
        stored: NDArray[np.uint32] = self._signatures[row // BLOCK][row % BLOCK]
        return stored

    def _add(self, own: NDArray[np.uint32], keys: NDArray[np.uint64], number: int) -> None:
        row = len(self._numbers)
        if row % BLOCK == 0:
            self._signatures.append(np.empty((BLOCK, HASHES), np.uint32))
        self._signatures[-1][row % BLOCK] = own
        self._numbers.append(number)
        for key in keys.tolist():
            self._recent.setdefault(key, []).append(row)
        if len(self._numbers) % BLOCK == 0:
            self._merge()

    def _merge(self) -> None:
        """Merge the recent keys into the sorted arrays."""
        keys = np.array([key for key, rows in self._recent.items() for _ in rows], np.uint64)
        rows = np.array([row for rows in self._recent.values() for row in rows], np.uint32)
        self._recent = {}
        while True:
            order = np.argsort(keys, kind="stable")
            keys, rows = keys[order], rows[order]
            if not self._sorted or len(self._sorted[-1][0]) > len(keys):
                break
            before = self._sorted.pop()
            keys, rows = np.concatenate([before[0], keys]), np.concatenate([before[1], rows])
        self._sorted.append((keys, rows))
