"""`fit` where several methods of training a classifier are compared on held-out rows (`methods` has the rule)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie.errors import ConfigError
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.comparison import select_rows
from bertie.training.finetune.data import LabelledDataset
from bertie.training.finetune.few_shot import ProbeFit, ProbeTraining
from bertie.training.finetune.methods import best_method, plan_methods
from bertie.training.finetune.validation import ValidationPlan, ValidationResult, pool, save_result

if TYPE_CHECKING:
    from bertie.training.finetune.fit import FineTuningRun


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """The method that was chosen, and the scores of all that were tried."""

    method: str
    metric: str
    scores: dict[str, float]  # by method, on the same rows
    predictions: Predictions | None  # for the held-out rows of each fold by the method that the other folds choose
    left_out: dict[str, str]  # why a method was not tried
    source: str  # "cross-validated", "held-out" or "dev"

    def __str__(self) -> str:
        parts = [f"{self.source} {self.metric} {self.scores[self.method]:.2f}"] if self.scores else []
        parts += [f"{name} {score:.2f}" for name, score in self.scores.items() if name != self.method]
        parts += [f"{name} not tried: {why}" for name, why in self.left_out.items()]
        return f"{self.method} ({'; '.join(parts)})" if parts else self.method


def compare_methods(
    task: AnyTrainable, folds: Mapping[str, Sequence[Predictions]], metric: str, left_out: dict[str, str], source: str
) -> MethodChoice:
    """Choose by the predictions of each method, fold by fold: the folds are the same for all."""
    count = len(next(iter(folds.values())))
    scores = {name: _score(task, parts, metric) for name, parts in folds.items()}
    parts = []
    for i in range(count):
        # The winner's score, the best of several, is biased upwards; that of the other folds' choice is not.
        others = {name: [p for j, p in enumerate(group) if j != i or count == 1] for name, group in folds.items()}
        chosen = best_method({name: _score(task, group, metric) for name, group in others.items()})
        parts.append(folds[chosen][i])
    return MethodChoice(best_method(scores), metric, scores, pool(parts), left_out, source)


def _score(task: AnyTrainable, parts: Sequence[Predictions], metric: str) -> float:
    """The metric over several parts; for multi-label predictions, at the best threshold."""
    training, predictions = training_for(task), pool(parts)
    if predictions.kind == "multi_label" and (values := training.fit_calibration(predictions)) is not None:
        predictions = training.calibrated(predictions, values)
    scores = training.scores(predictions, resamples=0)
    if metric not in scores:
        raise ConfigError(f"metric={metric!r} must be one of {', '.join(scores)}")
    return scores[metric].value


class MethodRun:
    """One `fit` by the methods of a plan. `full` starts the full fine-tuning, if that is one of them."""

    def __init__(
        self,
        task: AnyTrainable,
        data: LabelledDataset,
        dev: LabelledDataset | None,
        validation: ValidationPlan | None,
        full: Callable[[], FineTuningRun[Any]],
        *,
        folder: Path | None = None,
        progress: bool = True,
    ) -> None:
        self.task, self.data, self.dev, self.validation = task, data, dev, validation
        self.folder, self.progress, self._full = folder, progress, full
        self.training = training_for(task)
        self.training.check_data(data, dev)
        self.metric = task.recipe.metric or self.training.main_metric(data)
        self.plan = plan_methods(task.recipe, data)
        self.probe = ProbeTraining(task, data, progress=progress)
        task._use(self.probe.checkpoint, None)  # scores need its labels
        self._fits: dict[str, ProbeFit] = {}  # on all rows
        self._validated: ValidationResult | None = None  # of full fine-tuning

    def fit(self) -> None:
        """Choose a method, and train the final model."""
        choice = self._choose()
        task = self.task
        if choice.method == "full":
            run = self._run
            if self.dev is None:
                task.validation_ = self._validated
                task.history_ = run.train(self._validated)
        else:
            fitted = self._fits.get(choice.method) or self.probe.fit(choice.method, self.data)
            self.probe.use(fitted)
            task.history_ = fitted.history
            task.recipe_ = self.probe.recipe_of(choice.method, self.data)
            self._finish(choice)
        task.history_.method = str(choice)
        task.original_ = self.data.original
        if self.progress:
            print(f"method: {choice}", file=sys.stderr)

    def _choose(self) -> MethodChoice:
        methods, left_out = self.plan.methods, self.plan.left_out
        splits = [(self.data, self.dev)] if self.dev is not None else self.validation.splits if self.validation else ()
        if not splits:
            # Nothing is held out to compare them on.
            return MethodChoice(methods[-1], self.metric, {}, None, left_out, "")
        folds: dict[str, Sequence[Predictions]] = {}
        for name in methods:
            folds[name] = self._predict_full() if name == "full" else self._predict(name, splits)
        source = "dev" if self.dev is not None else "cross-validated" if len(splits) > 1 else "held-out"
        return compare_methods(self.task, folds, self.metric, left_out, source)

    def _predict(self, method: str, splits: Sequence[tuple[LabelledDataset, LabelledDataset]]) -> Sequence[Predictions]:
        parts = []
        for train, held in splits:
            fitted = self.probe.fit(method, train)
            if train is self.data:
                self._fits[method] = fitted
            parts.append(self.probe.predict(fitted, held))
        return parts

    def _predict_full(self) -> Sequence[Predictions]:
        run = self._run = self._full()
        run.choose_recipe()
        if self.dev is not None:
            self.task.validation_ = None
            self.task.history_ = run.train(None)
            return [self.training.predict_labelled(self.dev)]
        assert self.validation is not None
        self._validated = run.validate(self.validation)
        place = {example.row: i for i, example in enumerate(self._validated.predictions.data.examples)}
        return [
            select_rows(self._validated.predictions, [place[example.row] for example in held.examples])
            for _, held in self.validation.splits
        ]

    def _finish(self, choice: MethodChoice) -> None:
        """Calibrate by the predictions for held-out rows, and record them."""
        task, training, history = self.task, self.training, self.task.history_
        task.validation_ = None
        if self.dev is not None:
            training.calibrate(self.dev)
            scores = training.metrics(self.dev)
        elif choice.predictions is None or self.validation is None:
            return
        else:
            predictions = choice.predictions
            values = training.fit_calibration(predictions)
            if values is not None:
                predictions = training.calibrated(predictions, values)
                training.use_calibration(values)
            scores = {name: score.value for name, score in training.scores(predictions, resamples=0).items()}
        history.evaluations = [{"step": history.steps, "epoch": task.recipe_.epochs or 0.0, **scores}]
        if self.dev is None and self.validation is not None:
            task.validation_ = ValidationResult(
                plan=self.validation,
                metric=self.metric,
                value=scores[self.metric],
                predictions=predictions,
                epochs=task.recipe_.epochs or 0.0,
                calibration=values,
                evaluations=history.evaluations,
                histories=[replace(history)],
            )
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                save_result(self.folder, task.validation_, training.fingerprint([self.data]))


def fit_by_method(
    task: AnyTrainable,
    data: LabelledDataset,
    dev: LabelledDataset | None,
    validation: ValidationPlan | None,
    full: Callable[[], FineTuningRun[Any]],
    *,
    folder: Path | None,
    progress: bool,
) -> bool:
    """Fit a task by the method that is best on held-out rows; False if there is only full fine-tuning."""
    plan = plan_methods(task.recipe, data)
    compares = "full" in plan.methods
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # that torchrun started
    held_out = dev is not None or (validation is not None and validation.refit)
    if plan.only_full or (compares and (processes > 1 or not held_out)):
        return False
    if processes > 1:
        raise ConfigError(f"method={task.recipe.method!r} runs in one process; start it without torchrun")
    MethodRun(task, data, dev, validation, full, folder=folder, progress=progress).fit()
    return True
