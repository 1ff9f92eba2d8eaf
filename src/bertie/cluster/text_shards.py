"""Files to embed, cut into shards."""

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
    """A file that is read."""

    number: int
    name: str
    size: int
    version: str  # another one if the file changes
    kind: Format | None
    column: str
    id: str | None  # whether ids are "int" or "str", in all files alike; None: no file has any


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedJobConfig(JobConfig):
    """As `JobConfig`, to embed."""

    prompt: str | None
    folder: str
    rows: int
    chunk: tuple[int, int]  # rows and characters, as elsewhere: the same batches give the same last bit


@dataclass(frozen=True, slots=True)
class TextShard:
    """Some rows of a file, on their way to a worker; without texts if their vectors are there already."""

    source: InputFile
    name: str
    first: int
    rows: int
    texts: list[str]
    ids: list[str | int | None]
    read: float | None  # what part of the file was read when these were

    @property
    def what(self) -> str:
        """As errors call it."""
        return f"{self.source.name}, rows {self.first} to {self.first + self.rows - 1}"


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A shard is there."""

    source: int
    rows: int
    read: float | None


def inspect_files(names: Sequence[str], column: str | None, kind: Format | None) -> list[InputFile]:
    """Every file can be read and has the column: known before any work is done."""
    found = []
    for number, name in enumerate(names):
        table = open_table(name, kind)
        if table.size is None:
            raise InputError(f"{name} is no plain file; its rows could not be read again after a failure")
        text = table.column(["text"], column, "column=", only=True)
        ids = None
        if "id" in table.columns and text != "id":
            ids = "int" if isinstance(next(iter(table.rows(["id"])))["id"], int) else "str"
        version = str(os.stat(name).st_mtime_ns)
        found.append(InputFile(number, name, table.size, version, kind, text, ids))
    kinds = {source.id for source in found} - {None}
    ids = "str" if "str" in kinds else next(iter(kinds), None)
    return [replace(one, id=ids) for one in found]


def read_shards(source: InputFile, plan: EmbedJobConfig) -> Iterator[TextShard]:
    """A file, cut where chunks end: the chunks are those of one machine that reads all of it."""
    table = open_table(source.name, source.kind)
    extra = ["id"] if "id" in table.columns and source.column != "id" else []
    rows = enumerate(table.rows([source.column, *extra]), 1)
    items = ((number, row, text_cell(table, number, row, source.column)) for number, row in rows)
    some: list[tuple[int, Row, Any]] = []
    count = 0

    def shard() -> TextShard:
        name = f"{source.number:05}-{count:06}.parquet"
        there = _is_whole(Path(plan.folder, name), len(some))
        return TextShard(
            source,
            name,
            some[0][0],
            len(some),
            [] if there else [text for _, _, text in some],
            [] if there or source.id is None else [row.get("id") for _, row, _ in some],
            table.fraction(),
        )

    for chunk in chunk_rows(items, *plan.chunk):
        some += chunk
        if len(some) >= plan.rows:
            yield shard()
            some, count = [], count + 1
    if some:
        yield shard()


def _is_whole(path: Path, rows: int) -> bool:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == rows)
    except (OSError, pa.ArrowException):
        return False
