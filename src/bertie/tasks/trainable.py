"""Tasks that can be trained, as scikit-learn estimators.

Hyperparameters are passed to the constructor and data to `fit`, which always starts from the given model and returns
the fitted object. `fit` and `score` are implemented in `bertie.training`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import torch

from bertie.arguments import explain_arguments, explain_options
from bertie.checkpoints.checkpoint import Checkpoint, default_device, usable_device
from bertie.checkpoints.hub import DEFAULT, default_model
from bertie.errors import ConfigError
from bertie.evaluation.learning_curves import LearningCurve
from bertie.pipeline.inputs import Options
from bertie.pipeline.language_warnings import one_warning
from bertie.pipeline.outputs import Output
from bertie.pipeline.pipeline import Overflow
from bertie.recipe import EMBEDDING_FIELDS, Method, MixedPrecision, Recipe, ScheduleName
from bertie.tasks import registry
from bertie.tasks.base import Result, Task


class Hyperparameters(TypedDict, total=False):
    """The hyperparameters of `Trainable`, for constructors that pass them on."""

    method: Method
    epochs: float | None
    lr: float | None
    head_lr: float | None
    batch_size: int | None
    batch_tokens: int | None
    micro_tokens: int
    warmup: float
    schedule: ScheduleName
    decay: float
    weight_decay: float
    beta2: float
    max_grad_norm: float
    layer_decay: float
    freeze: int | Literal["encoder"]
    unfreeze: int
    lora: int
    lora_alpha: float | None
    class_weights: Literal["balanced"] | Mapping[str, float] | None
    label_smoothing: float
    dropout: float | None
    patience: int | None
    evals_per_epoch: int
    seed: int
    mixed_precision: MixedPrecision
    gradient_checkpointing: bool
    max_length: int | None
    train_windows: int
    dev_fraction: float | None
    folds: int | None
    refit: bool | None
    stop_loss: float | None
    budget: float | str | None
    metric: str | None
    abstain: float | None


class Trainable(Task[Options, Output, Result]):
    """A task that can be trained.

    `model` is a checkpoint, a folder, a built-in name or a hub id; by default the built-in model. The hyperparameters
    are documented at `bertie.Recipe`; `fit` chooses those that are None.
    """

    history_: Any  # the `bertie.training.callbacks.TrainingHistory` of the last `fit`
    recipe_: Recipe  # with the hyperparameters that the last `fit` chose
    validation_: Any  # predictions of `fit` for held-out rows: `bertie.training.finetune.validation`, or None
    original_: Mapping[str, Any]  # from label names to the labels that were passed to `fit`

    @explain_arguments
    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        deterministic: bool = False,
        device: str | torch.device | None = None,
        method: Method = "auto",
        epochs: float | None = None,
        lr: float | None = None,
        head_lr: float | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        micro_tokens: int = 16384,
        warmup: float = 0.1,
        schedule: ScheduleName = "linear",
        decay: float = 0.1,
        weight_decay: float = 0.01,
        beta2: float = 0.999,
        max_grad_norm: float = 1.0,
        layer_decay: float = 1.0,
        freeze: int | Literal["encoder"] = 0,
        unfreeze: int = 0,
        lora: int = 0,
        lora_alpha: float | None = None,
        class_weights: Literal["balanced"] | Mapping[str, float] | None = None,
        label_smoothing: float = 0.0,
        dropout: float | None = None,
        patience: int | None = None,
        evals_per_epoch: int = 1,
        seed: int = 0,
        mixed_precision: MixedPrecision = "auto",
        gradient_checkpointing: bool = False,
        max_length: int | None = None,
        train_windows: int = 16,
        dev_fraction: float | None = None,
        folds: int | None = None,
        refit: bool | None = None,
        stop_loss: float | None = None,
        budget: float | str | None = None,
        metric: str | None = None,
        abstain: float | None = None,
    ) -> None:
        arguments = locals()
        self._set_options(overflow, deterministic)
        # As they were passed: scikit-learn's clone checks that it gets the same objects back.
        self._model_argument, self._head_argument, self._device = model, head, device
        self._hyperparameters = {name: arguments[name] for name in Hyperparameters.__annotations__}
        self.recipe = Recipe(**self._hyperparameters)
        if isinstance(model, Checkpoint):
            self._use(model, head)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        """Set the checkpoint. One without a matching head waits for `fit`."""
        if head is None and not any(self._fits(info) for info in checkpoint.heads.values()):
            self._without_head = checkpoint
            return
        super()._use(checkpoint, head)

    def __getattr__(self, name: str) -> Any:
        """Load a model given by name when it is first needed."""
        if name not in ("checkpoint", "model", "tokenizer", "head", "pipeline"):
            return super().__getattr__(name)  # an error
        checkpoint = self.__dict__.get("_without_head")
        if checkpoint is None:
            if "_model_argument" not in self.__dict__:  # being copied or unpickled
                raise AttributeError(name)
            checkpoint = self._load_model()
        Task._use(self, checkpoint, self._head_argument)  # raises if the head is missing
        return self.__dict__[name]

    def _load_model(self) -> Checkpoint:
        """The model to start from, untouched by any earlier `fit`."""
        return load_copy(self._model_argument, self._device)

    @classmethod
    @explain_options(Checkpoint.load)
    def load(
        cls,
        name: str | Path | None = None,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> Self:
        """Load a trained model, by default the built-in one; `options` are passed to `Checkpoint.load`."""
        checkpoint, head = cls._load_checkpoint(name, head, options)
        task = cls(checkpoint, overflow=overflow, head=head, deterministic=deterministic)
        _ = task.model  # a missing head is an error now, not at the first text
        return task

    @classmethod
    def from_recipe(cls, model: Checkpoint | str | Path | None, recipe: Recipe, **options: Any) -> Self:
        """A task with the hyperparameters of a recipe; `options` are the other arguments of the constructor."""
        values = recipe.as_dict()
        for name in EMBEDDING_FIELDS:
            if (value := values.pop(name)) is not None:
                raise ConfigError(f"{name}={value!r} is for training an Embedder; leave it out")
        return cls(model, **options, **values)

    @property
    def device(self) -> torch.device:
        """The device of the model, or the device that it will be loaded on."""
        if self._is_loaded:
            return self.model.device
        checkpoint = self.__dict__.get("_without_head")
        return checkpoint.device if checkpoint is not None else _default_device(self._device)

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device, in place, for training too; a model that is not loaded yet is loaded there."""
        self._device = usable_device(device)
        checkpoint = self.checkpoint if self._is_loaded else self.__dict__.get("_without_head")
        if checkpoint is not None:
            checkpoint.to(self._device)
        return self

    @property
    def _is_loaded(self) -> bool:
        return "model" in self.__dict__

    def _facts(self) -> dict[str, object]:
        if self._is_loaded:
            return super()._facts()
        model = self._model_argument.source if isinstance(self._model_argument, Checkpoint) else self._model_argument
        changed = {name: value for name, value in self._hyperparameters.items() if value != getattr(Recipe(), name)}
        return {"model": str(model or DEFAULT), **changed, "loaded": False}

    # --- scikit-learn ---

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "model": self._model_argument,
            "overflow": self.overflow,
            "deterministic": self.deterministic,
            "head": self._head_argument,
            "device": self._device,
            **self._hyperparameters,
        }

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; the fitted model is discarded."""
        arguments = {**self.get_params(), **params}
        self.__dict__.clear()
        type(self).__init__(self, **arguments)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags, TransformerTags

        data_kind = registry.row_of(self).data_kind
        return Tags(
            estimator_type={"classify": "classifier", "regress": "regressor"}.get(data_kind or ""),
            target_tags=TargetTags(required=data_kind != "embed"),
            transformer_tags=TransformerTags() if data_kind == "embed" else None,
            classifier_tags=ClassifierTags() if data_kind == "classify" else None,
            regressor_tags=RegressorTags() if data_kind == "regress" else None,
        )

    def __sklearn_is_fitted__(self) -> bool:
        return self._is_loaded

    @explain_arguments
    @one_warning()
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        dev: Any = None,
        columns: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        progress: bool = True,
    ) -> Self:
        """Train on texts and labels, or on a table or file of both, starting from the given model.

        `dev`: a table, a file or a pair (X, y), used to choose the best epoch and to calibrate probabilities. Without
        it, part of the data is held out (`dev_fraction`), or cross-validation is used if rows are few (`folds`), and
        the model is then trained on all rows (`refit`); `validation_` has the predictions.
        `columns`: column names that differ from the usual ones, such as {"text": "review"}.
        `folder`: where the training state is saved, so that `resume` continues an interrupted run; saved every
        `save_steps` steps, or at each evaluation and every few minutes.
        `strategy`: how `torchrun` distributes the model, "ddp" or "fsdp". `progress`: show a progress bar.
        """
        if self._has_nothing_to_fit(X, y):
            return self
        from bertie.training.finetune.fit import fit

        return fit(
            self,
            X,
            y,
            dev=dev,
            columns=columns,
            folder=folder,
            resume=resume,
            save_steps=save_steps,
            strategy=strategy,
            progress=progress,
        )

    def _has_nothing_to_fit(self, X: Any, y: Any) -> bool:
        return False

    def learning_curve(
        self,
        X: Any,
        y: Any = None,
        *,
        dev: Any = None,
        test: Any = None,
        columns: Mapping[str, str] | None = None,
        fractions: Sequence[float] = (0.1, 0.3, 1.0),
        draws: int = 1,
        progress: bool = True,
    ) -> LearningCurve:
        """Train copies of this task on parts of the data, to estimate the benefit of more labels.

        The parts are nested and stratified, and all models are evaluated on the same rows: `test`, or `dev`, or a
        fifth of the data that is held out. `draws`: how often each part is drawn; more narrow the estimate. The result
        has `points`, a `band` of expected scores for up to four times as many rows, `twice` and a `summary()`. This
        task is not modified.
        """
        from bertie.training.finetune.learning_curve import learning_curve

        return learning_curve(
            self,
            X,
            y,
            dev=dev,
            test=test,
            columns=columns,
            fractions=fractions,
            draws=draws,
            progress=progress,
        )

    @explain_arguments
    def score(self, X: Any, y: Any = None, *, columns: Mapping[str, str] | None = None) -> float:
        """The task's main metric on labelled data, as in scikit-learn."""
        from bertie.training.finetune.base import score

        return score(self, X, y, columns=columns)


def _default_device(device: str | torch.device | None) -> torch.device:
    return torch.device(device or default_device())


def load_copy(model: Checkpoint | str | Path | None, device: str | torch.device | None) -> Checkpoint:
    """A checkpoint that can be trained without changing the given one: loaded by name, or a copy.

    If loaded by name, it is on the GPU by default, if there is one.
    """
    if not isinstance(model, Checkpoint):
        return Checkpoint.load(default_model() if model is None else model, device=device or default_device())
    checkpoint = deepcopy(model)
    if device is not None:
        checkpoint.to(device)
    return checkpoint
