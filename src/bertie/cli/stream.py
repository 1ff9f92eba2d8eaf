"""Stream rows through a task into an output, one chunk at a time: the core of every verb."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from bertie._version import __version__
from bertie.cli.common import UsageError, absolute_path
from bertie.data.journal import START_OVER, ResumableFile, RowDigest
from bertie.data.progress import Progress
from bertie.data.readers import STDIN, InputTable, Row, chunk_rows, text_cell
from bertie.data.writers import FieldType, JsonlWriter, Record, Schema, TableWriter, check_output_name, make_writer
from bertie.errors import InputError

# A chunk is one call of the task. Its batches depend on the chunk alone, and a run resumes between
# two chunks: so the batches are the same wherever a run was interrupted, and results are equal bit
# for bit.
CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 1 << 20

# The fields of every result about how much of its text was read, and their table columns.
READ_SCHEMA: Schema = {"tokens_total": int, "tokens_read": int, "windows": int}
READ_COLUMNS = ("tokens", "windows")

# Arguments that results do not depend on, or that the journal has in another form.
NOT_SETTINGS = (*("run", "cleanup", "items", "model", "output", "json", "resume", "overwrite", "quiet", "verbose"),)

Item = Any  # a text, or a pair of texts
NumberedItem = tuple[int, Row, Item]
Result = tuple[Record, Item]
Process = Callable[[list[Any]], Iterable[Record]]
FormatRow = Callable[[Record, Any], Iterable[Sequence[object]]]


class Stream:
    """Streams a table into an output. The constructor checks everything that needs no model."""

    def __init__(
        self, args: argparse.Namespace, table: InputTable, columns: Sequence[str], *, embeddings: bool = False
    ) -> None:
        self._args, self._table, self._columns = args, table, columns
        self._extra = ["id"] if "id" in table.columns and "id" not in columns else []
        self._output: ResumableFile | None = None
        name = args.output if args.output != STDIN else None
        if name is not None:
            check_output_name(name, embeddings=embeddings)
            self._output = ResumableFile(Path(name), self._settings(), resume=args.resume, overwrite=args.overwrite)
            args.cleanup.callback(self._output.close)  # also if the model cannot be loaded
        elif args.resume or args.overwrite:
            raise UsageError("--resume and --overwrite need an output file; pass it with -o")
        rows = table.rows([*columns, *self._extra])
        first = next(rows)
        self._rows = chain([first], rows)
        # By the first row of the input, wherever this run starts.
        self._id_type = int if isinstance(first.get("id"), int) else str
        self._items = self._number_items()
        self._consumed = RowDigest()
        if self._output is not None:
            self._skip_done(self._output)

    def _settings(self) -> dict[str, Any]:
        """Return everything that the results depend on."""
        rest = {key: value for key, value in vars(self._args).items() if key not in NOT_SETTINGS}
        items = [absolute_path(item) for item in self._args.items]
        return {
            "bertie": __version__,
            "model": absolute_path(self._args.model),
            "model_files": _model_stamp(self._args.model),
            "input": items,
            "input_size": self._table.size,
            **rest,
        }

    def results(self, process: Process) -> Iterator[list[Result]]:
        """Yield chunks of (record, item) pairs. `process` is called once per chunk."""
        list(process([]))  # reports invalid options without blaming the first row
        skip = 0 if self._output is None else self._output.rows
        interactive = self._output is None and sys.stdout.isatty()  # the results themselves show the progress
        progress = Progress(self._args.verb, self._table.fraction, initial=skip)
        with nullcontext() if interactive else progress:
            for chunk in self._chunks():
                try:
                    records = list(process([item for _, _, item in chunk]))
                except InputError as error:
                    raise self._locate_error(process, chunk, error) from None
                yield [
                    (self._row_fields(number, row) | record, item)
                    for (number, row, item), record in zip(chunk, records, strict=True)
                ]
                if not interactive:
                    progress.update(len(chunk))

    def write(
        self,
        results: Iterable[list[Result]],
        schema: Schema,
        titles: Sequence[str],
        format_row: FormatRow,
        *,
        dimension: int | None = None,
    ) -> None:
        """Write results as they arrive; `format_row` returns table rows of a result."""
        if self._output is None:
            self._print(results, titles, format_row)
            return
        writer = make_writer(self._output.final.name, self._full_schema(schema), dimension)
        with self._output as output:
            output.start(writer)
            for chunk in results:
                records = [record for record, _ in chunk]
                output.append(writer.encode(records), len(records), self._consumed.hexdigest())
            output.finish()

    def _print(self, results: Iterable[list[Result]], titles: Sequence[str], format_row: FormatRow) -> None:
        table, jsonl = TableWriter(titles), JsonlWriter()
        for chunk in results:
            if self._args.json:
                text = jsonl.encode([record for record, _ in chunk]).decode("utf-8")
            else:
                text = table.text(row for record, item in chunk for row in format_row(record, item))
            sys.stdout.write(text)
            sys.stdout.flush()

    def _chunks(self) -> Iterator[list[NumberedItem]]:
        for chunk in chunk_rows(self._items, CHUNK_ROWS, CHUNK_CHARACTERS):
            if self._output is not None:
                self._consumed.update(self._digested(chunk))
            yield chunk

    def _digested(self, chunk: Iterable[NumberedItem]) -> Iterator[str]:
        """Yield everything of the rows that the results depend on."""
        for _, row, item in chunk:
            if isinstance(item, str):
                yield item
            else:
                yield from item
            for key in self._extra:
                yield repr(row.get(key))

    def _skip_done(self, output: ResumableFile) -> None:
        """Skip the rows of an interrupted run, if they are the same as then."""
        left = output.rows
        for rows in chunk_rows(islice(self._items, left), CHUNK_ROWS, CHUNK_CHARACTERS):
            self._consumed.update(self._digested(rows))
            left -= len(rows)
        if output.rows and (left or self._consumed.hexdigest() != output.consumed):
            raise InputError(
                f"{self._table.name} was changed since {output.path} was started: its first {output.rows:,} rows are "
                f"not those of the interrupted run; restore the file, or {START_OVER}"
            )

    def _number_items(self) -> Iterator[NumberedItem]:
        for number, row in enumerate(self._rows, 1):
            texts = tuple(text_cell(self._table, number, row, column) for column in self._columns)
            yield number, row, texts if len(texts) > 1 else texts[0]

    def _full_schema(self, schema: Schema) -> Schema:
        return {"row": int} | dict.fromkeys(self._extra, self._id_type) | schema

    def _row_fields(self, number: int, row: Row) -> Record:
        fields: Record = {"row": number}
        for key in self._extra:
            value = row.get(key)
            if not isinstance(value, str | int | None):
                raise InputError(f"{self._table.name}, row {number}: id {value!r:.40} must be text or an integer")
            fields[key] = value
        return fields

    def _locate_error(self, process: Process, chunk: Sequence[tuple[int, Row, Item]], error: InputError) -> InputError:
        """Return the error with the row that caused it, found by processing each row separately."""
        for number, _, item in chunk:
            try:
                list(process([item]))
            except InputError as cause:
                # The task calls a single row text 0, and arguments are flags here.
                message = re.sub(r"^(text|pair|question|item) 0\b", r"the \1", str(cause))
                message = re.sub(r"\boverflow='(\w+)'", r"--overflow \1", message)
                return InputError(f"{self._table.name}, row {number}: {message}")
        return error


def _model_stamp(model: str | None) -> str | None:
    """Return a hash of the names, sizes and modification times of the files of a model folder."""
    from bertie.checkpoints.hub import is_local_folder

    if not model or not is_local_folder(model):
        return None
    folder = Path(model)
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".safetensors", ".bin", ".json", ".txt"))
    stats = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def result_schema(result: type, **types: FieldType) -> Schema:
    """Return the schema of a result class by its annotations; `types` overrides them."""
    hints = get_type_hints(result)
    return {field.name: types.get(field.name) or _field_type(hints[field.name]) for field in fields(result)}


def _field_type(hint: Any) -> FieldType:
    arguments = [argument for argument in get_args(hint) if argument not in (NoneType, Ellipsis)]
    if is_dataclass(hint) and isinstance(hint, type):
        return result_schema(hint)
    if get_origin(hint) is tuple:
        return [_field_type(arguments[0])]
    return _field_type(arguments[0]) if arguments else hint  # X | None is X: every field is nullable


def read_cells(record: Record) -> tuple[str, int]:
    """Return the cells of `READ_COLUMNS`."""
    return f"{record['tokens_read']}/{record['tokens_total']}", record["windows"]
