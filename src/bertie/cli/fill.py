"""Fill-mask: predict the masked tokens of each text.

With --every-token, predict each token of a text from all others; with --score, compute only the pseudo-log-likelihood
of the text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from math import exp, log
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
    from bertie.tasks import MaskedLM

EXAMPLE = """  bertie fill "Paris is the [MASK] of France."
  bertie fill gaps.txt --top-k 3 -o filled.jsonl -m google-bert/bert-base-uncased
  bertie fill "I moved to [MASK] last year." --candidates "New York,Paris"
  bertie fill "The river flows threw the city." --every-token
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
    parser.add_argument(
        "--candidates",
        metavar="A,B,…",
        help="rank only these words or phrases; those of several tokens by pseudo-log-likelihood",
    )
    parser.add_argument(
        "--every-token", action="store_true", help="predict every token in turn, from all others; no masks needed"
    )
    parser.add_argument(
        "--score", action="store_true", help="compute the pseudo-log-likelihood of each text; no masks needed"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.score and args.every_token:
        raise UsageError("--every-token and --score are mutually exclusive; --every-token includes the score")
    if (args.score or args.every_token) and args.candidates is not None:
        raise UsageError("--candidates restricts the predictions for masks: leave out --score and --every-token")
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks import MaskedLM
    from bertie.tasks.results import FillMaskResult, PseudoLikelihood

    task = load(MaskedLM, args)
    candidates = (
        None if args.candidates is None else [token.strip() or token for token in args.candidates.split(",") if token]
    )

    def fill(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.fill_each(texts, top_k=args.top_k, candidates=candidates))

    def score(texts: list[str]) -> Iterator[dict[str, Any]]:
        return map(asdict, task.pseudo_log_likelihood(texts))

    if args.every_token:
        _write_tokens(stream, task, args.top_k)
        return
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
        ("row", "characters", "token", "score", *(["log"] if candidates else []), *READ_COLUMNS, "text"),
        lambda record, text: [
            (
                record["row"],
                f"{mask['start']}-{mask['end']}",
                candidate["text"],
                candidate["score"],
                *([log(candidate["score"]) if candidate["score"] else float("-inf")] if candidates else []),
                *read_cells(record),
                text,
            )
            for mask in record["masks"]
            for candidate in mask["candidates"]
        ],
    )


def _write_tokens(stream: Stream, task: MaskedLM, top_k: int) -> None:
    """Write the predictions for every token of each text."""
    from bertie.tasks.results import TokenPredictionResult

    stream.write(
        stream.results(lambda texts: map(asdict, task.predict_tokens(texts, top_k=top_k))),
        result_schema(TokenPredictionResult),
        ("row", "characters", "token", "probability", "rank", "predicted", *READ_COLUMNS),
        lambda record, text: [
            (
                record["row"],
                f"{token['start']}-{token['end']}",
                token["text"],
                exp(token["log_likelihood"]),
                token["rank"],
                ", ".join(candidate["text"].strip() for candidate in token["candidates"]),
                *read_cells(record),
            )
            for token in record["tokens"]
        ],
    )
