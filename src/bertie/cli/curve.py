"""The flag --curve of `bertie train`: learning curves."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.cli.common import UsageError
from bertie.cli.labelled_input import count

if TYPE_CHECKING:
    from bertie.evaluation.learning_curves import LearningCurve
    from bertie.evaluation.report import ModelReport
    from bertie.recipe import Recipe
    from bertie.tasks.trainable import Trainable
    from bertie.training.finetune.runs import BestRun, FineTuningJob


def add_curve(parser: argparse.ArgumentParser) -> None:
    """Add --curve and --curve-draws."""
    parser.add_argument(
        "--curve",
        action="store_true",
        help="also train on 10%% and 30%% of the rows, and estimate the gain from more labels",
    )
    parser.add_argument(
        "--curve-draws",
        metavar="N",
        type=count,
        help="with --curve: random draws of each part, for a narrower estimate (default: 1)",
    )


def check_curve(args: argparse.Namespace) -> None:
    """Reject incompatible flags before training."""
    if args.curve_draws is not None and not args.curve:
        raise UsageError("--curve-draws needs --curve")
    if args.curve and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("--curve trains in one process; run it without torchrun")


def measure_curve(args: argparse.Namespace, recipe: Recipe, job: FineTuningJob, best: BestRun) -> LearningCurve | None:
    """Measure the learning curve and print a summary; None without --curve. `recipe`: before defaults are chosen."""
    if not args.curve:
        return None
    from bertie.tasks import registry
    from bertie.training.finetune.learning_curve import CurveData, measure

    seed = job.seeds[0]
    data = CurveData.choose(job.train, job.dev, job.test, seed)

    def new_task(seed: int) -> Trainable[Any, Any, Any]:
        task_class = registry.get(job.task).trainable_class
        return task_class.from_recipe(job.model, recipe.replace(seed=seed), overflow=job.overflow, device=job.device)

    predictions = best.predictions.get(data.split)
    curve = measure(
        new_task,
        data,
        draws=args.curve_draws or 1,
        seed=seed,
        full=None if predictions is None else (best.task, predictions),
        resamples=args.resamples,
    )
    print(f"{curve.summary()}; see {args.output}/learning_curve.html", file=sys.stderr)
    return curve


def save_all(folder: Path, report: ModelReport | None, curve: LearningCurve | None) -> None:
    """Write the report and the learning curve into a model's folder."""
    from bertie.training.finetune.learning_curve import save_curve
    from bertie.training.finetune.reports import save_report

    if report is not None:
        save_report(folder, report)
    if curve is not None:
        save_curve(folder, curve, report.title if report is not None else folder.name)
