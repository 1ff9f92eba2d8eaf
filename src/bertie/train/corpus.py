"""Raw text, cleaned and tokenized once into memory-mapped shards.

    documents ─► cleaned ─► excluded titles ─► copies ─► held out? ─► Tokenizer ─► DIR/shard-00000.bin, .idx, …

`shard-N.bin` holds token ids, without special tokens, as uint16 where the vocabulary allows it, else as uint32.
`shard-N.idx` holds each document's length in tokens (uint32), then a bit a token for where words begin, then a bit a
token for where lines begin. `corpus.json` tells the rest, and is written last: a folder with it is whole. A shard ends
with the document that fills it, and nothing in a shard depends on when the others were made. `build.json` lists the
shards that are whole while there are more to come: going on reads the sources again, which is cheap beside tokenizing,
and tokenizes what is behind the last whole shard.

Each line is tokenized for itself: line breaks are no tokens, and no token crosses one.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertie._version import __version__
from bertie.data.journal import Complete
from bertie.data.progress import Progress
from bertie.data.readers import FORMATS, STDIN, Table, kind_of, looks_like_data, open_table, text_of
from bertie.errors import CheckpointError, ConfigError, ExistsError, InputError, NotFoundError
from bertie.text.files import parse_json
from bertie.text.tokenizer import Tokenizer
from bertie.train.clean import Copies, Dedup, cleaned, long_enough, plain, title_key

Ids = NDArray[np.uint16] | NDArray[np.uint32]
Bits = NDArray[np.bool_]
Numbers = NDArray[np.int64]

MANIFEST, JOURNAL, HELD_OUT = "corpus.json", "build.json", "heldout"
FORMAT = 1
LONGEST = 1 << 24  # characters of a document; what is longer goes on as the next one
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


# ── sources ──


def files_of(sources: Sequence[str]) -> list[str]:
    """The files behind the sources: folders are read through, in the order of their names.

    >>> files_of(["-"])
    ['-']
    """
    found: list[str] = []
    for source in sources:
        folder = Path(source)
        if source != STDIN and not folder.exists():
            raise NotFoundError(f"there is no file or folder {source}")
        if source == STDIN or not folder.is_dir():
            found.append(source)
            continue
        inside = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file()
            and looks_like_data(path.name)
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if not inside:
            raise InputError(f"{source} holds no .txt, .csv, .tsv, .jsonl or .parquet file, compressed or not")
        found += map(str, inside)
    if not found:
        raise InputError("no source: name files or folders of text")
    return found


class Documents:
    """The documents of some files, one after the other; only one is held.

    Text has a paragraph a line and a blank line between documents. Tables have a document a row.
    """

    def __init__(self, files: Sequence[str], column: str | None = None) -> None:
        self.files, self._column = files, column
        self.sizes = [os.path.getsize(name) if os.path.isfile(name) else 0 for name in files]
        self._before = 0
        self._now: Table | None = None  # the table that is being read

    def fraction(self) -> float | None:
        """The share of all bytes that was read so far, if their number is known."""
        if STDIN in self.files or self._now is None:
            return None
        return (self._before + (self._now.fraction() or 0.0) * (self._now.size or 0)) / (sum(self.sizes) or 1)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Names for errors, and documents."""
        self._before = 0
        for name, size in zip(self.files, self.sizes, strict=True):
            self._now = table = open_table(name)
            if _is_plain(name):
                yield from _paragraphs(table)
            else:
                column = table.column(["text"], self._column, "--column", only=True)
                for number, row in enumerate(table.rows([column]), 1):
                    yield f"{table.name}, row {number}", text_of(table, number, row, column)
            self._before += size


def _paragraphs(table: Table) -> Iterator[tuple[str, str]]:
    lines: list[str] = []
    first = size = 0
    for number, row in enumerate(table.rows(["text"]), 1):
        line = row["text"]
        blank = not line or line.isspace()
        if lines and (blank or size > LONGEST):
            yield f"{table.name}, line {first}", "\n".join(lines)
            lines, size = [], 0
        if not blank:
            first = first if lines else number
            lines.append(line)
            size += len(line)
    if lines:
        yield f"{table.name}, line {first}", "\n".join(lines)


def _is_plain(name: str) -> bool:
    return FORMATS.get(kind_of(name) or "", "text") == "text"


def read_titles(file: str) -> list[str]:
    """Titles of documents to leave out: a table's column `title`, or a title a line."""
    table = open_table(file)
    column = "text" if _is_plain(file) else table.column(["title"], None, "a header line")
    return [title for row in table.rows([column]) if (title := str(row.get(column) or "")).strip()]


# ── building ──


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
    quiet: bool = True,
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
        with Progress("corpus", documents.fraction, file=io.StringIO() if quiet else None) as progress:
            for held_out, text in _kept(documents, settings, titles, counts, progress):
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


def fingerprint(tokenizer: Tokenizer) -> str:
    """What tells tokenizers apart: a digest of all that tokenizer.json says."""
    said = json.loads(tokenizer.files()["tokenizer.json"])
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


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
                raise Complete(f"{folder} is whole: there is nothing to resume")
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
        before, now = _flat(found.get("asked", {})), _flat(self.asked)
        for key in now | before:
            if before.get(key) != now.get(key):
                raise InputError(
                    f"{self.folder} was begun with {key}={before.get(key)!r:.200}, and now it is "
                    f"{now.get(key)!r:.200}; ask for the same, or choose another folder"
                )
        for part, shards in self.shards.items():
            for number, shard in enumerate(found["shards"][part]):
                sizes = [path.stat().st_size if path.exists() else -1 for path in _paths(self.folder / part, number)]
                if sizes != shard["bytes"]:  # the disk lost what the journal had seen: make it again
                    break
                shards.append(shard)

    def write(self) -> None:
        """After the files that it lists."""
        write_file(self.file, _json({"asked": self.asked, "shards": self.shards}))

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
            in_word = np.concatenate([one.words for one in found])
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
        for path, content in zip(_paths(self._folder, len(self._shards)), contents, strict=True):
            write_file(path, content)
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
        write_file(self._folder / MANIFEST, _json(made))
        return made


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"shard-{number:05}.bin", folder / f"shard-{number:05}.idx"


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode("utf-8")


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def read_json(path: Path) -> dict[str, Any]:
    """What one of a corpus's files says."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


# ── reading ──


class Corpus:
    """Documents as tokens, memory-mapped: opening one costs next to nothing, however large it is.

    >>> corpus = Corpus.open("path/to/corpus")            # doctest: +SKIP
    >>> len(corpus), corpus.tokens                        # doctest: +SKIP
    (621, 4213307)
    >>> corpus.document(0)                                # doctest: +SKIP
    array([3894, 1024, 1996, ...], dtype=uint16)
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        shards = about["shards"]
        self._ids: list[Ids] = []
        self._words: list[NDArray[np.uint8]] = []
        self._lines: list[NDArray[np.uint8]] = []
        lengths: list[NDArray[np.uint32]] = []
        for number, shard in enumerate(shards):
            ids, index = _paths(folder, number)
            documents, tokens = shard["documents"], shard["tokens"]
            self._ids.append(_mapped(ids, np.dtype(about["dtype"]).newbyteorder("<"), tokens))
            bits = -(-tokens // 8)
            marks = _mapped(index, np.dtype(np.uint8), 4 * documents + 2 * bits)
            lengths.append(marks[: 4 * documents].view("<u4"))
            self._words.append(marks[4 * documents : 4 * documents + bits])
            self._lines.append(marks[4 * documents + bits :])
        self.lengths: Numbers = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)  # (documents,)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])  # of documents, counted through all shards
        self._bases = np.concatenate(
            [[0], np.cumsum([shard["tokens"] for shard in shards], dtype=np.int64)]
        )  # of shards
        if self.tokens != self._bases[-1] or len(self) != about["documents"]:
            raise CheckpointError(f"{folder}: {MANIFEST} and the shards do not agree; build the corpus anew")

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> Corpus:
        """Open a corpus; if a tokenizer is given, it must be the one that the corpus was made with."""
        path = Path(folder)
        if not (path / MANIFEST).is_file():
            why = (
                "the build was stopped, go on with --resume" if (path / JOURNAL).exists() else "make it: bertie corpus"
            )
            raise NotFoundError(f"{path} holds no corpus ({why})")
        about = read_json(path / MANIFEST)
        if about.get("format") != FORMAT:
            raise CheckpointError(f"{path / MANIFEST}: format={about.get('format')!r} must be {FORMAT}")
        if tokenizer is not None and fingerprint(tokenizer) != about["tokenizer"]["fingerprint"]:
            raise ConfigError(
                f"{path} was made with another tokenizer (fingerprint={about['tokenizer']['fingerprint'][:12]}, and "
                f"this one's is {fingerprint(tokenizer)[:12]}); use that one, or build the corpus anew"
            )
        return cls(path, about)

    @classmethod
    def joined(cls, corpora: Sequence[Corpus]) -> Corpus:
        """Several corpora of one tokenizer as one, in their order; nothing is copied."""
        first = corpora[0]
        for other in corpora[1:]:
            if other.about["tokenizer"] != first.about["tokenizer"]:
                raise ConfigError(f"{other.folder} and {first.folder} were made with different tokenizers")
        one = cls(first.folder, first.about)
        one._ids, one._words, one._lines = (
            [part for corpus in corpora for part in getattr(corpus, name)] for name in ("_ids", "_words", "_lines")
        )
        one.lengths = np.concatenate([corpus.lengths for corpus in corpora])
        one._starts = np.concatenate([[0], np.cumsum(one.lengths)])
        one._bases = np.concatenate([[0], np.cumsum([len(ids) for ids in one._ids], dtype=np.int64)])
        return one

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many tokens all documents have together."""
        return int(self._starts[-1])

    @property
    def cls_id(self) -> int | None:
        """The id of the token that opens a text."""
        found: int | None = self.about["tokenizer"]["cls"]
        return found

    @property
    def sep_id(self) -> int | None:
        """The id of the token that closes a text."""
        found: int | None = self.about["tokenizer"]["sep"]
        return found

    def document(self, i: int) -> Ids:
        """The ids of a document, without special tokens: a read-only view (n,)."""
        shard, start, end = self._place(i)
        return self._ids[shard][start:end]

    def word_starts(self, i: int) -> Bits:
        """Which tokens of a document begin a word: (n,)."""
        shard, start, end = self._place(i)
        return _bits(self._words[shard], start, end)

    def lines(self, i: int) -> Numbers:
        """Where the lines of a document begin: (lines,), the first at 0. Lines without tokens are not there."""
        shard, start, end = self._place(i)
        return np.flatnonzero(_bits(self._lines[shard], start, end))

    @property
    def starts(self) -> Numbers:
        """Where each document begins, counted through all of them, and the end: (documents + 1,)."""
        return self._starts

    def word_bits(self) -> Iterator[tuple[Bits, int]]:
        """Shard by shard, which tokens begin a word, and how many tokens lie before the shard."""
        for packed, first, end in zip(self._words, self._bases[:-1].tolist(), self._bases[1:].tolist(), strict=True):
            yield _bits(packed, 0, end - first), first

    def _place(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < len(self):
            raise InputError(f"document {i} is not there: the corpus has {len(self):,}, counted from 0")
        start, end = int(self._starts[i]), int(self._starts[i + 1])
        # An empty document may lie at the very end, where no shard begins.
        shard = min(int(np.searchsorted(self._bases, start, "right")) - 1, len(self._ids) - 1)
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
            ids[there] = self._ids[shard][here]
            words[there] = self._words[shard][here >> 3] >> (here & 7).astype(np.uint8) & 1
        return ids, words


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
