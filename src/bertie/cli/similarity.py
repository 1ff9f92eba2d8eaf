"""Compute the similarity of texts: all pairs of a few texts, or the two texts of each row of a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
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
from bertie.cli.stream import READ_COLUMNS, READ_SCHEMA, Stream, read_cells
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie similarity "A cat sat on the mat." "The feline rested on the rug." "Stocks fell."
  bertie similarity pairs.csv -o scores.csv -m ./my-model                   # columns: text_a, text_b
"""
MAX_TEXTS = 2000  # of a similarity matrix


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "similarity", "compute the similarity of texts: all pairs, or row by row", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_pair(parser)
    add_model(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    table = open_input(args)
    columns = text_columns(args, table)
    if len(columns) == 1 and args.on_error == "null":
        raise UsageError("--on-error null is for a file of pairs; pass --on-error skip")
    stream = Stream(args, table, columns)
    if len(columns) == 1 and args.resume:
        raise UsageError("--resume is for a file of pairs; a similarity matrix needs all texts")
    if len(columns) == 1 and stream.has_more_than(MAX_TEXTS):
        raise InputError(
            f"{table.name} has over {MAX_TEXTS:,} texts, too many for a similarity matrix; pass pairs: text_a, text_b"
        )

    import numpy as np

    from bertie.tasks import Embedder

    task = load(Embedder, args)

    def embed(texts: list[str]) -> Iterator[dict[str, Any]]:
        for result in task.embed_each(texts):
            read = {key: getattr(result, key) for key in READ_SCHEMA}
            yield {"vector": result.vector} | read

    def compare(pairs: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
        embedded = list(embed([text for pair in pairs for text in pair]))
        for a, b in zip(embedded[::2], embedded[1::2], strict=True):
            score = float(task.compare(a["vector"][None], b["vector"][None])[0, 0])
            yield {"score": score} | {key: a[key] + b[key] for key in READ_SCHEMA}

    if len(columns) == 2:
        stream.write(
            stream.results(compare),
            {"score": float} | READ_SCHEMA,
            ("row", "score", *READ_COLUMNS, "first", "second"),
            lambda record, pair: [(record["row"], record["score"], *read_cells(record), *pair)],
        )
        return
    results = list(chain.from_iterable(stream.results(embed)))
    vectors = np.stack([record.pop("vector") for record, _ in results])
    for number, (record, _) in enumerate(results):
        read = {key: record.pop(key) for key in READ_SCHEMA}
        record |= {"scores": task.compare(vectors[number : number + 1], vectors)[0]} | read
    stream.write(
        [results],
        {"scores": [np.float32]} | READ_SCHEMA,
        ("row", *(str(record["row"]) for record, _ in results), "text"),
        lambda record, text: [(record["row"], *(float(score) for score in record["scores"]), text)],
    )
