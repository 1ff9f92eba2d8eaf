"""Train a model for a task on labelled texts, and report how good it is, with intervals.

All data is read and checked before anything else. The folder of --out appears when all is done: the model, a report
(report.md, report.html, report.json) and a model card (README.md). Until then the state of the run lies beside it, in
OUT.training; a run that was stopped in any way goes on with the same command and --resume.

The columns that are looked for: text, or text_a and text_b, with label or labels (classify) or score (regress); tokens
and tags (tag); question, context and answers (answer); query, passage and label (rerank); anchor, positive and
negative, or query and passage, or text_a and text_b with score or label (embed).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from bertie.cli.common import UsageError, add_model, device_of, model_name, verb
from bertie.data.journal import AlreadyComplete
from bertie.data.writers import TableWriter
from bertie.errors import BertieError, InputError
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.training.recipe_file import RecipeFile, read_recipe

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.evaluation.report import ModelReport
    from bertie.training.finetune.base import AnyTrainable, Predictions
    from bertie.training.finetune.data import Labelled
    from bertie.training.finetune.runs import Done, Job, Runs

EXAMPLE = """  bertie train classify train.jsonl --dev dev.jsonl --test test.jsonl -m ./my-encoder --out mood
  bertie train tag train.jsonl --dev-fraction 0.1 --columns tokens=words tags=ner -m ./my-encoder --out my-tagger
  bertie train classify reviews.csv --seeds 3 --lora 8 --lr 3e-4 -m ./my-encoder --out mood --json
  bertie train embed pairs.jsonl --dev-fraction 0.1 --batch-size 512 -m ./my-encoder --out my-embedder
  bertie train --recipe recipes/sst2.toml --data ./data --epochs 1 --out mood
  torchrun --nproc-per-node 4 -m bertie train classify train.jsonl -m ./my-encoder --out mood
"""

# What --help says of the fields of Recipe.
HELP = {
    "epochs": "passes over the training data",
    "lr": "the learning rate at its peak",
    "head_lr": "the learning rate of the head, if it is not that of the rest",
    "batch_size": "texts a step",
    "batch_tokens": "tokens a step, instead of --batch-size",
    "micro_tokens": "tokens held on the device at a time",
    "warmup": "the share of steps in which the rate rises",
    "schedule": "what becomes of the rate after the warm-up",
    "decay": "of the schedule wsd: the last share of steps, in which the rate falls",
    "weight_decay": "of matrices",
    "beta2": "of AdamW",
    "max_grad_norm": "the gradient's greatest norm; 0: none",
    "layer_decay": "a layer's rate is this times that of the layer above it",
    "freeze": "lower layers that are not trained, or 'encoder': the head alone is",
    "unfreeze": "frozen layers to unfreeze per epoch, top first",
    "lora": "the rank of LoRA's factors; 0: all weights are trained",
    "lora_alpha": "twice the rank unless given",
    "class_weights": "'balanced', or weights as good=1,bad=3",
    "label_smoothing": "the share of each label that goes to the others",
    "dropout": "another than the checkpoint's",
    "patience": "evaluations without a better dev score before it stops",
    "evals_per_epoch": "evaluations on the dev data",
    "seed": "of all that is random",
    "mixed_precision": "autocast dtype; auto: bf16 on GPUs that have it, else fp32",
    "gradient_checkpointing": "less memory, more time",
    "max_length": "tokens a window, fewer than the model could read",
    "train_windows": "windows of one long text that a step reads",
    "dev_fraction": "of the training data held out where there is no --dev",
    "metric": "that chooses the best epoch and the best seed; the task's main one unless given",
    "abstain": "the wanted precision of the answers that the model is sure of",
    "loss": (
        "embed: infonce, triplet, softmax, cosine, cosent, contrastive, margin-mse or kl, with settings as in "
        "triplet:margin=0.2,distance=cosine; what the data calls for unless given"
    ),
    "matryoshka": "embed: dimensions that vectors may be cut to, as 256,128,64",
    "pooling": "embed: cls, mean, max, last or weighted-mean; the checkpoint's, or mean",
}


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "train", "train a model on labelled texts, and report how good it is", __doc__, EXAMPLE)
    tasks = ", ".join(registry.trainable())
    parser.add_argument(
        "items", nargs="*", metavar="TASK TRAIN", help=f"what to train ({tasks}), then the files to train on"
    )
    parser.add_argument("--dev", metavar="FILE", help="to choose the best epoch by, and to calibrate on")
    parser.add_argument("--test", metavar="FILE", help="to report on; nothing is chosen by it")
    add_columns(parser)
    parser.add_argument("--recipe", metavar="TOML", help="a file that says all of this; flags win over it")
    parser.add_argument("--data", metavar="FOLDER", help="where the paths in the recipe start, if not beside it")
    add_model(parser, precision=False)
    parser.add_argument("--baseline", metavar="MODEL", help="another trained model, to compare with on the test data")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to make")
    parser.add_argument(
        "--seeds", metavar="N|A,B,…", type=_seeds, help="so many seeds, from --seed on; or these. The best is kept"
    )
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="how torchrun distributes the model")
    parser.add_argument("--save-steps", metavar="N", type=_count, help="save the state every N steps")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in --out, if there is one")
    add_draws(parser)
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    _add_recipe(parser.add_argument_group("how to train"))
    parser.set_defaults(run=run)


def add_columns(parser: argparse.ArgumentParser) -> None:
    """What the columns of files are called."""
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        nargs="+",
        action="extend",
        default=[],
        help="what a column is called instead of its usual name: text=review label=stars",
    )


def add_draws(parser: argparse.ArgumentParser) -> None:
    """How fine intervals are."""
    parser.add_argument(
        "--resamples", metavar="N", type=_count, default=1000, help="of the bootstrap behind each interval (1000)"
    )


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    """A flag for each field of Recipe; what is not given is None."""
    hints = get_type_hints(Recipe)
    for one in fields(Recipe):
        flag, hint = "--" + one.name.replace("_", "-"), hints[one.name]
        usual = "" if one.default is None else f" ({one.default:g})" if _is_number(one.default) else f" ({one.default})"
        options: dict[str, Any] = {"dest": f"recipe.{one.name}", "help": HELP[one.name] + usual}
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, **options)
        else:
            group.add_argument(flag, type=_value_of(hint), metavar=_metavar(hint), **options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metavar(hint: Any) -> str:
    named = {int: "N", float: "NUMBER", str: "NAME", NoneType: "none", tuple[int, ...]: "N,N,…"}
    return "|".join(
        one
        for kind in _kinds(hint)
        for one in (get_args(kind) if get_origin(kind) is Literal else (named.get(kind, "LABEL=WEIGHT,…"),))
    )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the only one."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _value_of(hint: Any) -> Callable[[str], Any]:
    """What a flag's text stands for, by the type of the field. `none` takes a recipe's value back."""

    def value(text: str) -> Any:
        for kind in _kinds(hint):
            if get_origin(kind) is Literal:
                if text in get_args(kind):
                    return text
            elif kind is NoneType:
                if text == "none":
                    return NONE
            elif kind in (int, float, str):
                try:
                    return kind(text)
                except ValueError:
                    continue
            elif kind == tuple[int, ...]:
                try:
                    return tuple(int(one) for one in text.split(","))
                except ValueError:
                    continue
            elif "=" in text:
                weights = pairs([text], "--class-weights", "LABEL=WEIGHT")
                return {label: float(weight) for label, weight in weights.items()}
        raise ValueError

    value.__name__ = _metavar(hint)  # argparse says: invalid N|none value
    return value


NONE = "none"  # of a flag, where no flag at all is None


def _seeds(text: str) -> list[int] | int:
    """How many, or which."""
    if "," in text:
        return [int(one) for one in text.split(",") if one.strip()]
    return _count(text)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


_seeds.__name__, _count.__name__ = "seeds", "count"


def run(args: argparse.Namespace) -> None:
    """Do it."""
    spread = int(os.environ.get("WORLD_SIZE", "1")) > 1  # by torchrun
    first = not spread or int(os.environ.get("RANK", "0")) == 0
    if not first:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    try:
        asked = _asked(args)
        job = _job(args, asked, first)
    except (BertieError, AlreadyComplete) as error:
        if first:
            raise
        raise SystemExit(isinstance(error, BertieError)) from None  # the first process says why
    _train(args, asked, job)


def _job(args: argparse.Namespace, asked: RecipeFile, first: bool) -> Job:
    """All that was asked for, with all data read and checked, before any model is loaded."""
    from bertie.evaluation.metrics import entities, is_span_scheme
    from bertie.training.finetune.data import split
    from bertie.training.finetune.runs import Job, claim

    recipe, seeds = _recipe_of(args, asked)
    if args.baseline is not None and asked.test is None:
        raise UsageError("--baseline is compared with on the test data; name it with --test")
    claim(Path(args.out), resume=args.resume, overwrite=args.overwrite)
    model = _model(args, asked)
    columns = asked.columns
    train = read(asked.task, asked.train, columns, training=True)
    dev, test = (
        None if file is None else read(asked.task, [file], columns, like=train) for file in (asked.dev, asked.test)
    )
    if asked.task == "embed":
        _comparable(dev, test)
    if asked.task == "tag" and (dev or test or recipe.dev_fraction) and is_span_scheme([train.labels]):
        entities([])  # a package that is missing is an error now, not after the first epoch
    if args.baseline is not None and test is not None:
        _baseline(args.baseline, asked.task, test)  # one that cannot be compared is an error now
    if dev is None and recipe.dev_fraction:
        # One part for all seeds, or their scores could not be compared.
        train, dev = split(train, recipe.dev_fraction, seeds[0])
    if first:
        for text in recipe.warnings():
            print(f"bertie: {text}", file=sys.stderr)
    if args.revision is not None:
        from bertie.checkpoints.hub import resolve

        model = str(resolve(model, args.revision))
    return Job(
        task=asked.task,
        model=model,
        train=train,
        dev=dev,
        test=test,
        recipe=recipe,
        seeds=seeds,
        overflow=args.overflow,
        device=device_of(args.device),
    )


def _comparable(dev: Labelled | None, test: Labelled | None) -> None:
    """Refuse two sets that are predictions in different ways."""
    if dev is not None and test is not None and (dev.inputs == "pairs") != (test.inputs == "pairs"):
        raise InputError(f"{dev.name} has {dev.inputs} and {test.name} {test.inputs}; give both scores, or both pairs")


def _model(args: argparse.Namespace, asked: RecipeFile) -> str:
    """The name of the model to begin from."""
    return asked.model if args.model is None and asked.model is not None else model_name(args)


def _asked(args: argparse.Namespace) -> RecipeFile:
    """What the recipe says, or the arguments as a recipe would say it."""
    columns = pairs(args.columns, "--columns", "NAME=COLUMN")
    if args.recipe is not None:
        if args.items:
            raise UsageError(f"{args.items[0]!r} and a recipe: --recipe says what to train on; leave one of them off")
        found = read_recipe(args.recipe, args.data)
        values = {one.name: getattr(found, one.name) for one in fields(RecipeFile)}
        given = {name: value for name in ("dev", "test") if (value := getattr(args, name)) is not None}
        return RecipeFile(**values | given | {"columns": found.columns | columns})
    if args.data is not None:
        raise UsageError("--data is where the paths of a recipe start; name one with --recipe")
    if not args.items or args.items[0] not in registry.trainable():
        what = f"{args.items[0]!r} is no task" if args.items else "name a task, or a recipe with --recipe"
        raise UsageError(f"{what}; the tasks are {', '.join(registry.trainable())} (see bertie train --help)")
    task, *files = args.items
    if not files:
        raise UsageError(f"name the file to train on: bertie train {task} FILE")
    return RecipeFile(
        title="", task=task, model=None, train=files, dev=args.dev, test=args.test, columns=columns, seeds=[],
        training=Recipe(),
    )  # fmt: skip


def _recipe_of(args: argparse.Namespace, asked: RecipeFile) -> tuple[Recipe, list[int]]:
    """The hyperparameters, flags winning, and the seeds."""
    given = {
        one.name: None if value == NONE else value
        for one in fields(Recipe)
        if (value := getattr(args, f"recipe.{one.name}")) is not None
    }
    recipe = asked.training.replace(**given)
    seeds = args.seeds
    if isinstance(seeds, list):
        if "seed" in given:
            raise UsageError(f"--seed {recipe.seed} and a list of --seeds; give one or the other")
        if not seeds or len(set(seeds)) < len(seeds):
            raise UsageError(f"--seeds {','.join(map(str, seeds))} must be different whole numbers")
        for seed in seeds:
            recipe.replace(seed=seed)  # refuses what is none
        return recipe, seeds
    if seeds is None and asked.seeds and "seed" not in given:
        return recipe, asked.seeds
    return recipe, [recipe.seed + i for i in range(seeds or 1)]


def pairs(items: Sequence[str], flag: str, what: str) -> dict[str, str]:
    """From `a=b` and `a=b,c=d` to a dict."""
    found = {}
    for item in items:
        for one in item.split(","):
            name, sign, value = one.partition("=")
            if not (name.strip() and sign and value.strip()):
                raise UsageError(f"{flag} takes {what}, not {one!r}")
            found[name.strip()] = value.strip()
    return found


def read(
    task: str,
    files: Sequence[str],
    columns: Mapping[str, str],
    *,
    training: bool = False,
    like: Labelled | None = None,
) -> Labelled:
    """Labelled data of files: to train on, to be predictions by, or with the labels of other data, `like` those."""
    from bertie.training.finetune.data import labelled

    kind: Any = task
    known = None if like is None else like.labels or None
    try:
        found = labelled(kind, [Path(file) for file in files], columns=columns, known=known, training=training)
    except InputError as error:
        said = re.sub(r"columns=\{'(\w+)': \.\.\.\}", r"--columns \1=…", str(error))
        raise InputError(re.sub(r"\bcolumns names\b", "--columns names", said)) from None
    if like is not None and found.multi != like.multi:
        many, few = (like, found) if like.multi else (found, like)
        raise InputError(f"{many.name} has lists of labels and {few.name} one label a row; give both lists, or neither")
    return found


def _baseline(model: str, task: str, data: Labelled) -> Labelled:
    """The data in the words of another model, which is not loaded for that."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.training.finetune.reports import in_words_of

    return in_words_of(registry.get(task).trainable_class(Checkpoint.inspect(model)), data)


def _train(args: argparse.Namespace, asked: RecipeFile, job: Job) -> None:
    import torch

    from bertie.training.distributed import World, local_device
    from bertie.training.finetune.runs import Runs

    world = World.current(local_device(torch.device(job.device)))
    out = Path(args.out)
    runs = Runs(out, job, world, resume=args.resume)
    if world.is_main:
        _say_plan(job, runs.state, len(runs.done))
    with warnings.catch_warnings():
        for text in job.recipe.warnings():  # they were said already, once
            warnings.filterwarnings("ignore", message=re.escape(text))
        for seed in job.seeds:
            runs.train(seed, save_steps=args.save_steps, strategy=args.strategy)
    if world.size > 1:
        torch.distributed.destroy_process_group()
    if world.is_main:
        _finish(args, asked, job, runs)


def _say_plan(job: Job, state: Path, done: int) -> None:
    """A few lines to standard error: what is about to be done."""
    data = job.train
    held = {"dev": job.dev, "test": job.test}
    parts = [f"{len(one.examples):,} {name}" for name, one in held.items() if one is not None]
    line = ", ".join([f"{len(data.examples):,} rows to train on", *parts])
    if job.task == "classify":
        counts = Counter(label for one in data.examples for label in _listed(one.target))
        some = ", ".join(f"{label} {count:,}" for label, count in counts.most_common(8))
        line += f"; {len(data.labels)} labels: {some}{', …' if len(counts) > 8 else ''}"
    elif data.labels:
        line += f"; {len(data.labels)} labels"
    print(f"{job.task}: {line}", file=sys.stderr)
    recipe = job.recipe
    steps = f"steps of {recipe.batch_tokens:,} tokens" if recipe.batch_tokens else _many(_steps(job), "step")
    seeds = "seed " if len(job.seeds) == 1 else "seeds "
    seeds += ", ".join(map(str, job.seeds)) + (f" ({done} done)" if done else "")
    print(
        f"{steps} in {_many(recipe.epochs, 'epoch')}, {seeds}, on {job.device}; state in {state.name}", file=sys.stderr
    )


def _many(count: float, what: str) -> str:
    return f"{count:,g} {what}{'' if count == 1 else 's'}"


def _listed(target: Any) -> Sequence[str]:
    return target if isinstance(target, tuple) else (target,)


def _steps(job: Job) -> int:
    """As `bertie.training.sampling.ExampleSampler` counts them."""
    whole, part = divmod(job.recipe.epochs, 1.0)
    each = math.ceil(len(job.train.examples) / job.recipe.batch_size)
    return int(whole) * each + (max(1, round(each * part)) if part else 0)


def _finish(args: argparse.Namespace, asked: RecipeFile, job: Job, runs: Runs) -> None:
    """Save the best model with its report, and say how good it is."""
    from bertie.training.finetune.reports import study, write_all

    best = runs.best()
    made: ModelReport | None = None
    if best.predictions:
        other = None if args.baseline is None else _other(args, job)
        train = [Path(name).name for name in asked.train]
        held = [f"{job.recipe.dev_fraction:.0%} of {', '.join(train)}"]
        made = study(
            best.task,
            best.predictions,
            title=asked.title or Path(args.out).absolute().name,
            model=_model(args, asked),
            train=job.train,
            recipe=job.recipe,
            runs=[runs.done[seed] for seed in job.seeds],
            chosen=best.done.seed,
            metric=runs.metric,
            baseline=other,
            files={"train": train, "dev": [asked.dev] if asked.dev else held, "test": [asked.test or ""]},
            resamples=args.resamples,
        )
    runs.finish(lambda folder: None if made is None else write_all(folder, made))
    if args.json:
        seeds = {"seeds": [_of_seed(runs.done[seed]) for seed in job.seeds], "chosen": best.done.seed}
        print(json.dumps({"out": args.out, "task": job.task, **seeds, **({} if made is None else summary(made))}))
        return
    if made is None:
        print("bertie: without --dev or --test there is nothing to report on", file=sys.stderr)
        return
    sys.stdout.write(table(made))
    print(f"{args.out} is the model of seed {best.done.seed}; its report is {args.out}/report.html", file=sys.stderr)


def _other(args: argparse.Namespace, job: Job) -> tuple[str, AnyTrainable, Predictions]:
    """The baseline, and what it says of the test data."""
    from bertie.training.finetune.base import training_for

    assert job.test is not None
    data = _baseline(args.baseline, job.task, job.test)
    task = registry.get(job.task).trainable_class.load(args.baseline, overflow=job.overflow, device=job.device)
    return short_name(args.baseline), task, training_for(task).predict_labelled(data)


def short_name(model: str) -> str:
    """A hub id, or the last part of a path."""
    return Path(model).absolute().name if Path(model).is_dir() else model


def _of_seed(done: Done) -> dict[str, Any]:
    history = done.history
    facts = {"steps": history.steps, "best_step": history.best_step, "tokens": history.tokens}
    values = {
        split: {metric: value if math.isfinite(value) else None for metric, value in found.items()}
        for split, found in (("dev", done.dev), ("test", done.test))
        if found
    }
    return {"seed": done.seed, **values, **facts, "seconds": round(history.seconds, 3)}


def summary(study: ModelReport) -> dict[str, Any]:
    """The scores of a study for scripts."""
    from bertie.evaluation.model_report import selective_predictions

    found: dict[str, Any] = {
        split: {metric: score.as_dict() for metric, score in one.scores.items()}
        for split, one in study.evaluations.items()
    }
    if study.leaks is not None:
        check = study.leaks[study.final]
        without = {metric: score.as_dict() for metric, score in (check.scores_without or {}).items()}
        found["leaks"] = {"rows": len(check.leaks), "scores": without}
    if study.calibration is not None:
        one = study.calibration
        errors = {"before": one.before.as_dict(), "after": one.after.as_dict()}
        found["calibration"] = {"temperature": one.temperature, **errors}
    if (held := selective_predictions(study).get(study.final)) is not None and study.abstention is not None:
        facts = {"threshold": study.abstention.threshold, "target": study.abstention.target}
        found["abstention"] = {**facts, "precision": held.precision.as_dict(), "coverage": held.coverage}
    if study.comparison is not None:
        other = study.comparison
        found["baseline"] = {
            "name": other.name,
            "scores": {metric: score.as_dict() for metric, score in other.scores.items()},
            "difference": {metric: gap.as_dict() for metric, gap in other.differences.items()},
            "mcnemar": other.mcnemar,
        }
    return found


def table(study: ModelReport) -> str:
    """The scores of a study for people."""
    splits = study.evaluations
    seeds = study.seeds or []
    titles = ["metric", *(title for split in splits for title in (split, "95%"))]
    titles += ["seeds: mean ± sd"] if seeds else []
    titles += [study.comparison.name, "difference", "p"] if study.comparison is not None else []
    rows = []
    for metric in splits[study.final].scores:
        row: list[object] = [metric]
        for one in splits.values():
            score = one.scores[metric]
            row += [score.value, f"{score.low:.4f}–{score.high:.4f}"]
        if seeds:
            values = [seed[metric] for seed in seeds]
            row.append(f"{fmean(values):.4f} ± {stdev(values):.4f}")
        if study.comparison is not None:
            gap = study.comparison.differences[metric]
            row += [study.comparison.scores[metric].value, f"{gap.value:+.4f} ({gap.low:+.4f}–{gap.high:+.4f})", gap.p]
        rows.append(row)
    text = TableWriter(titles).text(rows)
    if study.leaks is not None and (check := study.leaks[study.final]).leaks:
        main = (
            "" if check.scores_without is None else f"; without them {study.main} is {check.scores_without[study.main]}"
        )
        text += f"{len(check.leaks):,} of {check.rows:,} rows of {study.final} are in the training data{main}\n"
    return text
