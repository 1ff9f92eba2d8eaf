"""Read documents from files: text, Markdown, HTML, PDF, and the rows of tables.

A document's version is a hash of its text and metadata. The version of a file's last document ends
in `@` and a stamp of the file: its size, modification time and read options. A store with that
version has the complete file, so that a file with the same stamp need not be read again
(`bertie.search.file_changes`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from bertie.data.compression import decompression_errors, open_decompressed
from bertie.data.folders import LINK, OnSkip
from bertie.data.readers import InputTable, Row, data_suffix, open_table, text_cell
from bertie.errors import BertieError, InputError, NotFoundError
from bertie.search.document_input import to_scalar
from bertie.search.records import Document, MetadataValue
from bertie.search.text_extraction import extract_html, extract_pdf
from bertie.search.transcoding import declared_charset, decode, is_encoding, utf8_copy
from bertie.text.tokenizer import checked_text

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

MAX_FILE_BYTES = 1 << 30  # decompressed size of a file that becomes one document
TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
DOCUMENT_SUFFIXES = (*TEXT_SUFFIXES, *HTML_SUFFIXES, ".pdf", *TABLE_SUFFIXES)

_TITLE = re.compile(r"^(?:# +(\S[^\n]*?)[ \t#\r]*|(\S[^\n]*?)[ \t\r]*\n(?:={3,}|-{3,})[ \t\r]*)$", re.MULTILINE)
_CLOCK_TICK = 20_000_000  # ns: file system clocks advance in steps of up to 10 ms


class ReadOptions(TypedDict, total=False):
    """The options of `read_documents`."""

    text: str
    id: str | None
    title: str | None
    metadata: Sequence[str] | None
    encoding: str | None
    on_error: Literal["raise", "skip"]
    on_skip: OnSkip | None
    follow_symlinks: bool


def read_documents(paths: Paths, **options: Unpack[ReadOptions]) -> Iterator[Document]:
    """Read files and folders: one document per file, or per row of JSONL, CSV, TSV and Parquet.

    Folders are read recursively, sorted by name, without hidden files; files may be compressed.
    Symbolic links inside a folder are skipped, since they may point outside it, unless
    `follow_symlinks` is true; a link that is passed as a path is followed. A document's id is its
    path relative to the given folder; for a row, `#` and the value of the column `id` are appended
    (by default the column "id" or "_id", or the row number if there is neither).

    `text`, `title` and `metadata` select columns of tables; without `metadata`, all columns with
    scalar values are used. Text must be UTF-8 or start with a byte order mark; `encoding` applies
    to all other text, and is never guessed. A file or row that cannot be read raises an error, or
    is skipped with `on_error="skip"`. `on_skip` is called with the path and the reason for each
    skipped file or row, including symbolic links, and files with an unknown suffix in a folder.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.md").write_text("# Rivers\\n\\nThe Rhine is long.")
    >>> _ = (folder / "b.csv").write_text("id,text,year\\nx,The Elbe is long too.,1999\\n")
    >>> for document in read_documents(folder):
    ...     print(document.id, document.metadata)
    a.md {'path': 'a.md', 'title': 'Rivers'}
    b.csv#x {'path': 'b.csv', 'year': '1999'}
    """
    return DocumentReader(paths, **options).documents()


def list_paths(paths: Paths) -> list[str]:
    """Return one or several paths as a list."""
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


@dataclass(frozen=True, slots=True)
class _DocumentFile:
    path: str  # absolute
    name: str  # relative to the given folder
    suffix: str


class DocumentReader:
    """A single pass over files.

    Afterwards `read` has the paths that were read completely, `links` the symbolic links that were not followed,
    and `failed` the paths that could not be read.
    """

    def __init__(
        self,
        paths: Paths,
        text: str = "text",
        id: str | None = None,
        title: str | None = None,
        metadata: Sequence[str] | None = None,
        encoding: str | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        on_skip: OnSkip | None = None,
        follow_symlinks: bool = False,
        is_unchanged: Callable[[str, str], bool] = lambda path, stamp: False,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise InputError(f"on_error={on_error!r} must be 'raise' or 'skip'")
        if isinstance(metadata, str):
            raise InputError(f"metadata={metadata!r} must be a list of columns")
        if encoding is not None and not is_encoding(encoding):
            raise InputError(f"encoding={encoding!r} is unknown; use cp1252, latin-1, utf-16-le, …")
        self._roots = list_paths(paths)
        if not self._roots:
            raise InputError("paths is empty; pass a file or a folder")
        for root in self._roots:
            if not os.path.lexists(root):
                raise NotFoundError(f"no such file or folder: {root}")
        self._text, self._id, self._title, self._encoding = text, id, title, encoding
        self._metadata = None if metadata is None else tuple(metadata)
        self._on_error, self._on_skip, self._is_unchanged = on_error, on_skip, is_unchanged
        self._follow_symlinks = follow_symlinks
        options = repr((text, id, title, self._metadata, encoding))
        self._options_hash = f"{zlib.crc32(options.encode('utf-8', 'replace')):08x}"
        self.read: set[str] = set()
        self.failed: set[str] = set()
        self.links: set[str] = set()

    def documents(self) -> Iterator[Document]:
        """Read all files."""
        for file in self._files():
            yield from self._read_file(file)

    # --- finding files ---

    def _files(self) -> Iterator[_DocumentFile]:
        names: dict[str, str] = {}  # relative name -> path
        seen: set[str] = set()
        for root in self._roots:
            count = 0
            for file in self._walk(root):
                count += 1
                if file.path in seen:
                    continue
                seen.add(file.path)
                other = names.setdefault(file.name, file.path)
                if other != file.path:
                    raise InputError(
                        f"{other} and {file.path} would both get the document id {file.name!r}; "
                        "pass a folder that contains both, or use two indexes"
                    )
                yield file
            if not count and not self.failed:
                suffixes = ", ".join(DOCUMENT_SUFFIXES)
                links = f", and {len(self.links):,} symbolic links are not followed" if self.links else ""
                raise InputError(f"the folder {root} contains no readable file{links}; suffixes: {suffixes}")

    def _walk(self, root: str) -> Iterator[_DocumentFile]:
        top = os.path.abspath(root)
        if not os.path.isdir(top):
            suffix = data_suffix(top)
            if suffix == ".json":
                raise InputError(f"{root} is JSON; convert it to JSONL, one object per line: jq -c '.[]'")
            # A file that is passed explicitly and has an unknown suffix is read as text.
            known = suffix if suffix in DOCUMENT_SUFFIXES else ".txt"
            yield _DocumentFile(top, os.path.basename(top), known)
            return
        visited: set[tuple[int, int]] = set()  # symbolic links may form cycles
        stack = [top]
        while stack:
            path = stack.pop()
            if path != top and not self._follow_symlinks and os.path.islink(path):
                self.links.add(path)
                self._skip(path, LINK)
                continue
            if os.path.isdir(path):
                try:
                    status = os.stat(path)
                    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
                except OSError as error:
                    self._fail(path, InputError(f"the folder {path} cannot be read: {error.strerror}"))
                    continue
                if (status.st_dev, status.st_ino) not in visited:
                    visited.add((status.st_dev, status.st_ino))
                    stack += [os.path.join(path, name) for name in reversed(names)]
                continue
            suffix = data_suffix(path)
            if suffix not in DOCUMENT_SUFFIXES:
                self._skip(path, f"its suffix is none of {', '.join(DOCUMENT_SUFFIXES)}")
                continue
            yield _DocumentFile(path, Path(path).relative_to(top).as_posix(), suffix)

    def _fail(self, path: str, error: BertieError) -> None:
        if self._on_error == "raise":
            raise error
        self.failed.add(path)
        self._skip(path, str(error))

    def _skip(self, path: str, reason: str) -> None:
        if self._on_skip is not None:
            self._on_skip(path.encode("utf-8", "backslashreplace").decode("utf-8"), reason)

    # --- reading a file ---

    def _read_file(self, file: _DocumentFile) -> Iterator[Document]:
        last: Document | None = None
        try:
            if any("\ud800" <= c <= "\udfff" for c in file.path):
                raise InputError(f"{file.path!a}: the file name is not UTF-8; rename the file")
            stamp = self._stamp(file.path)
            if self._is_unchanged(file.path, stamp):
                return
            for document in self._table_rows(file) if file.suffix in TABLE_SUFFIXES else self._whole_file(file):
                if last is not None:
                    yield last
                last = document
            # The stamp differs if the file was written meanwhile.
            if last is not None and file.path not in self.failed and stamp == self._stamp(file.path):
                last = replace(last, version=f"{last.version}@{stamp}")
        except (BertieError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, BertieError):
                error = InputError(f"{file.path} cannot be read: {error.strerror or error}")
            if last is not None:
                yield last
            if self._on_error == "raise" and isinstance(error, InputError):
                error = InputError(f"{error}; or skip unreadable files and rows with --skip (on_error='skip')")
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
            raise InputError(f"{path} is a broken symbolic link, or was just deleted") from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file")
        age = time.time_ns() - status.st_mtime_ns
        if 0 <= age < _CLOCK_TICK:  # a change within the same clock tick could not be detected
            time.sleep((_CLOCK_TICK - age) / 1e9)
            status = os.stat(path)
        return f"{status.st_size}-{status.st_mtime_ns}-{self._options_hash}"

    def _document(self, file: _DocumentFile, suffix: str, text: str, metadata: dict[str, MetadataValue]) -> Document:
        version = hashlib.sha256(text.encode("utf-8"))
        version.update(b"\0" + json.dumps(metadata, sort_keys=True).encode("utf-8"))
        return Document(file.name + suffix, text, metadata, file.path, version.hexdigest()[:32])

    def _whole_file(self, file: _DocumentFile) -> Iterator[Document]:
        with open(file.path, "rb") as raw, decompression_errors(file.path):
            data = open_decompressed(raw, file.path).read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise InputError(
                f"{file.path} is larger than {MAX_FILE_BYTES >> 30} GiB, the limit for a document; split it"
            )
        metadata: dict[str, MetadataValue] = {"path": file.name}
        title: str | None
        if file.suffix == ".pdf":
            text, title, metadata["pages"] = extract_pdf(data, file.path)
        elif file.suffix in HTML_SUFFIXES:
            text, title = extract_html(decode(data, file.path, self._encoding, declared_charset(data)), file.path)
        else:
            text = decode(data, file.path, self._encoding)
            heading = _TITLE.search(text, 0, 4096) if file.suffix != ".txt" else None
            title = (heading[1] or heading[2]) if heading else None
        if title:
            metadata["title"] = title
        yield self._document(file, "", text, metadata)

    def _table_rows(self, file: _DocumentFile) -> Iterator[Document]:
        with utf8_copy(file.path, file.suffix, self._encoding) as name, _errors_name(file.path, name):
            table = open_table(name)
            text_column, id_column, metadata_columns = self._columns(table, file)
            columns: Sequence[str] = table.columns
            if metadata_columns is not None:
                columns = [text_column, *([id_column] if id_column else []), *metadata_columns]
            seen: set[str] = set()
            for number, row in enumerate(table.rows(tuple(dict.fromkeys(columns))), 1):
                where = f"{file.path}, row {number}"
                try:
                    text = checked_text(text_cell(table, number, row, text_column), where)
                    suffix = str(number) if id_column is None else _row_id(row, id_column, where, seen)
                    metadata: dict[str, MetadataValue] = {"path": file.name}
                    for column in row if metadata_columns is None else metadata_columns:
                        if column not in (text_column, id_column):
                            self._add_metadata(metadata, column, row, where)
                except InputError as error:
                    self._fail(file.path, InputError(str(error).replace(name, file.path)))
                    continue
                yield self._document(file, f"#{suffix}", text, metadata)

    def _columns(self, table: InputTable, file: _DocumentFile) -> tuple[str, str | None, tuple[str, ...] | None]:
        """Return the text column, the id column, and the metadata columns (None: all)."""
        text = table.column((self._text,), None, "text= (--column)", only=self._text == "text")
        id = self._id or next((name for name in ("id", "_id") if name in table.columns and name != text), None)
        requested = [name for name in (self._id, self._title, *(self._metadata or ())) if name is not None]
        if file.suffix not in (".jsonl", ".ndjson"):  # the first row of JSONL need not have all columns
            for name in requested:
                table.column((), name, "")
        if self._metadata is None:
            return text, id, None
        title = () if self._title is None else (self._title,)
        return text, id, tuple(dict.fromkeys((*title, *self._metadata)))

    def _add_metadata(self, metadata: dict[str, MetadataValue], column: str, row: Row, where: str) -> None:
        value = to_scalar(row.get(column))
        if isinstance(value, MetadataValue):
            metadata["title" if column == self._title else column] = value
        elif value is not None and self._metadata is not None:
            kind = type(value).__name__
            raise InputError(f"{where}: column {column!r} contains a {kind}; metadata must be scalar values")


def _row_id(row: Row, column: str, where: str, seen: set[str]) -> str:
    value = row.get(column)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise InputError(f"{where}: the id in column {column!r} is {value!r:.40}; it must be text or an integer")
    id = checked_text(str(value), f"{where}, column {column!r}")
    if id in seen:
        raise InputError(f"{where}: duplicate id {id!r:.80} in column {column!r}")
    seen.add(id)
    return id


@contextmanager
def _errors_name(path: str, copy: str) -> Iterator[None]:
    """In errors, replace the path of a temporary copy by that of the user's file."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(copy, path)) from None
