"""Classify texts, or pairs of texts; with --labels, into any labels by a model of natural language inference."""

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
    add_pair,
    load,
    open_input,
    text_columns,
    verb,
)
from bertie.cli.stream import READ_COLUMNS, Stream, read_cells, result_schema
from bertie.errors import InputError

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.tasks import Classifier

EXAMPLE = """  bertie classify "A delight from start to finish." "Dull."
  bertie classify pairs.tsv --text-a premise --text-b hypothesis -o labels.csv -m ./my-nli-model
  bertie classify "The match ended in a draw." --labels sports,politics -m FacebookAI/roberta-large-mnli
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "classify", "a label for each text or pair of texts", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_pair(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument("--labels", metavar="A,B,…", help="labels that the model need not have been trained on")
    parser.add_argument("--template", help="with --labels: the sentence to be true, with {} for the label")
    parser.add_argument("--multi", action="store_true", help="with --labels: predict_labelled each label by itself")
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    if args.labels is None and (args.template is not None or args.multi):
        raise UsageError("--template and --multi need --labels")
    table = open_input(args.items, args.format)
    columns = text_columns(args, table)
    if args.labels is not None and len(columns) > 1:
        raise UsageError("--labels are for single texts, and these are pairs; name the column of texts with --column")
    stream = Stream(args, table, columns)

    from bertie.tasks import Classifier, ZeroShot
    from bertie.tasks.results import ClassificationResult

    if args.labels is None:
        task = load(Classifier, args)
        if len(columns) > 1 and args.head is None:
            task = _for_pairs(task, built_in=args.model is None)
        labels = list(task.info.labels.values())

        def work(texts: list[Any]) -> Iterator[dict[str, Any]]:
            return map(asdict, task.classify_each(texts))
    else:
        zero = load(ZeroShot, args)
        labels = [one.strip() for one in args.labels.split(",") if one.strip()]
        options = {} if args.template is None else {"template": args.template}

        def work(texts: list[Any]) -> Iterator[dict[str, Any]]:
            return map(asdict, zero.classify_each(texts, labels, multi=args.multi, **options))

    stream.write(
        stream.results(work),
        result_schema(ClassificationResult, scores=dict.fromkeys(labels, float)),
        ("row", "label", "score", *READ_COLUMNS, "text"),
        lambda record, item: [
            (
                record["row"],
                record["label"],
                record["score"],
                *read_cells(record),
                item if isinstance(item, str) else " | ".join(item),
            )
        ],
    )


def _for_pairs(task: Classifier, *, built_in: bool) -> Classifier:
    """Of several heads, the one that is known to be for pairs: that of natural language inference."""
    from bertie.tasks.zero_shot import entailment_label

    able = [name for name, info in task.checkpoint.heads.items() if entailment_label(info) is not None]
    if built_in and not able:
        raise InputError("the built-in model classifies single texts, and these are pairs; name another with -m")
    if task.head in able or not able:
        return task
    if len(able) > 1:
        raise InputError(
            f"{task.checkpoint.source} has several heads for this; pass --head with one of {', '.join(able)}"
        )
    return type(task)(task.checkpoint, overflow=task.overflow, head=able[0])
