"""From rows to results to an output, a chunk at a time: the middle of every verb."""

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
from bertie.cli.common import UsageError, absolute
from bertie.data.journal import ResumableFile
from bertie.data.progress import Progress
from bertie.data.readers import STDIN, Row, Table, chunk_rows, text_cell
from bertie.data.writers import FieldType, JsonlWriter, Record, Schema, TableWriter, check_output_name, make_writer
from bertie.errors import InputError

# A chunk is one call of the task. The batches within it depend on it alone, and a run can only be gone on with between
# two chunks: so the same batches are formed wherever it stopped, and the last bit of a result is the same.
ROWS_A_CHUNK = 1024
CHARACTERS_A_CHUNK = 1 << 20

# What every result says of how much of its text was read, and how a table shows it.
READING: Schema = {"tokens_total": int, "tokens_read": int, "windows": int}
READ = ("tokens", "windows")

Item = Any  # a text, or a tuple of two
Result = tuple[Record, Item]
Work = Callable[[list[Any]], Iterable[Record]]
Show = Callable[[Record, Any], Iterable[Sequence[object]]]


class Stream:
    """A table on its way to an output. Making it checks all that can be checked before the model is loaded."""

    def __init__(
        self, args: argparse.Namespace, table: Table, columns: Sequence[str], *, vectors: bool = False
    ) -> None:
        self._args, self._table, self._columns = args, table, columns
        self._extra = ["id"] if "id" in table.columns and "id" not in columns else []
        self._part: ResumableFile | None = None
        name = args.output if args.output != STDIN else None
        if name is not None:
            check_output_name(name, vectors=vectors)
            self._part = ResumableFile(Path(name), self._asked(), resume=args.resume, overwrite=args.overwrite)
        elif args.resume or args.overwrite:
            raise UsageError("--resume and --overwrite are about an output file; name it with -o")
        rows = table.rows([*columns, *self._extra])
        first = next(rows)
        self._rows = chain([first], rows)
        # Of the very first row, wherever this run begins.
        self._id_kind = int if isinstance(first.get("id"), int) else str

    def _asked(self) -> dict[str, Any]:
        """All that the results depend on."""
        rest = {
            key: value
            for key, value in vars(self._args).items()
            if key not in ("run", "items", "model", "output", "json", "resume", "overwrite")
        }
        items = [absolute(item) for item in self._args.items]
        return {
            "bertie": __version__,
            "model": absolute(self._args.model),
            "model_files": _stamp(self._args.model),
            "input": items,
            "input_size": self._table.size,
            **rest,
        }

    def results(self, work: Work) -> Iterator[list[Result]]:
        """The record and the item of each row, in chunks. `work` is called once a chunk."""
        list(work([]))  # what is wrong with the options is not the first row's fault
        rows = self._items()
        skip = 0 if self._part is None else self._part.rows
        watched = self._part is None and sys.stdout.isatty()  # the results themselves show how far it is
        progress = Progress(self._args.verb, self._table.fraction, before=skip)
        with nullcontext() if watched else progress:
            for chunk in chunk_rows(islice(rows, skip, None), ROWS_A_CHUNK, CHARACTERS_A_CHUNK):
                try:
                    done = list(work([item for _, _, item in chunk]))
                except InputError as error:
                    raise self._blamed(work, chunk, error) from None
                yield [
                    (self._named(number, row) | record, item)
                    for (number, row, item), record in zip(chunk, done, strict=True)
                ]
                if not watched:
                    progress.update(len(chunk))

    def write(
        self,
        results: Iterable[list[Result]],
        schema: Schema,
        titles: Sequence[str],
        show: Show,
        *,
        dimension: int | None = None,
    ) -> None:
        """Write results as they come. `show` makes a result the rows of a table for people."""
        if self._part is None:
            self._print(results, titles, show)
            return
        writer = make_writer(self._part.final.name, self._whole(schema), dimension)
        with self._part as part:
            part.start(writer)
            for some in results:
                part.append(writer.body([record for record, _ in some]), len(some))
            part.finish()

    def _print(self, results: Iterable[list[Result]], titles: Sequence[str], show: Show) -> None:
        table, jsonl = TableWriter(titles), JsonlWriter()
        for some in results:
            if self._args.json:
                text = jsonl.body([record for record, _ in some]).decode("utf-8")
            else:
                text = table.text(row for record, item in some for row in show(record, item))
            sys.stdout.write(text)
            sys.stdout.flush()

    def _items(self) -> Iterator[tuple[int, Row, Item]]:
        for number, row in enumerate(self._rows, 1):
            texts = tuple(text_cell(self._table, number, row, column) for column in self._columns)
            yield number, row, texts if len(texts) > 1 else texts[0]

    def _whole(self, schema: Schema) -> Schema:
        return {"row": int} | dict.fromkeys(self._extra, self._id_kind) | schema

    def _named(self, number: int, row: Row) -> Record:
        named: Record = {"row": number}
        for key in self._extra:
            value = row.get(key)
            if not isinstance(value, str | int | None):
                raise InputError(f"{self._table.name}, row {number}: id {value!r:.40} must be text or a whole number")
            named[key] = value
        return named

    def _blamed(self, work: Work, chunk: Sequence[tuple[int, Row, Item]], error: InputError) -> InputError:
        """The same error with the row that it comes from, found by asking for each row alone."""
        for number, _, item in chunk:
            try:
                list(work([item]))
            except InputError as own:
                # Of one row alone the task says that it is text 0; and its options are flags here.
                said = re.sub(r"^(text|pair|question|item) 0\b", r"the \1", str(own))
                said = re.sub(r"\blong='(\w+)'", r"--overflow \1", said)
                return InputError(f"{self._table.name}, row {number}: {said}")
        return error


def _stamp(model: str | None) -> str | None:
    """Of a folder: another one if its files change, as when the model in it is trained on."""
    folder = Path(model or "")
    if not model or not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.suffix in (".safetensors", ".bin", ".json", ".txt"))
    facts = [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def schema_of(result: type, **given: FieldType) -> Schema:
    """The fields of a result and their kinds, from its annotations; `given` are those that these do not tell."""
    hints = get_type_hints(result)
    return {one.name: given.get(one.name) or _kind(hints[one.name]) for one in fields(result)}


def _kind(hint: Any) -> FieldType:
    inner = [one for one in get_args(hint) if one not in (NoneType, Ellipsis)]
    if is_dataclass(hint) and isinstance(hint, type):
        return schema_of(hint)
    if get_origin(hint) is tuple:
        return [_kind(inner[0])]
    return _kind(inner[0]) if inner else hint  # X | None is X: every kind may have no value


def read_cells(record: Record) -> tuple[str, int]:
    """The cells under `READ`."""
    return f"{record['tokens_read']}/{record['tokens_total']}", record["windows"]
