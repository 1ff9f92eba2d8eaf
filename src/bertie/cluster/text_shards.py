"""Splitting input files into shards of texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertie.cluster.ray_job import JobConfig
from bertie.data.readers import Format, Row, chunk_rows, open_table, text_cell
from bertie.errors import InputError

ROWS_PER_SHARD = 16_384


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of texts."""

    number: int
    name: str
    size: int
    version: str  # changes with the file
    format: Format | None
    column: str
    id_type: str | None  # "int" or "str", the same for all files; None: no file has ids


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJobConfig(JobConfig):
    """The configuration of an embedding job."""

    prompt: str | None
    folder: str
    rows: int
    chunk: tuple[int, int]  # rows and characters per call: the same batches as on one machine give the same last bit


@dataclass(frozen=True, slots=True)
class TextShard:
    """A range of rows of a file; without texts if its embeddings exist already."""

    file: InputFile
    name: str
    first: int
    rows: int
    texts: list[str]
    ids: list[str | int | None]
    progress: float | None  # fraction of the file that had been read

    @property
    def description(self) -> str:
        """A description for error messages."""
        return f"{self.file.name}, rows {self.first} to {self.first + self.rows - 1}"


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A completed shard."""

    file: int
    rows: int
    progress: float | None


def inspect_files(names: Sequence[str], column: str | None, format: Format | None) -> list[InputFile]:
    """Check before any work is done that every file can be read and has the column."""
    files = []
    for number, name in enumerate(names):
        table = open_table(name, format)
        if table.size is None:
            raise InputError(f"{name} is not a regular file; its rows could not be read again after a failure")
        text = table.column(["text"], column, "column=", only=True)
        id_type = None
        if "id" in table.columns and text != "id":
            id_type = "int" if isinstance(next(iter(table.rows(["id"])))["id"], int) else "str"
        version = str(os.stat(name).st_mtime_ns)
        files.append(InputFile(number, name, table.size, version, format, text, id_type))
    types = {file.id_type for file in files} - {None}
    id_type = "str" if "str" in types else next(iter(types), None)
    return [replace(file, id_type=id_type) for file in files]


def read_shards(file: InputFile, config: EmbedJobConfig) -> Iterator[TextShard]:
    """Split a file at the chunk boundaries of a single machine that reads all of it."""
    table = open_table(file.name, file.format)
    extra = ["id"] if "id" in table.columns and file.column != "id" else []
    rows = enumerate(table.rows([file.column, *extra]), 1)
    items = ((number, row, text_cell(table, number, row, file.column)) for number, row in rows)
    shard: list[tuple[int, Row, Any]] = []
    count = 0

    def make_shard() -> TextShard:
        name = f"{file.number:05}-{count:06}.parquet"
        exists = _is_complete(Path(config.folder, name), len(shard))
        return TextShard(
            file,
            name,
            shard[0][0],
            len(shard),
            [] if exists else [text for _, _, text in shard],
            [] if exists or file.id_type is None else [row.get("id") for _, row, _ in shard],
            table.fraction(),
        )

    for chunk in chunk_rows(items, *config.chunk):
        shard += chunk
        if len(shard) >= config.rows:
            yield make_shard()
            shard, count = [], count + 1
    if shard:
        yield make_shard()


def _is_complete(path: Path, rows: int) -> bool:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == rows)
    except (OSError, pa.ArrowException):
        return False
