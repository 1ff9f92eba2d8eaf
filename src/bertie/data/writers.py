"""Write records as JSONL, CSV, TSV, Parquet or NumPy arrays, or print them as a table.

A record is a dict; its schema maps field names to types: `int`, `float`, `str`, `np.float32`, a
list of a type (`[int]`) or a struct of types (`{"start": int}`). All but the table are append-only,
so that a file truncated after any chunk can be resumed.
"""

from __future__ import annotations

import csv
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bertie.data.atomic import fsync, named_errors
from bertie.data.compression import COMPRESSED_SUFFIXES, check_codec, compress
from bertie.data.readers import data_suffix
from bertie.errors import InputError, MissingPackageError

Record = dict[str, Any]
FieldType = Any  # int, float, str, np.float32, [FieldType] or {name: FieldType}
Schema = dict[str, FieldType]
OUTPUT_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".npy")


class Writer(ABC):
    """Encodes records as bytes that are appended to a file."""

    def header(self) -> bytes:
        """Return what precedes all records."""
        return b""

    @abstractmethod
    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode a chunk of records."""

    def finalize(self, part: Path) -> Path:
        """Turn the appended chunks into the final file, and return its path."""
        return part


def check_output_name(name: str, *, embeddings: bool) -> None:
    """Reject a file name that cannot be written, before any work is done."""
    suffix = data_suffix(name)
    allowed = [known for known in OUTPUT_SUFFIXES if embeddings or known != ".npy"]
    if suffix not in allowed:
        raise InputError(
            f"{name}: the suffix must be one of {', '.join(allowed)}; text formats also with .gz, .xz or .zst"
        )
    compression = Path(name.lower()).suffix
    if compression in COMPRESSED_SUFFIXES and suffix in (".parquet", ".npy"):
        raise InputError(f"{name}: {suffix} cannot be compressed as {compression}; omit that suffix")
    check_codec(compression)
    if suffix == ".parquet":
        _arrow()


def make_writer(name: str, schema: Schema, dimension: int | None = None) -> Writer:
    """Return a writer by the suffix of a file name; JSONL without a suffix."""
    suffix, compression = data_suffix(name), Path(name.lower()).suffix
    if suffix == ".npy":
        assert dimension is not None
        return NpyWriter(dimension)
    if suffix == ".parquet":
        return ParquetWriter(schema)
    if suffix in (".csv", ".tsv"):
        return CsvWriter(schema, "," if suffix == ".csv" else "\t", compression)
    return JsonlWriter(compression)


class JsonlWriter(Writer):
    """One JSON object per line."""

    def __init__(self, compression: str = "") -> None:
        self._compression = compression

    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode one line per record."""
        text = "".join(json.dumps(_plain(record), ensure_ascii=False) + "\n" for record in records)
        return compress(text.encode("utf-8"), self._compression)


class CsvWriter(Writer):
    """One line per record; lists and structs are JSON in their cell."""

    def __init__(self, schema: Schema, delimiter: str, compression: str = "") -> None:
        self._fields, self._delimiter, self._compression = tuple(schema), delimiter, compression

    def header(self) -> bytes:
        """Return the column names."""
        return self._lines([self._fields])

    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode one line per record, or more if a text has several."""
        return self._lines([_cell(_plain(record.get(name))) for name in self._fields] for record in records)

    def _lines(self, rows: Iterable[Sequence[object]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        return compress(text.getvalue().encode("utf-8"), self._compression)


class NpyWriter(Writer):
    """The embeddings of the records as a float32 array (N, dimension)."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension

    def header(self) -> bytes:
        """Return the header for zero rows, which has room for any number of them."""
        return self._header(0)

    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode the raw values."""
        import numpy as np

        missing = np.full(self._dimension, np.nan)  # of rows that could not be embedded, if they are kept
        vectors = [missing if record["vector"] is None else record["vector"] for record in records]
        return np.stack(vectors).astype("<f4").tobytes() if vectors else b""

    def finalize(self, part: Path) -> Path:
        """Write the number of rows into the header."""
        rows = (part.stat().st_size - len(self.header())) // (4 * self._dimension)
        with named_errors(part), open(part, "r+b") as file:
            file.write(self._header(rows))
            file.flush()
            os.fsync(file.fileno())
        return part

    def _header(self, rows: int) -> bytes:
        import numpy as np

        file = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, self._dimension)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.getvalue()


class ParquetWriter(Writer):
    """Appends an Arrow stream, and converts it to Parquet at the end."""

    def __init__(self, schema: Schema) -> None:
        self._pa = _arrow()
        self._schema = self._pa.schema([(name, self._arrow_type(field_type)) for name, field_type in schema.items()])

    def header(self) -> bytes:
        """Return the schema."""
        return bytes(self._schema.serialize())

    def encode(self, records: Sequence[Record]) -> bytes:
        """Encode a record batch."""
        try:
            batch = self._pa.RecordBatch.from_pylist(list(records), schema=self._schema)
        except self._pa.ArrowException as error:
            raise InputError(f"a value has another type than those before it: {error}") from None
        return bytes(batch.serialize())

    def finalize(self, part: Path) -> Path:
        """Convert the stream, one row group at a time."""
        complete = part.with_name(part.name + ".parquet")
        try:
            with named_errors(complete):
                self._convert(part, complete)
                fsync(complete)
        except BaseException:
            complete.unlink(missing_ok=True)
            raise
        return complete

    def _convert(self, part: Path, complete: Path) -> None:
        from pyarrow import ipc, parquet

        with (
            open(part, "rb") as file,
            ipc.open_stream(file) as stream,
            parquet.ParquetWriter(complete, self._schema) as out,
        ):
            batches = iter(stream)
            while group := list(islice(batches, 16)):
                out.write_table(self._pa.Table.from_batches(group))

    def _arrow_type(self, field_type: FieldType) -> Any:
        pa = self._pa
        if isinstance(field_type, list):
            return pa.list_(self._arrow_type(field_type[0]))
        if isinstance(field_type, dict):
            return pa.struct([(name, self._arrow_type(member)) for name, member in field_type.items()])
        scalars = {int: pa.int64(), float: pa.float64(), str: pa.string()}
        return scalars[field_type] if field_type in scalars else pa.from_numpy_dtype(field_type)


class TableWriter:
    """Formats an aligned table, whose column widths follow the rows so far."""

    MAX_CELL = 60

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = titles
        self._widths: list[int] = []

    def text(self, rows: Iterable[Sequence[object]]) -> str:
        """Format rows; the titles precede the first."""
        cells = [[_shorten(cell, self.MAX_CELL) for cell in row] for row in rows]
        if not self._widths:
            cells.insert(0, list(self._titles))
            self._widths = [0] * len(self._titles)
        for row in cells:
            self._widths = [max(w, len(cell)) for w, cell in zip(self._widths, row, strict=True)]
        return "".join(
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, self._widths, strict=True)).rstrip() + "\n"
            for row in cells
        )


def _shorten(cell: object, limit: int) -> str:
    text = f"{cell:.4f}" if isinstance(cell, float) else str(cell)
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _plain(value: Any) -> Any:
    """Convert numpy arrays and scalars to Python objects."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingPackageError("Parquet needs the package pyarrow: pip install 'bertie[data]'") from None
    return pyarrow
