"""Find labelled spans in each text: named entities, parts of speech, or any other labels of the model.

With --labels: zero-shot, with any labels and a GLiNER model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bertie.cli.common import (
    UsageError,
    add_column,
    add_head,
    add_input,
    add_model,
    add_output,
    load,
    open_input,
    verb,
)
from bertie.cli.elmo import load_tagger, uses_elmo
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie tag "Ada Lovelace was born in London."
  bertie tag news.jsonl --column body -o entities.jsonl -m dslim/bert-base-NER
  bertie tag "Aspirin eases headaches." --labels medicine,symptom -m urchade/gliner_small-v2.1
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(
        verbs, "tag", "token classification: named entities and other spans, also zero-shot", __doc__, EXAMPLE
    )
    add_input(parser)
    add_column(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument(
        "--aggregation-strategy",
        choices=("average", "first", "max", "simple", "none"),
        default="average",
        help="how the tokens of a word get one label: from their average probabilities (the default), the first token, "
        "or the most confident one (max); simple: label tokens and merge adjacent ones; none: one span per token",
    )
    parser.add_argument("--ignore-labels", default="O", metavar="A,B,…", help="labels to ignore (default: O)")
    parser.add_argument(
        "--labels", metavar="A,B,…", help="zero-shot: find spans with these labels, with a GLiNER model"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="with --labels: minimum score of a span (default: 0.5)"
    )
    parser.add_argument("--nested", action="store_true", help="with --labels: allow nested spans")
    parser.add_argument("--multi-label", action="store_true", help="with --labels: allow several labels per span")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.labels is None and (args.nested or args.multi_label or args.threshold != 0.5):
        raise UsageError("--threshold, --nested and --multi-label need --labels")
    if args.labels is not None and (args.aggregation_strategy != "average" or args.ignore_labels != "O"):
        raise UsageError(
            "--aggregation-strategy and --ignore-labels need a token classification head: leave out --labels"
        )
    table = open_input(args)
    stream = Stream(args, table, [table.column(["text"], args.column, "--column", only=True)])

    from bertie.tasks.results import TaggingResult

    if args.labels is not None:
        work = _by_labels(args)
    elif uses_elmo(args):
        work = _by_elmo(args)
    else:
        work = _by_head(args)

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


def _by_head(args: argparse.Namespace) -> Callable[[list[str]], Iterator[dict[str, Any]]]:
    """Tag with the labels of a head."""
    from bertie.tasks import Tagger

    task = load(Tagger, args)
    options: dict[str, Any] = {"aggregation_strategy": args.aggregation_strategy}
    options["ignore_labels"] = args.ignore_labels.split(",")
    return lambda texts: map(asdict, task.tag_each(texts, **options))


def _by_elmo(args: argparse.Namespace) -> Callable[[list[str]], Iterator[dict[str, Any]]]:
    """Tag with an ELMo tagger."""
    tagger, ignored = load_tagger(args), args.ignore_labels.split(",")
    return lambda texts: map(asdict, tagger.tag_each(texts, ignore_labels=ignored))


def _by_labels(args: argparse.Namespace) -> Callable[[list[str]], Iterator[dict[str, Any]]]:
    """Tag with the labels given by --labels."""
    from bertie.tasks import ZeroShotTagger

    task = load(ZeroShotTagger, args)
    labels = [label.strip() for label in args.labels.split(",") if label.strip()]
    options: dict[str, Any] = {"threshold": args.threshold, "flat": not args.nested, "multi_label": args.multi_label}
    task.options(labels, **options)  # raises if they are invalid
    return lambda texts: map(asdict, task.tag_each(texts, labels, **options))
