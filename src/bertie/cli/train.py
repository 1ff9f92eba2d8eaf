"""Fine-tune a model for a task on labelled texts, and report its scores with confidence intervals.

All data is read and checked first. The output folder is created at the end, with the model, a report (report.md,
report.html, report.json) and a model card (README.md). Until then the training state is kept beside it, in
OUT.training; to resume an interrupted run, repeat the command with --resume.

Column names: text, or text_a and text_b, with label or labels (classify) or score (regress); tokens and tags (tag);
question, context and answers (answer); query, passage and label (rerank); anchor, positive and negative, or query and
passage, or text_a and text_b with score or label (embed). zero-shot-tag reads the data of tag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie import recipes
from bertie.cli.common import UsageError, add_model, model_name, select_device, verb
from bertie.cli.curve import add_curve, check_curve, measure_curve, save_all
from bertie.cli.labelled_input import add_columns, add_resamples, count, parse_pairs, read_labelled
from bertie.cli.output_conflicts import check_distinct
from bertie.cli.recipe_flags import add_recipe_flags, recipe_values
from bertie.cli.report_output import add_no_baselines, report_as_dict, report_table, short_name
from bertie.data.journal import AlreadyComplete
from bertie.errors import BertieError
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.training.output_folder import check_output, lock_output
from bertie.training.recipe_file import RecipeFile, read_recipe

if TYPE_CHECKING:
    from bertie.cli.common import Verbs
    from bertie.evaluation.report import ModelReport
    from bertie.training.finetune.comparison import Baseline
    from bertie.training.finetune.data import LabelledDataset
    from bertie.training.finetune.runs import BestRun, FineTuningJob, RunResult, SeedRuns

EXAMPLE = """  bertie train classify train.jsonl --dev dev.jsonl --test test.jsonl -m ./my-encoder -o mood
  bertie train tag train.jsonl --dev-fraction 0.1 --columns tokens=words tags=ner -m ./my-encoder -o my-tagger
  bertie train classify reviews.csv --seeds 3 --lora 8 --lr 3e-4 -m ./my-encoder -o mood --json
  bertie train embed pairs.jsonl --dev-fraction 0.1 --batch-size 512 -m ./my-encoder -o my-embedder
  bertie train --recipe example -o tickets                                # with data that comes with Bertie
  bertie train --recipe sst2 --data ./data --epochs 1 -o mood
  torchrun --no-python --nproc-per-node 4 bertie train classify train.jsonl -m ./my-encoder -o mood
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "train", "fine-tune a model on labelled texts, and report its scores", __doc__, EXAMPLE)
    tasks = ", ".join(registry.trainable())
    parser.add_argument("items", nargs="*", metavar="TASK TRAIN", help=f"the task ({tasks}), then the training files")
    parser.add_argument(
        "--dev", metavar="FILE", help="validation data: selects the best epoch and calibrates the model"
    )
    parser.add_argument("--test", metavar="FILE", help="test data for the report; never used for selection")
    add_columns(parser)
    parser.add_argument(
        "--recipe",
        metavar="TOML|NAME",
        help="task, data and settings: a TOML file, or a name listed by `bertie recipes`; flags override it",
    )
    parser.add_argument(
        "--data", metavar="FOLDER", help="folder that paths in the recipe are relative to (default: that of the file)"
    )
    add_model(parser, precision=False, from_settings=False)
    parser.add_argument("--baseline", metavar="MODEL", help="another trained model to compare with on the test data")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to save the model in")
    parser.add_argument(
        "--seeds",
        metavar="N|A,B,…",
        type=_seeds,
        help="number of seeds, starting at --seed, or a list of seeds; the best run is kept",
    )
    parser.add_argument(
        "--strategy", choices=("ddp", "fsdp"), default="ddp", help="parallelism under torchrun (default: ddp)"
    )
    parser.add_argument("--save-steps", metavar="N", type=count, help="save the training state every N steps")
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run, if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace the model in the output folder")
    add_resamples(parser)
    add_no_baselines(parser)
    add_curve(parser)
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    add_recipe_flags(parser.add_argument_group("hyperparameters"))
    parser.set_defaults(run=run)


def _seeds(text: str) -> list[int] | int:
    """A number of seeds, or a list of them."""
    if "," in text:
        return [int(seed) for seed in text.split(",") if seed.strip()]
    return count(text)


_seeds.__name__ = "seeds"  # in argparse's message


def run(args: argparse.Namespace) -> None:
    """Train, and print the scores."""
    started = time.monotonic()
    is_main = int(os.environ.get("RANK", "0")) == 0  # of the processes that torchrun starts
    if not is_main:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    try:
        settings = _settings(args)
        job = _job(args, settings)
    except (BertieError, AlreadyComplete) as error:
        if is_main:
            raise
        raise SystemExit(isinstance(error, BertieError)) from None  # the main process prints the reason
    runs = _open_runs(args, job)
    from bertie.training.finetune.budget import Deadline, available_seconds

    with warnings.catch_warnings():
        for text in (*job.recipe.warnings(), *job.notes[1]):  # printed once, with the plan
            warnings.filterwarnings("ignore", message=re.escape(text))
        for number, seed in enumerate(job.seeds, 1):
            budget, rows = job.recipe.budget, 0 if job.test is None else len(job.test.examples)
            share = number / len(job.seeds)
            deadline = None if budget is None else Deadline(started + available_seconds(budget) * share, rows)
            runs.train(seed, save_steps=args.save_steps, strategy=args.strategy, deadline=deadline)
    runs.close()
    if is_main:
        _finish(args, settings, job, runs)


def _settings(args: argparse.Namespace) -> RecipeFile:
    """The recipe file with the flags applied, or the flags as a recipe."""
    columns = parse_pairs(args.columns, "--columns", "NAME=COLUMN")
    flags = recipe_values(args)
    if args.recipe is not None:
        if args.items:
            raise UsageError(
                f"{args.items[0]!r} and --recipe, which defines the task and the data: leave one of them out"
            )
        settings = read_recipe(recipes.find(args.recipe, recipes.FINE_TUNING), _data_root(args))
        splits = {split: file for split in ("dev", "test") if (file := getattr(args, split)) is not None}
        settings = replace(settings, columns=settings.columns | columns, **splits)
        seeds = [] if "seed" in flags else settings.seeds
    else:
        if args.data is not None:
            raise UsageError("--data is for the paths in a recipe; pass one with --recipe")
        if not args.items or args.items[0] not in registry.trainable():
            what = f"{args.items[0]!r} is not a task" if args.items else "name a task, or a recipe with --recipe"
            raise UsageError(f"{what}; the tasks are {', '.join(registry.trainable())} (see bertie train --help)")
        task, *files = args.items
        if not files:
            raise UsageError(f"name the training file: bertie train {task} FILE")
        settings = RecipeFile(
            title="", task=task, model=None, train=files, dev=args.dev, test=args.test, columns=columns, seeds=[],
            training=Recipe(),
        )  # fmt: skip
        seeds = []
    recipe = settings.training.replace(**flags)
    if args.seeds is not None or not seeds:
        seeds = _seed_list(args.seeds, recipe, "seed" in flags)
    model = settings.model if args.model is None and settings.model is not None else model_name(args)
    return replace(settings, training=recipe, seeds=seeds, model=model)


def _data_root(args: argparse.Namespace) -> str | None:
    """The folder of a recipe's data: for a packaged recipe the current folder, or that of the example data."""
    if args.data is not None or not recipes.is_packaged(args.recipe, recipes.FINE_TUNING):
        return str(args.data) if args.data is not None else None
    return None if args.recipe == "example" else "."


def _seed_list(seeds: list[int] | int | None, recipe: Recipe, seed_given: bool) -> list[int]:
    if not isinstance(seeds, list):
        return [recipe.seed + i for i in range(seeds or 1)]
    if seed_given:
        raise UsageError(f"--seed {recipe.seed} and a list of --seeds; use one of them")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {','.join(map(str, seeds))} must be different whole numbers")
    for seed in seeds:
        recipe.replace(seed=seed)  # raises if it is out of range
    return seeds


def _job(args: argparse.Namespace, settings: RecipeFile) -> FineTuningJob:
    """The job, with all data read and checked before any model is loaded."""
    from bertie.training.distributed import is_main_process
    from bertie.training.finetune.data import split
    from bertie.training.finetune.defaults import ChosenRecipe, choose, dev_fraction
    from bertie.training.finetune.methods import plan_methods
    from bertie.training.finetune.validation import plan_validation

    check_curve(args)
    if args.baseline is not None and settings.test is None:
        raise UsageError("--baseline is compared on the test data; pass it with --test")
    for name in (*settings.train, settings.dev, settings.test):
        check_distinct(args.output, name or "")
    check_distinct(args.output, str(settings.model), is_model=True)
    if is_main_process():
        args.cleanup.callback(lock_output(Path(args.output)).release)
    check_output(Path(args.output), resume=args.resume, overwrite=args.overwrite)
    task, recipe, columns = settings.task, settings.training, settings.columns
    train = read_labelled(task, settings.train, columns, training=True)
    dev, test = (
        None if file is None else read_labelled(task, [file], columns, like=train)
        for file in (settings.dev, settings.test)
    )
    # The same split for all seeds, so that their scores can be compared.
    validation = plan_validation(recipe, train, settings.seeds[0]) if dev is None else None
    if dev is None and validation is None and (fraction := dev_fraction(recipe, train)):
        train, dev = split(train, fraction, settings.seeds[0])
        recipe = recipe.replace(dev_fraction=fraction)
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.runs import FineTuningJob

    training_for(registry.get(task).trainable_class()).check_data(train, dev, test)
    if args.baseline is not None and test is not None:
        _baseline_data(args.baseline, task, test)  # raises if its labels do not match
    model = str(settings.model)
    if args.revision is not None:
        from bertie.checkpoints.hub import resolve

        model = str(resolve(model, args.revision))
    chosen = ChosenRecipe(recipe, ())
    if plan_methods(recipe, train).only_full:
        chosen = choose(recipe, Checkpoint.inspect(model).model.config, train, has_dev=dev is not None)
    return FineTuningJob(
        task=task,
        model=model,
        train=train,
        dev=dev,
        test=test,
        validation=validation,
        recipe=chosen.recipe,
        notes=(chosen.reasons, chosen.warnings),
        seeds=settings.seeds,
        overflow=args.overflow,
        device=select_device(args.device),
    )


def _open_runs(args: argparse.Namespace, job: FineTuningJob) -> SeedRuns:
    """The runs of a job, including completed ones; prints the plan."""
    import torch

    from bertie.training.distributed import World, local_device
    from bertie.training.finetune.runs import SeedRuns

    world = World.current(local_device(torch.device(job.device)))
    runs = SeedRuns(Path(args.output), job, world, resume=args.resume)
    if world.is_main:
        _print_plan(job, runs)
    return runs


def _print_plan(job: FineTuningJob, runs: SeedRuns) -> None:
    """Print the plan to standard error."""
    from bertie.training.finetune.defaults import print_reasons
    from bertie.training.finetune.methods import plan_methods
    from bertie.training.finetune.reports import label_counts

    reasons, warnings_ = job.notes
    for text in (*job.recipe.warnings(), *warnings_):
        print(f"bertie: {text}", file=sys.stderr)
    splits = {"dev": job.dev, "test": job.test}
    rows = [f"{len(data.examples):,} {split}" for split, data in splits.items() if data is not None]
    line = ", ".join([f"{len(job.train.examples):,} training rows", *rows])
    if job.train.labels:
        line += f"; {len(job.train.labels)} labels"
    if job.task == "classify" and (counts := label_counts(job.train)):
        common = sorted(counts.items(), key=lambda item: -item[1])[:8]
        line += ": " + ", ".join(f"{label} {rows:,}" for label, rows in common) + (", …" if len(counts) > 8 else "")
    print(f"{job.task}: {line}", file=sys.stderr)
    print_reasons(reasons)
    recipe, done = job.recipe.resolve(), len(runs.results)
    steps = f"steps of {recipe.batch_tokens:,} tokens" if recipe.batch_tokens else _plural(_steps(job), "step")
    seeds = ("seed " if len(job.seeds) == 1 else "seeds ") + ", ".join(map(str, job.seeds))
    seeds += f" ({done} done)" if done else ""
    epochs = _plural(recipe.epochs, "epoch")
    if job.validation is not None:
        seeds += f"; {job.validation.description}"
    methods = plan_methods(job.recipe, job.train)
    work = f"{steps} in {epochs}" if methods.only_full else f"method {', '.join(methods.methods)}"
    print(f"{work}, {seeds}, on {job.device}; state in {runs.state.name}", file=sys.stderr)


def _plural(number: float, what: str) -> str:
    return f"{number:,g} {what}{'' if number == 1 else 's'}"


def _steps(job: FineTuningJob) -> int:
    """The number of steps, as the sampler counts them."""
    recipe = job.recipe.resolve()
    whole, part = divmod(recipe.epochs, 1.0)
    per_epoch = math.ceil(len(job.train.examples) / recipe.batch_size)
    return int(whole) * per_epoch + (max(1, round(per_epoch * part)) if part else 0)


def _finish(args: argparse.Namespace, settings: RecipeFile, job: FineTuningJob, runs: SeedRuns) -> None:
    """Save the best model with its report, and print the scores."""
    best = runs.best()
    report = _report(args, settings, job, runs, best) if best.predictions else None
    curve = measure_curve(args, settings.training, job, best)
    runs.finish(lambda folder: save_all(folder, report, curve))
    if args.json:
        seeds = {"seeds": [_run_as_dict(runs.results[seed]) for seed in job.seeds], "best_seed": best.result.seed}
        scores = {} if report is None else report_as_dict(report)
        if best.validation is not None:
            scores["dev_source"] = best.validation.description
        scores |= {} if curve is None else {"learning_curve": curve.as_dict()}
        print(json.dumps({"output": args.output, "task": job.task, **seeds, **scores}))
        return
    if report is None:
        print(f"saved {args.output}; without --dev, --test or held-out rows there is no score", file=sys.stderr)
        return
    sys.stdout.write(report_table(report))
    sys.stdout.flush()  # before what follows on standard error
    score = report.evaluations[report.final].scores[report.main]
    seed = f" (seed {best.result.seed})" if len(job.seeds) > 1 else ""
    source = report.final if best.validation is None or report.final != "dev" else best.validation.description
    print(f"saved {args.output}{seed}: {report.main} {score}, {source}", file=sys.stderr)
    print(f"report: {args.output}/report.html", file=sys.stderr)


def _report(
    args: argparse.Namespace, settings: RecipeFile, job: FineTuningJob, runs: SeedRuns, best: BestRun
) -> ModelReport:
    from bertie.training.finetune.cheap_baselines import BaselineSettings
    from bertie.training.finetune.reports import TrainingRecord, build_report

    train = [Path(name).name for name in settings.train]
    part = "" if job.validation is not None else f"{job.recipe.dev_fraction or 0:.0%} of "
    held_out = [f"{part}{', '.join(train)}"]
    results = [runs.results[seed] for seed in job.seeds]
    recipe = Recipe.from_mapping(best.result.recipe) if best.result.recipe else job.recipe
    # Embeddings of all rows take too long for a budget.
    frozen = None if job.recipe.budget is not None and job.device == "cpu" else job.model
    encoder = BaselineSettings(frozen, short_name(str(job.model)), job.device)
    return build_report(
        best.task,
        best.predictions,
        title=settings.title or Path(args.output).absolute().name,
        model=str(settings.model),
        train=job.train,
        training=TrainingRecord(recipe, results, best.result.seed, runs.metric, best.validation),
        baseline=None if args.baseline is None else _baseline(args.baseline, job),
        cheap_baselines=None if args.no_baselines else encoder,
        files={"train": train, "dev": [settings.dev] if settings.dev else held_out, "test": [settings.test or ""]},
        resamples=args.resamples,
    )


def _baseline_data(model: str, task: str, data: LabelledDataset) -> LabelledDataset:
    """The data with the labels of a baseline; its weights are not loaded."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.training.finetune.comparison import with_labels_of

    return with_labels_of(registry.get(task).trainable_class(Checkpoint.inspect(model)), data)


def _baseline(model: str, job: FineTuningJob) -> Baseline:
    """The baseline and its predictions on the test data."""
    from bertie.training.finetune.base import training_for
    from bertie.training.finetune.comparison import Baseline

    assert job.test is not None
    data = _baseline_data(model, job.task, job.test)
    task = registry.get(job.task).trainable_class.load(model, overflow=job.overflow, device=job.device)
    return Baseline(short_name(model), task, training_for(task).predict_labelled(data))


def _run_as_dict(result: RunResult) -> dict[str, Any]:
    history = result.history
    scores: dict[str, Any] = {
        split: {metric: value if math.isfinite(value) else None for metric, value in values.items()}
        for split, values in (("dev", result.dev), ("test", result.test))
        if values
    }
    if history.method:
        scores["method"] = history.method
    counts = {"steps": history.steps, "best_step": history.best_step, "tokens": history.tokens}
    return {"seed": result.seed, **scores, **counts, "seconds": round(history.seconds, 3)}
