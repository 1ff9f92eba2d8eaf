"""A corpus that is there: its files, memory-mapped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.errors import CheckpointError, ConfigError, InputError, NotFoundError
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_files import parse_json

Ids = NDArray[np.uint16] | NDArray[np.uint32]
Bits = NDArray[np.bool_]
Numbers = NDArray[np.int64]

MANIFEST, JOURNAL, HELD_OUT = "corpus.json", "build.json", "heldout"
FORMAT = 1


def paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The two files of a shard."""
    return folder / f"shard-{number:05}.bin", folder / f"shard-{number:05}.idx"


def read_json(path: Path) -> dict[str, Any]:
    """What one of a corpus's files says."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def fingerprint(tokenizer: Tokenizer) -> str:
    """What tells tokenizers apart: a digest of all that tokenizer.json says."""
    said = json.loads(tokenizer.files()["tokenizer.json"])
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Shard:
    ids: Ids  # (tokens,)
    lengths: NDArray[np.uint32]  # (documents,)
    words: NDArray[np.uint8]  # eight tokens a byte, as lines
    lines: NDArray[np.uint8]


class Corpus:
    """Documents as tokens, memory-mapped: opening one costs next to nothing, however large it is.

    >>> corpus = Corpus.open("path/to/corpus")            # doctest: +SKIP
    >>> len(corpus), corpus.tokens                        # doctest: +SKIP
    (621, 4213307)
    >>> corpus.document(0)                                # doctest: +SKIP
    array([3894, 1024, 1996, ...], dtype=uint16)
    """

    def __init__(self, folder: Path, about: dict[str, Any], shards: Sequence[_Shard]) -> None:
        self.folder, self.about, self._shards = folder, about, shards
        self.cls_id: int | None = about["tokenizer"]["cls"]  # opens a text
        self.sep_id: int | None = about["tokenizer"]["sep"]  # closes it
        lengths = np.concatenate([np.zeros(0, np.int64), *(shard.lengths for shard in shards)])
        self.lengths: Numbers = lengths.astype(np.int64)  # (documents,)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])  # of documents, counted through all shards
        tokens = [len(shard.ids) for shard in shards]
        self._bases = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])  # of shards

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> Corpus:
        """Open a corpus; if a tokenizer is given, it must be the one that the corpus was made with."""
        path = Path(folder)
        if not (path / MANIFEST).is_file():
            stopped = (path / JOURNAL).exists()
            why = "the build was stopped, go on with --resume" if stopped else "make it: bertie corpus"
            raise NotFoundError(f"{path} holds no corpus ({why})")
        about = read_json(path / MANIFEST)
        if about.get("format") != FORMAT:
            raise CheckpointError(f"{path / MANIFEST}: format={about.get('format')!r} must be {FORMAT}")
        if tokenizer is not None and fingerprint(tokenizer) != about["tokenizer"]["fingerprint"]:
            raise ConfigError(
                f"{path} was made with another tokenizer (fingerprint={about['tokenizer']['fingerprint'][:12]}, and "
                f"this one's is {fingerprint(tokenizer)[:12]}); use that one, or build the corpus anew"
            )
        one = cls(path, about, [_shard(path, number, about) for number in range(len(about["shards"]))])
        if one.tokens != one._bases[-1] or len(one) != about["documents"]:
            raise CheckpointError(f"{path}: {MANIFEST} and the shards do not agree; build the corpus anew")
        return one

    @classmethod
    def joined(cls, corpora: Sequence[Corpus]) -> Corpus:
        """Several corpora of one tokenizer as one, in their order; nothing is copied."""
        first = corpora[0]
        for other in corpora[1:]:
            if other.about["tokenizer"] != first.about["tokenizer"]:
                raise ConfigError(f"{other.folder} and {first.folder} were made with different tokenizers")
        return cls(first.folder, first.about, [shard for corpus in corpora for shard in corpus._shards])

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many tokens all documents have together."""
        return int(self._starts[-1])

    def document(self, i: int) -> Ids:
        """The ids of a document, without special tokens: a read-only view (n,)."""
        shard, start, end = self._place(i)
        return self._shards[shard].ids[start:end]

    def word_starts(self, i: int) -> Bits:
        """Which tokens of a document begin a word: (n,)."""
        shard, start, end = self._place(i)
        return _bits(self._shards[shard].words, start, end)

    def lines(self, i: int) -> Numbers:
        """Where the lines of a document begin: (lines,), the first at 0. Lines without tokens are not there."""
        shard, start, end = self._place(i)
        return np.flatnonzero(_bits(self._shards[shard].lines, start, end))

    @property
    def starts(self) -> Numbers:
        """Where each document begins, counted through all of them, and the end: (documents + 1,)."""
        return self._starts

    def word_bits(self) -> Iterator[tuple[Bits, int]]:
        """Shard by shard, which tokens begin a word, and how many tokens lie before the shard."""
        for shard, first in zip(self._shards, self._bases[:-1].tolist(), strict=True):
            yield _bits(shard.words, 0, len(shard.ids)), first

    def _place(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < len(self):
            raise InputError(f"document {i} is not there: the corpus has {len(self):,}, counted from 0")
        start, end = int(self._starts[i]), int(self._starts[i + 1])
        # An empty document may lie at the very end, where no shard begins.
        shard = min(int(np.searchsorted(self._bases, start, "right")) - 1, len(self._shards) - 1)
        base = int(self._bases[shard])
        return shard, start - base, end - base

    def gather(self, documents: Numbers, starts: Numbers, lengths: Numbers) -> tuple[Numbers, Bits]:
        """Many pieces of documents at once, end to end: ids (T,) and which begin a word (T,). None may be empty."""
        begins = self._starts[documents] + starts  # counted through all shards
        shards = np.searchsorted(self._bases, begins, "right") - 1
        order = np.argsort(shards, kind="stable")  # each shard is asked once
        sizes = lengths[order]
        ends = np.cumsum(sizes)
        run = np.arange(int(ends[-1]) if len(ends) else 0)
        source = run + np.repeat(begins[order] - self._bases[shards[order]] - (ends - sizes), sizes)  # (T,)
        target = run + np.repeat((np.cumsum(lengths) - lengths)[order] - (ends - sizes), sizes)  # (T,)
        ids, words = np.empty(len(run), np.int64), np.empty(len(run), np.bool_)
        found, first = np.unique(shards[order], return_index=True)
        cuts = [*(ends - sizes)[first].tolist(), len(run)]
        for shard, (begin, end) in zip(found.tolist(), pairwise(cuts), strict=True):
            here, there = source[begin:end], target[begin:end]
            ids[there] = self._shards[shard].ids[here]
            words[there] = self._shards[shard].words[here >> 3] >> (here & 7).astype(np.uint8) & 1
        return ids, words


def _shard(folder: Path, number: int, about: dict[str, Any]) -> _Shard:
    ids, index = paths(folder, number)
    documents, tokens = about["shards"][number]["documents"], about["shards"][number]["tokens"]
    bits = -(-tokens // 8)
    marks = _mapped(index, np.dtype(np.uint8), 4 * documents + 2 * bits)
    lengths, words, lines = np.split(marks, [4 * documents, 4 * documents + bits])
    found = _mapped(ids, np.dtype(about["dtype"]).newbyteorder("<"), tokens)
    return _Shard(found, lengths.view("<u4"), words, lines)


def _bits(packed: NDArray[np.uint8], start: int, end: int) -> Bits:
    first = start // 8
    found = np.unpackbits(packed[first : -(-end // 8)], bitorder="little")
    return found[start - 8 * first : end - 8 * first].view(np.bool_)


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; build the corpus anew") from None
    if size != count * dtype.itemsize:
        raise CheckpointError(
            f"{path} has {size:,} bytes where {MANIFEST} says {count * dtype.itemsize:,}: it is cut short or of "
            "another corpus; build the corpus anew"
        )
    if not count:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
