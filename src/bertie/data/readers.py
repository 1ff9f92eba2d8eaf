"""Stream the rows of text, CSV, TSV, JSONL and Parquet files in bounded memory.

A row is a dict; rows are numbered from 1.
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
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

from bertie.data.atomic import named_errors
from bertie.data.compression import COMPRESSED_SUFFIXES, decompression_errors, open_decompressed
from bertie.data.encodings import open_utf8
from bertie.errors import BertieWarning, InputError, MissingPackageError, NotFoundError

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
MAX_LINE_BYTES = 1 << 28  # a longer line means that it is not a text file


@dataclass(frozen=True, slots=True)
class InputTable:
    """A stream of rows, which can be read once."""

    name: str
    columns: tuple[str, ...]
    text_columns: tuple[str, ...]  # columns that contain text, by the first row or the schema
    rows: Callable[[Sequence[str]], Iterator[Row]]  # with at least the requested columns
    fraction: Callable[[], float | None]  # of the file that has been read
    size: int | None = None  # of the file, in bytes
    is_literal: bool = False  # texts of the command line rather than a file

    def column(self, names: Sequence[str], requested: str | None, flag: str, *, only: bool = False) -> str:
        """Return the requested column, else the first of `names`, or the only text column."""
        if requested is not None:
            if requested not in self.columns:
                raise InputError(f"{self.name} has no column {requested!r}, {self._available()}")
            return requested
        for name in names:
            if name in self.columns:
                return name
        if only and len(self.text_columns) == 1:
            return self.text_columns[0]
        raise InputError(f"{self.name} has no column {names[0]!r}, {self._available()}; select one with {flag}")

    def _available(self) -> str:
        return f"only {', '.join(map(repr, self.columns[:20]))}"


class MalformedRow(dict[str, Any]):
    """A row that could not be read, and why."""

    def __init__(self, error: InputError) -> None:
        super().__init__()
        self.error = error


def text_cell(table: InputTable, number: int, row: Row, column: str) -> str:
    """Return the text of a cell; anything else raises an error that names the row."""
    if isinstance(row, MalformedRow):
        raise row.error
    value = row.get(column)
    if isinstance(value, str):
        return value
    actual = "no value" if value is None or value != value else f"{type(value).__name__} {value!r:.40}, not text,"
    raise InputError(f"{table.name}, row {number}: {actual} in column {column!r}; fill it in or remove the row")


def data_suffix(name: str) -> str | None:
    """Return the suffix of a file name, without that of its compression.

    >>> data_suffix("reviews.csv.gz")
    '.csv'
    """
    path = Path(name.lower())
    if path.suffix in COMPRESSED_SUFFIXES:
        path = path.with_suffix("")
    return path.suffix or None


def is_data_file(name: str) -> bool:
    """Return whether a name has the suffix of a readable file."""
    return data_suffix(name) in FORMATS


def table_from_texts(texts: Sequence[str], column: str = "text") -> InputTable:
    """Return a table of texts."""
    rows = ({column: text} for text in texts)
    return InputTable("the command line", (column,), (column,), lambda _: rows, lambda: None, is_literal=True)


def open_table(name: str, format: Format | None = None, *, keep_malformed: bool = False) -> InputTable:
    """Open a file, or standard input as `-`. `format` overrides that of the suffix.

    `keep_malformed`: lines that cannot be read become a `MalformedRow` instead of an error, where the next line can
    still be found.
    """
    if format is None:
        format = _format_of(name)
    raw, size = _open(name)
    data = open_decompressed(raw, name)
    title = "standard input" if name == STDIN else name

    def fraction() -> float | None:
        return raw.tell() / size if size else None

    if format == "parquet":
        return _parquet(title, data, size)
    readers: dict[Format, Callable[[str, BinaryIO], Iterator[Row]]] = {
        "text": _text,
        "jsonl": _jsonl,
        "csv": lambda title, data: _csv(title, data, ","),
        "tsv": lambda title, data: _csv(title, data, "\t"),
    }
    rows = readers[format](title, data) if keep_malformed else _stop_at_malformed(readers[format](title, data))
    begin = [first for first in [next(rows, None)] if first is not None]
    while begin and isinstance(begin[-1], MalformedRow) and (row := next(rows, None)) is not None:
        begin.append(row)  # the first row that can be read has the columns
    if not begin:
        raise InputError(f"{title} is empty")
    first = begin[-1]
    if isinstance(first, MalformedRow):
        raise first.error
    text_columns = tuple(key for key, value in first.items() if key != "id" and _is_text(value))
    return InputTable(title, tuple(first), text_columns, lambda _: chain(begin, rows), fraction, size)


def _stop_at_malformed(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, MalformedRow):
            raise row.error
        yield row


def read_text_file(name: str) -> str:
    """Read a text file as one text."""
    raw, _ = _open(name)
    with decompression_errors(name):
        return "".join(line for _, line in _lines(name, open_decompressed(raw, name)))


def _format_of(name: str) -> Format:
    suffix = data_suffix(name)
    if suffix == ".json":
        raise InputError(
            f"{name} is JSON; convert it to JSONL, one object per line (jq -c '.[]'), or pass --format jsonl"
        )
    return FORMATS.get(suffix or "", "text")


def _open(name: str) -> tuple[io.BufferedReader, int | None]:
    if name == STDIN:
        if sys.stdin is None:
            raise InputError("standard input is closed; redirect a file or a pipe to it")
        raw = sys.stdin.buffer
        return raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw), None  # type: ignore[arg-type]
    try:
        file = open(name, "rb")  # noqa: SIM115  (it stays open until the command ends)
    except IsADirectoryError:
        raise InputError(f"{name} is a folder; pass one of its files") from None
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {name}") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    status = os.fstat(file.fileno())
    return file, status.st_size if stat.S_ISREG(status.st_mode) else None


@overload
def _lines(name: str, data: BinaryIO) -> Iterator[tuple[int, str]]: ...
@overload
def _lines(name: str, data: BinaryIO, *, keep_malformed: bool) -> Iterator[tuple[int, str | InputError]]: ...
def _lines(name: str, data: BinaryIO, *, keep_malformed: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield numbered lines, decoded one by one, so that an error can name the line, or stand in its place."""
    number = 0
    with decompression_errors(name), named_errors(name):
        data = open_utf8(data, name)
        while line := data.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise InputError(
                    f"{name}, line {number} is longer than {MAX_LINE_BYTES >> 20} MiB: this is not a text file"
                )
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                malformed = InputError(
                    f"{name}, line {number} is not UTF-8 (byte 0x{line[error.start]:02x} at {error.start}); convert "
                    "the file, for example with iconv -f latin1 -t utf-8"
                )
                if not keep_malformed:
                    raise malformed from None
                yield number, malformed
                continue
            yield number, text


def _text(name: str, data: BinaryIO) -> Iterator[Row]:
    for _, line in _lines(name, data, keep_malformed=True):
        if isinstance(line, InputError):
            yield MalformedRow(line)
        else:
            yield {"text": line.removesuffix("\n").removesuffix("\r")}


class _DuplicateKeyError(Exception):
    """A key that occurs twice in a JSON object."""


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object; Python itself would keep the last of several values."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _DuplicateKeyError(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _jsonl(name: str, data: BinaryIO) -> Iterator[Row]:
    for number, line in _lines(name, data, keep_malformed=True):
        if isinstance(line, InputError):
            yield MalformedRow(line)
        elif line.strip():
            try:
                yield _json_row(line)
            except InputError as error:
                yield MalformedRow(InputError(f"{name}, line {number} {error}"))


def _json_row(line: str) -> Row:
    try:
        value = _DECODER.decode(line)
    except _DuplicateKeyError as error:
        raise InputError(f"has the key {error.args[0]!r:.60} twice; remove one") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}") from None
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise InputError(f"is {type(value).__name__}; each line must be an object or a text")
    return value


def _csv(name: str, data: BinaryIO, delimiter: str) -> Iterator[Row]:
    # The default limit is 128 KiB per field; documents may be longer.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines: Iterator[str] = (line for _, line in _lines(name, data))
    first = next(lines, None)
    if first is None:
        return
    actual = _delimiter_of(first, delimiter)
    if actual != delimiter:
        title = _DELIMITERS[actual]
        warnings.warn(f"{name} is separated by {title}, by its first line, and read so", BertieWarning, stacklevel=2)
        delimiter = actual
    if not first.startswith("sep="):
        lines = chain([first], lines)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(rows, None)
        if header is None:
            return
        if len(set(header)) < len(header):
            raise InputError(f"{name} has duplicate column names in its header: {', '.join(header)}")
        number = 0
        for row in rows:
            if not row:  # a blank line
                continue
            number += 1
            if len(row) != len(header):
                message = f"{name}, row {number} (line {rows.line_num}) has {len(row)} fields and the header "
                yield MalformedRow(InputError(f"{message}{len(header)}; quote fields that contain the separator"))
                continue
            # CSV has no other way to express a missing value.
            yield {key: value or None for key, value in zip(header, row, strict=True)}
    except csv.Error as error:
        raise InputError(
            f"{name}, line {rows.line_num} is not valid {'TSV' if delimiter == chr(9) else 'CSV'}: {error}"
        ) from None


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def _delimiter_of(header: str, expected: str) -> str:
    """Return the delimiter of a table, another one than expected if only that one separates its header."""
    header = header.rstrip("\r\n")
    if header.startswith("sep=") and header[4:] in _DELIMITERS:  # as Excel writes it
        return header[4:]
    for delimiter in (expected, *_DELIMITERS):
        names = next(csv.reader([header], delimiter=delimiter), [])
        if len(names) > 1 and (delimiter == expected or all(name and name == name.strip() for name in names)):
            return delimiter
    return expected


def _parquet(name: str, data: BinaryIO, size: int | None) -> InputTable:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise MissingPackageError("Parquet needs the package pyarrow: pip install 'bertie[data]'") from None
    if not (isinstance(data, io.BufferedReader) and data.seekable() and size is not None):
        spool: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (deleted when the command ends)
        with decompression_errors(name):
            shutil.copyfileobj(data, spool, 1 << 20)
        spool.seek(0)
        data = spool
    try:
        # buffer_size: read columns in pieces rather than whole row groups of any size.
        file = parquet.ParquetFile(data, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{name} is not Parquet: {str(error).splitlines()[0]}") from None
    total = file.metadata.num_rows
    if not total:
        raise InputError(f"{name} is empty")
    schema = file.schema_arrow
    text_columns = tuple(field.name for field in schema if field.name != "id" and _is_text_type(pa, field.type))
    done = 0

    def rows(columns: Sequence[str]) -> Iterator[Row]:
        nonlocal done
        try:
            for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
                done += batch.num_rows
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{name} is corrupt after row {done}: {str(error).splitlines()[0]}") from None

    return InputTable(name, tuple(schema.names), text_columns, rows, lambda: done / total, size)


def _is_text_type(pa: Any, arrow_type: Any) -> bool:
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(arrow_type) for check in checks)


def _is_text(value: object) -> bool:
    """Whether a value is text, and not a number in CSV."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False


def chunk_rows(
    rows: Iterable[tuple[int, Row, Any]], max_rows: int, max_characters: int
) -> Iterator[list[tuple[int, Row, Any]]]:
    """Group (number, row, item) tuples into chunks of bounded size."""
    chunk: list[tuple[int, Row, Any]] = []
    size = 0
    for item in rows:
        chunk.append(item)
        size += sum(map(len, item[2])) if isinstance(item[2], tuple) else len(item[2])
        if len(chunk) == max_rows or size > max_characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
