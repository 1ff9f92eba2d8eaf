"""Score a trained model on labelled texts: every metric with its 95% interval.

The task is that of the model's head. Labels are the model's own; where those are names, whole numbers in the file count
them from 0, as in the data sets of the Hugging Face hub.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bertie.cli.common import add_model, device_of, model_name, verb
from bertie.cli.train import add_columns, add_draws, pairs, read, short_name, summary, table
from bertie.config import HeadName
from bertie.errors import ExistsError, InputError, NotFoundError
from bertie.train.recipe import TASKS

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.config import HeadInfo
    from bertie.hub import Checkpoint
    from bertie.tasks.base import Long
    from bertie.tasks.learn import Judged, Learner
    from bertie.train.data import Labelled

    AnyLearner = Learner[Any, Any, Any]

EXAMPLE = """  bertie eval test.jsonl -m ./my-model
  bertie eval test.csv --columns text=review label=stars -m ./my-model --json | jq .accuracy.value
  bertie eval test.jsonl -m ./my-model --baseline ./the-old-one --train train.jsonl -o report
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "eval", "score a model on labelled texts, with intervals", __doc__, EXAMPLE)
    parser.add_argument("file", metavar="FILE", help="labelled texts: .csv, .tsv, .jsonl, .parquet, .gz, .zst")
    add_columns(parser)
    add_model(parser)
    parser.add_argument("--task", choices=TASKS, help="what the model is for, where its head does not tell")
    parser.add_argument("--head", metavar="NAME", help="one of several heads of the model")
    parser.add_argument("--baseline", metavar="MODEL", help="another model, to compare with on the same texts")
    parser.add_argument("--train", metavar="FILE", help="what the model was trained on, to find texts that leaked")
    add_draws(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="write a report there: report.md, .html and .json")
    parser.add_argument("--overwrite", action="store_true", help="replace the report if there is one")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from bertie.train.study import in_words_of, study

    columns = pairs(args.columns, "--columns", "NAME=COLUMN")
    if args.output is not None:
        _claim(Path(args.output), args.overwrite)
    model = model_name(args)
    plain, task = _outline(model, args.task, args.head, args.revision)
    given = read(task, [args.file], columns)
    train = None if args.train is None else read(task, [args.train], columns)
    asked = [(model, args.head, args.revision, in_words_of(plain, given))]
    if args.baseline is not None:
        other, _ = _outline(args.baseline, task)
        asked.append((args.baseline, None, None, in_words_of(other, given)))
    device = device_of(args.device)
    (_, learner, judged), *others = (_judged(task, *one, args.long, device) for one in asked)
    made = study(
        learner,
        {"test": judged},
        title=f"{short_name(model)} on {Path(args.file).name}",
        model=model,
        train=train,
        baseline=others[0] if others else None,
        files={"train": [args.train or ""], "test": [args.file]},
        draws=args.draws,
    )
    if args.output is not None:
        from bertie.evaluate.report import write

        write(args.output, made)
    if args.json:
        found = summary(made)
        print(json.dumps(found.pop("test") | found))
    else:
        sys.stdout.write(table(made))


def _judged(
    task: str, model: str, head: str | None, revision: str | None, data: Labelled, long: Long, device: str
) -> tuple[str, AnyLearner, Judged]:
    """What a model says of the data."""
    from bertie.tasks.heads import LEARNERS

    learner = LEARNERS[task].load(model, long=long, head=head, revision=revision, device=device)
    return short_name(model), learner, learner.judge(data)


def _outline(
    model: str, task: str | None, head: str | None = None, revision: str | None = None
) -> tuple[AnyLearner, str]:
    """A model without its weights, put to its task, and the task."""
    from bertie.hub import Checkpoint
    from bertie.tasks.heads import LEARNERS

    kind: Any = head if head in get_args(HeadName) else None
    name = None if kind else head
    checkpoint = Checkpoint.inspect(model, revision=revision, head=kind)
    task = task or task_of(checkpoint, name)
    learner = LEARNERS[task](checkpoint, head=name)
    _ = learner.head  # one that is missing is an error now
    return learner, task


def task_of(checkpoint: Checkpoint, head: str | None = None) -> str:
    """What a checkpoint was trained for, by its heads or the one that is named."""
    if head is not None:
        checkpoint.model.head(head)  # refuses one that is not there
    found = {
        name: task
        for name, info in checkpoint.heads.items()
        if head in (None, name) and (task := _task_of_head(checkpoint, name, info)) is not None
    }
    if len(found) > 1:
        raise InputError(f"{checkpoint.source} has several heads; choose with --head: {', '.join(found)}")
    if not found:
        have = ", ".join(checkpoint.heads) or "none"
        raise NotFoundError(
            f"{checkpoint.source} has no head that says anything of labelled texts (its heads: {have}); bertie train "
            f"makes one, for {', '.join(TASKS)}"
        )
    return next(iter(found.values()))


def _task_of_head(checkpoint: Checkpoint, name: str, info: HeadInfo) -> str | None:
    if info.task is not None or info.kind != "classify":
        task = info.task or info.kind
        return task if task in TASKS else None
    if info.problem == "regression":
        return "regress"
    if len(info.labels) > 1 or info.problem is not None:
        return "classify"
    if checkpoint.cross_encoder is not None and name in checkpoint.blueprint.heads:
        return "rerank"
    raise InputError(
        f"the head {name!r} of {checkpoint.source} gives one number; say what it is for with --task rerank or regress"
    )


def _claim(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExistsError(f"{folder} is a file; a report is written into a folder")
    if (folder / "report.json").exists() and not overwrite:
        raise ExistsError(f"{folder} holds a report already; pass --overwrite, or another name")
