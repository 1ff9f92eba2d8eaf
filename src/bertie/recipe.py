"""The hyperparameters of training, every one of them checked in one place."""

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
EMBEDDING_FIELDS = ("loss", "matryoshka", "pooling")  # of Recipe
POOLINGS = ("cls", "mean", "max", "last", "weighted-mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The hyperparameters of fine-tuning. What contradicts itself is a ConfigError.

    >>> recipe = Recipe(epochs=2, lr=2e-5)
    >>> recipe.epochs, recipe.batch_size
    (2.0, 32)
    >>> Recipe(lr=0)
    Traceback (most recent call last):
        ...
    bertie.errors.ConfigError: lr=0 must be a number above 0 and at most 1
    """

    epochs: float = 3.0
    lr: float = 3e-5  # at its peak
    head_lr: float | None = None  # None: the same as lr
    batch_size: int = 32  # texts an optimizer step
    batch_tokens: int | None = None  # instead of batch_size: tokens an optimizer step
    micro_tokens: int = 16384  # held on the device at a time; a step is made of as many micro-batches as it takes
    warmup: float = 0.1  # share of all steps
    schedule: ScheduleName = "linear"  # what becomes of the rate after the warm-up
    decay: float = 0.1  # of "wsd": the last share of all steps, over which the rate goes down
    weight_decay: float = 0.01
    beta2: float = 0.999
    clip: float = 1.0  # the gradient's greatest norm; 0: none
    layer_decay: float = 1.0  # a layer's rate is this times that of the layer above it
    freeze: int | Literal["encoder"] = 0  # lower layers, and the embeddings with the first
    thaw: int = 0  # layers that thaw each epoch, top first; 0: never
    lora: int = 0  # rank; 0: without
    lora_alpha: float | None = None  # None: 2 x rank
    class_weights: Literal["balanced"] | Mapping[str, float] | None = None
    label_smoothing: float = 0.0
    dropout: float | None = None  # None: the checkpoint's
    patience: int | None = None  # evaluations without a better dev score before it stops
    evals_per_epoch: int = 1
    seed: int = 0
    mixed_precision: MixedPrecision = "auto"
    gradient_checkpointing: bool = False
    max_length: int | None = None  # tokens a window; None: the model's
    train_windows: int = 16  # windows of one long text that a step reads; more are drawn anew each epoch
    dev_share: float = 0.0  # of the training data held out when no dev set is given
    metric: str | None = None  # that chooses the best evaluation; None: the task's main one
    abstain: float | None = None  # wanted precision of the answers it is sure of
    loss: str | None = None  # embed: by name, as "infonce" or "triplet:margin=0.2"; None: what the data calls for
    matryoshka: tuple[int, ...] | None = None  # embed: dimensions that vectors may be cut to
    pooling: str | None = None  # embed: cls, mean, max, last or weighted-mean; None: the checkpoint's, or mean

    def __post_init__(self) -> None:
        for name, numbers in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, numbers.checked(name, value))
        for name, choices in (("schedule", get_args(ScheduleName)), ("mixed_precision", get_args(MixedPrecision))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if not isinstance(self.gradient_checkpointing, bool):
            raise ConfigError(f"gradient_checkpointing={self.gradient_checkpointing!r} must be true or false")
        if self.pooling is not None and self.pooling not in POOLINGS:
            raise ConfigError(f"pooling={self.pooling!r} must be one of {', '.join(POOLINGS)}")
        if self.loss is not None and (not isinstance(self.loss, str) or not self.loss):
            raise ConfigError(f"loss={self.loss!r} must be the name of a loss")
        object.__setattr__(self, "matryoshka", _dimensions(self.matryoshka))
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f"metric={self.metric!r} must be the name of a metric")
        if self.freeze != "encoder":
            least_0 = _Numbers(int, "a whole number of at least 0, or 'encoder'", lambda x: x >= 0)
            object.__setattr__(self, "freeze", least_0.checked("freeze", self.freeze))
        object.__setattr__(self, "class_weights", _class_weights(self.class_weights))
        if self.thaw and not self.freeze:
            raise ConfigError(f"thaw={self.thaw} needs freeze: there is nothing to thaw")
        if self.lora and self.freeze:
            raise ConfigError(
                f"freeze={self.freeze!r} with lora={self.lora}: LoRA holds all weights of the encoder fixed already; "
                "choose one of them"
            )
        if self.lora_alpha is not None and not self.lora:
            raise ConfigError(f"lora_alpha={self.lora_alpha:g} needs lora, the rank")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """A recipe from names and values, as a file or a command line gives them.

        >>> Recipe.from_mapping({"epoch": 2})
        Traceback (most recent call last):
            ...
        bertie.errors.ConfigError: a recipe has no field 'epoch'; did you mean 'epochs'?
        """
        refuse_unknown("a recipe", values, [field.name for field in fields(cls)])
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Every field, as plain values that JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.class_weights, Mapping):
            values["class_weights"] = dict(self.class_weights)
        return values

    def replace(self, **changes: Any) -> Self:
        """The same recipe but for `changes`.

        >>> Recipe().replace(epochs=1).epochs
        1.0
        """
        return self.from_mapping(self.as_dict() | changes)

    def warnings(self) -> list[str]:
        """What is allowed but rarely wise.

        >>> Recipe(patience=3).warnings()
        ['patience=3 never stops a run of 3 evaluations early; lower it, or raise evals_per_epoch']
        """
        found = []
        head_only = self.freeze == "encoder" and not self.thaw
        if self.lr > 5e-5 and not self.lora and (not self.freeze or self.thaw):
            found.append(
                f"lr={self.lr:g} is above 5e-5: fine-tuning all weights so fast usually destroys what pretraining "
                "learnt; lower it, or set head_lr if it is meant for the head"
            )
        if self.lora and self.lr < 1e-4:
            found.append(
                f"lr={self.lr:g} is low for lora={self.lora}: its factors start from nothing, and 1e-4 to 1e-3 is usual"
            )
        head_lr = self.lr if self.head_lr is None else self.head_lr
        if head_only and head_lr < 1e-4:
            named = "lr" if self.head_lr is None else "head_lr"
            found.append(
                f"{named}={head_lr:g} is low for freeze='encoder': only the head trains, and about 1e-3 is usual"
            )
        evaluations = math.ceil(self.epochs * self.evals_per_epoch)
        if self.patience is not None and self.patience >= evaluations - 1:  # the first is always the best so far
            found.append(
                f"patience={self.patience} never stops a run of {evaluations} evaluations early; lower it, or raise "
                "evals_per_epoch"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers that a field takes: whole ones if the kind is int."""

    kind: type[int] | type[float]
    words: str
    holds: Callable[[float], bool]

    def checked(self, name: str, value: Any) -> int | float:
        """The value as a plain int or float: NumPy's scalars come from searches over grids."""
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
    dict.fromkeys(("epochs", "lora_alpha"), _ABOVE_0)
    | dict.fromkeys(("weight_decay", "clip"), _LEAST_0)
    | dict.fromkeys(("warmup", "label_smoothing", "dropout", "dev_share"), _SHARE)
    | dict.fromkeys(("beta2", "abstain"), _INSIDE)
    | dict.fromkeys(("lr", "head_lr", "layer_decay", "decay"), _RATE)
    | dict.fromkeys(("thaw", "lora"), _WHOLE)
    | dict.fromkeys(("batch_size", "batch_tokens", "micro_tokens", "patience"), _COUNT)
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
        raise ConfigError(f"class_weights={value!r} must be 'balanced', or a weight for each label by its name")
    return {label: _ABOVE_0.checked(f"class_weights[{label!r}]", weight) for label, weight in value.items()}


def _dimensions(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or not (found := list(value)):
        raise ConfigError(f"matryoshka={value!r} must be a list of dimensions")
    return tuple(int(_COUNT.checked("matryoshka", one)) for one in found)


def check_seed(name: str, value: Any) -> int:
    """A random seed as a plain int."""
    return int(_SEED.checked(name, value))


def refuse_unknown(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """An error for names that are not known, with the nearest that is."""
    unknown = [key for key in given if key not in known]
    if not unknown:
        return
    near = [one for key in unknown for one in get_close_matches(str(key), known, 1)]
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else f"it has: {', '.join(known)}"
    raise ConfigError(f"{what} has no field {', '.join(map(repr, unknown))}; {hint}")
