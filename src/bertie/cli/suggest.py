"""Suggest which unlabelled texts to label next.

Active learning. With a trained classifier or tagger (-m), suggest texts that it is uncertain about and that differ from
each other; without one, or with a model that only embeds, typical texts of the largest clusters. The output has an
empty column label to fill in, for `bertie train`. Pass the texts that are already labelled with --labelled, so that
different ones are suggested.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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
from bertie.cli.stream import Stream
from bertie.data.readers import open_table, text_cell

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie suggest unlabelled.csv -k 50 -o to-label.csv                # nothing is labelled yet
  bertie suggest unlabelled.csv -m ./mood --labelled train.csv -k 50 -o to-label.csv
  bertie suggest sentences.txt -m ./my-tagger -k 20 --json
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "suggest", "suggest which unlabelled texts to label next", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    add_top_k(parser, 20, "number of texts to suggest")
    parser.add_argument("--labelled", metavar="FILE", help="texts that are already labelled")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the clustering (default: 0)")
    add_output(parser)
    parser.set_defaults(run=run)


def _labelled_texts(name: str | None, column: str | None) -> list[str]:
    if name is None:
        return []
    table = open_table(name)
    chosen = table.column(["text"], column if column in table.columns else None, "--column", only=True)
    return [text_cell(table, number, row, chosen) for number, row in enumerate(table.rows([chosen]), 1)]


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.top_k < 1:
        raise UsageError(f"-k {args.top_k} must be at least 1")
    table = open_input(args)
    column = table.column(["text"], args.column, "--column", only=True)
    stream = Stream(args, table, [column])
    if args.resume:
        raise UsageError("suggest does not support --resume: it selects among all texts")
    known = _labelled_texts(args.labelled, column)

    from bertie.tasks import Embedder, Tagger
    from bertie.tasks.suggest import embedder_of, predictor_of, score_texts, select

    head, args.head = args.head, None  # an embedder has none
    task = predictor_of(load(Embedder, args), head)

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        return ({"candidate": candidate} for candidate in score_texts(task, texts))

    results = [result for chunk in stream.results(work) for result in chunk]
    vectors = [candidate.vector for candidate in score_texts(embedder_of(task), known)]
    candidates = [record.pop("candidate") for record, _ in results]
    labelled = list(zip(known, vectors, strict=True))
    fields = {} if isinstance(task, Tagger) else {"label": None}
    chosen = []
    for suggestion in select(candidates, args.top_k, labelled=labelled, seed=args.seed):
        record, text = results[suggestion.index]
        values = {"text": suggestion.text} | fields | {"score": suggestion.score, "reason": suggestion.reason}
        chosen.append((record | values, text))
    stream.write(
        [chosen],
        {"text": str} | dict.fromkeys(fields, str) | {"score": float, "reason": str},
        ("row", "score", "reason", "text"),
        lambda record, text: [(record["row"], record["score"], record["reason"], text)],
    )
