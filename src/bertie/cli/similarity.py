"""Say how alike texts are: each to each of a few, or the two of each pair in a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    add_column,
    add_input,
    add_model,
    add_output,
    add_pair,
    load,
    open_input,
    text_columns,
    verb,
)
from bertie.cli.stream import READ_COLUMNS, READ_SCHEMA, Result, Stream, read_cells
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie similar "A cat sat on the mat." "The feline rested on the rug." "Stocks fell."
  bertie similar pairs.csv -o scores.csv -m ./my-model                   # columns: text_a, text_b
"""
MOST = 2000  # texts that are compared each to each


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "similar", "how alike texts are, each to each or pair by pair", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_pair(parser)
    add_model(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    table = open_input(args.items, args.format)
    columns = text_columns(args, table)
    stream = Stream(args, table, columns)
    if len(columns) == 1 and args.resume:
        raise UsageError("--resume is for a file of pairs; texts are compared each to each when all are read")

    import numpy as np

    from bertie.tasks import Embedder

    task = load(Embedder, args)

    def embed(texts: list[str]) -> Iterator[dict[str, Any]]:
        for one in task.embed_each(texts):
            read = {"tokens_total": one.tokens_total, "tokens_read": one.tokens_read, "windows": one.windows}
            yield {"vector": one.vector} | read

    def compare(pairs: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        found = list(embed([text for pair in pairs for text in pair]))
        for one, two in zip(found[::2], found[1::2], strict=True):
            score = float(task.compare(one["vector"][None], two["vector"][None])[0, 0])
            yield {"score": score} | {key: one[key] + two[key] for key in READ_SCHEMA}

    if len(columns) == 2:
        stream.write(
            stream.results(compare),
            {"score": float} | READ_SCHEMA,
            ("row", "score", *READ_COLUMNS, "first", "second"),
            lambda record, pair: [(record["row"], record["score"], *read_cells(record), *pair)],
        )
        return
    found = _few(stream.results(embed), table.name)
    vectors = np.stack([record.pop("vector") for record, _ in found])
    for number, (record, _) in enumerate(found):
        read = {key: record.pop(key) for key in READ_SCHEMA}
        record |= {"scores": task.compare(vectors[number : number + 1], vectors)[0]} | read
    stream.write(
        [found],
        {"scores": [np.float32]} | READ_SCHEMA,
        ("row", *(str(record["row"]) for record, _ in found), "text"),
        lambda record, text: [(record["row"], *(float(one) for one in record["scores"]), text)],
    )


def _few(results: Iterator[list[Result]], name: str) -> list[Result]:
    found: list[Result] = []
    for some in results:
        found += some
        if len(found) > MOST:
            raise InputError(f"{name} has over {MOST:,} texts, too many for each to each; give pairs: text_a, text_b")
    return found
