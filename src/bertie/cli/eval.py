"""Evaluate a trained model on labelled texts: every metric with its 95% confidence interval.

The model's head determines the task. Labels must be those of the model; if they are names, integers in the file are
their indices, counted from 0, as in Hugging Face datasets. An embedding model without such a head is evaluated on pairs
of texts: by the correlation of its similarities with the column score.

With --beir, evaluate retrieval on a folder in BEIR's format: corpus.jsonl, queries.jsonl and qrels/test.tsv.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bertie.cli.common import (
    UsageError,
    add_model,
    add_rerank,
    add_rerank_weight,
    add_weights,
    check_file_exists,
    model_name,
    select_device,
    verb,
)
from bertie.cli.eval_retrieval import MODES, evaluate_retrieval
from bertie.cli.labelled_input import add_columns, add_resamples, parse_pairs, read_labelled
from bertie.cli.report_output import add_no_baselines, print_scores, report_as_dict, report_table, short_name
from bertie.config import HeadName
from bertie.errors import ExistsError, InputError, NotFoundError
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs
    from bertie.config import HeadInfo
    from bertie.training.finetune.base import AnyTrainable
    from bertie.training.finetune.cheap_baselines import BaselineSettings
    from bertie.training.finetune.comparison import Baseline
    from bertie.training.finetune.data import LabelledDataset

EMBED = "embed"  # the task of models without a head

EXAMPLE = """  bertie eval test.jsonl -m ./my-model
  bertie eval test.csv --columns text=review label=stars -m ./my-model --json | jq .accuracy.value
  bertie eval test.jsonl -m ./my-model --baseline ./the-old-one --train train.jsonl -o report
  bertie eval --beir ./scifact -m ./my-embedder --mode hybrid --reranker ./my-reranker --tune train
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "eval", "evaluate a model on labelled texts, with confidence intervals", __doc__, EXAMPLE)
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="labelled texts (.csv, .tsv, .jsonl, .parquet; .gz, .xz, .zst)"
    )
    add_columns(parser)
    add_model(parser)
    parser.add_argument(
        "--task", choices=registry.trainable(), help="the task, if the model's head does not determine it"
    )
    parser.add_argument("--head", metavar="NAME", help="head to evaluate, if the model has several")
    parser.add_argument("--baseline", metavar="MODEL", help="another model to compare with on the same texts")
    parser.add_argument(
        "--train", metavar="FILE", help="the model's training data, for cheap baselines and leak detection"
    )
    add_resamples(parser)
    add_no_baselines(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="folder to write a report to: report.md, .html and .json")
    parser.add_argument("--overwrite", action="store_true", help="replace the report in that folder")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    group = parser.add_argument_group("retrieval")
    group.add_argument(
        "--beir", metavar="FOLDER", help="folder with corpus, queries and relevance judgments, instead of FILE"
    )
    group.add_argument("--split", metavar="NAME", help="split of the relevance judgments (default: test)")
    group.add_argument("--mode", choices=MODES, help="embeddings (the default), BM25, or both")
    add_rerank(group, "the first 100 documents of a query")
    add_rerank_weight(group)
    add_weights(group)
    group.add_argument("--tune", metavar="SPLIT", help="tune the fusion weights on this split")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Evaluate, and print the scores."""
    if (args.file is None) == (args.beir is None):
        raise UsageError("pass either a FILE of labelled texts or a folder with --beir")
    if args.beir is not None:
        _refuse(args, "--beir evaluates retrieval", "columns", "task", "head", "train", "output")
        evaluate_retrieval(args)
        return
    flags = ("split", "mode", "rerank", "reranker", "rerank_weight", "weights", "tune")
    _refuse(args, "only --beir evaluates retrieval", *flags)
    check_file_exists(args.file)
    model = model_name(args)
    if args.task == EMBED or (args.task is None and _is_embedding_model(model, args)):
        _refuse(args, f"{model} is evaluated by its embeddings", "head", "train", "output")
        _evaluate_embeddings(args, model)
    else:
        _evaluate_labelled(args, model)


def _refuse(args: argparse.Namespace, why: str, *flags: str) -> None:
    for flag in flags:
        if getattr(args, flag):
            raise UsageError(f"{why}: leave out --{flag.replace('_', '-')}")


def _evaluate_labelled(args: argparse.Namespace, model: str) -> None:
    """Evaluate the model's head."""
    from bertie.training.finetune.comparison import with_labels_of
    from bertie.training.finetune.reports import build_report

    columns = parse_pairs(args.columns, "--columns", "NAME=COLUMN")
    if args.output is not None:
        _check_report_folder(Path(args.output), args.overwrite)
    # Inspect the models first: data that does not match is an error before weights are loaded.
    outline, task = outline_of(model, args.task, args.head, args.revision)
    data = read_labelled(task, [args.file], columns)
    train = None if args.train is None else with_labels_of(outline, read_labelled(task, [args.train], columns))
    test, baseline = with_labels_of(outline, data), None
    if args.baseline is not None:
        baseline_test = with_labels_of(outline_of(args.baseline, task)[0], data)
    subject = _predict(args, task, model, test, head=args.head, revision=args.revision)
    if args.baseline is not None:
        baseline = _predict(args, task, args.baseline, baseline_test)
    report = build_report(
        subject.task,
        {"test": subject.predictions},
        title=f"{short_name(model)} on {Path(args.file).name}",
        model=model,
        train=train,
        baseline=baseline,
        cheap_baselines=None if args.no_baselines else _frozen_encoder(args),
        files={"train": [args.train or ""], "test": [args.file]},
        resamples=args.resamples,
    )
    if args.output is not None:
        from bertie.evaluation.report import write_report

        write_report(args.output, report)
    if args.json:
        values = report_as_dict(report)
        print(json.dumps(values.pop("test") | values))
    else:
        sys.stdout.write(report_table(report))


def _frozen_encoder(args: argparse.Namespace) -> BaselineSettings:
    """Frozen embeddings of the built-in model: the base of the evaluated model is not known."""
    from bertie.checkpoints import hub
    from bertie.training.finetune.cheap_baselines import BaselineSettings

    encoder = hub.DEFAULT if hub.DEFAULT in hub.built_in() else None
    return BaselineSettings(encoder, encoder, select_device(args.device))


def _predict(args: argparse.Namespace, task: str, model: str, data: LabelledDataset, **options: Any) -> Baseline:
    """Load a model and predict the data."""
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.comparison import Baseline

    loaded = registry.get(task).trainable_class.load(
        model, overflow=args.overflow, device=select_device(args.device), precision=args.precision, **options
    )
    return Baseline(short_name(model), loaded, training_for(loaded).predict_labelled(data))


def outline_of(
    model: str, task: str | None, head: str | None = None, revision: str | None = None
) -> tuple[AnyTrainable, str]:
    """Inspect a model without loading its weights; return its task object and the task's name."""
    from bertie.checkpoints.checkpoint import Checkpoint

    kind: Any = head if head in get_args(HeadName) else None
    name = None if kind else head
    checkpoint = Checkpoint.inspect(model, revision=revision, head=kind)
    task = task or task_of(checkpoint, name)
    outline = registry.get(task).trainable_class(checkpoint, head=name)
    _ = outline.head  # raises if it is missing
    return outline, task


def task_of(checkpoint: Checkpoint, head: str | None = None) -> str:
    """The task of a checkpoint: that of `head`, or of its only head."""
    if head is not None:
        checkpoint.model.head(head)  # raises if it is missing
    tasks = {
        name: task
        for name, info in checkpoint.heads.items()
        if head in (None, name) and (task := _task_of_head(checkpoint, name, info)) is not None
    }
    if len(tasks) > 1:
        raise InputError(f"{checkpoint.source} has several heads; select one with --head: {', '.join(tasks)}")
    if not tasks:
        heads, known = ", ".join(checkpoint.heads) or "none", ", ".join(registry.trainable(with_head=True))
        raise NotFoundError(
            f"{checkpoint.source} has no head that can be evaluated on labelled texts (its heads: {heads}); bertie "
            f"train trains one, for {known}; --task {EMBED} evaluates its embeddings, on pairs of texts"
        )
    return next(iter(tasks.values()))


def _task_of_head(checkpoint: Checkpoint, name: str, info: HeadInfo) -> str | None:
    if info.task is None and info.kind == "classify" and info.problem is None and len(info.labels) == 1:
        if checkpoint.cross_encoder is not None and name in checkpoint.spec.heads:
            return "rerank"
        raise InputError(
            f"the head {name!r} of {checkpoint.source} has one output; pass its task with --task rerank or regress"
        )
    row = registry.row_for_head(info)
    return None if row is None else row.name


def _is_embedding_model(model: str, args: argparse.Namespace) -> bool:
    """Whether a model has sentence embeddings and no head for labelled texts."""
    from bertie.checkpoints.checkpoint import Checkpoint

    if args.head is not None:
        return False
    checkpoint = Checkpoint.inspect(model, revision=args.revision)
    return checkpoint.sentence is not None and not any(map(registry.row_for_head, checkpoint.heads.values()))


def _evaluate_embeddings(args: argparse.Namespace, model: str) -> None:
    """Correlate the similarities of pairs with their scores."""
    from bertie.evaluation import metrics
    from bertie.evaluation.report import Comparison
    from bertie.tasks import Embedder
    from bertie.tasks.pairwise import similarity_pairwise

    data = read_labelled("regress", [args.file], parse_pairs(args.columns, "--columns", "NAME=COLUMN"))
    texts = [(example.texts[0], example.texts[-1]) for example in data.examples if len(example.texts) == 2]
    if len(texts) < len(data.examples):
        raise InputError(
            f"{data.name} has single texts; embeddings are compared in pairs, in columns text_a and text_b"
        )
    gold = [float(example.target) for example in data.examples]

    def similarities(name: str, revision: str | None) -> Any:
        options = {"overflow": args.overflow, "device": select_device(args.device), "precision": args.precision}
        return similarity_pairwise(Embedder.load(name, revision=revision, **options), texts)

    predicted = similarities(model, args.revision)
    scores = metrics.sts(gold, predicted, resamples=args.resamples)
    comparison = None
    if args.baseline is not None:
        other = similarities(args.baseline, None)
        gaps = metrics.paired("regress", (gold, predicted), (gold, other), resamples=args.resamples)
        comparison = Comparison(
            name=short_name(args.baseline),
            split="test",
            scores=metrics.sts(gold, other, resamples=args.resamples),
            differences={name: gaps[name] for name in scores},
        )
    print_scores(scores, comparison, as_json=args.json)


def _check_report_folder(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExistsError(f"{folder} is a file; a report is written into a folder")
    if (folder / "report.json").exists() and not overwrite:
        raise ExistsError(f"{folder} already contains a report; pass --overwrite, or another name")
