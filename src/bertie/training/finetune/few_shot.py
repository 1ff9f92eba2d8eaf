"""Training on few labelled texts: the methods, and which of them is used.

    frozen      logistic regression on the pooled hidden states of the encoder as it is (`linear_probe`)
    few-shot    the same, after the upper half of the encoder has been trained so that texts of one label are similar:
                SetFit's two steps (Tunstall et al. 2022), with every pair of a batch instead of sampled pairs
    full        the head and all weights are trained together (`bertie.training.finetune.fit`)

The rule of method="auto", for single texts, by the number of rows per label:

    up to 64    frozen and few-shot (frozen only for multi-label data), and from 32 on also full
    more        full, and up to 20,000 rows also frozen, which costs little and is sometimes better

Each is trained on the same parts of the data and predicts the rest: the dev data, or the rows that were held out. The
one with the best score is trained on all rows; of equal ones, the one that trains more weights. Pairs of texts are
always trained in full, and so is everything if a hyperparameter of full fine-tuning was set (`lr`, `epochs`, …).

The score that is reported is not that of the winner, which is the best of several and so too high. Where there are
folds, the method for the rows of a fold is chosen by the other folds, and the score is that of these predictions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.linear_head import with_linear_head
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import ConfigError, InputError
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

FEW, FULL_FROM = 64, 32  # rows per label
MOST_FROZEN_ROWS = 20_000
SCALE = 10.0  # of the contrastive loss
ROWS_PER_STEP = 64
MOST_EPOCHS, LEAST_EPOCHS, ROW_PASSES = 20, 4, 1280  # of the contrastive training
# Hyperparameters that say that full fine-tuning is wanted.
FULL_ONLY = (
    *("epochs", "lr", "head_lr", "batch_size", "batch_tokens", "layer_decay", "freeze", "unfreeze", "lora"),
    *("class_weights", "label_smoothing", "patience", "evals_per_epoch", "metric"),
)
# What the contrastive training takes from the recipe.
_SHARED = ("seed", "dropout", "weight_decay", "warmup", "mixed_precision", "micro_tokens", "train_windows")
_DEFAULTS = {item.name: item.default for item in fields(Recipe)}


@dataclass(frozen=True, slots=True)
class MethodPlan:
    """The methods to compare, in the order of the weights they train, and why the others are not tried."""

    methods: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def only_full(self) -> bool:
        """Whether there is nothing to compare, and full fine-tuning is used."""
        return self.methods == ("full",)


def plan_methods(recipe: Recipe, data: LabelledDataset) -> MethodPlan:
    """Which methods to try.

    >>> from bertie.training.finetune.data import read_dataset
    >>> data = read_dataset("classify", [f"text {i}" for i in range(48)], ["a", "b", "c"] * 16)
    >>> plan_methods(Recipe(), data)
    MethodPlan(methods=('frozen', 'few-shot'), left_out={'full': '48 rows'})
    """
    rows, method = len(data.examples), recipe.method
    pairs = any(len(example.texts) != 1 for example in data.examples)
    if method not in ("auto", "full"):
        _check_explicit(method, data, pairs)
        return MethodPlan((method,))
    given = next((name for name in FULL_ONLY if getattr(recipe, name) != _DEFAULTS[name]), None)
    if method == "full" or data.kind != "classify" or pairs or len(data.labels) < 2 or given is not None:
        return MethodPlan(("full",))
    per_label = rows / len(data.labels)
    if per_label > FEW:
        return MethodPlan(("frozen", "full") if rows <= MOST_FROZEN_ROWS else ("full",))
    methods = ["frozen", *([] if data.multi_label else ["few-shot"])]
    if per_label >= FULL_FROM:
        return MethodPlan((*methods, "full"))
    return MethodPlan(tuple(methods), {"full": f"{rows:,} rows"})


def _check_explicit(method: str, data: LabelledDataset, pairs: bool) -> None:
    if data.kind != "classify":
        raise ConfigError(f"method={method!r} is for classification; leave it out to train for {data.kind}")
    if pairs:
        raise InputError(f"method={method!r} is for single texts, and {data.name} has pairs; use method='full'")
    if method == "few-shot" and data.multi_label:
        raise InputError(
            f"method='few-shot' is for one label per text, and {data.name} has several; use method='frozen' or 'full'"
        )


# --- training ---


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
        """Train on some of the data."""
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

    def use(self, fitted: ProbeFit) -> None:
        """Give the model to the task."""
        fitted.head.store(fitted.checkpoint)
        self.task._use(fitted.checkpoint, None)

    def _features(self, checkpoint: Checkpoint, data: LabelledDataset) -> FeatureTable:
        """What the head reads; of the frozen encoder each row is computed once."""
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
    """The hyperparameters of the contrastive training, as far as they were not given."""
    config = checkpoint.model.config
    epochs = max(LEAST_EPOCHS, min(MOST_EPOCHS, math.ceil(ROW_PASSES / rows)))
    return Recipe(
        lr=recipe.lr or default_lr(config),
        epochs=recipe.epochs or epochs,
        batch_size=recipe.batch_size or min(rows, ROWS_PER_STEP),
        freeze=recipe.freeze or config.depth // 2,
        **{name: getattr(recipe, name) for name in _SHARED},
    )


# --- comparison ---


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """The method that was chosen, and what every one that was tried had predicted for held-out rows."""

    method: str
    metric: str
    scores: dict[str, float]  # by method, on the same rows
    predictions: Predictions  # each row by the method that the other folds would choose
    left_out: dict[str, str]
    source: str  # "cross-validated", "held-out" or "dev"

    def __str__(self) -> str:
        others = [f"{name} {score:.2f}" for name, score in self.scores.items() if name != self.method]
        others += [f"{name} not tried: {why}" for name, why in self.left_out.items()]
        own = f"{self.source} {self.metric} {self.scores[self.method]:.2f}"
        return f"method: {self.method} ({'; '.join([own, *others])})"


def compare_methods(
    task: AnyTrainable,
    folds: dict[str, Sequence[Predictions]],
    metric: str,
    *,
    left_out: dict[str, str] | None = None,
    source: str = "",
) -> MethodChoice:
    """Choose a method by the predictions of each, by fold. The folds are the same for all, and so is their order."""
    count = len(next(iter(folds.values())))
    scores = {name: _score(task, parts, metric) for name, parts in folds.items()}
    parts = []
    for i in range(count):
        others = {
            name: _score(task, [part for j, part in enumerate(group) if j != i or count == 1], metric)
            for name, group in folds.items()
        }
        parts.append(folds[_best(others)][i])
    source = source or ("cross-validated" if count > 1 else "held-out")
    return MethodChoice(_best(scores), metric, scores, pool(parts), left_out or {}, source)


def _best(scores: dict[str, float]) -> str:
    """The method with the best score; of equal ones the last, which trains most weights."""
    return max(reversed(scores), key=lambda name: -math.inf if math.isnan(scores[name]) else scores[name])


def _score(task: AnyTrainable, parts: Sequence[Predictions], metric: str) -> float:
    scores = training_for(task).scores(pool(parts), resamples=0)
    if metric not in scores:
        raise ConfigError(f"metric={metric!r} must be one of {', '.join(scores)}")
    return scores[metric].value


def pool(parts: Sequence[Predictions]) -> Predictions:
    """The predictions of several parts of the data, in the order of the rows."""
    examples = [example for part in parts for example in part.data.examples]
    order = sorted(range(len(examples)), key=lambda i: examples[i].row)

    def ordered(name: str) -> list[Any]:
        values = [value for part in parts for value in getattr(part, name)]
        return [values[i] for i in order]

    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("probabilities", "confidence", "lengths", "read", "windows")
    }
    data = replace(parts[0].data, examples=[examples[i] for i in order])
    return replace(parts[0], data=data, gold=ordered("gold"), predicted=ordered("predicted"), **arrays)
