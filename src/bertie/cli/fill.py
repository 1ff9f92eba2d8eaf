"""Find words for the masks in each text; with --score, say how likely each text is instead."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError, add_column, add_head, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie fill "Paris is the [MASK] of France."
  bertie fill gaps.txt --top-k 3 -o filled.jsonl -m google-bert/bert-base-uncased
  bertie fill "A cat sat on the mat." --score -m ./my-model
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "fill", "words for masked places, or how likely a text is", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument("--top-k", type=int, default=5, metavar="N", help="candidates for each mask (5)")
    parser.add_argument("--candidates", metavar="A,B,…", help="choose among these only")
    parser.add_argument("--score", action="store_true", help="the pseudo-log-likelihood of each text; no masks needed")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    if args.score and args.candidates is not None:
        raise UsageError("--candidates are for masks; --score fills none")
    table = open_input(args.items, args.format)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks import MaskedLM
    from bertie.tasks.results import FillMaskResult, PseudoLikelihood

    task = load(MaskedLM, args)
    candidates = None if args.candidates is None else [one for one in args.candidates.split(",") if one]

    def fill(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.fill_each(texts, top_k=args.top_k, candidates=candidates))

    def score(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.pseudo_log_likelihood(texts))

    if args.score:
        stream.write(
            stream.results(score),
            result_schema(PseudoLikelihood),
            ("row", "log-likelihood", "a token", *READ_COLUMNS, "text"),
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
            (record["row"], f"{mask['start']}-{mask['end']}", one["text"], one["score"], *read_cells(record), text)
            for mask in record["masks"]
            for one in mask["candidates"]
        ],
    )
