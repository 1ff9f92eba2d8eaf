"""Training with one or several seeds, resumable at any time: data in, the folder of the best model out.

While a job runs, everything is in OUT.training, beside the output folder OUT:

    job.json           the settings: only the same job can be resumed
    seed-1/            the training state of a run (`bertie.training.state`, and of its folds:
                       `bertie.training.finetune.validation`), replaced at its end by
        result.json    its history and scores, and
        model/         its model, if it is the best so far

OUT appears when everything is done: complete with its report, or not at all.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bertie._version import __version__
from bertie.checkpoints.hub import absolute_name
from bertie.data.atomic import atomic_write
from bertie.errors import CheckpointError
from bertie.pipeline.pipeline import Overflow
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.training.callbacks import TrainingHistory
from bertie.training.distributed import Strategy, World, local_device
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.budget import Deadline
from bertie.training.finetune.data import LabelledDataset, fingerprint
from bertie.training.finetune.fit import HISTORY, fit_labelled
from bertie.training.finetune.validation import RESULT as VALIDATION
from bertie.training.finetune.validation import ValidationPlan, ValidationResult, load_result
from bertie.training.output_folder import MODEL, RESULT, publish, state_folder

SETTINGS, STATE = "job.json", "state.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningJob:
    """What to train, on which data, and how."""

    task: str  # a trainable one of `bertie.tasks.registry`
    model: str | Path
    train: LabelledDataset
    dev: LabelledDataset | None
    test: LabelledDataset | None
    recipe: Recipe
    seeds: list[int]
    device: str
    overflow: Overflow = "window"
    validation: ValidationPlan | None = None  # parts of `train` to hold out, before the model is trained on all rows
    notes: tuple[Sequence[str], Sequence[str]] = ((), ())  # why the hyperparameters were chosen; warnings

    def settings(self) -> dict[str, Any]:
        """All that the result depends on."""
        data = {"train": self.train, "dev": self.dev, "test": self.test}
        recipe = {name: value for name, value in self.recipe.as_dict().items() if name != "seed"}
        return {
            "bertie": __version__,
            "task": self.task,
            "model": absolute_name(self.model),
            "overflow": self.overflow,
            "seeds": self.seeds,
            **recipe,
            **{split: None if part is None else fingerprint(part) for split, part in data.items()},
        }

    def new_task(self, seed: int) -> AnyTrainable:
        """An untrained task with the hyperparameters of the job."""
        task_class = registry.get(self.task).trainable_class
        recipe = self.recipe.replace(seed=seed)
        return task_class.from_recipe(self.model, recipe, overflow=self.overflow, device=self.device)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of one seed. Scores are values without intervals, by metric."""

    seed: int
    history: TrainingHistory
    dev: dict[str, float] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)
    epochs: float | None = None  # of the final model: the recipe's, or fewer
    recipe: dict[str, Any] = field(default_factory=dict)  # with what `fit` chose


@dataclass(frozen=True, slots=True)
class BestRun:
    """The model of the best seed, loaded as it was saved, and its predictions on dev and test data."""

    result: RunResult
    task: AnyTrainable
    predictions: dict[str, Predictions]
    validation: ValidationPlan | None = None  # if the dev predictions are for rows that were held out


class SeedRuns:
    """The runs of a job, one per seed. Every process of a distributed job has one; only the main process writes."""

    def __init__(self, out: Path, job: FineTuningJob, world: World, *, resume: bool = False) -> None:
        self.out, self.job, self.world, self.resume = out.absolute(), job, world, resume
        self.state = state_folder(out)
        self.results: dict[int, RunResult] = {}
        self._predictions: dict[int, dict[str, Predictions]] = {}
        if world.is_main:
            self._open()
        self.results = self._broadcast(self.results)

    def _open(self) -> None:
        settings = json.loads(json.dumps(self.job.settings()))
        if self.resume and (self.state / SETTINGS).is_file():
            self._check_same_job(settings)
            self.results = {seed: result for seed in self.job.seeds if (result := self._read(seed)) is not None}
            return
        shutil.rmtree(self.state, ignore_errors=True)
        self.state.mkdir(parents=True)
        atomic_write(self.state / SETTINGS, json.dumps(settings).encode())

    def _check_same_job(self, settings: dict[str, Any]) -> None:
        before = _read_json(self.state / SETTINGS)
        for key in {**settings, **before}:
            if settings.get(key) != before.get(key):
                old, new = (f"{values.get(key)!r:.80}" for values in (before, settings))
                what = f"other {key} data" if key in ("train", "dev", "test") else f"{key}={old}, and now it is {new}"
                raise CheckpointError(
                    f"{self.state} was started with {what}; use the same settings, or pass --overwrite without "
                    "--resume to start again"
                )

    def _read(self, seed: int) -> RunResult | None:
        file = self._folder(seed) / RESULT
        if not file.is_file():
            return None
        raw = _read_json(file)
        return RunResult(**raw | {"history": TrainingHistory(**raw["history"])})

    def _folder(self, seed: int) -> Path:
        return self.state / f"seed-{seed}"

    def _model(self, seed: int) -> Path:
        return self._folder(seed) / MODEL

    def _broadcast(self, results: dict[int, RunResult]) -> dict[int, RunResult]:
        """The results of the main process, whose disk the others may not see."""
        if self.world.size == 1:
            return results
        values = [results]
        dist.broadcast_object_list(values, src=0, device=local_device(torch.device(self.job.device)))
        return values[0]

    def train(
        self,
        seed: int,
        *,
        save_steps: int | None = None,
        strategy: Strategy = "ddp",
        progress: bool = True,
        deadline: Deadline | None = None,
    ) -> RunResult:
        """Train with one seed, unless that is done already."""
        if seed in self.results:
            return self.results[seed]
        job, folder = self.job, self._folder(seed)
        try:
            task = fit_labelled(
                job.new_task(seed),
                job.train,
                job.dev,
                validation=job.validation,
                folder=folder,
                resume=self.resume,
                save_steps=save_steps,
                strategy=strategy,
                progress=progress,
                deadline=deadline,
            )
        except BaseException:
            if self.world.is_main and not self.results and not _can_resume(folder):
                shutil.rmtree(self.state, ignore_errors=True)
            raise
        predictions = self._predict(task, task.validation_)
        scores = {
            split: {metric: score.value for metric, score in training_for(task).scores(part, resamples=0).items()}
            for split, part in predictions.items()
        }
        result = self.results[seed] = RunResult(
            seed, task.history_, **scores, epochs=task.recipe_.epochs, recipe=task.recipe_.as_dict()
        )
        self._predictions[seed] = predictions
        if self.world.is_main:
            task.save(self._model(seed), overwrite=True)
            atomic_write(folder / RESULT, json.dumps(asdict(result)).encode())
            for state in (*folder.glob("*.pt"), folder / "log.csv"):
                state.unlink(missing_ok=True)
        self._drop_worse()
        return result

    def _predict(self, task: AnyTrainable, validation: ValidationResult | None) -> dict[str, Predictions]:
        """Predictions on the dev and test data; without dev data, those for the rows that were held out."""
        splits = {"dev": self.job.dev, "test": self.job.test}
        training = training_for(task)
        held_out = {} if validation is None else {"dev": validation.predictions}
        return held_out | {split: training.predict_labelled(data) for split, data in splits.items() if data is not None}

    def _drop_worse(self) -> None:
        best = self.best_seed()
        for seed in self.results:
            if seed != best:
                self._predictions.pop(seed, None)
                if self.world.is_main:
                    shutil.rmtree(self._model(seed), ignore_errors=True)

    def best_seed(self) -> int:
        """The seed with the highest dev score; the first one without dev data."""

        def dev_score(seed: int) -> float:
            value = self.results[seed].dev.get(self.metric, -math.inf)
            return value if math.isfinite(value) else -math.inf

        return max((seed for seed in self.job.seeds if seed in self.results), key=dev_score)

    @property
    def metric(self) -> str:
        """The metric that selects the best seed."""
        job = self.job
        training = training_for(registry.get(job.task).trainable_class())
        return job.recipe.metric or training.main_metric(job.train if job.dev is None else job.dev)

    def best(self) -> BestRun:
        """The best model, loaded from disk: the report is on what is kept."""
        job, seed = self.job, self.best_seed()
        task = registry.get(job.task).trainable_class.load(self._model(seed), overflow=job.overflow, device=job.device)
        validation = None if job.validation is None else load_result(self._folder(seed), job.train)
        predictions = self._predictions.get(seed)
        if predictions is None:  # an earlier process finished this seed
            predictions = self._predict(task, validation)
        return BestRun(self.results[seed], task, predictions, None if validation is None else validation.plan)

    def close(self) -> None:
        """Leave the process group: the rest is done by the main process."""
        if self.world.size > 1:
            dist.destroy_process_group()

    def finish(self, write: Callable[[Path], None]) -> None:
        """Let `write` add a report to the best model, then move it to the output folder."""
        model = self._model(self.best_seed())
        write(model)
        publish(model, self.out, self.state)


def _can_resume(folder: Path) -> bool:
    return any(file for name in (STATE, HISTORY, VALIDATION) for file in folder.rglob(name))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); pass --overwrite without --resume to start again"
        ) from None
    return values
