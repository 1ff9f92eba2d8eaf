"""Fill-mask: predict the masked tokens of each text.

With --score, compute the pseudo-log-likelihood of each text instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    add_column,
    add_head,
    add_input,
    add_model,
    add_output,
    add_top_k,
    load,
    open_input,
    verb,
)
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie fill "Paris is the [MASK] of France."
  bertie fill gaps.txt --top-k 3 -o filled.jsonl -m google-bert/bert-base-uncased
  bertie fill "A cat sat on the mat." --score -m ./my-model
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "fill", "fill-mask: predict masked tokens, or score whole texts", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    add_top_k(parser, 5, "candidates per mask")
    parser.add_argument("--candidates", metavar="A,B,…", help="restrict the predictions to these tokens")
    parser.add_argument(
        "--score", action="store_true", help="compute the pseudo-log-likelihood of each text; no masks needed"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.score and args.candidates is not None:
        raise UsageError("--candidates restricts mask predictions; --score makes none")
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks import MaskedLM
    from bertie.tasks.results import FillMaskResult, PseudoLikelihood

    task = load(MaskedLM, args)
    candidates = None if args.candidates is None else [token for token in args.candidates.split(",") if token]

    def fill(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.fill_each(texts, top_k=args.top_k, candidates=candidates))

    def score(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.pseudo_log_likelihood(texts))

    if args.score:
        stream.write(
            stream.results(score),
            result_schema(PseudoLikelihood),
            ("row", "log-likelihood", "per token", *READ_COLUMNS, "text"),
            lambda record, text: [
                (
                    record["row"],
                    record["log_likelihood"],
                    record["log_likelihood"] / max(1, record["tokens_read"]),
                    *read_cells(record),
                    text,
                )
            ],
        )
        return
    stream.write(
        stream.results(fill),
        result_schema(FillMaskResult),
        ("row", "characters", "token", "score", *READ_COLUMNS, "text"),
        lambda record, text: [
            (
                record["row"],
                f"{mask['start']}-{mask['end']}",
                candidate["text"],
                candidate["score"],
                *read_cells(record),
                text,
            )
            for mask in record["masks"]
            for candidate in mask["candidates"]
        ],
    )
