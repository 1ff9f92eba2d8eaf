"""Copy some rows of a table into a file of the same format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from bertie.data.atomic import atomic_rename, draft_name, named_errors
from bertie.data.compression import COMPRESSED_SUFFIXES, check_codec, compress
from bertie.data.readers import FORMATS, Format, InputTable, Row, data_suffix
from bertie.data.writers import CsvWriter, JsonlWriter, Writer
from bertie.errors import InputError

CHUNK = 4096  # rows


class TextWriter(Writer):
    """One line per record."""

    def __init__(self, compression: str = "") -> None:
        self._compression = compression

    def encode(self, records: Iterable[Row]) -> bytes:
        """Encode the text of each record."""
        return compress("".join(f"{record['text']}\n" for record in records).encode("utf-8"), self._compression)


def check_same_format(output: str, format: Format) -> None:
    """Refuse an output file whose suffix is not that of the input's format."""
    suffixes = [suffix for suffix, known in FORMATS.items() if known == format]
    compression = Path(output.lower()).suffix
    if data_suffix(output) not in suffixes:
        raise InputError(f"{output} holds rows of the input, and must end in {' or '.join(suffixes)} as it does")
    if compression in COMPRESSED_SUFFIXES and format == "parquet":
        raise InputError(f"{output}: .parquet cannot be compressed as {compression}; omit that suffix")
    check_codec(compression)


def copy_rows(table: InputTable, output: Path, format: Format, keep: Callable[[int], bool]) -> None:
    """Write the rows of a table whose number, from 1, is to be kept."""
    rows = (row for number, row in enumerate(table.rows(table.columns), 1) if keep(number))
    if format == "parquet":
        _copy_parquet(table, rows, output)
        return
    compression = Path(output.name.lower()).suffix if output.name.lower().endswith(COMPRESSED_SUFFIXES) else ""
    schema = dict.fromkeys(table.columns, str)
    writer: Writer = TextWriter(compression)
    if format in ("csv", "tsv"):
        writer = CsvWriter(schema, "," if format == "csv" else "\t", compression)
    elif format == "jsonl":
        writer = JsonlWriter(compression)
    with draft(output) as temporary, named_errors(temporary), open(temporary, "wb") as file:
        file.write(writer.header())
        while chunk := list(islice(rows, CHUNK)):
            file.write(writer.encode(chunk))


def _copy_parquet(table: InputTable, rows: Iterator[Row], output: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema: Any = parquet.read_schema(table.name)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{table.name}: its rows cannot be copied ({reason}); decompress the file first") from None
    with draft(output) as temporary, named_errors(temporary), parquet.ParquetWriter(temporary, schema) as writer:
        while chunk := list(islice(rows, CHUNK)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))


@contextmanager
def draft(path: Path) -> Iterator[Path]:
    """The name of a temporary file, which is renamed at the end, or removed after an error."""
    temporary = path.with_name(draft_name(path.name))
    try:
        yield temporary
        atomic_rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
