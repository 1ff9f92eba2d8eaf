"""Stream rows through a task into an output, one chunk at a time: the core of every verb."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from bertie._version import __version__
from bertie.cli.common import UsageError, absolute_path
from bertie.data.journal import START_OVER, ResumableFile, RowDigest
from bertie.data.progress import Progress
from bertie.data.readers import STDIN, InputTable, MalformedRow, Row, chunk_rows, text_cell
from bertie.data.terminal import style
from bertie.data.writers import FieldType, JsonlWriter, Record, Schema, TableWriter, check_output_name, make_writer
from bertie.errors import InputError
from bertie.pipeline.read_counts import READ_COUNTS

# A chunk is one call of the task. Its batches depend on the chunk alone, and a run resumes between
# two chunks: the batches are the same wherever a run was interrupted, and results are bit-identical.
CHUNK_ROWS = 1024
CHUNK_CHARACTERS = 1 << 20
MAX_RETRIES = 8  # of a chunk without the row that failed; then each row is tried separately
MAX_LISTED = 5  # errors of rows
ERROR = "error"  # the field of a row without a result

READ_SCHEMA: Schema = dict.fromkeys(READ_COUNTS, int)
READ_COLUMNS = ("tokens", "windows")  # in a terminal

# Arguments that results do not depend on, or that the journal stores in another form.
NOT_SETTINGS = (*("run", "cleanup", "items", "model", "output", "json", "resume", "overwrite", "quiet", "verbose"),)

Item = Any  # a text, or a pair of texts
NumberedItem = tuple[int, Row, Item]
Result = tuple[Record, Item]
Process = Callable[[list[Any]], Iterable[Record]]
FormatRow = Callable[[Record, Any], Iterable[Sequence[object]]]


class Stream:
    """Streams a table into an output. The constructor checks everything that needs no model."""

    def __init__(
        self,
        args: argparse.Namespace,
        table: InputTable,
        columns: Sequence[str],
        *,
        embeddings: bool = False,
        lists: Sequence[str] = (),  # columns whose cells may be lists, which are passed on as JSON
        has_on_error: bool = True,  # whether the verb has the flag --on-error
    ) -> None:
        self._args, self._table, self._columns, self._lists = args, table, columns, lists
        self._has_on_error = has_on_error
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
        begin = [next(rows)]
        while isinstance(begin[-1], MalformedRow):
            begin.append(next(rows))
        self._rows = chain(begin, rows)
        # The type of the first readable row of the input, even if this run starts at a later one.
        self._id_type = int if isinstance(begin[-1].get("id"), int) else str
        self._schema: Schema = {}  # of the results
        self._cell_errors: dict[int, str] = {}  # by row
        self._failures = _Failures(args.on_error)
        self._chunk_rows = 0
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

    def has_more_than(self, limit: int) -> bool:
        """Whether there are more than `limit` items to process; reads that many rows ahead."""
        ahead, count = [], 0
        for entry in self._items:
            ahead.append(entry)
            empty = self._args.skip_empty and _is_empty(entry[2])
            count += entry[0] not in self._cell_errors and not empty
            if count > limit:
                break
        self._items = chain(ahead, self._items)
        return count > limit

    def results(self, process: Process) -> Iterator[list[Result]]:
        """Yield chunks of (record, item) pairs. `process` is called once per chunk, or again without failing rows."""
        list(process([]))  # reports invalid options without blaming the first row
        skip = 0 if self._output is None else self._output.rows
        interactive = self._output is None and sys.stdout.isatty()  # the results themselves show the progress
        fraction: float | None = self._table.fraction() if skip else 0.0
        # A few texts on the command line need no progress bar, even if the first of them takes a second.
        show = None if self._table.is_literal else True
        progress = Progress(self._args.verb, lambda: fraction, initial=skip, show=show)
        with nullcontext() if interactive else progress:
            for chunk in self._chunks():
                yield self._process(process, chunk)
                fraction = self._table.fraction()
                if not interactive:
                    progress.update(len(chunk))
        self._failures.report()

    def _process(self, process: Process, chunk: Sequence[NumberedItem]) -> list[Result]:
        """The results of a chunk; rows that cannot be processed are left out, or have an error instead."""
        rows = []
        for entry in chunk:
            if self._args.skip_empty and entry[0] not in self._cell_errors and _is_empty(entry[2]):
                self._failures.empty += 1
            else:
                rows.append(entry)
        good = [entry for entry in rows if entry[0] not in self._cell_errors]
        records: dict[int, Record] = {}
        for attempt in range(len(good) + 1):
            try:
                records = {
                    entry[0]: record for entry, record in zip(good, process([item for _, _, item in good]), strict=True)
                }
                break
            except InputError as error:
                if self._args.on_error == "stop":
                    raise self._locate_error(process, good, error) from None
                good = self._without_failing(process, good, error, probe=attempt >= MAX_RETRIES)
        results, nothing = [], {ERROR: None} if self._args.on_error == "null" else {}
        for number, row, item in rows:
            message = self._cell_errors.pop(number, None)
            fields = self._row_fields(number, row)
            if message is None:
                results.append((fields | records[number] | nothing, item))
                continue
            self._failures.add(message)
            if self._args.on_error == "null":
                results.append((fields | dict.fromkeys(self._schema) | {ERROR: message}, item))
        return results

    def _without_failing(
        self, process: Process, rows: Sequence[NumberedItem], error: InputError, *, probe: bool
    ) -> list[NumberedItem]:
        """Remove the row that the error names; with `probe`, all rows that fail when processed separately."""
        named = re.match(r"(?:text|pair|question|item|context) (\d+)\b", str(error))
        suspects = rows if probe or named is None else [rows[int(named[1])]]
        failed = len(self._cell_errors)
        for number, _, item in suspects:
            try:
                list(process([item]))
            except InputError as cause:
                self._cell_errors[number] = self._describe(number, cause)
        if len(self._cell_errors) == failed:
            raise error  # not caused by a row
        return [entry for entry in rows if entry[0] not in self._cell_errors]

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
        if self._args.on_error == "null":
            schema = {**schema, ERROR: str}
        self._schema.update(schema)
        if self._output is None:
            self._print(results, titles, format_row)
            return
        writer = make_writer(self._output.final.name, self._full_schema(schema), dimension)
        with self._output as output:
            output.start(writer)
            for chunk in results:
                records = [record for record, _ in chunk]
                output.append(writer.encode(records), self._chunk_rows, self._consumed.hexdigest())
            output.finish()

    def store_vectors(self, results: Iterable[list[Result]], dimension: int) -> Any:
        """Write embeddings to the partial file, and memory-map it (n, dimension); `remove_stored` deletes it."""
        import numpy as np

        assert self._output is not None
        writer = make_writer(self._output.final.name, {}, dimension)
        with self._output as output:
            output.start(writer)
            for chunk in results:
                data = writer.encode([record for record, _ in chunk])
                output.append(data, self._chunk_rows, self._consumed.hexdigest())
            output.commit()
        shape = (output.rows, dimension)
        return np.memmap(output.path, "<f4", "r", offset=len(writer.header()), shape=shape)

    def remove_stored(self) -> None:
        """Delete the file that `store_vectors` wrote."""
        assert self._output is not None
        self._output.journal.unlink(missing_ok=True)
        self._output.path.unlink(missing_ok=True)

    def _print(self, results: Iterable[list[Result]], titles: Sequence[str], format_row: FormatRow) -> None:
        table, jsonl = TableWriter(titles), JsonlWriter()
        for number, chunk in enumerate(results):
            first = number == 0
            if self._args.json:
                text = jsonl.encode([record for record, _ in chunk]).decode("utf-8")
            else:
                good = [result for result in chunk if result[0].get(ERROR) is None]
                text = table.text(row for record, item in good for row in format_row(record, item))
                if first:
                    title, newline, rest = text.partition("\n")
                    text = style(title, "bold") + newline + rest
            sys.stdout.write(text)
            sys.stdout.flush()

    def _chunks(self) -> Iterator[list[NumberedItem]]:
        for chunk in chunk_rows(self._items, CHUNK_ROWS, CHUNK_CHARACTERS):
            if self._output is not None:
                self._consumed.update(self._digested(chunk))
            self._chunk_rows = len(chunk)
            yield chunk

    def _digested(self, chunk: Iterable[NumberedItem]) -> Iterator[str]:
        """Yield the cells of the rows that the results depend on."""
        for _, row, item in chunk:
            if isinstance(item, str):
                yield item
            else:
                yield from item
            for key in self._extra:
                yield repr(row.get(key))

    def _skip_done(self, output: ResumableFile) -> None:
        """Skip the rows that an interrupted run has processed; raise an error if they have changed."""
        left = output.rows
        for rows in chunk_rows(islice(self._items, left), CHUNK_ROWS, CHUNK_CHARACTERS):
            self._consumed.update(self._digested(rows))
            left -= len(rows)
        if output.rows and (left or self._consumed.hexdigest() != output.consumed):
            raise InputError(
                f"{self._table.name} has changed since {output.path} was started: its first {output.rows:,} rows "
                f"differ from those of the interrupted run; restore the file, or {START_OVER}"
            )

    def _number_items(self) -> Iterator[NumberedItem]:
        for number, row in enumerate(self._rows, 1):
            texts = tuple(self._text(number, row, column) for column in self._columns)
            yield number, row, texts if len(texts) > 1 else texts[0]

    def _text(self, number: int, row: Row, column: str) -> str:
        """The text of a cell; with --skip-empty, an empty text if it is missing."""
        value = row.get(column)
        if self._args.skip_empty and not isinstance(row, MalformedRow) and (value is None or value != value):
            return ""
        if column in self._lists and isinstance(value, list | dict):
            return json.dumps(value, ensure_ascii=False)
        try:
            return text_cell(self._table, number, row, column)
        except InputError as error:
            if self._args.on_error == "stop":
                advice = "; --on-error skip leaves such rows out" if self._has_on_error else ""
                raise InputError(f"{error}{advice}") from None
            self._cell_errors[number] = str(error)
            return ""

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

    def _locate_error(self, process: Process, chunk: Sequence[NumberedItem], error: InputError) -> InputError:
        """Return the error with the row that caused it, found by processing each row separately."""
        for number, _, item in chunk:
            try:
                list(process([item]))
            except InputError as cause:
                return InputError(self._describe(number, cause))
        return error

    def _describe(self, number: int, error: InputError) -> str:
        """The message of an error with its row. The task calls a single row text 0, and arguments are flags here."""
        message = re.sub(r"^(text|pair|question|item|context) 0\b", r"the \1", str(error))
        message = re.sub(r"\boverflow='(\w+)'", r"--overflow \1", message)
        return f"{self._table.name}, row {number}: {message}"


@dataclass
class _Failures:
    """Rows that were left out, or have no result."""

    on_error: str
    empty: int = 0
    failed: int = 0

    def add(self, message: str) -> None:
        """Count a row, and print the first few messages."""
        self.failed += 1
        if self.failed <= MAX_LISTED:
            print(f"bertie: {message}", file=sys.stderr)

    def report(self) -> None:
        """Print the counts."""
        what = "skipped" if self.on_error == "skip" else "without a result"
        counts = [f"rows without text: {self.empty:,} skipped"] if self.empty else []
        counts += [f"rows with errors: {self.failed:,} {what}"] if self.failed else []
        if counts:
            print(f"bertie: {'; '.join(counts)}", file=sys.stderr)


def _is_empty(item: Item) -> bool:
    return not item.strip() if isinstance(item, str) else not all(text.strip() for text in item)


def _model_stamp(model: str | None) -> str | None:
    """Return a hash of the names, sizes and modification times of the files of a model folder."""
    from bertie.checkpoints.hub import is_local_folder

    if not model or not is_local_folder(model):
        return None
    folder = Path(model)
    files = sorted(
        file for file in folder.rglob("*") if file.suffix in (".safetensors", ".bin", ".json", ".txt", ".hdf5", ".h5")
    )
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
