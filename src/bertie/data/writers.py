"""JSONL, CSV, TSV, Parquet, NumPy and a table for people: what records become, a chunk at a time.

A record is a dict; its schema names its fields and their kinds: `int`, `float`, `str`, `np.float32`, a list of a kind
(`[int]`) or a struct of kinds (`{"start": int}`). All but the table are append-only, so that a file that is cut after
any chunk can be gone on with.
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

from bertie.data.compression import COMPRESSED_SUFFIXES, check_codec, compress
from bertie.data.readers import data_suffix
from bertie.errors import InputError, MissingPackageError

Record = dict[str, Any]
FieldType = Any  # int, float, str, np.float32, [FieldType] or {name: FieldType}
Schema = dict[str, FieldType]
OUTPUT_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".npy")


class Writer(ABC):
    """How records become a file."""

    def head(self) -> bytes:
        """What comes before all records."""
        return b""

    @abstractmethod
    def body(self, records: Sequence[Record]) -> bytes:
        """A chunk of records."""

    def seal(self, part: Path, rows: int) -> Path:
        """Make what was appended the final file, and say where it is."""
        return part


def check_output_name(name: str, *, vectors: bool) -> None:
    """Fail before any work if a file of this name could not be written."""
    kind = data_suffix(name)
    known = [one for one in OUTPUT_SUFFIXES if vectors or one != ".npy"]
    if kind not in known:
        raise InputError(
            f"{name}: the ending must say what to write: {', '.join(known)}, the text ones also with .gz, .xz or .zst"
        )
    packed = Path(name.lower()).suffix
    if packed in COMPRESSED_SUFFIXES and kind in (".parquet", ".npy"):
        raise InputError(f"{name}: {kind} is not written as {packed}; leave that off")
    check_codec(packed)
    if kind == ".parquet":
        _arrow()


def make_writer(name: str, schema: Schema, dimension: int | None = None) -> Writer:
    """By the ending of a file; a name without any is JSONL."""
    kind, packed = data_suffix(name), Path(name.lower()).suffix
    if kind == ".npy":
        assert dimension is not None
        return NpyWriter(dimension)
    if kind == ".parquet":
        return ParquetWriter(schema)
    if kind in (".csv", ".tsv"):
        return CsvWriter(schema, "," if kind == ".csv" else "\t", packed)
    return JsonlWriter(packed)


class JsonlWriter(Writer):
    """One JSON object a line."""

    def __init__(self, packed: str = "") -> None:
        self._packed = packed

    def body(self, records: Sequence[Record]) -> bytes:
        """A line each."""
        text = "".join(json.dumps(_plain(record), ensure_ascii=False) + "\n" for record in records)
        return compress(text.encode("utf-8"), self._packed)


class CsvWriter(Writer):
    """A line a record; lists and structs are JSON in their cell."""

    def __init__(self, schema: Schema, delimiter: str, packed: str = "") -> None:
        self._fields, self._delimiter, self._packed = tuple(schema), delimiter, packed

    def head(self) -> bytes:
        """The names of the columns."""
        return self._lines([self._fields])

    def body(self, records: Sequence[Record]) -> bytes:
        """A line each, or more where a text has several."""
        return self._lines([_cell(_plain(record.get(name))) for name in self._fields] for record in records)

    def _lines(self, rows: Iterable[Sequence[object]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        return compress(text.getvalue().encode("utf-8"), self._packed)


class NpyWriter(Writer):
    """(N, dimension) float32: the records' vectors, as `numpy.load` reads them."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension

    def head(self) -> bytes:
        """For no rows yet; it is as long for any number, since numpy leaves room to let the first axis grow."""
        return self._header(0)

    def body(self, records: Sequence[Record]) -> bytes:
        """The bare numbers."""
        import numpy as np

        return np.stack([record["vector"] for record in records]).astype("<f4").tobytes()

    def seal(self, part: Path, rows: int) -> Path:
        """Say in the header how many there are."""
        with open(part, "r+b") as file:
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
    """Appended as an Arrow stream, which may end after any batch; made into Parquet at the end."""

    def __init__(self, schema: Schema) -> None:
        self._pa = _arrow()
        self._schema = self._pa.schema([(name, self._type(kind)) for name, kind in schema.items()])

    def head(self) -> bytes:
        """The schema."""
        return bytes(self._schema.serialize())

    def body(self, records: Sequence[Record]) -> bytes:
        """A batch."""
        try:
            batch = self._pa.RecordBatch.from_pylist(list(records), schema=self._schema)
        except self._pa.ArrowException as error:
            raise InputError(f"a value is of another kind than those before it: {error}") from None
        return bytes(batch.serialize())

    def seal(self, part: Path, rows: int) -> Path:
        """Copy the batches, a few row groups' worth at a time."""
        from pyarrow import ipc, parquet

        whole = part.with_name(part.name + ".parquet")
        with (
            open(part, "rb") as file,
            ipc.open_stream(file) as stream,
            parquet.ParquetWriter(whole, self._schema) as out,
        ):
            batches = iter(stream)
            while some := list(islice(batches, 16)):  # a row group
                out.write_table(self._pa.Table.from_batches(some))
        with open(whole, "rb") as file:
            os.fsync(file.fileno())
        return whole

    def _type(self, kind: FieldType) -> Any:
        pa = self._pa
        if isinstance(kind, list):
            return pa.list_(self._type(kind[0]))
        if isinstance(kind, dict):
            return pa.struct([(name, self._type(one)) for name, one in kind.items()])
        simple = {int: pa.int64(), float: pa.float64(), str: pa.string()}
        return simple[kind] if kind in simple else pa.from_numpy_dtype(kind)


class TableWriter:
    """Columns for people. Widths follow what was seen so far, since the rest is not known yet."""

    CELL = 60

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = titles
        self._widths: list[int] = []

    def text(self, rows: Iterable[Sequence[object]]) -> str:
        """Some rows; the titles before the first."""
        cells = [[_short(cell, self.CELL) for cell in row] for row in rows]
        if not self._widths:
            cells.insert(0, list(self._titles))
            self._widths = [0] * len(self._titles)
        for row in cells:
            self._widths = [max(w, len(cell)) for w, cell in zip(self._widths, row, strict=True)]
        return "".join(
            "  ".join(f"{cell:<{w}}" for cell, w in zip(row, self._widths, strict=True)).rstrip() + "\n"
            for row in cells
        )


def _short(cell: object, most: int) -> str:
    text = f"{cell:.4f}" if isinstance(cell, float) else str(cell)
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: Any) -> Any:
    """Without numpy's arrays and numbers."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise MissingPackageError("Parquet needs the package pyarrow: pip install 'bertie[data]'") from None
    return pyarrow
