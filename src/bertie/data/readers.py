"""Text, CSV, TSV, JSONL and Parquet, row by row.

However large a file is, only a few of its rows are held. A row is a dict; rows are counted from 1.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bertie.data.compression import COMPRESSED_SUFFIXES, decompression_errors, open_decompressed
from bertie.errors import InputError, MissingPackageError, NotFoundError

Row = dict[str, Any]
Format = Literal["text", "csv", "tsv", "jsonl", "parquet"]
FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
STDIN = "-"
LONGEST_LINE = 1 << 28  # beyond this it is no text file


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to be read once, in order."""

    name: str
    columns: tuple[str, ...]
    textual: tuple[str, ...]  # the columns that hold texts, by the first row or the schema
    rows: Callable[[Sequence[str]], Iterator[Row]]  # at least the columns asked for
    fraction: Callable[[], float | None]  # of the file that was read so far
    size: int | None = None  # of the file in bytes
    direct: bool = False  # texts of the command line, no file

    def column(self, names: Sequence[str], asked: str | None, flag: str, *, only: bool = False) -> str:
        """The column that was asked for, else the first of `names`; with `only`, else the only one with texts."""
        if asked is not None:
            if asked not in self.columns:
                raise InputError(f"{self.name} has no column {asked!r}, {self._have()}")
            return asked
        for name in names:
            if name in self.columns:
                return name
        if only and len(self.textual) == 1:
            return self.textual[0]
        raise InputError(f"{self.name} has no column {names[0]!r}, {self._have()}; name the right one with {flag}")

    def _have(self) -> str:
        return f"only {', '.join(map(repr, self.columns[:20]))}"


def text_cell(table: Table, number: int, row: Row, column: str) -> str:
    """The text in a column. Whatever is not there, or no text, is an error that says where."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    what = "no value" if value is None or value != value else f"{type(value).__name__} {value!r:.40}, not text,"
    raise InputError(f"{table.name}, row {number}: {what} in column {column!r}; fill it in or leave the row out")


def data_suffix(name: str) -> str | None:
    """The ending that says what a file holds, without that of its compression."""
    path = Path(name.lower())
    if path.suffix in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix or None


def is_data_file(name: str) -> bool:
    """Does it end as the files that can be read?"""
    return data_suffix(name) in FORMATS


def table_from_texts(texts: Sequence[str], column: str = "text") -> Table:
    """Texts given directly."""
    rows = ({column: text} for text in texts)
    return Table("the command line", (column,), (column,), lambda _: rows, lambda: None, direct=True)


def open_table(name: str, kind: Format | None = None) -> Table:
    """A file, or standard input as `-`. `kind` says what it holds, where its ending does not."""
    if kind is None:
        kind = _kind(name)
    raw, size = _open(name)
    data = open_decompressed(raw, name)
    title = "standard input" if name == STDIN else name

    def fraction() -> float | None:
        return raw.tell() / size if size else None

    if kind == "parquet":
        return _parquet(title, data, size)
    readers: dict[Format, Callable[[str, BinaryIO], Iterator[Row]]] = {
        "text": _text,
        "jsonl": _jsonl,
        "csv": lambda title, data: _csv(title, data, ","),
        "tsv": lambda title, data: _csv(title, data, "\t"),
    }
    rows = readers[kind](title, data)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{title} is empty: there is nothing to do")
    textual = tuple(key for key, value in first.items() if key != "id" and _is_text(value))
    return Table(title, tuple(first), textual, lambda _: chain([first], rows), fraction, size)


def read_text_file(name: str) -> str:
    """All of a text file, as one text."""
    raw, _ = _open(name)
    with decompression_errors(name):
        return "".join(line for _, line in _lines(name, open_decompressed(raw, name)))


def _kind(name: str) -> Format:
    ending = data_suffix(name)
    if ending == ".json":
        raise InputError(f"{name} is JSON; make it JSONL, one object a line (jq -c '.[]'), or pass --format jsonl")
    return FORMATS.get(ending or "", "text")


def _open(name: str) -> tuple[io.BufferedReader, int | None]:
    if name == STDIN:
        raw = sys.stdin.buffer
        return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw), None  # type: ignore[arg-type]
    try:
        file = open(name, "rb")  # noqa: SIM115  (it is read until the command ends)
    except IsADirectoryError:
        raise InputError(f"{name} is a folder; give one of its files") from None
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {name}") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    status = os.fstat(file.fileno())
    return file, status.st_size if stat.S_ISREG(status.st_mode) else None


def _lines(name: str, data: BinaryIO) -> Iterator[tuple[int, str]]:
    """Lines with their ends, decoded one by one, so that an error can say where."""
    number = 0
    with decompression_errors(name):
        while line := data.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise InputError(f"{name}, line {number} has over {LONGEST_LINE >> 20} MiB: this is no text file")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{name}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); convert "
                    "the file, for example with iconv -f latin1 -t utf-8"
                ) from None


def _text(name: str, data: BinaryIO) -> Iterator[Row]:
    for _, line in _lines(name, data):
        yield {"text": line.removesuffix("\n").removesuffix("\r")}


def _jsonl(name: str, data: BinaryIO) -> Iterator[Row]:
    for number, line in _lines(name, data):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}, line {number} is not JSON: {error}") from None
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise InputError(f"{name}, line {number} is {type(value).__name__}; each line must be an object or a text")
        yield value


def _csv(name: str, data: BinaryIO, delimiter: str) -> Iterator[Row]:
    # The standard library stops at 128 KiB a field; documents may be longer.
    csv.field_size_limit(LONGEST_LINE)
    rows = csv.reader((line for _, line in _lines(name, data)), delimiter=delimiter, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if len(set(header)) < len(header):
            raise InputError(f"{name} has two columns of one name in its first line: {', '.join(header)}")
        number = 0
        for row in rows:
            if not row:  # a blank line
                continue
            number += 1
            if len(row) != len(header):
                raise InputError(
                    f"{name}, row {number} (line {rows.line_num}) has {len(row)} fields and the header {len(header)}; "
                    'put fields that hold the separator in "quotes"'
                )
            # CSV has no other way to say that a value is missing.
            yield {key: value or None for key, value in zip(header, row, strict=True)}
    except csv.Error as error:
        raise InputError(
            f"{name}, line {rows.line_num} is no {'TSV' if delimiter == chr(9) else 'CSV'}: {error}"
        ) from None


def _parquet(name: str, data: BinaryIO, size: int | None) -> Table:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingPackageError("Parquet needs the package pyarrow: pip install 'bertie[data]'") from None
    if not (isinstance(data, io.BufferedReader) and data.seekable() and size is not None):
        spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (it goes when the command ends)
        with decompression_errors(name):
            shutil.copyfileobj(data, spool, 1 << 20)
        spool.seek(0)
        data = spool
    try:
        # buffer_size: read columns piece by piece, not a row group of any size at once.
        file = parquet.ParquetFile(data, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name} is not Parquet: {str(error).splitlines()[0]}") from None
    total = file.metadata.num_rows
    if not total:
        raise InputError(f"{name} is empty: there is nothing to do")
    schema = file.schema_arrow
    textual = tuple(one.name for one in schema if one.name != "id" and _holds_text(pa, one.type))
    done = 0

    def rows(wanted: Sequence[str]) -> Iterator[Row]:
        nonlocal done
        try:
            for batch in file.iter_batches(batch_size=1024, columns=list(wanted)):
                done += batch.num_rows
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{name} is damaged after row {done}: {str(error).splitlines()[0]}") from None

    return Table(name, tuple(schema.names), textual, rows, lambda: done / total, size)


def _holds_text(pa: Any, kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_text(value: object) -> bool:
    """Text, and not a number as CSV writes it."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def chunk_rows(
    rows: Iterable[tuple[int, Row, Any]], items: int, characters: int
) -> Iterator[list[tuple[int, Row, Any]]]:
    """Rows in chunks that depend on nothing but the rows, and end at a number of items or of characters."""
    chunk: list[tuple[int, Row, Any]] = []
    size = 0
    for one in rows:
        chunk.append(one)
        size += sum(map(len, one[2])) if isinstance(one[2], tuple) else len(one[2])
        if len(chunk) == items or size > characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
