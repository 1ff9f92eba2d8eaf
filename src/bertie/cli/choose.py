"""Multiple choice: which of several texts fits a context best, with a probability for each.

The context and its choices are arguments, or the columns context and choices of a file, where choices is a list.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_head, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.data.readers import InputTable

EXAMPLE = """  bertie choose "He put the kettle on the stove." "It began to sing." "It flew away." -m ./my-model
  bertie choose questions.jsonl -o chosen.jsonl -m ./my-model            # columns: context, choices
  bertie train choose swag.jsonl -o ./my-model                           # with the column label, the right choice
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "choose", "multiple choice: select the text that fits a context best", __doc__, EXAMPLE)
    what = "a context, then its choices; or a file with the columns context and choices; or - for stdin"
    add_input(parser, "CONTEXT CHOICE CHOICE|FILE|-", what)
    parser.add_argument("--context-column", metavar="NAME", help="column of contexts (default: context or question)")
    parser.add_argument("--choices-column", metavar="NAME", help="column of lists of choices (default: choices)")
    add_model(parser)
    add_head(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    table = open_input(args, "context")
    if table.is_literal:
        table = _literal(args, table)
    columns = [
        table.column(["context", "question"], args.context_column, "--context-column"),
        table.column(["choices"], args.choices_column, "--choices-column"),
    ]
    stream = Stream(args, table, columns, lists=columns[1:])

    from bertie.tasks import Chooser
    from bertie.tasks.results import ChoiceResult

    task = load(Chooser, args)

    def work(items: list[Any]) -> Iterator[dict[str, Any]]:
        questions = [(context, _choices(cell, i)) for i, (context, cell) in enumerate(items)]
        return map(asdict, task.choose_each(questions))

    stream.write(
        stream.results(work),
        result_schema(ChoiceResult),
        ("row", "", "score", *READ_COLUMNS, "choice"),
        lambda record, item: [
            (record["row"], "→" if i == record["index"] else "", score, *read_cells(record), choice)
            for i, (score, choice) in enumerate(zip(record["scores"], _choices(item[1], 0), strict=True))
        ],
    )


def _literal(args: argparse.Namespace, table: InputTable) -> InputTable:
    """The context and the choices from the command line, as a table with one row."""
    context, *choices = args.items
    if len(choices) < 2:
        raise UsageError("a context needs at least two choices: pass them after it, or a file with both")
    row = {"context": context, "choices": choices}
    return replace(table, columns=tuple(row), text_columns=("context",), rows=lambda _: iter([row]))


def _choices(cell: str, row: int) -> list[str]:
    """Parse the choices of a cell, a JSON list; lists in JSONL and Parquet files arrive as JSON."""
    try:
        choices = json.loads(cell)
    except ValueError:
        choices = None
    if isinstance(choices, dict):  # the format of ARC and CommonsenseQA
        choices = choices.get("text")
    if not isinstance(choices, list):
        raise InputError(f"context {row}: choices must be a JSON list of texts, not {cell!r:.60}")
    return choices
