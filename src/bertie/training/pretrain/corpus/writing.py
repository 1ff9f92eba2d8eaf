"""Write shards, and keep a journal of the complete ones so that a build can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.data.atomic import PathLock, atomic_write, draft_name
from bertie.data.journal import AlreadyComplete, check_same_settings
from bertie.errors import CheckpointError, ExistsError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.corpus.shards import HELD_OUT, JOURNAL, MANIFEST, BoolArray, read_json, shard_paths

TOKENIZE_BLOCK = 1 << 20  # characters tokenized at once


class BuildJournal:
    """The inputs of a build, and its complete shards."""

    def __init__(self, folder: Path, inputs: dict[str, Any], resume: bool) -> None:
        self.folder, self.inputs, self.file = folder, inputs, folder / JOURNAL
        self.shards: dict[str, list[dict[str, Any]]] = {"": [], HELD_OUT: []}
        try:
            folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror}") from None
        self._lock = PathLock(folder.absolute().with_name(f"{folder.absolute().name}.lock"), folder)
        try:
            self._open(resume)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool) -> None:
        folder = self.folder
        if (folder / MANIFEST).exists():
            if resume:
                self.file.unlink(missing_ok=True)
                raise AlreadyComplete(f"{folder} is complete: there is nothing to resume")
            raise ExistsError(f"{folder} holds a corpus already; choose another folder, or remove it")
        if self.file.exists():
            if resume:
                self._read()
            elif any(read_json(self.file)["shards"].values()):
                raise ExistsError(f"{folder} holds an interrupted build; pass --resume, or remove the folder")
        elif folder.exists() and (not folder.is_dir() or {*os.listdir(folder)} - {draft_name(JOURNAL)}):
            raise ExistsError(f"{folder} exists and is not a corpus; choose another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror}") from None
        self.write()

    def close(self) -> None:
        """Let another process build the corpus."""
        self._lock.release()

    def _read(self) -> None:
        journal = read_json(self.file)
        before, now = _flatten(journal.get("inputs", {})), _flatten(self.inputs)
        check_same_settings(self.folder, before, now, "choose another folder")
        for part, shards in self.shards.items():
            for number, shard in enumerate(journal["shards"][part]):
                sizes = [
                    path.stat().st_size if path.exists() else -1 for path in shard_paths(self.folder / part, number)
                ]
                if sizes != shard["bytes"]:  # not on disk as the journal recorded it: build it again
                    break
                shards.append(shard)

    def write(self) -> None:
        """Save the journal, after the files that it lists."""
        atomic_write(self.file, _json({"inputs": self.inputs, "shards": self.shards}))

    def on_error(self, error: BaseException) -> None:
        """Note in the error what is saved; if nothing is, remove the folder."""
        if any(self.shards.values()):
            count = sum(map(len, self.shards.values()))
            error.add_note(f"{count:,} shards are saved in {self.folder}; --resume continues after them")
            return
        if list(self.folder.iterdir()) == [self.file]:
            self.file.unlink()
            self.folder.rmdir()


def _flatten(inputs: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested dicts by one level, so that an error can name the key that differs."""
    return {
        f"{key}.{inner}" if inner else key: value
        for key, values in inputs.items()
        for inner, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


class ShardWriter:
    """Tokenizes documents and writes them as shards."""

    def __init__(self, journal: BuildJournal, part: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._journal, self._folder, self._shards = journal, journal.folder / part, journal.shards[part]
        self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
        self._dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
        self._digest = hashlib.blake2b(digest_size=16)
        self._added = 0
        # Of resumed shards: the digest of all texts up to the end of each shard, by the number of documents.
        ends = accumulate(shard["documents"] for shard in self._shards)
        self._known_digests = {end: shard["text"] for end, shard in zip(ends, self._shards, strict=True)}
        self._complete = max(self._known_digests, default=0)  # documents in complete shards
        self._pending: list[str] = []
        self._characters = 0
        self._start_shard()

    def _start_shard(self) -> None:
        self._ids: list[NDArray[Any]] = []
        self._words: list[BoolArray] = []
        self._lines: list[BoolArray] = []
        self._tokens = 0

    def add(self, text: str) -> None:
        """Add the next document; on resume it may be in a complete shard already."""
        self._added += 1
        if self._added > self._complete:
            self._pending.append(text)
            self._characters += len(text)
            if self._characters >= TOKENIZE_BLOCK:
                self._tokenize()
            return
        self._update_digest(text)
        if self._known_digests.get(self._added, self._digest.hexdigest()) != self._digest.hexdigest():
            raise InputError(
                f"the sources differ from those that {self._folder} was started with, at document {self._added:,} or "
                "earlier; choose another folder"
            )

    def _update_digest(self, text: str) -> None:
        self._digest.update(text.encode("utf-8") + b"\0")

    def _tokenize(self) -> None:
        texts, self._pending, self._characters = self._pending, [], 0
        lines_of = [text.split("\n") for text in texts]
        encodings = iter(self._tokenizer.encode_batch([line for lines in lines_of for line in lines], special=False))
        for text, lines in zip(texts, lines_of, strict=True):
            encoded = list(islice(encodings, len(lines)))
            ids = np.concatenate([encoding.ids for encoding in encoded])
            if len(ids) and int(ids.max()) > np.iinfo(self._dtype).max:
                raise CheckpointError(
                    f"the tokenizer returned id={ids.max()}, and its vocabulary has {self._tokenizer.vocab_size} tokens"
                )
            word_ids = np.concatenate([encoding.word_ids for encoding in encoded])
            line = np.repeat(np.arange(len(lines)), [len(encoding) for encoding in encoded])
            line_starts = np.ones(len(ids), np.bool_)
            line_starts[1:] = line[1:] != line[:-1]
            word_starts = line_starts | (word_ids < 0)  # a token outside words counts as a word
            word_starts[1:] |= word_ids[1:] != word_ids[:-1]
            self._ids.append(ids.astype(self._dtype))
            self._words.append(word_starts)
            self._lines.append(line_starts)
            self._tokens += len(ids)
            self._update_digest(text)
            if self._tokens >= self._shard_tokens:
                self._flush()

    def _flush(self) -> None:
        ids, words, lines = np.concatenate(self._ids), np.concatenate(self._words), np.concatenate(self._lines)
        lengths = np.array([len(document) for document in self._ids], "<u4")
        index = b"".join(
            [lengths.tobytes(), *(np.packbits(bits, bitorder="little").tobytes() for bits in (words, lines))]
        )
        self._folder.mkdir(exist_ok=True)
        contents = (ids.tobytes(), index)
        for path, content in zip(shard_paths(self._folder, len(self._shards)), contents, strict=True):
            atomic_write(path, content)
        self._shards.append(
            {
                "documents": len(lengths),
                "tokens": len(ids),
                "words": int(words.sum()),
                "lines": int(lines.sum()),
                "bytes": [len(content) for content in contents],
                "text": self._digest.hexdigest(),
            }
        )
        self._journal.write()
        self._start_shard()

    def finish(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write the last shard, then corpus.json, which marks the corpus as complete; return its contents."""
        if self._added < self._complete:
            raise InputError(
                f"the sources differ from those that {self._folder} was started with: they have "
                f"{self._added:,} documents, and there were {self._complete:,}; choose another folder"
            )
        if self._pending:
            self._tokenize()
        if self._ids:
            self._flush()
        self._folder.mkdir(exist_ok=True)
        totals = {key: sum(shard[key] for shard in self._shards) for key in ("documents", "tokens", "words", "lines")}
        manifest = self._journal.inputs | totals | {"dtype": self._dtype.name} | extra | {"shards": self._shards}
        atomic_write(self._folder / MANIFEST, _json(manifest))
        return manifest


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
