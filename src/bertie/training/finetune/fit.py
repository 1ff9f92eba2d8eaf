"""`fit` of every labelled task: reads the data, chooses unset hyperparameters, validates and trains."""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.data.atomic import atomic_write
from bertie.data.progress import format_time
from bertie.errors import ConfigError, ExistsError
from bertie.recipe import Recipe
from bertie.training.callbacks import TrainingHistory
from bertie.training.distributed import Strategy, World
from bertie.training.finetune.base import Predictions, TaskT, starting_checkpoint, training_for
from bertie.training.finetune.budget import PREDICTION, PROBE, PROBE_STEPS, Deadline, Speed, plan_time
from bertie.training.finetune.data import Kind, LabelledDataset, read_dataset, split
from bertie.training.finetune.defaults import choose, dev_fraction, print_reasons
from bertie.training.finetune.method_fit import fit_by_method
from bertie.training.finetune.validation import RESULT as VALIDATION
from bertie.training.finetune.validation import (
    ValidationPlan,
    ValidationResult,
    evaluation_steps,
    load_predictions,
    load_result,
    plan_validation,
    save_predictions,
    save_result,
    summarize,
)
from bertie.training.loop import Trainer
from bertie.training.sampling import BatchSampler, ExampleSampler
from bertie.training.stage import Stage

HISTORY, BUDGET = "history.json", "budget.json"  # of a fold that is done; how the time is spent


def fit(
    task: TaskT,
    X: Any,
    y: Any = None,
    *,
    dev: Any = None,
    columns: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    save_steps: int | None = None,
    strategy: Strategy = "ddp",
    progress: bool = True,
) -> TaskT:
    """Train a task on labelled data, as `Trainable.fit` documents."""
    kind, recipe = training_for(task).data_kind, task.recipe
    data = read_dataset(kind, X, y, columns=columns)
    validation = plan_validation(recipe, data, recipe.seed) if dev is None else None
    held_out = None
    if validation is None:
        data, held_out = with_dev(data, dev, recipe, kind=kind, columns=columns, name="the dev data")
    return fit_labelled(
        task,
        data,
        held_out,
        validation=validation,
        folder=folder,
        resume=resume,
        save_steps=save_steps,
        strategy=strategy,
        progress=progress,
    )


def with_dev(
    data: LabelledDataset, dev: Any, recipe: Recipe, *, kind: Kind, columns: Mapping[str, str] | None, name: str
) -> tuple[LabelledDataset, LabelledDataset | None]:
    """The training data and the dev data: read as given, or split off by `recipe.dev_fraction`."""
    if dev is None:
        fraction = dev_fraction(recipe, data)
        return split(data, fraction, recipe.seed) if fraction else (data, None)
    X, y = dev if isinstance(dev, tuple) and len(dev) == 2 else (dev, None)
    known = data.labels or None
    return data, read_dataset(kind, X, y, columns=columns, name=name, known=known, training=False)


def fit_labelled(
    task: TaskT,
    data: LabelledDataset,
    dev: LabelledDataset | None = None,
    *,
    validation: ValidationPlan | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    save_steps: int | None = None,
    strategy: Strategy = "ddp",
    progress: bool = True,
    deadline: Deadline | None = None,
) -> TaskT:
    """Train a task on data that has been read already; `validation` holds out parts of it first.

    `deadline` is the end of the recipe's budget (default: counted from now).
    """
    if deadline is None and task.recipe.budget is not None:
        deadline = Deadline.after(task.recipe.budget)
    if (head := task.get_params().get("head")) is not None:
        raise ConfigError(
            f"head={head!r}: fit() trains a checkpoint with one head; train several heads over one encoder together "
            "with bertie.MultiTask"
        )
    options = RunOptions(None if folder is None else Path(folder), resume, save_steps, strategy, progress)
    run = partial(FineTuningRun, task, data, dev, options, deadline)
    if fit_by_method(task, data, dev, validation, run, folder=options.folder, progress=progress):
        return task
    return _fit_full(run(), validation)


def _fit_full(run: FineTuningRun[TaskT], validation: ValidationPlan | None) -> TaskT:
    """Train the head and all weights together."""
    task = run.task
    try:
        run.choose_recipe()
        validation = run.plan_time(validation)
        refit = validation is not None and validation.refit
        task.validation_ = run.validate(validation) if validation is not None and refit else None
        task.history_ = run.train(task.validation_)
        if validation is not None and not refit:
            task.validation_ = run.held_out_result(validation, task.history_)
        task.original_ = run.data.original
    finally:
        run.training.finish()
    return task


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where the state of a run is saved, and how it runs."""

    folder: Path | None
    resume: bool
    save_steps: int | None
    strategy: Strategy
    progress: bool


class FineTuningRun(Generic[TaskT]):
    """One `fit`: a model for each part that is held out, then the final one. Each starts from the given checkpoint."""

    def __init__(
        self,
        task: TaskT,
        data: LabelledDataset,
        dev: LabelledDataset | None,
        options: RunOptions,
        deadline: Deadline | None = None,
    ) -> None:
        self.task, self.data, self.dev, self.options, self.deadline = task, data, dev, options, deadline
        self._end: float | None = None  # of training, by the deadline
        self.training = training_for(task)
        self.training.check_data(data, dev)
        self._unused: Checkpoint | None = self._checkpoint()

    def _checkpoint(self) -> Checkpoint:
        arguments = self.task.get_params()
        checkpoint = self.training.prepare(starting_checkpoint(arguments["model"], arguments["device"]), self.data)
        length = self.task.recipe.max_length
        return checkpoint if length is None else checkpoint.with_max_length(length)

    def choose_recipe(self) -> None:
        """Choose the hyperparameters that are None."""
        assert self._unused is not None
        chosen = choose(self.task.recipe, self._unused.model.config, self.data, has_dev=self.dev is not None)
        self.recipe = self.task.recipe_ = chosen.recipe
        for text in (*self.recipe.warnings(), *chosen.warnings):
            warnings.warn(text, stacklevel=5)
        if self.options.progress:
            print_reasons(chosen.reasons)

    # --- the budget ---

    def plan_time(self, validation: ValidationPlan | None) -> ValidationPlan | None:
        """Choose what to hold out and the number of epochs, so that training ends before its deadline."""
        options, recipe = self.options, self.recipe.resolve()
        if self.deadline is None:
            return validation
        file = None if options.folder is None else options.folder / BUDGET
        world = World.current(self._device)
        saved = json.loads(file.read_text("utf-8")) if file is not None and file.is_file() and options.resume else None
        if saved is None:
            speed = self._speed(self.deadline)
            row = speed.step * speed.steps / (recipe.epochs * len(self.data.examples))
            self._end = self.deadline.without_prediction(row * PREDICTION)
            parts = 0 if validation is None else len(validation.splits)
            fraction = 0.0 if validation is None else len(validation.splits[0][1].examples) / validation.rows
            refit = validation is not None and validation.refit
            plan = plan_time(self._end - time.monotonic(), speed, recipe.epochs, parts, refit=refit, fraction=fraction)
            saved = {"step": speed.step, **asdict(plan)}
        self._end = self._end or self.deadline.at
        saved = world.broadcast(saved)
        if file is not None and world.is_main:
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(saved).encode())
        self.recipe = self.task.recipe_ = self.recipe.replace(epochs=saved["epochs"])
        self._print(f"budget {format_time(recipe.budget or 0.0)}: {_describe_time(saved, recipe.epochs)}")
        if validation is None or saved["held_out"] == len(validation.splits) > 1:
            return validation
        if len(validation.splits) > 1:
            validation = plan_validation(self.recipe.replace(folds=0, refit=True), self.data, validation.seed)
        if validation is not None and not saved["refit"]:
            validation = replace(validation, refit=False)
            self.data, self.dev = validation.splits[0]
        return validation

    def _speed(self, deadline: Deadline) -> Speed:
        """Measure some steps, with a model that is discarded afterwards."""
        started = time.monotonic()
        stage = Stage(deadline=started + PROBE * (deadline.at - started))
        options, self.options = self.options, replace(self.options, progress=False, resume=False, save_steps=None)
        trainer = self._trainer(self.data, None, stage)
        start, steps = time.monotonic() - started, trainer.pace.planned
        trainer.pace.planned = trainer.pace.total = min(PROBE_STEPS, steps)
        started = time.monotonic()
        history = trainer.run()
        self.options = options
        return Speed(trainer.pace.seconds or (time.monotonic() - started) / history.steps, start, steps)

    def held_out_result(self, plan: ValidationPlan, history: TrainingHistory) -> ValidationResult:
        """The predictions of the final model, if it was not trained on the rows that were held out."""
        assert self.dev is not None
        predictions = self.training.predict_labelled(self.dev)
        value = self.training.scores(predictions, resamples=0)[self.metric].value
        calibration = self.task.info.calibration if self.task.head else None
        epochs = self.recipe.resolve().epochs
        result = ValidationResult(plan, self.metric, value, predictions, epochs, calibration, history.evaluations, [])
        if self.options.folder is not None and World.current(self._device).is_main:
            save_result(self.options.folder, result, "")
        return result

    def _start(self) -> None:
        """Give the task an untrained model."""
        self.task._use(self._unused or self._checkpoint(), None)
        self._unused = None

    def _trainer(
        self,
        data: LabelledDataset,
        folder: Path | None,
        stage: Stage,
        *,
        dev: LabelledDataset | None = None,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        keep: Literal["best", "last"] = "best",
        some_epochs: bool = False,
    ) -> Trainer:
        """The trainer of one model; with `some_epochs` it is evaluated after some epochs only."""
        self._start()
        plan, options = self.training.plan(data), self.options
        sampler: BatchSampler = ExampleSampler(plan, self.recipe) if isinstance(plan, Sequence) else plan
        return Trainer(
            self.task.model,
            sampler,
            self.recipe,
            evaluate=evaluate,
            metric=self.metric,
            folder=folder,
            resume=options.resume,
            save_steps=options.save_steps,
            fingerprint=self.training.fingerprint([data] if dev is None else [data, dev]),
            strategy=options.strategy,
            progress=options.progress,
            evaluate_at=evaluation_steps(sampler.epoch_starts[1:]) if some_epochs else None,
            keep=keep,
            stage=stage,
        )

    @property
    def metric(self) -> str:
        """The metric that selects the number of epochs."""
        return self.recipe.metric or self.training.main_metric(self.data if self.dev is None else self.dev)

    # --- the final model ---

    def train(self, validation: ValidationResult | None) -> TrainingHistory:
        """Train the final model."""
        stage = Stage(deadline=self._end)
        if validation is not None:
            before = sum(len(rest.examples) for rest, _ in validation.plan.splits) / validation.plan.rows
            stage = Stage("train on all rows", before=before, deadline=self._end)
            self.recipe = self.task.recipe_ = self.recipe.replace(epochs=validation.epochs)
        dev, training = self.dev, self.training
        evaluate = None if dev is None else lambda: training.metrics(dev)
        history = self._trainer(self.data, self.options.folder, stage, dev=dev, evaluate=evaluate).run()
        if dev is not None:
            training.calibrate(dev)
        if validation is not None:
            if validation.calibration is not None:
                training.use_calibration(validation.calibration)
            history.evaluations = validation.evaluations
            history.seconds += sum(part.seconds for part in validation.histories)
        return history

    # --- validation ---

    def validate(self, plan: ValidationPlan) -> ValidationResult:
        """Train a model for each part that is held out, and predict it."""
        folder, world = self.options.folder, World.current(self._device)
        if folder is not None and not self.options.resume and self._started(folder):
            raise ExistsError(f"{folder} holds an unfinished run; resume it, or choose or empty the folder")
        fingerprint = self._fingerprint()
        result = None
        if folder is not None and world.is_main and self.options.resume:
            result = load_result(folder, self.data, fingerprint)
        result = world.broadcast(result)
        if result is None:
            slow = len(plan.splits) > 1 and self._device.type == "cpu" and self._end is None
            hint = " (--folds 0 or --budget 5m takes less time)" if slow else ""
            self._print(f"validation: {plan.description}{hint}")
            folds = [self._fold(plan, index, world) for index in range(len(plan.splits))]
            result = world.broadcast(summarize(self.training, plan, folds, self.metric, self.recipe))
            if folder is not None and world.is_main:
                save_result(folder, result, fingerprint)
                for path in folder.glob("fold-*"):
                    shutil.rmtree(path, ignore_errors=True)
        self._print(f"{result.plan.description}: {result.metric} {result.value:.4f}")
        return result

    @property
    def _device(self) -> Any:
        return (self._unused.model if self._unused is not None else self.task.model).device

    def _fingerprint(self) -> str:
        self._start()
        value = self.training.fingerprint([self.data])
        self._unused = self.task.checkpoint  # it has not been trained
        return value

    @staticmethod
    def _started(folder: Path) -> bool:
        return (folder / VALIDATION).exists() or any(folder.glob(f"fold-*/{HISTORY}"))

    def _fold(self, plan: ValidationPlan, index: int, world: World) -> tuple[TrainingHistory, Sequence[Predictions]]:
        """Train on the other rows, and predict those of a fold after some epochs."""
        (train, held), folder = plan.splits[index], self.options.folder
        folder = None if folder is None else folder / f"fold-{index + 1}"
        done = _read_fold(folder, held) if folder is not None and world.is_main and self.options.resume else None
        if (done := world.broadcast(done)) is not None:
            return done
        predictions: dict[float, Predictions] = {}

        def evaluate() -> dict[str, float]:
            step = trainer.state.step
            part = predictions[step] = self.training.predict_labelled(held)
            if folder is not None and world.is_main:
                save_predictions(folder / f"predictions-{step}.json", part)
            return {name: score.value for name, score in self.training.scores(part, resamples=0).items()}

        rows = [len(part.examples) for part, _ in plan.splits]
        before, after = sum(rows[:index]) / rows[index], (sum(rows[index + 1 :]) + plan.rows) / rows[index]
        now, end = time.monotonic(), self._end
        stage = Stage(plan.name(index), before, after, None if end is None else now + (end - now) / (1 + after))
        keep: Literal["best", "last"] = "best" if self.recipe.patience else "last"
        trainer = self._trainer(train, folder, stage, dev=held, evaluate=evaluate, keep=keep, some_epochs=True)
        history = trainer.run()
        if folder is not None and world.is_main:
            atomic_write(folder / HISTORY, json.dumps(asdict(history)).encode())
            for state in (*folder.glob("*.pt"), folder / "log.csv"):
                state.unlink(missing_ok=True)
            done = _read_fold(folder, held)  # with what an interrupted run predicted
        parts = [predictions[step] for row in history.evaluations if (step := row["step"]) in predictions]
        return world.broadcast(done or (history, parts))

    def _print(self, text: str) -> None:
        if self.options.progress and World.current(self._device).is_main:
            print(text, file=sys.stderr)


def _describe_time(plan: Mapping[str, Any], epochs: float) -> str:
    held = "" if not plan["held_out"] else "a held-out part"
    held = f"{plan['held_out']} folds" if plan["held_out"] > 1 else held
    parts = f"{held}, then training on all rows" if held and plan["refit"] else held
    chosen = f"{plan['epochs']:.3g} of {epochs:g} epochs" if plan["epochs"] < epochs else f"all {epochs:g} epochs"
    return (
        f"{plan['step']:.2g} s per step; {parts + ', ' if parts else ''}{chosen}, about {format_time(plan['seconds'])}"
    )


def _read_fold(folder: Path, held: LabelledDataset) -> tuple[TrainingHistory, Sequence[Predictions]] | None:
    """The history and the predictions of a fold that is done."""
    if not (folder / HISTORY).is_file():
        return None
    history = TrainingHistory(**json.loads((folder / HISTORY).read_text("utf-8")))
    return history, [
        load_predictions(folder / f"predictions-{row['step']:.0f}.json", held) for row in history.evaluations
    ]
