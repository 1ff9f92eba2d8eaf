"""Classify texts or pairs of texts.

With --labels: zero-shot classification, by natural language inference (NLI), embedding similarity, or both.
"""

from __future__ import annotations

import argparse
import sys
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
  bertie classify "The plot is thin, but the acting is superb." --explain
  bertie classify pairs.tsv --text-a premise --text-b hypothesis -o labels.csv -m ./my-nli-model
  bertie classify "The match ended in a draw." --labels sports,politics -m FacebookAI/roberta-large-mnli
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "classify", "classify texts or pairs of texts, also zero-shot", __doc__, EXAMPLE)
    add_input(parser)
    add_column(parser)
    add_pair(parser)
    add_model(parser)
    add_head(parser)
    parser.add_argument(
        "--window-size",
        type=_window_size,
        metavar="N|sentence",
        help="split texts into windows of at most N tokens, or into sentences (default: the model's maximum length)",
    )
    parser.add_argument(
        "--window-pooling",
        choices=("mean", "confidence", "max"),
        default="mean",
        help="how the predictions of windows are combined: mean of log-probabilities (the default), mean weighted by "
        "confidence, or maximum probability of each label",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="leave-one-out attribution: how much the label's probability drops without each word (group of words)",
    )
    parser.add_argument("--labels", metavar="A,B,…", help="zero-shot classification with these labels")
    parser.add_argument(
        "--method",
        choices=("auto", "entailment", "embedding", "combined"),
        default="auto",
        help="with --labels: entailment (NLI), embedding similarity, or both combined (default: embedding, or "
        "entailment if the model has no sentence embeddings or --head is given)",
    )
    parser.add_argument("--template", help="with --labels: hypothesis template, with {} for the label")
    parser.add_argument(
        "--multi-label", action="store_true", help="with --labels: score each label independently; several may apply"
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Run the verb."""
    if args.labels is None and (args.template is not None or args.multi_label or args.method != "auto"):
        raise UsageError("--template, --multi-label and --method need --labels")
    if args.labels is not None and (args.window_size is not None or args.window_pooling != "mean"):
        raise UsageError("--window-size and --window-pooling need a classification head: leave out --labels")
    if args.explain and (args.labels is not None or args.window_size is not None or args.window_pooling != "mean"):
        raise UsageError(
            "--explain needs a classification head: leave out --labels, --window-size and --window-pooling"
        )
    table = open_input(args)
    columns = text_columns(args, table)
    if args.labels is not None and len(columns) > 1:
        raise UsageError("--labels takes single texts, but these are pairs; select the text column with --column")
    stream = Stream(args, table, columns)

    from bertie.tasks import Classifier, ZeroShot
    from bertie.tasks.results import ClassificationResult

    if args.labels is None:
        task = load(Classifier, args)
        if len(columns) > 1 and args.head is None:
            task = _for_pairs(task, built_in=args.model is None)
        if args.explain:
            _write_words(stream, task)
            return
        labels = list(task.info.labels.values())

        def work(texts: list[Any]) -> Iterator[dict[str, Any]]:
            sizes: dict[str, Any] = {"window_size": args.window_size, "window_pooling": args.window_pooling}
            return map(asdict, task.classify_each(texts, **sizes))
    else:
        zero = load(ZeroShot, args)
        labels = [label.strip() for label in args.labels.split(",") if label.strip()]
        options: dict[str, Any] = {"template": args.template, "multi_label": args.multi_label, "method": args.method}
        zero.resolve_method(args.method)  # raises if the model lacks what it needs

        def work(texts: list[Any]) -> Iterator[dict[str, Any]]:
            return map(asdict, zero.classify_each(texts, labels, **options))

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
    if args.labels is not None and len(labels) == 1 and not args.multi_label and not args.quiet:
        print("bertie: --labels has one label, scored on its own; separate several with commas", file=sys.stderr)


def _write_words(stream: Stream, task: Classifier) -> None:
    """Write the words of each text with their weights for its label."""
    from bertie.tasks.results import AttributionResult

    stream.write(
        stream.results(lambda texts: map(asdict, task.attribute(texts))),
        result_schema(AttributionResult),
        ("row", "label", "score", "words", "weight", *READ_COLUMNS),
        lambda record, item: [
            (
                record["row"],
                record["label"],
                record["score"],
                piece["text"].strip(),
                piece["weight"],
                *read_cells(record),
            )
            for piece in record["pieces"]
        ],
    )


def _window_size(text: str) -> int | str:
    """A number of tokens, or sentence."""
    return text if text == "sentence" else int(text)


def _for_pairs(task: Classifier, *, built_in: bool) -> Classifier:
    """Choose the head for natural language inference, which takes pairs."""
    from bertie.tasks.zero_shot import entailment_label

    fitting = [name for name, info in task.checkpoint.heads.items() if entailment_label(info) is not None]
    if built_in and not fitting:
        raise InputError(
            "the built-in model classifies single texts, but these are pairs; choose another model with -m"
        )
    if task.head in fitting or not fitting:
        return task
    if len(fitting) > 1:
        raise InputError(
            f"{task.checkpoint.source} has several heads for this; pass --head with one of {', '.join(fitting)}"
        )
    return type(task)(task.checkpoint, overflow=task.overflow, head=fitting[0])
