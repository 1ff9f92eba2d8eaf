"""Validation without dev data: predictions for rows that were held out, before the final model is trained on all rows.

One part is held out, or each of several folds in turn. A model is trained on the rest, to the end of its schedule, and
predicts the rows it has not seen at the ends of some epochs. These predictions, of all folds together, give the number
of epochs, the temperature and thresholds, and the score that is reported. The models themselves are discarded.

In the folder of a run:

    fold-1/                 the training state of a fold, replaced at its end by
        predictions-9.json  what it predicted after so many steps, and
        history.json        its history
    validation.json         the result, which replaces the folds
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.config import Calibration
from bertie.data.atomic import atomic_write
from bertie.errors import CheckpointError, ConfigError, InputError
from bertie.recipe import Recipe
from bertie.training.callbacks import TrainingHistory
from bertie.training.finetune.base import Predictions, TaskTraining
from bertie.training.finetune.data import LabelledDataset, split, split_folds
from bertie.training.finetune.defaults import default_folds, default_refit, dev_fraction

RESULT = "validation.json"
MOST_EVALUATIONS = 6  # of a fold
_ARRAYS = ("probabilities", "confidence", "lengths", "read", "windows", "no_answer")


@dataclass(frozen=True, slots=True)
class ValidationPlan:
    """The parts that are held out, each with the rows that a model is trained on to predict it."""

    splits: tuple[tuple[LabelledDataset, LabelledDataset], ...]
    rows: int  # in all
    seed: int = 0  # of the split
    refit: bool = True  # whether the final model is trained on all rows

    @property
    def description(self) -> str:
        """How a score on these parts was obtained, in words."""
        if len(self.splits) > 1:
            return f"{len(self.splits)}-fold cross-validation, then trained on all {self.rows:,} rows"
        held = len(self.splits[0][1].examples)
        if not self.refit:
            return f"held-out {held / self.rows:.0%} ({held:,} rows), without time to refit on all {self.rows:,} rows"
        return f"held-out {held / self.rows:.0%} ({held:,} rows), then refitted on all {self.rows:,} rows"

    @classmethod
    def of_rows(cls, data: LabelledDataset, held_out: Sequence[Sequence[int]], **options: Any) -> ValidationPlan:
        """Build a plan that holds out rows, given by their numbers."""
        splits = []
        for numbers in map(set, held_out):
            rest, held = ([e for e in data.examples if (e.row in numbers) == wanted] for wanted in (False, True))
            splits.append((replace(data, examples=rest), replace(data, examples=held)))
        return cls(tuple(splits), len(data.examples), **options)

    @property
    def held_out(self) -> list[list[int]]:
        """The numbers of the rows in each part."""
        return [[example.row for example in held.examples] for _, held in self.splits]

    @property
    def train(self) -> LabelledDataset | None:
        """The rows that were not held out; None: all were, in turn."""
        return self.splits[0][0] if len(self.splits) == 1 else None

    def name(self, index: int) -> str:
        """The name of a part, for messages."""
        return f"fold {index + 1} of {len(self.splits)}" if len(self.splits) > 1 else "validation"


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """What models predicted for rows that they were not trained on."""

    plan: ValidationPlan
    metric: str
    value: float  # of the metric, before calibration
    predictions: Predictions  # after calibration, in the order of the rows
    epochs: float  # that the final model is trained for
    calibration: Calibration | None
    evaluations: list[dict[str, float]]  # rows of step, epoch and scores, of all folds together
    histories: list[TrainingHistory]  # of each fold


def plan_validation(recipe: Recipe, data: LabelledDataset, seed: int) -> ValidationPlan | None:
    """The parts to hold out before training on all rows; None: nothing is held out, or training ends with that."""
    if data.kind == "embed":
        for name in ("folds", "refit"):
            if getattr(recipe, name):
                raise ConfigError(f"{name}={getattr(recipe, name)} is not for embed; leave it out, or give dev data")
        return None
    rows = len(data.examples)
    if count := default_folds(recipe, data):
        if count > rows:
            raise ConfigError(f"folds={count} must be at most the number of rows, {rows:,}")
        try:
            return ValidationPlan(tuple(split_folds(data, count, seed)), rows, seed)
        except InputError:  # too few different texts
            if recipe.folds is not None:
                raise
            return None
    fraction = dev_fraction(recipe, data)
    if not fraction or not default_refit(recipe, data):
        return None
    return ValidationPlan((split(data, fraction, seed),), rows, seed)


def evaluation_steps(epoch_ends: Sequence[int]) -> list[int]:
    """The ends of some epochs, evenly distributed, and always the last.

    >>> evaluation_steps([10, 20]), evaluation_steps(range(1, 51))
    ([10, 20], [8, 17, 25, 33, 42, 50])
    """
    count = min(MOST_EVALUATIONS, len(epoch_ends))
    return [epoch_ends[math.floor(i * len(epoch_ends) / count + 0.5) - 1] for i in range(1, count + 1)]


def choose_evaluation(values: Sequence[float], rows: int) -> int:
    """The index of the last evaluation, or of the best if the last is worse by over two standard errors.

    The best of many is partly luck, and only at the last one has the learning rate decayed.

    >>> choose_evaluation([0.5, 0.91, 0.9], rows=100), choose_evaluation([0.5, 0.91, 0.8], rows=100)
    (2, 1)
    """
    scores = [-math.inf if math.isnan(value) else value for value in values]
    best = max(range(len(scores)), key=lambda i: scores[i])
    p = min(max(scores[best], 0.02), 0.98)
    falls = scores[best] - scores[-1] > 2 * math.sqrt(p * (1 - p) / rows)
    return best if falls else len(scores) - 1


def summarize(
    training: TaskTraining[Any],
    plan: ValidationPlan,
    folds: Sequence[tuple[TrainingHistory, Sequence[Predictions]]],
    metric: str,
    recipe: Recipe,
) -> ValidationResult:
    """Choose the number of epochs and calibrate by the predictions of all folds at each evaluation."""
    # A fold may end earlier than planned; the last evaluation of each is at the end of its schedule.
    count = min(len(predictions) for _, predictions in folds)
    points = [*range(count - 1), -1]
    pooled = [pool([predictions[i] for _, predictions in folds]) for i in points]
    histories = [history for history, _ in folds]
    evaluations = []
    for row, part in zip([histories[0].evaluations[i] for i in points], pooled, strict=True):
        scores = {name: score.value for name, score in training.scores(part, resamples=0).items()}
        evaluations.append({"step": row["step"], "epoch": row["epoch"], **scores})
    if metric not in evaluations[0]:
        names = [name for name in evaluations[0] if name not in ("step", "epoch")]
        raise ConfigError(f"metric={metric!r} must be one of {', '.join(names)}")
    values = [row[metric] for row in evaluations]
    stopped = any(history.stopped_early for history in histories)
    index = int(np.nanargmax(values)) if stopped else choose_evaluation(values, plan.rows)
    calibration = training.fit_calibration(pooled[index])
    predictions = pooled[index] if calibration is None else training.calibrated(pooled[index], calibration)
    epochs = recipe.resolve().epochs if index == len(pooled) - 1 and not stopped else evaluations[index]["epoch"]
    value = values[index]
    return ValidationResult(plan, metric, value, predictions, epochs, calibration, evaluations, histories)


def pool(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of several parts of the data, in the order of the rows."""
    examples = [example for part in parts for example in part.data.examples]
    order = sorted(range(len(examples)), key=lambda i: examples[i].row)

    def ordered(name: str) -> list[Any]:
        values = [value for part in parts for value in getattr(part, name)]
        return [values[i] for i in order]

    arrays: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else np.concatenate([getattr(p, name) for p in parts])[order]
        for name in _ARRAYS
    }
    data = replace(parts[0].data, examples=[examples[i] for i in order])
    return replace(parts[0], data=data, gold=ordered("gold"), predicted=ordered("predicted"), **arrays)


# --- on disk ---


def save_predictions(path: Path, predictions: Predictions) -> None:
    """Write predictions as JSON, without their data."""
    atomic_write(path, json.dumps(_predictions_as_dict(predictions)).encode())


def load_predictions(path: Path, data: LabelledDataset) -> Predictions:
    """Read the predictions for some data."""
    return _predictions_from_dict(_read(path), data)


def save_result(folder: Path, result: ValidationResult, fingerprint: str) -> None:
    """Write the result of a validation."""
    values = {
        "fingerprint": fingerprint,
        "held_out": result.plan.held_out,
        "seed": result.plan.seed,
        "refit": result.plan.refit,
        "metric": result.metric,
        "value": result.value,
        "predictions": _predictions_as_dict(result.predictions),
        "epochs": result.epochs,
        "calibration": None if result.calibration is None else asdict(result.calibration),
        "evaluations": result.evaluations,
        "histories": [asdict(history) for history in result.histories],
    }
    atomic_write(folder / RESULT, json.dumps(values).encode())


def load_result(folder: Path, data: LabelledDataset, fingerprint: str | None = None) -> ValidationResult | None:
    """Read the result of a validation on some data, if there is one."""
    path = folder / RESULT
    if not path.is_file():
        return None
    raw = _read(path)
    if fingerprint is not None and raw.pop("fingerprint") != fingerprint:
        raise CheckpointError(
            f"{folder} holds a run with another recipe, other data or another model, and can only be resumed with its "
            "own. Choose another folder, or remove this one"
        )
    plan = ValidationPlan.of_rows(data, raw["held_out"], seed=raw["seed"], refit=raw["refit"])
    held = {row for rows in plan.held_out for row in rows}
    data = replace(data, examples=[example for example in data.examples if example.row in held])
    calibration = raw["calibration"]
    return ValidationResult(
        plan,
        raw["metric"],
        raw["value"],
        _predictions_from_dict(raw["predictions"], data),
        raw["epochs"],
        None if calibration is None else Calibration(**calibration),
        raw["evaluations"],
        [TrainingHistory(**history) for history in raw["histories"]],
    )


def _predictions_as_dict(predictions: Predictions) -> dict[str, Any]:
    arrays: dict[str, NDArray[Any] | None] = {name: getattr(predictions, name) for name in _ARRAYS}
    return {
        "kind": predictions.kind,
        "gold": list(predictions.gold),
        "predicted": list(predictions.predicted),
        **{name: None if array is None else array.tolist() for name, array in arrays.items()},
    }


def _predictions_from_dict(raw: dict[str, Any], data: LabelledDataset) -> Predictions:
    def values(name: str) -> list[Any]:
        return [tuple(value) if raw["kind"] == "multi_label" else value for value in raw[name]]

    dtypes: dict[str, type[np.generic]] = dict.fromkeys(("probabilities", "confidence", "no_answer"), np.float32)
    arrays: dict[str, Any] = {
        name: None if raw[name] is None else np.array(raw[name], dtype=dtypes.get(name, np.int64)) for name in _ARRAYS
    }
    return Predictions(raw["kind"], data, values("gold"), values("predicted"), **arrays)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); start again without resume") from None
    return raw
