"""Code that all fine-tuning tasks share: evaluation on labelled data, and the interface of training adapters.

A task is inference only. Its adapter, a `TaskTraining`, adds what training needs: the head for the data, the objective,
examples as training items, predictions beside the true labels, metrics and calibration. Long texts are trained on the
way they are read, in windows.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import Calibration, HeadInfo
from bertie.errors import ConfigError, InputError
from bertie.evaluation.metrics import Score
from bertie.nn.linear import precision_of
from bertie.pipeline.inputs import TaskInput
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.tasks.trainable import Trainable, load_copy
from bertie.text.windows import Window
from bertie.training.distributed import local_device
from bertie.training.finetune.data import Example, Kind, LabelledDataset, fingerprint, read_dataset
from bertie.training.objectives import Objective, TrainingExample, TrainingWindow
from bertie.training.sampling import BatchSampler, TrainingTask

AnyTrainable = Trainable[Any, Any, Any]
TaskT = TypeVar("TaskT", bound=AnyTrainable)


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's predictions on labelled data, beside the true labels."""

    kind: str  # a key of `bertie.evaluation.metrics.MAIN`
    data: LabelledDataset
    gold: Sequence[Any]
    predicted: Sequence[Any]
    probabilities: NDArray[np.float32] | None  # (n, labels) of a classifier
    confidence: NDArray[np.float32] | None  # (n,) the probability of the predicted label
    lengths: NDArray[np.int64]  # (n,) tokens per text
    read: NDArray[np.int64]  # (n,) tokens of it that were read
    windows: NDArray[np.int64]  # (n,)
    no_answer: NDArray[np.float32] | None = None  # (n,) the probability of "no answer" to a question


class TaskTraining(ABC, Generic[TaskT]):
    """How one task is trained and evaluated."""

    data_kind: ClassVar[Kind]

    def __init__(self, task: TaskT) -> None:
        self.task = task

    @property
    def recipe(self) -> Recipe:
        """The task's hyperparameters, with those that `fit` has chosen."""
        recipe: Recipe = self.task.__dict__.get("recipe_") or self.task.recipe
        return recipe

    @property
    def labels(self) -> list[str]:
        """The labels of the task's head, in the order of its outputs."""
        return list(self.task.info.labels.values())

    # --- what a task defines ---

    @abstractmethod
    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """The head that the data needs."""

    @abstractmethod
    def objective(self, data: LabelledDataset) -> Objective:
        """The training objective."""

    @abstractmethod
    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """Convert an example to a training item: the windows of its text, with their targets."""

    @abstractmethod
    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Predict labelled data."""

    @abstractmethod
    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Every metric with its confidence interval; `resamples=0`: values only."""

    def main_metric(self, data: LabelledDataset) -> str:
        """The metric that selects the best epoch and seed: by default that of the task's registry row."""
        return str(registry.row_of(self.task).metric)

    def texts(self, example: Example) -> tuple[str, ...]:
        """The texts of an example as the model reads them."""
        return example.texts

    def check_metrics(self, data: LabelledDataset) -> None:
        """Raise before training if a package that the metrics need is missing."""

    def check_data(
        self, train: LabelledDataset, dev: LabelledDataset | None, test: LabelledDataset | None = None
    ) -> None:
        """Raise before training if the task cannot be trained or evaluated on this data."""
        for data in (dev, test):
            if data is not None:
                self.check_metrics(data)

    def calibrate(self, dev: LabelledDataset) -> None:
        """Fit temperature and thresholds on held-out data."""

    def fit_calibration(self, predictions: Predictions) -> Calibration | None:
        """Fit a calibration to uncalibrated predictions; None if the task has no calibration."""
        return None

    def calibrated(self, predictions: Predictions, values: Calibration) -> Predictions:
        """Apply a calibration to uncalibrated predictions."""
        return predictions

    def use_calibration(self, values: Calibration) -> None:
        """Set the calibration of the task's head."""

    def finish(self) -> None:
        """Clean up after training, however it ended."""

    # --- what all share ---

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """The checkpoint with a fresh head for the data, and no other."""
        info = self.head_for(data)
        labels = list(info.labels.values()) or None
        return checkpoint.with_head(info.kind, labels, problem=info.problem, seed=self.recipe.seed)

    def plan(self, data: LabelledDataset) -> Sequence[TrainingTask] | BatchSampler:
        """The tasks that training samples examples from, or a batch sampler over them."""
        return [self.source(data)]

    def source(self, data: LabelledDataset) -> TrainingTask:
        """The head with its objective and its training items."""
        return TrainingTask(str(self.task.head), self.objective(data), list(self.items(data)))

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize examples into training items."""
        inputs = (TaskInput(f"{data.name}, row {example.row}", self.texts(example), None) for example in data.examples)
        for example, text in zip(data.examples, self.task.pipeline.read(inputs), strict=True):
            yield self.item(example, text.windows)

    def metrics(self, data: LabelledDataset) -> dict[str, float]:
        """The values of all metrics, without intervals."""
        return {name: score.value for name, score in self.scores(self.predict_labelled(data), resamples=0).items()}

    def fingerprint(self, data: Sequence[LabelledDataset]) -> str:
        """A hash of all that a run depends on."""
        return run_fingerprint(self.task.checkpoint, self.recipe, self.task.overflow, data)


def training_for(task: TaskT) -> TaskTraining[TaskT]:
    """The training adapter of a task, by its row in the registry."""
    row = registry.row_of(task)
    if row.training is None:
        raise ConfigError(f"{type(task).__name__} cannot be trained")
    adapter: TaskTraining[TaskT] = registry.resolve(row.training)(task)
    return adapter


def score(task: AnyTrainable, X: Any, y: Any = None, *, columns: Mapping[str, str] | None = None) -> float:
    """The task's main metric on labelled data."""
    training = training_for(task)
    known = (tuple(training.labels) or None) if training.data_kind in ("classify", "tag") else None
    data = read_dataset(training.data_kind, X, y, columns=columns, name="the data", known=known, training=False)
    return training.metrics(data)[training.main_metric(data)]


def starting_checkpoint(model: Checkpoint | str | Path | None, device: str | torch.device | None) -> Checkpoint:
    """The checkpoint to train, unaffected by earlier calls of `fit`; on this process's GPU, if there is one."""
    if device is not None or not isinstance(model, Checkpoint):
        device = local_device(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    checkpoint = load_copy(model, device)
    checkpoint.origin = None  # its weights will change, and fused optimizers do not increment version counters
    if checkpoint.tokenizer is None:
        raise InputError(f"{checkpoint.source} has no tokenizer, which training needs")
    if (precision := precision_of(checkpoint.model.encoder)) in ("int8", "fp8"):
        raise InputError(
            f"{checkpoint.source} was loaded with precision={precision!r}, for inference; load it with "
            "precision='fp32' to train it"
        )
    return checkpoint


def run_fingerprint(checkpoint: Checkpoint, recipe: Recipe, overflow: str, data: Sequence[LabelledDataset]) -> str:
    """A hash of all that a run depends on: weights, configuration, hyperparameters and data."""
    digest = hashlib.sha256()
    for name, parameter in checkpoint.model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().sum(dtype=torch.float64).cpu().numpy().tobytes())
    for value in (recipe.as_dict(), checkpoint.config, overflow, [fingerprint(part) for part in data]):
        digest.update(json.dumps(value, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def pieces(windows: Sequence[Window]) -> tuple[TrainingWindow, ...]:
    """Convert windows to training windows, with their shares of the text."""
    total = sum(window.weight for window in windows)
    return tuple(TrainingWindow(w.encoding.ids, w.encoding.segments, w.weight / total) for w in windows)


def class_weights(recipe: Recipe, data: LabelledDataset, counts: Mapping[str, int]) -> dict[str, float]:
    """The loss weight of each label: 1, as given in the recipe, or inversely proportional to its frequency."""
    weights = recipe.class_weights
    if weights is None:
        return dict.fromkeys(data.labels, 1.0)
    if weights == "balanced":
        total = sum(counts.values())
        return {label: total / (len(data.labels) * max(1, counts.get(label, 0))) for label in data.labels}
    unknown = sorted(set(weights) - set(data.labels))
    if unknown:
        raise ConfigError(
            f"class_weights has unknown labels: {', '.join(unknown)}; the labels are {', '.join(data.labels[:20])}"
        )
    return {label: float(weights.get(label, 1.0)) for label in data.labels}


def token_counts(results: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(n,) each: tokens in total, tokens read, and windows of each result."""
    total, read, windows = (
        np.array([getattr(result, name) for result in results], dtype=np.int64)
        for name in ("tokens_total", "tokens_read", "windows")
    )
    return total, read, windows
