"""Read a corpus from its memory-mapped shards."""

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
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

MANIFEST, JOURNAL, HELD_OUT = "corpus.json", "build.json", "heldout"
FORMAT = 1


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """The two files of a shard."""
    return folder / f"shard-{number:05}.bin", folder / f"shard-{number:05}.idx"


def read_json(path: Path) -> dict[str, Any]:
    """Read one of a corpus's JSON files."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of the contents of tokenizer.json."""
    contents = json.loads(tokenizer.files()["tokenizer.json"])
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Shard:
    ids: Ids  # (tokens,)
    lengths: NDArray[np.uint32]  # (documents,)
    words: NDArray[np.uint8]  # bit-packed word starts, eight tokens per byte; likewise lines
    lines: NDArray[np.uint8]


class Corpus:
    """Tokenized documents in memory-mapped shards; opening is fast however large the corpus is.

    >>> corpus = Corpus.open("path/to/corpus")            # doctest: +SKIP
    >>> len(corpus), corpus.tokens                        # doctest: +SKIP
    (621, 4213307)
    >>> corpus.document(0)                                # doctest: +SKIP
    array([3894, 1024, 1996, ...], dtype=uint16)
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], shards: Sequence[_Shard]) -> None:
        self.folder, self.manifest, self._shards = folder, manifest, shards
        self.cls_id: int | None = manifest["tokenizer"]["cls"]  # [CLS]
        self.sep_id: int | None = manifest["tokenizer"]["sep"]  # [SEP]
        lengths = np.concatenate([np.zeros(0, np.int64), *(shard.lengths for shard in shards)])
        self.lengths: IntArray = lengths.astype(np.int64)  # (documents,)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])  # of documents, counted through all shards
        tokens = [len(shard.ids) for shard in shards]
        self._bases = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])  # of shards

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> Corpus:
        """Open a corpus; a given tokenizer must be the one the corpus was built with."""
        path = Path(folder)
        if not (path / MANIFEST).is_file():
            interrupted = (path / JOURNAL).exists()
            why = "the build was interrupted; continue it with --resume" if interrupted else "build it: bertie corpus"
            raise NotFoundError(f"{path} holds no corpus ({why})")
        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path / MANIFEST}: format={manifest.get('format')!r} must be {FORMAT}")
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != manifest["tokenizer"]["fingerprint"]:
            raise ConfigError(
                f"{path} was built with another tokenizer (fingerprint={manifest['tokenizer']['fingerprint'][:12]}, "
                f"this one's is {tokenizer_fingerprint(tokenizer)[:12]}); use that one, or rebuild the corpus"
            )
        corpus = cls(path, manifest, [_open_shard(path, number, manifest) for number in range(len(manifest["shards"]))])
        if corpus.tokens != corpus._bases[-1] or len(corpus) != manifest["documents"]:
            raise CheckpointError(f"{path}: {MANIFEST} and the shards do not agree; rebuild the corpus")
        return corpus

    @classmethod
    def concatenate(cls, corpora: Sequence[Corpus]) -> Corpus:
        """Concatenate corpora of one tokenizer, without copying."""
        first = corpora[0]
        for other in corpora[1:]:
            if other.manifest["tokenizer"] != first.manifest["tokenizer"]:
                raise ConfigError(f"{other.folder} and {first.folder} were built with different tokenizers")
        return cls(first.folder, first.manifest, [shard for corpus in corpora for shard in corpus._shards])

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return int(self._starts[-1])

    def document(self, i: int) -> Ids:
        """(n,) token ids of a document without special tokens, a read-only view."""
        shard, start, end = self._locate(i)
        return self._shards[shard].ids[start:end]

    def word_starts(self, i: int) -> BoolArray:
        """(n,) whether each token of a document begins a word."""
        shard, start, end = self._locate(i)
        return _unpack_bits(self._shards[shard].words, start, end)

    def lines(self, i: int) -> IntArray:
        """(lines,) token index where each line of a document begins, the first at 0; empty lines are skipped."""
        shard, start, end = self._locate(i)
        return np.flatnonzero(_unpack_bits(self._shards[shard].lines, start, end))

    @property
    def starts(self) -> IntArray:
        """(documents + 1,) token offsets of the documents in the whole corpus."""
        return self._starts

    def word_bits(self) -> Iterator[tuple[BoolArray, int]]:
        """Yield per shard whether each token begins a word, and the token offset of the shard."""
        for shard, first in zip(self._shards, self._bases[:-1].tolist(), strict=True):
            yield _unpack_bits(shard.words, 0, len(shard.ids)), first

    def _locate(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < len(self):
            raise InputError(f"document {i} does not exist: the corpus has {len(self):,}, counted from 0")
        start, end = int(self._starts[i]), int(self._starts[i + 1])
        # An empty document may be at the very end, where no shard begins.
        shard = min(int(np.searchsorted(self._bases, start, "right")) - 1, len(self._shards) - 1)
        base = int(self._bases[shard])
        return shard, start - base, end - base

    def gather(self, documents: IntArray, starts: IntArray, lengths: IntArray) -> tuple[IntArray, BoolArray]:
        """Gather many non-empty pieces of documents: ids (T,) and whether each begins a word (T,)."""
        begins = self._starts[documents] + starts  # in the whole corpus
        shards = np.searchsorted(self._bases, begins, "right") - 1
        order = np.argsort(shards, kind="stable")  # read each shard once
        sizes = lengths[order]
        ends = np.cumsum(sizes)
        run = np.arange(int(ends[-1]) if len(ends) else 0)
        source = run + np.repeat(begins[order] - self._bases[shards[order]] - (ends - sizes), sizes)  # (T,)
        target = run + np.repeat((np.cumsum(lengths) - lengths)[order] - (ends - sizes), sizes)  # (T,)
        ids, words = np.empty(len(run), np.int64), np.empty(len(run), np.bool_)
        used, first = np.unique(shards[order], return_index=True)
        cuts = [*(ends - sizes)[first].tolist(), len(run)]
        for shard, (begin, end) in zip(used.tolist(), pairwise(cuts), strict=True):
            src, dst = source[begin:end], target[begin:end]
            ids[dst] = self._shards[shard].ids[src]
            words[dst] = self._shards[shard].words[src >> 3] >> (src & 7).astype(np.uint8) & 1
        return ids, words


def _open_shard(folder: Path, number: int, manifest: dict[str, Any]) -> _Shard:
    ids, index = shard_paths(folder, number)
    documents, tokens = manifest["shards"][number]["documents"], manifest["shards"][number]["tokens"]
    bits = -(-tokens // 8)
    marks = _memory_map(index, np.dtype(np.uint8), 4 * documents + 2 * bits)
    lengths, words, lines = np.split(marks, [4 * documents, 4 * documents + bits])
    tokens_map = _memory_map(ids, np.dtype(manifest["dtype"]).newbyteorder("<"), tokens)
    return _Shard(tokens_map, lengths.view("<u4"), words, lines)


def _unpack_bits(packed: NDArray[np.uint8], start: int, end: int) -> BoolArray:
    first = start // 8
    bits = np.unpackbits(packed[first : -(-end // 8)], bitorder="little")
    return bits[start - 8 * first : end - 8 * first].view(np.bool_)


def _memory_map(path: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; rebuild the corpus") from None
    if size != count * dtype.itemsize:
        raise CheckpointError(
            f"{path} has {size:,} bytes where {MANIFEST} says {count * dtype.itemsize:,}: it is truncated or of "
            "another corpus; rebuild the corpus"
        )
    if not count:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
