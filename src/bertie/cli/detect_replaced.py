"""Replaced-token detection: find words that look replaced, with an ELECTRA or DeBERTa-v3 discriminator.

The table lists words with a probability of at least --threshold; files and --json contain all words and tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_column, add_head, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie detect-replaced "The chef ate the meal for his guests." -m google/electra-small-discriminator
  bertie detect-replaced drafts.txt -o words.jsonl -m ./my-electra
  bertie detect-replaced "A text." --threshold 0 -m ./my-electra          # every word
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "detect-replaced", "replaced-token detection: find words that look replaced", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        metavar="P",
        help="minimum probability of words in the table (default: 0.5)",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if not 0 <= args.threshold <= 1:
        raise UsageError(f"--threshold {args.threshold:g} must be a probability, from 0 to 1")
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks import ReplacedTokenDetector
    from bertie.tasks.results import ReplacedTokenResult

    task = load(ReplacedTokenDetector, args)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.detect_each(texts))

    stream.write(
        stream.results(work),
        result_schema(ReplacedTokenResult),
        ("row", "characters", "word", "score", *READ_COLUMNS),
        lambda record, text: [
            (record["row"], f"{word['start']}-{word['end']}", word["text"], word["score"], *read_cells(record))
            for word in record["words"]
            if word["score"] >= args.threshold
        ],
    )
