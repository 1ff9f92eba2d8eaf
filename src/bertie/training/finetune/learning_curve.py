"""Train on subsets of the data, to estimate the gain from more labels.

The subsets are nested and stratified: 10% of the rows, 30% with these among them, then all. Every model is evaluated on
the same rows: the test data, or the dev data, or a part of the training data that no model is trained on.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from bertie.data.atomic import atomic_write
from bertie.errors import InputError
from bertie.evaluation.curve_plot import plot_learning_curve
from bertie.evaluation.intervals import RESAMPLES, Score
from bertie.evaluation.learning_curves import CurvePoint, LearningCurve, band_sizes, extrapolate
from bertie.evaluation.pages import Block, Plot, Section, Table, to_html
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.data import LabelledDataset, read_dataset, split
from bertie.training.finetune.fit import fit_labelled, with_dev
from bertie.training.finetune.validation import plan_validation

FRACTIONS = (0.1, 0.3, 1.0)
HELD_OUT, MOST_HELD_OUT = 0.2, 1000  # of the training data, where there is neither test nor dev data
FEWEST = 8  # rows to train on
NAME = "learning_curve"  # of the files in a report's folder


@dataclass(frozen=True, slots=True)
class CurveData:
    """What the models of a learning curve are trained and evaluated on."""

    train: LabelledDataset
    dev: LabelledDataset | None  # to select the best epoch on
    held_out: LabelledDataset
    split: str  # the name of what is held out: test, dev or held-out

    @classmethod
    def choose(
        cls, train: LabelledDataset, dev: LabelledDataset | None, test: LabelledDataset | None, seed: int
    ) -> CurveData:
        """Evaluate on the test data, or on the dev data, or on a part of the training data."""
        if test is not None:
            return cls(train, dev, test, "test")
        if dev is not None:
            return cls(train, dev, dev, "dev")
        rest, held_out = split(train, min(HELD_OUT, MOST_HELD_OUT / len(train.examples)), seed)
        return cls(rest, None, held_out, "held-out")


def learning_curve(
    task: AnyTrainable,
    X: Any,
    y: Any = None,
    *,
    dev: Any = None,
    test: Any = None,
    columns: Mapping[str, str] | None = None,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = 1,
    progress: bool = True,
) -> LearningCurve:
    """Train copies of a task on parts of the data, as `Trainable.learning_curve` documents."""
    kind = training_for(task).data_kind
    train = read_dataset(kind, X, y, columns=columns)

    def read(data: Any, name: str) -> LabelledDataset | None:
        if data is None:
            return None
        texts, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        known = train.labels or None
        return read_dataset(kind, texts, labels, columns=columns, name=name, known=known, training=False)

    data = CurveData.choose(train, read(dev, "the dev data"), read(test, "the test data"), task.recipe.seed)

    def new_task(seed: int) -> AnyTrainable:
        return type(task)(**task.get_params() | {"seed": seed})

    return measure(new_task, data, fractions=fractions, draws=draws, seed=task.recipe.seed, progress=progress)


def measure(
    new_task: Callable[[int], AnyTrainable],
    data: CurveData,
    *,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = 1,
    seed: int = 0,
    full: tuple[AnyTrainable, Predictions] | None = None,
    resamples: int = RESAMPLES,
    progress: bool = True,
) -> LearningCurve:
    """Train on each part; `full` is a model that was trained on all rows already, with its predictions."""
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise InputError(f"fractions={list(fractions)} must be between 0 and 1")
    if draws < 1:
        raise InputError(f"draws={draws} must be at least 1")
    rows = len(data.train.examples)
    sizes = sorted({round(rows * fraction) for fraction in fractions})
    if not (sizes := [size for size in sizes if size >= FEWEST]):
        raise InputError(f"{data.train.name} has {rows} rows, too few for a learning curve")
    probe = new_task(seed)
    metric = probe.recipe.metric or training_for(probe).main_metric(data.held_out)
    points = []
    for size in sizes:
        scores = []
        for draw in range(draws if size < rows else 1):
            if size == rows and full is not None:
                task, predictions = full
            else:
                task = _train(new_task(seed + draw), subset(data.train, size, seed + draw), data.dev)
                predictions = training_for(task).predict_labelled(data.held_out)
            scores.append(training_for(task).scores(predictions, resamples=resamples)[metric])
        points.append(_point(size, scores))
        if progress:
            print(f"learning curve: {size:,} of {rows:,} rows, {metric} {points[-1].score}", file=sys.stderr)
    curve = LearningCurve(training_for(probe).data_kind, metric, data.split, len(data.held_out.examples), tuple(points))
    bounded = all(-1 <= point.score.value <= 1 for point in points)
    if len(points) < 3 or not bounded:
        return curve
    return replace(curve, band=extrapolate(points, band_sizes(sizes[0], sizes[-1])))


def subset(data: LabelledDataset, rows: int, seed: int) -> LabelledDataset:
    """A stratified subset of the data; with the same seed, a smaller subset is contained in each larger one.

    Each label's rows are put in random order, and the first of each are taken, in proportion.
    """
    if rows >= len(data.examples):
        return data
    single = data.kind == "classify" and not data.multi_label
    strata: dict[str, list[int]] = {}
    for i, example in enumerate(data.examples):
        strata.setdefault(example.target if single else "", []).append(i)
    places = []
    for label, members in sorted(strata.items()):
        shift = int.from_bytes(_random_key(seed, label)[:4]) / 2**32
        order = sorted(members, key=lambda i: _random_key(seed, str(i), *data.examples[i].texts))
        places += [((position + shift) / len(order), i) for position, i in enumerate(order)]
    chosen = sorted(i for _, i in sorted(places)[:rows])
    return replace(data, examples=[data.examples[i] for i in chosen])


def _random_key(seed: int, *parts: str) -> bytes:
    return sha256(json.dumps([seed, *parts]).encode()).digest()


def _train(task: AnyTrainable, train: LabelledDataset, dev: LabelledDataset | None) -> AnyTrainable:
    """Train as `fit` does: without dev data, parts are held out to choose the method and the number of epochs."""
    recipe = task.recipe
    validation = plan_validation(recipe, train, recipe.seed) if dev is None else None
    if dev is None and validation is None:
        train, dev = with_dev(train, None, recipe, kind=train.kind, columns=None, name="the dev data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the recipe, which training on all rows gives, too
        return fit_labelled(task, train, dev, validation=validation, progress=False)


def _point(rows: int, scores: Sequence[Score]) -> CurvePoint:
    """The mean of the draws, with an interval of their mean width."""
    values = tuple(score.value for score in scores)
    mean, width = float(np.mean(values)), float(np.mean([score.high - score.low for score in scores]))
    middle = float(np.mean([(score.high + score.low) / 2 for score in scores]))
    return CurvePoint(rows, Score(mean, middle - width / 2, middle + width / 2), values)


def save_curve(folder: str | Path, curve: LearningCurve, title: str) -> None:
    """Write learning_curve.html and learning_curve.json into a folder."""
    atomic_write(Path(folder) / f"{NAME}.json", (json.dumps(curve.as_dict(), indent=2) + "\n").encode())
    atomic_write(Path(folder) / f"{NAME}.html", curve_page(curve, title).encode())


def curve_page(curve: LearningCurve, title: str) -> str:
    """The learning curve as a page."""
    expected = {point.rows: point for point in curve.band}
    most = curve.points[-1].rows
    measured = [[f"{point.rows:,}", "measured", str(point.score)] for point in curve.points]
    later = [[f"{rows:,}", "expected", str(expected[rows].score)] for rows in (2 * most, 4 * most) if rows in expected]
    note = (
        f"Every model was evaluated on the same {curve.held_out:,} {curve.split} rows. Bars are 95% intervals. The "
        "band is where one training run is expected to score, with 95% probability, if the error follows a power law."
    )
    verdict = curve.verdict()
    table = Table(("training rows", "", curve.metric), measured + later)
    blocks: list[Block] = [f"{verdict[0].upper()}{verdict[1:]}.", Plot(plot_learning_curve(curve), note), table]
    return to_html(f"Learning curve of {title}", [Section(f"{curve.metric} by training rows", blocks)])
