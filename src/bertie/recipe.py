"""Training hyperparameters and their validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, Self, get_args

from bertie.errors import ConfigError

ScheduleName = Literal["linear", "cosine", "wsd", "constant"]
MixedPrecision = Literal["auto", "fp32", "bf16", "fp16"]
Method = Literal["auto", "full", "few-shot", "frozen"]
EMBEDDING_FIELDS = ("loss", "matryoshka", "pooling")  # fields of Recipe that only an Embedder has
POOLINGS = ("cls", "mean", "max", "last", "weighted-mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training hyperparameters. Invalid or contradictory values raise a ConfigError.

    Fine-tuning chooses `lr`, `head_lr`, `epochs`, `batch_size`, `dev_fraction`, `folds`, `refit` and `patience` from
    the model and the data if they are None (see `bertie.training.finetune.defaults`). Other training uses `resolve`.

    >>> recipe = Recipe(epochs=2)
    >>> recipe.epochs, recipe.lr, recipe.resolve().lr
    (2.0, None, 3e-05)
    >>> Recipe(lr=0)
    Traceback (most recent call last):
        ...
    bertie.errors.ConfigError: lr=0 must be a number above 0 and at most 1
    """

    method: Method = "auto"  # classify: see `bertie.training.finetune.few_shot`
    epochs: float | None = None
    lr: float | None = None  # peak learning rate
    head_lr: float | None = None  # learning rate of the head; None: chosen by fine-tuning, elsewhere lr
    batch_size: int | None = None  # texts per optimizer step
    batch_tokens: int | None = None  # tokens per optimizer step, instead of batch_size
    micro_tokens: int = 16384  # tokens per micro-batch; a step accumulates as many micro-batches as it needs
    warmup: float = 0.1  # fraction of all steps
    schedule: ScheduleName = "linear"  # of the learning rate after the warmup
    decay: float = 0.1  # schedule="wsd": the last fraction of all steps, in which the learning rate decays
    weight_decay: float = 0.01
    beta2: float = 0.999
    max_grad_norm: float = 1.0  # gradient clipping; 0: none
    layer_decay: float = 1.0  # learning rate of a layer relative to the layer above it
    freeze: int | Literal["encoder"] = 0  # number of lower layers to freeze, with the embeddings
    unfreeze: int = 0  # frozen layers to unfreeze per epoch, from the top; 0: none
    lora: int = 0  # LoRA rank; 0: train all weights
    lora_alpha: float | None = None  # None: 2 x rank
    class_weights: Literal["balanced"] | Mapping[str, float] | None = None
    label_smoothing: float = 0.0
    dropout: float | None = None  # None: the checkpoint's
    patience: int | None = None  # evaluations without improvement before early stopping; 0: never stop early
    evals_per_epoch: int = 1
    seed: int = 0
    mixed_precision: MixedPrecision = "auto"  # auto: bf16 on GPUs that have it, else fp32; bf16 on a CPU: linear layers
    gradient_checkpointing: bool = False
    max_length: int | None = None  # tokens per window; None: the model's
    train_windows: int = 16  # windows per long text and step; more are sampled anew in each epoch
    dev_fraction: float | None = None  # of the training data to hold out if no dev data is given; 0: none
    folds: int | None = None  # of cross-validation, instead of holding out; 0: none; None: only if rows are few
    refit: bool | None = None  # after holding out, train on all rows; None: if that takes reasonable time
    stop_loss: float | None = None  # training loss that ends a run after one more epoch; 0: none
    budget: float | None = None  # seconds of training, or a text like "90s", "5m" or "1h"
    metric: str | None = None  # selects the best evaluation; None: the task's main metric
    abstain: float | None = None  # target precision of confident predictions; sets the abstention threshold
    loss: str | None = None  # embed: a name, such as "infonce" or "triplet:margin=0.2"; None: by the kind of data
    matryoshka: tuple[int, ...] | None = None  # embed: dimensions that embeddings may be truncated to
    pooling: str | None = None  # embed: one of POOLINGS; None: the checkpoint's, else mean or last

    def __post_init__(self) -> None:
        if isinstance(self.budget, str):
            object.__setattr__(self, "budget", parse_duration("budget", self.budget))
        for name, numbers in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, numbers.check(name, value))
        for name, kind in (("schedule", ScheduleName), ("mixed_precision", MixedPrecision), ("method", Method)):
            choices = get_args(kind)
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        for name in ("gradient_checkpointing", "refit"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name not in _OPTIONAL):
                raise ConfigError(f"{name}={value!r} must be true or false")
        self._check_validation()
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ConfigError(f"pooling={self.pooling!r} must be one of {', '.join(POOLINGS)}")
        if self.loss is not None and (not isinstance(self.loss, str) or not self.loss):
            raise ConfigError(f"loss={self.loss!r} must be the name of a loss")
        object.__setattr__(self, "matryoshka", _dimensions(self.matryoshka))
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f"metric={self.metric!r} must be the name of a metric")
        if self.freeze != "encoder":
            least_0 = _Numbers(int, "a whole number of at least 0, or 'encoder'", lambda x: x >= 0)
            object.__setattr__(self, "freeze", least_0.check("freeze", self.freeze))
        object.__setattr__(self, "class_weights", _class_weights(self.class_weights))
        if self.unfreeze and not self.freeze:
            raise ConfigError(f"unfreeze={self.unfreeze} needs freeze: there is nothing to unfreeze")
        if self.lora and self.freeze:
            raise ConfigError(
                f"freeze={self.freeze!r} with lora={self.lora}: LoRA freezes all weights of the encoder already; "
                "set one of them"
            )
        if self.lora_alpha is not None and not self.lora:
            raise ConfigError(f"lora_alpha={self.lora_alpha:g} needs lora, the rank")

    def _check_validation(self) -> None:
        if self.folds == 1:
            raise ConfigError("folds=1 must be 0, for no cross-validation, or at least 2")
        if self.folds and self.dev_fraction:
            raise ConfigError(f"folds={self.folds} with dev_fraction={self.dev_fraction:g}: set one of them")
        if self.folds and self.refit is False:
            raise ConfigError(
                f"folds={self.folds} with refit=False: cross-validation only estimates the score of a model that is "
                "trained on all rows; set one of them"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Create a recipe from names and values, as read from a file or the command line.

        >>> Recipe.from_mapping({"epoch": 2})
        Traceback (most recent call last):
            ...
        bertie.errors.ConfigError: a recipe has no field 'epoch'; did you mean 'epochs'?
        """
        refuse_unknown("a recipe", values, [field.name for field in fields(cls)])
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON-serializable values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.class_weights, Mapping):
            values["class_weights"] = dict(self.class_weights)
        return values

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed.

        >>> Recipe().replace(epochs=1).epochs
        1.0
        """
        return self.from_mapping(self.as_dict() | changes)

    def fill(self, **values: Any) -> Self:
        """A copy with these values for the fields that are None.

        >>> Recipe(epochs=1).fill(epochs=3, lr=1e-4).epochs
        1.0
        """
        return self.replace(**{name: value for name, value in values.items() if getattr(self, name) is None})

    def resolve(self) -> ResolvedRecipe:
        """The recipe with defaults for the fields that are None: those for fine-tuning a base-size model."""
        return ResolvedRecipe.from_mapping({name: value for name, value in self.as_dict().items() if value is not None})

    def warnings(self) -> list[str]:
        """Warnings about settings that are valid but rarely useful.

        >>> Recipe(epochs=3, patience=3).warnings()
        ['patience=3 never stops a run of 3 evaluations early; lower it, or raise evals_per_epoch']
        """
        messages = []
        head_only = self.freeze == "encoder" and not self.unfreeze
        if self.lora and self.lr is not None and self.lr < 1e-4:
            messages.append(
                f"lr={self.lr:g} is low for lora={self.lora}: the adapters start from zero, and 1e-4 to 1e-3 is usual"
            )
        head_lr = self.lr if self.head_lr is None else self.head_lr
        if head_only and head_lr is not None and head_lr < 1e-4:
            named = "lr" if self.head_lr is None else "head_lr"
            messages.append(
                f"{named}={head_lr:g} is low for freeze='encoder': only the head trains, and about 1e-3 is usual"
            )
        if self.patience and self.epochs is not None:
            evaluations = math.ceil(self.epochs * self.evals_per_epoch)
            if self.patience >= evaluations - 1:  # the first is always the best so far
                messages.append(
                    f"patience={self.patience} never stops a run of {evaluations} evaluations early; lower it, or "
                    "raise evals_per_epoch"
                )
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRecipe(Recipe):
    """A recipe without hyperparameters left to choose."""

    epochs: float = 3.0
    lr: float = 3e-5
    batch_size: int = 32
    dev_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers a field accepts; only integers if the kind is int."""

    kind: type[int] | type[float]
    words: str
    holds: Callable[[float], bool]

    def check(self, name: str, value: Any) -> int | float:
        """The value as a plain int or float; grid searches pass NumPy scalars."""
        fits = isinstance(value, Integral if self.kind is int else Real) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or not self.holds(value):
            raise ConfigError(f"{name}={value!r} must be {self.words}")
        return self.kind(value)


_ABOVE_0 = _Numbers(float, "a number above 0", lambda x: x > 0)
_LEAST_0 = _Numbers(float, "a number of at least 0", lambda x: x >= 0)
_SHARE = _Numbers(float, "a number from 0 up to, but not including, 1", lambda x: 0 <= x < 1)
_INSIDE = _Numbers(float, "a number between 0 and 1", lambda x: 0 < x < 1)
_RATE = _Numbers(float, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
_WHOLE = _Numbers(int, "a whole number of at least 0", lambda x: x >= 0)
_COUNT = _Numbers(int, "a whole number of at least 1", lambda x: x >= 1)
_SEED = _Numbers(int, "a whole number from 0 to 4294967295", lambda x: 0 <= x < 1 << 32)

_NUMBERS: dict[str, _Numbers] = (
    dict.fromkeys(("epochs", "lora_alpha", "budget"), _ABOVE_0)
    | dict.fromkeys(("weight_decay", "max_grad_norm", "stop_loss"), _LEAST_0)
    | dict.fromkeys(("warmup", "label_smoothing", "dropout", "dev_fraction"), _SHARE)
    | dict.fromkeys(("beta2", "abstain"), _INSIDE)
    | dict.fromkeys(("lr", "head_lr", "layer_decay", "decay"), _RATE)
    | dict.fromkeys(("unfreeze", "lora", "patience", "folds"), _WHOLE)
    | dict.fromkeys(("batch_size", "batch_tokens", "micro_tokens"), _COUNT)
    | dict.fromkeys(("evals_per_epoch", "max_length", "train_windows"), _COUNT)
    | {"seed": _SEED}
)
_OPTIONAL = {field.name for field in fields(Recipe) if field.default is None}


def _class_weights(value: Any) -> Literal["balanced"] | dict[str, float] | None:
    if value is None:
        return None
    if value == "balanced":
        return "balanced"
    if not isinstance(value, Mapping) or not value or not all(isinstance(label, str) for label in value):
        raise ConfigError(f"class_weights={value!r} must be 'balanced' or a mapping from labels to weights")
    return {label: _ABOVE_0.check(f"class_weights[{label!r}]", weight) for label, weight in value.items()}


def _dimensions(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or not (dimensions := list(value)):
        raise ConfigError(f"matryoshka={value!r} must be a list of dimensions")
    return tuple(int(_COUNT.check("matryoshka", dimension)) for dimension in dimensions)


def parse_duration(name: str, text: str) -> float:
    """Parse a duration into seconds.

    >>> [parse_duration("budget", text) for text in ("90s", "5m", "1.5h", "20")]
    [90.0, 300.0, 5400.0, 20.0]
    """
    number, unit = text.strip().rstrip("smh"), text.strip()[-1:]
    try:
        seconds = float(number) * _UNITS.get(unit, 1)
    except ValueError:
        seconds = math.nan
    if len(text.strip()) - len(number) > 1 or not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{name}={text!r} must be a duration above 0, such as 90s, 5m or 1h")
    return seconds


_UNITS = {"s": 1, "m": 60, "h": 3600}


def check_seed(name: str, value: Any) -> int:
    """A random seed as a plain int."""
    return int(_SEED.check(name, value))


def refuse_unknown(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise an error for unknown names that suggests the closest known ones."""
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    close = [match for name in unknown for match in get_close_matches(str(name), known, 1)]
    hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"it has: {', '.join(known)}"
    raise ConfigError(f"{what} has no field {', '.join(map(repr, unknown))}; {hint}")
