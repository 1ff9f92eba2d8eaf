"""Tokenize texts, and count the windows that the model needs for them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    add_column,
    add_input,
    add_model,
    add_output,
    add_pair,
    model_name,
    open_input,
    text_columns,
    verb,
)
from bertie.cli.stream import READ_SCHEMA, Stream
from bertie.errors import NotFoundError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie tokenize "A cat sat on the mat."
  bertie tokenize corpus.txt.zst -o tokens.parquet -m ./my-model
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "tokenize", "tokenize texts: token ids, tokens and offsets", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_pair(parser)
    add_model(parser, overflow=False)
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb; the weights are not loaded."""
    table = open_input(args)
    stream = Stream(args, table, text_columns(args, table))

    import numpy as np

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.tasks.decoding import read_counts
    from bertie.text.encoding import Encodings
    from bertie.text.windows import windows

    checkpoint = Checkpoint.inspect(model_name(args), revision=args.revision)
    tokenizer, max_length = checkpoint.tokenizer, checkpoint.max_length
    if tokenizer is None:
        raise NotFoundError(f"{checkpoint.source} has no tokenizer")

    coverage = tokenizer.coverage

    def work(items: list[Any]) -> Iterator[dict[str, Any]]:
        for item, encoding in zip(items, tokenizer.encode_batch(items), strict=True):
            parts = windows(encoding, item if isinstance(item, tuple) else (item,), max_length)
            flat = Encodings(encoding.ids, encoding.segments, np.array([len(encoding)]), int(encoding.special.sum()))
            unknown, other = coverage.count_unknown(flat), coverage.count_non_english(flat)
            yield {
                "ids": encoding.ids.tolist(),
                "tokens": [tokenizer.token(int(i)) for i in encoding.ids],
                "offsets": encoding.offsets.tolist(),
                **read_counts(parts),
                "tokens_unknown": 0 if unknown is None else int(unknown[0]),
                "tokens_non_english": 0 if other is None else int(other[0]),
            }

    stream.write(
        stream.results(work),
        {"ids": [int], "tokens": [str], "offsets": [[int]]} | READ_SCHEMA,
        ("row", "token", "id", "characters", "windows"),
        lambda record, item: [
            (record["row"], token, number, f"{start}-{end}", record["windows"])
            for token, number, (start, end) in zip(record["tokens"], record["ids"], record["offsets"], strict=True)
        ],
    )
