"""Classifiers from few labelled texts: the methods "frozen" and "few-shot" of `bertie.training.finetune.methods`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.linear_head import with_linear_head
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.evaluation.calibration import softmax
from bertie.pipeline.inputs import TaskInput
from bertie.recipe import Recipe
from bertie.training.callbacks import TrainingHistory
from bertie.training.embedding.losses import SupervisedContrastiveLoss
from bertie.training.embedding.objective import EmbeddingObjective, make_row
from bertie.training.embedding.row_sampler import RowSampler
from bertie.training.finetune.base import AnyTrainable, Predictions, pieces, starting_checkpoint, training_for
from bertie.training.finetune.data import LabelledDataset
from bertie.training.finetune.defaults import default_lr
from bertie.training.finetune.linear_probe import FeatureTable, LinearHead, head_features
from bertie.training.loop import Trainer
from bertie.training.sampling import TrainingTask

SCALE = 10.0  # of the contrastive loss
ROWS_PER_STEP = 64
MOST_EPOCHS, LEAST_EPOCHS, ROW_PASSES = 20, 4, 1280  # of the contrastive training
# Fields of the recipe that the contrastive training uses.
_SHARED = ("seed", "dropout", "weight_decay", "warmup", "mixed_precision", "micro_tokens", "train_windows")


@dataclass(frozen=True, slots=True)
class ProbeFit:
    """A trained model and its head."""

    checkpoint: Checkpoint
    head: LinearHead
    history: TrainingHistory


class ProbeTraining:
    """Trains classifiers of the methods frozen and few-shot on parts of one dataset."""

    def __init__(self, task: AnyTrainable, data: LabelledDataset, *, progress: bool = False) -> None:
        self.task, self.data, self.progress = task, data, progress
        self.recipe: Recipe = task.recipe
        self.info = training_for(task).head_for(data)
        arguments = task.get_params()
        checkpoint = starting_checkpoint(arguments["model"], arguments["device"])
        if self.recipe.max_length is not None:
            checkpoint = checkpoint.with_max_length(self.recipe.max_length)
        self.checkpoint = with_linear_head(checkpoint, self.info)
        self._frozen: dict[int, FeatureTable] = {}  # by the identity of the data

    def fit(self, method: str, data: LabelledDataset) -> ProbeFit:
        """Train a classifier on a part of the data."""
        began = time.monotonic()
        checkpoint, history = self.checkpoint, TrainingHistory()
        if method == "few-shot":
            checkpoint = deepcopy(self.checkpoint)
            history = self._contrast(checkpoint, data)
        features = self._features(checkpoint, data).features
        head = LinearHead.fit(features, self._targets(data), multi_label=data.multi_label, seed=self.recipe.seed)
        history.seconds = time.monotonic() - began
        return ProbeFit(checkpoint, head, history)

    def predict(self, fitted: ProbeFit, data: LabelledDataset) -> Predictions:
        """The predictions of a model, without calibration."""
        table = self._features(fitted.checkpoint, data)
        logits = fitted.head.logits(table.features)
        labels, counts = np.array(self.data.labels, dtype=object), table.counts
        if data.multi_label:
            p = (1 / (1 + np.exp(-np.clip(logits, -500, 500)))).astype(np.float32)
            gold: Sequence[Any] = [tuple(example.target) for example in data.examples]
            predicted: Sequence[Any] = [tuple(labels[row >= 0.5]) for row in p]
            return Predictions("multi_label", data, gold, predicted, p, p.max(1), *counts.T)
        p = softmax(logits).astype(np.float32)
        gold = [example.target for example in data.examples]
        return Predictions("classify", data, gold, list(labels[p.argmax(1)]), p, p.max(1), *counts.T)

    def recipe_of(self, method: str, data: LabelledDataset) -> Recipe:
        """The task's recipe, with the hyperparameters that a method has chosen."""
        if method == "frozen":
            return self.recipe.replace(method=method)
        chosen = contrastive_recipe(self.recipe, self.checkpoint, len(data.examples))
        values = {name: getattr(chosen, name) for name in ("lr", "epochs", "batch_size", "freeze")}
        return self.recipe.replace(method=method, **values)

    def use(self, fitted: ProbeFit) -> None:
        """Set the task's model."""
        fitted.head.store(fitted.checkpoint)
        self.task._use(fitted.checkpoint, None)

    def _features(self, checkpoint: Checkpoint, data: LabelledDataset) -> FeatureTable:
        """The input features of the head; those of the frozen encoder are computed once per row."""
        if checkpoint is not self.checkpoint:
            return head_features(checkpoint, data.examples, self.task.overflow)
        missing = [example for example in data.examples if id(example) not in self._frozen]
        if missing:
            table = head_features(checkpoint, missing, self.task.overflow)
            self._frozen |= {id(example): table.take([i]) for i, example in enumerate(missing)}
        return FeatureTable.concatenate([self._frozen[id(example)] for example in data.examples])

    def _targets(self, data: LabelledDataset) -> NDArray[np.float64]:
        index = {label: i for i, label in enumerate(self.data.labels)}
        targets = np.zeros((len(data.examples), len(index)))
        for row, example in enumerate(data.examples):
            targets[row, [index[label] for label in (example.target if data.multi_label else (example.target,))]] = 1.0
        return targets

    def _contrast(self, checkpoint: Checkpoint, data: LabelledDataset) -> TrainingHistory:
        """Train the upper half of the encoder: texts of one label become similar, others dissimilar."""
        model, index = checkpoint.model, {label: i for i, label in enumerate(self.data.labels)}
        pipeline = type(self.task)(checkpoint, overflow=self.task.overflow).pipeline
        inputs = (TaskInput(f"{data.name}, row {e.row}", e.texts, None) for e in data.examples)
        items = [
            make_row([pieces(text.windows)], np.int64(index[example.target]))
            for example, text in zip(data.examples, pipeline.read(inputs), strict=True)
        ]
        objective = EmbeddingObjective(SupervisedContrastiveLoss(SCALE))
        objective.attach(model, SentenceModules.create(model.config.width, normalize=False))
        recipe = contrastive_recipe(self.recipe, checkpoint, len(items))
        try:
            return Trainer(
                model, RowSampler(TrainingTask("", objective, items), recipe), recipe, progress=self.progress
            ).run()
        finally:
            model.auxiliary.clear()


def contrastive_recipe(recipe: Recipe, checkpoint: Checkpoint, rows: int) -> Recipe:
    """The hyperparameters of the contrastive training, with defaults for those that are not set."""
    config = checkpoint.model.config
    epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, math.ceil(ROW_PASSES / rows)))
    return Recipe(
        lr=recipe.lr or default_lr(config),
        epochs=recipe.epochs or epochs,
        batch_size=recipe.batch_size or min(rows, ROWS_PER_STEP),
        freeze=recipe.freeze or config.depth // 2,
        **{name: getattr(recipe, name) for name in _SHARED},
    )
