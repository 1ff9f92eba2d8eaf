"""Find labelled spans in each text: named entities, parts of speech, or any other labels of the model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import add_column, add_head, add_input, add_model, add_output, load, open_input, verb
from bertie.cli.elmo import load_tagger, uses_elmo
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie tag "Ada Lovelace was born in London."
  bertie tag news.jsonl --column body -o entities.jsonl -m dslim/bert-base-NER
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "tag", "token classification: named entities and other spans", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument(
        "--aggregation-strategy",
        choices=("average", "first", "max", "simple", "none"),
        default="average",
        help="how the tokens of a word get one label: by their average probabilities (the default), by the first token "
        "or by the most confident one (max); simple: label tokens and join adjacent ones; none: one span per token",
    )
    parser.add_argument("--ignore-labels", default="O", metavar="A,B,…", help="labels that mark no span (default: O)")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks import Tagger
    from bertie.tasks.results import TaggingResult

    elmo = load_tagger(args) if uses_elmo(args) else None
    task = load(Tagger, args) if elmo is None else None

    def work(texts: list[str]) -> Iterator[dict[str, Any]]:
        ignore_labels = args.ignore_labels.split(",")
        if elmo is not None:
            return map(asdict, elmo.tag_each(texts, ignore_labels=ignore_labels))
        assert task is not None
        return map(
            asdict,
            task.tag_each(texts, aggregation_strategy=args.aggregation_strategy, ignore_labels=ignore_labels),
        )

    stream.write(
        stream.results(work),
        result_schema(TaggingResult),
        ("row", "label", "score", "characters", *READ_COLUMNS, "span"),
        lambda record, text: [
            (
                record["row"],
                span["label"],
                span["score"],
                f"{span['start']}-{span['end']}",
                *read_cells(record),
                span["text"],
            )
            for span in record["spans"]
        ],
    )
