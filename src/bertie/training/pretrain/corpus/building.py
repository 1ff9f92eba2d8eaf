"""From documents to shards: cleaned, without copies, tokenized, and safe to stop."""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertie._version import __version__
from bertie.data.atomic import atomic_write
from bertie.data.journal import AlreadyComplete, check_same_settings
from bertie.data.progress import Progress
from bertie.errors import CheckpointError, ExistsError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.cleaning import Copies, Dedup, cleaned, long_enough, plain, title_key
from bertie.training.pretrain.corpus.documents import Documents, files_of
from bertie.training.pretrain.corpus.shards import (
    FORMAT,
    HELD_OUT,
    JOURNAL,
    MANIFEST,
    Bits,
    fingerprint,
    paths,
    read_json,
)

AT_ONCE = 1 << 20  # characters that are tokenized together
SHOWN = 10  # examples of copies in corpus.json


@dataclass(frozen=True, slots=True)
class Settings:
    """What becomes of raw text on its way into a corpus."""

    clean: tuple[str, ...] = ("nfc", "controls", "spaces")
    least_characters: int = 0  # shorter documents are dropped
    least_words: int = 0
    dedup: Dedup = "exact"
    memory: int = 4 << 30  # bytes that finding copies may take
    held_out: float = 0.0  # the share of documents that go to DIR/heldout, by their words and the seed
    seed: int = 0
    shard_tokens: int = 1 << 24
    column: str | None = None  # of tables: text, else the only one with texts

    def __post_init__(self) -> None:
        cleaned("", self.clean)
        if not 0 <= self.held_out < 1:
            raise InputError(f"held_out={self.held_out} must be from 0 to below 1")
        if self.dedup not in ("exact", "near", "none"):
            raise InputError(f"dedup={self.dedup!r} must be exact, near or none")
        for name in ("least_characters", "least_words", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must be 0 or more")
        for name in ("shard_tokens", "memory"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be 1 or more")


@dataclass(slots=True)
class Counts:
    """What became of the documents."""

    read: int = 0
    short: int = 0  # or empty
    excluded: int = 0  # by title
    exact: int = 0  # copies
    near: int = 0
    kept: int = 0
    held_out: int = 0
    titles: list[str] = field(default_factory=list)  # that were left out
    copies: list[dict[str, Any]] = field(default_factory=list)  # a few examples


def build(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    folder: str | Path,
    settings: Settings | None = None,
    *,
    exclude: Sequence[str] = (),
    resume: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Make a corpus of files and folders; the answer is what corpus.json holds.

    Documents whose first line is one of the titles in `exclude` are left out. `resume` goes on with a build that was
    stopped, if there is one; the result is the same to the byte.
    """
    settings, top = settings or Settings(), Path(folder)
    documents = Documents(files_of(sources), settings.column)
    titles = {title_key(title) for title in exclude}
    asked = {
        "format": FORMAT,
        "bertie": __version__,
        "tokenizers": tokenizers.__version__,
        "tokenizer": _described(tokenizer),
        "sources": [{"name": name, "bytes": size} for name, size in zip(documents.files, documents.sizes, strict=True)],
        "settings": json.loads(json.dumps(asdict(settings))),
        "titles": hashlib.sha256("\n".join(sorted(titles)).encode()).hexdigest() if titles else None,
    }
    journal = _Journal(top, asked, resume)
    main = _Writer(journal, "", tokenizer, settings.shard_tokens)
    held = _Writer(journal, HELD_OUT, tokenizer, settings.shard_tokens)
    counts = Counts()
    try:
        with Progress("corpus", documents.fraction, file=None if progress else io.StringIO()) as bar:
            for held_out, text in _kept(documents, settings, titles, counts, bar):
                (held if held_out else main).take(text)
            if not counts.kept:
                raise InputError(f"nothing is left of {counts.read:,} documents: all were dropped or held out")
            if settings.held_out:
                held.finish({})
            made = main.finish({"counts": asdict(counts)})
    except BaseException as error:
        journal.stop(error)
        raise
    journal.file.unlink(missing_ok=True)
    return made


def _kept(
    documents: Documents, settings: Settings, titles: set[str], counts: Counts, progress: Progress
) -> Iterator[tuple[bool, str]]:
    """The documents that stay, and whether each is held out."""
    copies = Copies(settings.dedup, settings.memory)
    shown: Counter[str] = Counter()
    for place, raw in documents:
        counts.read += 1
        progress.update(1)
        text = cleaned(raw, settings.clean)
        if not text or not long_enough(text, settings.least_characters, settings.least_words):
            counts.short += 1
            continue
        title = text.split("\n", 1)[0]
        if titles and title_key(title) in titles:
            counts.excluded += 1
            counts.titles.append(title)
            continue
        words = plain(text)
        try:
            draw = _draw(words, settings.seed)
        except UnicodeEncodeError:
            raise InputError(f"{place}: half of a UTF-16 pair, which is no text; clean with 'controls'") from None
        copy = copies.check(words, counts.read)
        if copy is not None:
            counts.exact += copy.kind == "exact"
            counts.near += copy.kind == "near"
            shown[copy.kind] += 1
            if shown[copy.kind] <= SHOWN:
                example = {"document": counts.read, "place": place, "title": title[:80]}
                counts.copies.append(example | asdict(copy))
            continue
        held_out = draw < settings.held_out
        counts.held_out += held_out
        counts.kept += not held_out
        yield held_out, text


def _draw(words: str, seed: int) -> float:
    """From 0 to below 1, by the words alone: a text is on the same side wherever and however often it is there."""
    digest = hashlib.blake2b(words.encode("utf-8"), digest_size=8, salt=seed.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little") / (1 << 64)


def _described(tokenizer: Tokenizer) -> dict[str, Any]:
    roles = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.unk_id)
    return {
        "fingerprint": fingerprint(tokenizer),
        "kind": tokenizer.kind,
        "vocab": tokenizer.vocab_size,
        "cls": tokenizer.cls_id,
        "sep": tokenizer.sep_id,
        "special": sorted({one for one in roles if one is not None}),
    }


class _Journal:
    """Which shards are whole, and what was asked."""

    def __init__(self, folder: Path, asked: dict[str, Any], resume: bool) -> None:
        self.folder, self.asked, self.file = folder, asked, folder / JOURNAL
        self.shards: dict[str, list[dict[str, Any]]] = {"": [], HELD_OUT: []}
        if (folder / MANIFEST).exists():
            if resume:
                self.file.unlink(missing_ok=True)
                raise AlreadyComplete(f"{folder} is whole: there is nothing to resume")
            raise ExistsError(f"{folder} holds a corpus already; choose another folder, or remove it")
        if self.file.exists():
            if resume:
                self._read()
            elif any(read_json(self.file)["shards"].values()):
                raise ExistsError(f"{folder} holds a build that was stopped; pass --resume, or remove the folder")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ExistsError(f"{folder} is there and is no corpus; choose another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be written: {error.strerror}") from None
        self.write()

    def _read(self) -> None:
        found = read_json(self.file)
        check_same_settings(self.folder, _flat(found.get("asked", {})), _flat(self.asked), "choose another folder")
        for part, shards in self.shards.items():
            for number, shard in enumerate(found["shards"][part]):
                sizes = [path.stat().st_size if path.exists() else -1 for path in paths(self.folder / part, number)]
                if sizes != shard["bytes"]:  # the disk lost what the journal had seen: make it again
                    break
                shards.append(shard)

    def write(self) -> None:
        """After the files that it lists."""
        atomic_write(self.file, _json({"asked": self.asked, "shards": self.shards}))

    def stop(self, error: BaseException) -> None:
        """Say what is safe; if nothing is, leave nothing behind."""
        if any(self.shards.values()):
            count = sum(map(len, self.shards.values()))
            error.add_note(f"{count:,} shards are safe in {self.folder}, --resume goes on after them")
            return
        if list(self.folder.iterdir()) == [self.file]:
            self.file.unlink()
            self.folder.rmdir()


def _flat(asked: dict[str, Any]) -> dict[str, Any]:
    """With the values of dicts one level down, that an error may name the one that differs."""
    return {
        f"{key}.{inner}" if inner else key: value
        for key, values in asked.items()
        for inner, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


class _Writer:
    """Documents in, whole shards out."""

    def __init__(self, journal: _Journal, part: str, tokenizer: Tokenizer, shard_tokens: int) -> None:
        self._journal, self._folder, self._shards = journal, journal.folder / part, journal.shards[part]
        self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
        self._dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
        self._digest = hashlib.blake2b(digest_size=16)
        self._taken = 0
        # Of what is already there: the digest of all texts up to the end of each shard, by their number.
        ends = accumulate(shard["documents"] for shard in self._shards)
        self._known = {end: shard["text"] for end, shard in zip(ends, self._shards, strict=True)}
        self._whole = max(self._known, default=0)
        self._waiting: list[str] = []
        self._characters = 0
        self._clear()

    def _clear(self) -> None:
        self._ids: list[NDArray[Any]] = []
        self._words: list[Bits] = []
        self._lines: list[Bits] = []
        self._tokens = 0

    def take(self, text: str) -> None:
        """The next document, which may be in a whole shard already."""
        self._taken += 1
        if self._taken > self._whole:
            self._waiting.append(text)
            self._characters += len(text)
            if self._characters >= AT_ONCE:
                self._tokenize()
            return
        self._note(text)
        if self._known.get(self._taken, self._digest.hexdigest()) != self._digest.hexdigest():
            raise InputError(
                f"the sources are not those that {self._folder} was begun with: document {self._taken:,} or one before "
                "it differs; choose another folder"
            )

    def _note(self, text: str) -> None:
        self._digest.update(text.encode("utf-8") + b"\0")

    def _tokenize(self) -> None:
        texts, self._waiting, self._characters = self._waiting, [], 0
        lines = [text.split("\n") for text in texts]
        encodings = iter(self._tokenizer.encode_batch([line for own in lines for line in own], special=False))
        for text, own in zip(texts, lines, strict=True):
            found = list(islice(encodings, len(own)))
            ids = np.concatenate([one.ids for one in found])
            if len(ids) and int(ids.max()) > np.iinfo(self._dtype).max:
                raise CheckpointError(
                    f"the tokenizer gave id={ids.max()}, and its vocabulary has {self._tokenizer.vocab_size} tokens"
                )
            in_word = np.concatenate([one.word_ids for one in found])
            line = np.repeat(np.arange(len(own)), [len(one) for one in found])
            first = np.ones(len(ids), np.bool_)
            first[1:] = line[1:] != line[:-1]
            # -1: what no word holds stands for itself.
            word = first | (in_word < 0)
            word[1:] |= in_word[1:] != in_word[:-1]
            self._ids.append(ids.astype(self._dtype))
            self._words.append(word)
            self._lines.append(first)
            self._tokens += len(ids)
            self._note(text)
            if self._tokens >= self._shard_tokens:
                self._flush()

    def _flush(self) -> None:
        ids, words, lines = np.concatenate(self._ids), np.concatenate(self._words), np.concatenate(self._lines)
        lengths = np.array([len(one) for one in self._ids], "<u4")
        index = b"".join(
            [lengths.tobytes(), *(np.packbits(bits, bitorder="little").tobytes() for bits in (words, lines))]
        )
        self._folder.mkdir(exist_ok=True)
        contents = (ids.tobytes(), index)
        for path, content in zip(paths(self._folder, len(self._shards)), contents, strict=True):
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
        self._clear()

    def finish(self, more: dict[str, Any]) -> dict[str, Any]:
        """Write what is left, then corpus.json, which makes it a corpus."""
        if self._taken < self._whole:
            raise InputError(
                f"the sources are not those that {self._folder} was begun with: they have {self._taken:,} documents "
                f"where there were {self._whole:,}; choose another folder"
            )
        if self._waiting:
            self._tokenize()
        if self._ids:
            self._flush()
        self._folder.mkdir(exist_ok=True)
        totals = {key: sum(shard[key] for shard in self._shards) for key in ("documents", "tokens", "words", "lines")}
        made = self._journal.asked | totals | {"dtype": self._dtype.name} | more | {"shards": self._shards}
        atomic_write(self._folder / MANIFEST, _json(made))
        return made


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
