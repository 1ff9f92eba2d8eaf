"""Files to documents: text, Markdown, HTML, PDF, and the rows of tables.

A document is told from an older one of the same id by its version, a hash of its text and metadata. The version of a
file's last document ends in `@` and a stamp of the file: its size and time, and how it was read. A store that has it
has all of that file, so that a file with the same stamp is not read again (`FileChanges`).
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, datetime
from datetime import time as clock
from pathlib import Path
from typing import BinaryIO, Literal, TypedDict, Unpack

from bertie.data.compression import decompression_errors, open_decompressed
from bertie.data.readers import Row, Table, data_suffix, open_table, text_cell
from bertie.errors import BertieError, InputError, NotFoundError
from bertie.search.records import Document, MetadataValue
from bertie.search.text_extraction import BYTE_ORDER_MARKS, charset_of, decode, extract_html, extract_pdf, is_encoding
from bertie.text.tokenizer import checked_text

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Skipped = Callable[[str, str], None]

LARGEST = 1 << 30  # bytes of a file that becomes one document, decompressed
TEXT = (".txt", ".text", ".md", ".markdown", ".rst")
HTML = (".html", ".htm", ".xhtml")
ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
DOCUMENT_SUFFIXES = (*TEXT, *HTML, ".pdf", *ROWS)

_TITLE = re.compile(r"^(?:# +(\S[^\n]*?)[ \t#\r]*|(\S[^\n]*?)[ \t\r]*\n(?:={3,}|-{3,})[ \t\r]*)$", re.MULTILINE)
_TICK = 20_000_000  # ns: clocks of file systems go on by up to 10 ms at once


class ReadOptions(TypedDict, total=False):
    """How files are read: see `documents`."""

    text: str
    id: str | None
    title: str | None
    metadata: Sequence[str] | None
    encoding: str | None
    on_error: Literal["raise", "skip"]
    skipped: Skipped | None


def read_documents(paths: Paths, **options: Unpack[ReadOptions]) -> Iterator[Document]:
    """Read files and folders, one document a file, or one a row of JSONL, CSV, TSV and Parquet.

    Folders are read with all below them, in the order of names, without hidden files; files may be compressed. A
    document's id is its path below the folder that was given; of a row `path#` and its `id` (the column of that name,
    or `id` or `_id` if there is one, else the number of the row).

    `text`, `title` and `metadata` name columns of rows; without `metadata` all that hold single values are taken.
    Text must be UTF-8 or begin with a byte order mark. `encoding` is what all other text is in: nothing is guessed.
    A file that cannot be read is an error, or with `on_error="skip"` left out. `skipped` is called with the path and
    the reason for each that is left out, also for those in folders whose ending is not known.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.md").write_text("# Rivers\\n\\nThe Rhine is long.")
    >>> _ = (folder / "b.csv").write_text("id,text,year\\nx,The Elbe is long too.,1999\\n")
    >>> for one in read_documents(folder):
    ...     print(one.id, one.metadata)
    a.md {'path': 'a.md', 'title': 'Rivers'}
    b.csv#x {'path': 'b.csv', 'year': '1999'}
    """
    return _Reader(paths, **options).documents()


class FileChanges:
    """What differs between files and the documents that a store has of them.

    `known` is what `Store.documents` gives. Iterating yields the documents that are new or have another content; files
    that have the stamp of last time are not read. After that, `gone` are the ids of documents that are there no more.
    Those of files that could not be read are kept, and so are those from outside `paths`.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one"), (folder / "b.txt").write_text("two")
    >>> known = [(one.id, one.source, one.version) for one in read_documents(folder)]
    >>> (folder / "a.txt").unlink()
    >>> _ = (folder / "c.txt").write_text("three")
    >>> changes = FileChanges(folder, known)
    >>> [one.id for one in changes], changes.gone, changes.unchanged
    (['c.txt'], ['a.txt'], 1)
    """

    def __init__(
        self, paths: Paths, known: Iterable[tuple[str, str | None, str]], **options: Unpack[ReadOptions]
    ) -> None:
        self.added = self.changed = self.unchanged = 0
        self.gone: list[str] = []
        roots = [os.path.abspath(root) for root in _several(paths)]
        self._known: dict[str, tuple[str, str]] = {}  # source and version by id
        self._others: dict[str, str | None] = {}  # source by id, of those from elsewhere
        self._stamps: dict[str, list[str]] = {}  # of all documents of a source
        for name, source, version in known:
            if source is None or not _within(source, roots):
                self._others[name] = source
                continue
            self._known[name] = (source, version)
            self._stamps.setdefault(source, []).append(version.partition("@")[2])
        self._unread: set[str] = set()
        self._reader = _Reader(roots, **options, unless=self._is_known)

    def _is_known(self, path: str, stamp: str) -> bool:
        same = {one for one in self._stamps.get(path, ()) if one} == {stamp}
        if same:
            self._unread.add(path)
        return same

    def __iter__(self) -> Iterator[Document]:
        seen: set[str] = set()
        for document in self._reader.documents():
            seen.add(document.id)
            if document.id in self._others:
                self._refuse_clash(document)
            _, version = self._known.get(document.id, ("", None))
            if version is not None and self._is_same(document, version):
                self.unchanged += 1
                continue
            self.added, self.changed = self.added + (version is None), self.changed + (version is not None)
            yield document
        for name, (source, _) in self._known.items():
            if name in seen:
                continue
            if source in self._unread:
                self.unchanged += 1
            elif source in self._reader.read or not (_within(source, self._reader.failed) or os.path.lexists(source)):
                self.gone.append(name)

    def _is_same(self, document: Document, version: str) -> bool:
        if document.version == version:
            return True
        # A file that was only touched is not worth embedding again. Of many rows, the one that bears the stamp is:
        # with an older stamp left on it, the whole file would be read each time.
        rows = len(self._stamps.get(document.source or "", ())) > 1
        return not rows and document.version.partition("@")[0] == version.partition("@")[0]

    def _refuse_clash(self, document: Document) -> None:
        """Unless a file has moved, another document of its name is not to be replaced."""
        other = self._others[document.id]
        if other is None or os.path.lexists(other):
            raise InputError(
                f"{document.source} would be the document {document.id!r}, and there is one of that name already, "
                f"{'added as a text' if other is None else f'from {other}'}; give a folder that holds both files, or "
                "use another index"
            )


def _several(paths: Paths) -> list[str]:
    return [os.fspath(one) for one in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _within(path: str, roots: Collection[str]) -> bool:
    while path not in roots:
        path, below = os.path.dirname(path), path
        if path == below:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _File:
    path: str  # absolute
    name: str  # below the root
    kind: str


class _Reader:
    """One reading of files. `read` and `failed` tell how it went."""

    def __init__(
        self,
        paths: Paths,
        text: str = "text",
        id: str | None = None,
        title: str | None = None,
        metadata: Sequence[str] | None = None,
        encoding: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        skipped: Skipped | None = None,
        unless: Callable[[str, str], bool] = lambda path, stamp: False,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise InputError(f"on_error={on_error!r} must be 'raise' or 'skip'")
        if isinstance(metadata, str):
            raise InputError(f"metadata={metadata!r} must be a list of columns")
        if encoding is not None and not is_encoding(encoding):
            raise InputError(f"encoding={encoding!r} is not known; cp1252, latin-1, utf-16-le … are")
        self._roots = _several(paths)
        if not self._roots:
            raise InputError("paths is empty; name a file or a folder")
        for root in self._roots:
            if not os.path.lexists(root):
                raise NotFoundError(f"there is no file or folder {root}")
        self._text, self._id, self._title, self._encoding = text, id, title, encoding
        self._metadata = None if metadata is None else tuple(metadata)
        self._on_error, self._skipped, self._unless = on_error, skipped, unless
        how = repr((text, id, title, self._metadata, encoding))
        self._how = f"{zlib.crc32(how.encode('utf-8', 'replace')):08x}"
        self.read: set[str] = set()
        self.failed: set[str] = set()

    def documents(self) -> Iterator[Document]:
        for file in self._files():
            yield from self._of(file)

    # --- which files ---

    def _files(self) -> Iterator[_File]:
        names: dict[str, str] = {}  # by id
        seen: set[str] = set()
        for root in self._roots:
            count = 0
            for file in self._below(root):
                count += 1
                if file.path in seen:
                    continue
                seen.add(file.path)
                other = names.setdefault(file.name, file.path)
                if other != file.path:
                    raise InputError(
                        f"{other} and {file.path} would both be the document {file.name!r}; "
                        "give the folder that holds both, or index them apart"
                    )
                yield file
            if not count and not self.failed:
                raise InputError(
                    f"the folder {root} holds no file that can be read; endings: {', '.join(DOCUMENT_SUFFIXES)}"
                )

    def _below(self, root: str) -> Iterator[_File]:
        path = os.path.abspath(root)
        if not os.path.isdir(path):
            own = data_suffix(path)
            if own == ".json":
                raise InputError(f"{root} is JSON; make it JSONL, one object a line: jq -c '.[]'")
            # What is given by name and has no known ending is text.
            yield _File(path, os.path.basename(path), own if own in DOCUMENT_SUFFIXES else ".txt")
            return
        folders: set[tuple[int, int]] = set()  # a link may lead back to one that was seen
        waiting = [path]
        while waiting:
            one = waiting.pop()
            if os.path.isdir(one):
                try:
                    status = os.stat(one)
                    below = sorted(name for name in os.listdir(one) if not name.startswith("."))
                except OSError as error:
                    self._fail(one, InputError(f"the folder {one} cannot be read: {error.strerror}"))
                    continue
                if (status.st_dev, status.st_ino) not in folders:
                    folders.add((status.st_dev, status.st_ino))
                    waiting += [os.path.join(one, name) for name in reversed(below)]
                continue
            kind = data_suffix(one)
            if kind not in DOCUMENT_SUFFIXES:
                self._leave(one, f"its ending is none of {', '.join(DOCUMENT_SUFFIXES)}")
                continue
            yield _File(one, Path(one).relative_to(path).as_posix(), kind)

    def _fail(self, path: str, error: BertieError) -> None:
        if self._on_error == "raise":
            raise error
        self.failed.add(path)
        self._leave(path, str(error))

    def _leave(self, path: str, reason: str) -> None:
        if self._skipped is not None:
            self._skipped(path.encode("utf-8", "backslashreplace").decode("utf-8"), reason)

    # --- what is in a file ---

    def _of(self, file: _File) -> Iterator[Document]:
        last: Document | None = None
        try:
            if any("\ud800" <= c <= "\udfff" for c in file.path):
                raise InputError(f"{file.path!a} has a name that is not UTF-8; rename it")
            stamp = self._stamp(file.path)
            if self._unless(file.path, stamp):
                return
            for document in self._rows(file) if file.kind in ROWS else self._whole(file):
                if last is not None:
                    yield last
                last = document
            # Another stamp: it was written to meanwhile.
            if last is not None and file.path not in self.failed and stamp == self._stamp(file.path):
                last = replace(last, version=f"{last.version}@{stamp}")
        except (BertieError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, BertieError):
                error = InputError(f"{file.path} cannot be read: {error.strerror or error}")
            if last is not None:
                yield last
            self._fail(file.path, error)
            return
        if file.path not in self.failed:
            self.read.add(file.path)
        if last is not None:
            yield last

    def _stamp(self, path: str) -> str:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise InputError(f"{path} is a link to a file that is not there, or was just deleted") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no regular file; only files and folders are read")
        age = time.time_ns() - status.st_mtime_ns
        if 0 <= age < _TICK:  # a change within the same tick of the clock could not be told from none
            time.sleep((_TICK - age) / 1e9)
            status = os.stat(path)
        return f"{status.st_size}-{status.st_mtime_ns}-{self._how}"

    def _document(self, file: _File, suffix: str, text: str, metadata: dict[str, MetadataValue]) -> Document:
        version = hashlib.sha256(text.encode("utf-8"))
        version.update(b"\0" + json.dumps(metadata, sort_keys=True).encode("utf-8"))
        return Document(file.name + suffix, text, metadata, file.path, version.hexdigest()[:32])

    def _whole(self, file: _File) -> Iterator[Document]:
        with open(file.path, "rb") as raw, decompression_errors(file.path):
            data = open_decompressed(raw, file.path).read(LARGEST + 1)
        if len(data) > LARGEST:
            raise InputError(f"{file.path} has over {LARGEST >> 30} GiB, too much for one document; split it")
        metadata: dict[str, MetadataValue] = {"path": file.name}
        title: str | None
        if file.kind == ".pdf":
            text, title, metadata["pages"] = extract_pdf(data, file.path)
        elif file.kind in HTML:
            text, title = extract_html(decode(data, file.path, self._encoding, charset_of(data)), file.path)
        else:
            text = decode(data, file.path, self._encoding)
            heading = _TITLE.search(text, 0, 4096) if file.kind != ".txt" else None
            title = (heading[1] or heading[2]) if heading else None
        if title:
            metadata["title"] = title
        yield self._document(file, "", text, metadata)

    def _rows(self, file: _File) -> Iterator[Document]:
        with _utf8(file, self._encoding) as name, _named(name, file.path):
            table = open_table(name)
            column, own, picked = self._columns(table, file)
            wanted = table.columns if picked is None else dict.fromkeys([column, *([own] if own else []), *picked])
            seen: set[str] = set()
            for number, row in enumerate(table.rows(tuple(wanted)), 1):
                try:
                    text = checked_text(text_cell(table, number, row, column), f"{file.path}, row {number}")
                    suffix = str(number) if own is None else _key(row, own, f"{file.path}, row {number}", seen)
                    metadata: dict[str, MetadataValue] = {"path": file.name}
                    for key in row if picked is None else picked:
                        if key not in (column, own):
                            self._put(metadata, key, row, f"{file.path}, row {number}")
                except InputError as error:
                    self._fail(file.path, InputError(str(error).replace(name, file.path)))
                    continue
                yield self._document(file, f"#{suffix}", text, metadata)

    def _columns(self, table: Table, file: _File) -> tuple[str, str | None, tuple[str, ...] | None]:
        """The column with the text, that with the id, and those that become metadata (None: all)."""
        column = table.column((self._text,), None, "text= (--column)", only=self._text == "text")
        own = self._id or next((name for name in ("id", "_id") if name in table.columns and name != column), None)
        asked = [one for one in (self._id, self._title, *(self._metadata or ())) if one is not None]
        if file.kind not in (".jsonl", ".ndjson"):  # there the first row need not have all
            for name in asked:
                table.column((), name, "")
        if self._metadata is None:
            return column, own, None
        title = () if self._title is None else (self._title,)
        return column, own, tuple(dict.fromkeys((*title, *self._metadata)))

    def _put(self, metadata: dict[str, MetadataValue], key: str, row: Row, where: str) -> None:
        value = _scalar(row.get(key))
        name = "title" if key == self._title else key
        if isinstance(value, MetadataValue):
            metadata[name] = value
        elif value is not None and self._metadata is not None:
            raise InputError(f"{where}: column {key!r} holds {type(value).__name__}; metadata must be single values")


def _key(row: Row, column: str, where: str, seen: set[str]) -> str:
    value = row.get(column)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InputError(f"{where}: the id in column {column!r} is {value!r:.40}; it must be text or a whole number")
    key = checked_text(str(value), f"{where}, column {column!r}")
    if key in seen:
        raise InputError(f"{where}: the id {key!r:.80} in column {column!r} is that of an earlier row as well")
    seen.add(key)
    return key


def _scalar(value: object) -> object:
    """A single value as metadata hold it; what is none stays as it is, and what says nothing is None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value.isoformat() if isinstance(value, datetime | date | clock) else value


# --- rows in other encodings ---


@contextmanager
def _utf8(file: _File, encoding: str | None) -> Iterator[str]:
    """The name of a file with the rows in UTF-8: the file itself, or a copy that goes at the end."""
    if file.kind == ".parquet":
        yield file.path
        return
    with open(file.path, "rb") as raw, decompression_errors(file.path):
        begin = open_decompressed(raw, file.path).read(4)
        marked = next((kind for mark, kind in BYTE_ORDER_MARKS if begin.startswith(mark) and kind != "utf-8-sig"), None)
    if marked is None and (encoding is None or _is_utf8(file.path)):
        yield file.path
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", suffix=file.kind) as copy:
        with open(file.path, "rb") as raw, decompression_errors(file.path):
            try:
                for piece in _pieces(open_decompressed(raw, file.path), marked or encoding or ""):
                    copy.write(piece)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{file.path} is neither UTF-8 nor {marked or encoding} ({error.reason}); name its encoding with "
                    "--encoding (encoding=)"
                ) from None
        copy.flush()
        yield copy.name


def _is_utf8(path: str) -> bool:
    try:
        with open(path, "rb") as raw, decompression_errors(path):
            for piece in _pieces(open_decompressed(raw, path), "utf-8"):
                if "\0" in piece or "\x1b" in piece:
                    return False
    except UnicodeDecodeError:
        return False
    return True


def _pieces(data: BinaryIO, encoding: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder(encoding)()
    while piece := data.read(1 << 20):
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


@contextmanager
def _named(name: str, path: str) -> Iterator[None]:
    """Errors speak of the user's file, not of its copy."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(name, path)) from None
