"""The verb of a task without a module in this package: texts in, one result per text out."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from bertie.cli.common import add_column, add_head, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.stream import READ_COLUMNS, READ_SCHEMA, Stream, read_cells, result_schema
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.tasks.registry import TaskRow


def add_task_verbs(verbs: argparse._SubParsersAction[Any]) -> None:
    """Declare the verbs of tasks in the registry that have no module in this package."""
    for row in registry.TASKS.values():
        if row.verb is not None and row.verb not in verbs.choices:
            add(verbs, row)


def add(verbs: Verbs, row: TaskRow) -> None:
    """Declare the verb of a task."""
    example = (
        f'  bertie {row.verb} "A text." -m ./my-model\n  bertie {row.verb} texts.jsonl -o results.jsonl -m ./my-model\n'
    )
    parser = verb(verbs, str(row.verb), f"run the task {row.name} on each text", None, example)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    add_output(parser)
    parser.set_defaults(run=partial(run, row))


def run(row: TaskRow, args: argparse.Namespace) -> None:
    """Run the task, and write its results."""
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.pipeline.inputs import text_inputs

    task = load(row.task_class, args)
    schema = result_schema(get_type_hints(row.task_class.decode)["return"])
    columns = [name for name in schema if name not in READ_SCHEMA]

    def process(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.run(text_inputs(texts, str(row.verb), None), texts))

    stream.write(
        stream.results(process),
        schema,
        ("row", *columns, *READ_COLUMNS, "text"),
        lambda record, text: [(record["row"], *(record[name] for name in columns), *read_cells(record), text)],
    )
