"""Pretraining recipes: every field is checked before training starts."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bertie.errors import ConfigError, NotFoundError
from bertie.recipe import Recipe, refuse_unknown
from bertie.tasks import registry
from bertie.training.pretrain.masking import Masking

MASKING_KEYS = tuple(item.name for item in fields(Masking))
EMBEDDING_TERMS = ("embeddings", "similarities", "neighbours")
SENTENCE_TERMS = ("words", *EMBEDDING_TERMS, "mlm")
COMMON_KEYS = ("kind", "share", "corpus", "max_length", "batch_tokens")
TASK_KEYS = ("name", "train", "dev", "batch_size", "columns")


@dataclass(frozen=True, slots=True)
class ObjectiveKeys:
    """The keys of an [[objective]] table of one kind, besides the common ones."""

    allowed: tuple[str, ...]
    required: tuple[str, ...] = ()


def objective_keys() -> dict[str, ObjectiveKeys]:
    """The keys of all kinds of objective."""
    masked = (*MASKING_KEYS, "static")
    distillation = ("teacher", "temperature", "soft", "mlm", "cosine", "copy_layers")
    sentence = ("teacher", "teacher_corpus", "layers", *SENTENCE_TERMS)
    kinds = {
        "mlm": ObjectiveKeys((*masked, "pairs", "enhanced_mask_decoder")),
        "rtd": ObjectiveKeys((*masked, "generator", "sharing", "weight")),
        "mlm_distillation": ObjectiveKeys((*masked, *distillation), ("teacher",)),
        "relation_distillation": ObjectiveKeys(
            ("teacher", "relations", "heads", "layer", "student_layer"), ("teacher",)
        ),
        "sentence_distillation": ObjectiveKeys((*MASKING_KEYS, *sentence), ("teacher", "teacher_corpus")),
        "embedding_distillation": ObjectiveKeys(
            ("teacher", "prompts", "center", "clusters", *EMBEDDING_TERMS), ("teacher",)
        ),
    }
    for task in registry.trainable(with_head=True):
        soft_labels = ("teacher", "temperature", "hard") if task in ("classify", "tag") else ()
        kinds[task] = ObjectiveKeys((*TASK_KEYS, *soft_labels), ("name", "train"))
    return kinds


_POSITIVE_INTEGERS = ("max_length", "batch_tokens", "batch_size", "layers", "heads", "clusters")
_WEIGHTS = (*SENTENCE_TERMS, "soft", "cosine", "temperature", "weight", "hard", "center")  # numbers of at least 0
_STRINGS = ("name", "train", "dev", "pairs", "sharing", "tokenizer")
_FOLDERS = ("corpus", "teacher_corpus", "teacher")
RUN_KEYS = ("tokens", "steps", "batch_warmup", "evals", "save_steps")  # of [training], besides the fields of Recipe
# Fields of Recipe that pretraining does not have.
FINE_TUNING_KEYS = (
    *("epochs", "batch_size", "evals_per_epoch", "patience", "dev_fraction", "metric", "abstain", "class_weights"),
    *("loss", "matryoshka"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainRecipe:
    """The model, the corpus, the objectives and the hyperparameters of a pretraining run.

    >>> recipe = PretrainRecipe(model={"model_type": "bert"}, recipe=Recipe(batch_tokens=65536), tokens=10**9)
    >>> recipe.steps
    15259
    """

    model: Mapping[str, Any] | str  # keys of config.json for a new model, or the name of a checkpoint to continue from
    tokenizer: str | None = None
    corpus: str | Sequence[str] | None = None  # one folder, or several that are read as one
    # With `pooling` the model is saved as a sentence encoder.
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=5e-4, batch_tokens=131_072))
    tokens: int | None = None
    steps: int = 0
    batch_warmup: float = 0.0  # the share of all tokens over which the batch size grows
    evals: int = 10
    save_steps: int | None = None
    objectives: Sequence[Mapping[str, Any]] = ({"kind": "mlm"},)

    def __post_init__(self) -> None:
        _check_values("", {"corpus": self.corpus, "tokenizer": self.tokenizer})
        for name, least in (("tokens", 1), ("steps", 0), ("evals", 0)):
            if name != "tokens" or self.tokens is not None:
                _check_integer("", name, getattr(self, name), least)
        if (self.tokens is None) == (not self.steps):
            raise ConfigError("[training] needs either tokens or steps")
        if self.recipe.batch_tokens is None:
            raise ConfigError("[training] needs batch_tokens: the tokens per step")
        if self.tokens is not None:
            object.__setattr__(self, "steps", max(1, math.ceil(self.tokens / self.recipe.batch_tokens)))
        if not isinstance(self.batch_warmup, int | float) or not 0 <= self.batch_warmup < 1:
            raise ConfigError(f"batch_warmup={self.batch_warmup!r} must be from 0 to below 1")
        if not self.objectives or not all(isinstance(objective, Mapping) for objective in self.objectives):
            raise ConfigError("objective must be one or more tables: write [[objective]] above each")
        for number, objective in enumerate(self.objectives, 1):
            _check_objective(objective, number)
        if self.batch_warmup and len(self.objectives) > 1:
            raise ConfigError("batch_warmup is for a single objective")

    @classmethod
    def read(cls, file: str | Path | None, **overrides: Any) -> PretrainRecipe:
        """Read a TOML file; `overrides` that are not None take precedence."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = tomllib.loads(Path(file).read_text("utf-8"))
            except OSError as error:
                raise NotFoundError(f"{file} cannot be read: {error.strerror}") from None
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: {error}") from None
        return cls.from_mapping(values, **overrides)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], **overrides: Any) -> PretrainRecipe:
        """Build a recipe from the tables of a TOML file."""
        refuse_unknown("the recipe", values, ("title", "model", "data", "training", "objective"))
        for name in ("model", "data", "training"):
            if not isinstance(values.get(name, {}), (Mapping, str) if name == "model" else Mapping):
                raise ConfigError(f"{name}={values[name]!r:.80} must be a table: write [{name}] above its keys")
        data, training = dict(values.get("data", {})), dict(values.get("training", {}))
        refuse_unknown("[data]", data, ("corpus", "tokenizer"))
        overrides = {name: value for name, value in overrides.items() if value is not None}
        model = overrides.pop("model", None) or values.get("model")
        if not model:
            raise ConfigError("the recipe has no model: name a checkpoint to continue from, or give config.json's keys")
        for name, value in overrides.items():
            (data if name in ("corpus", "tokenizer") else training)[name] = value
            other = {"tokens": "steps", "steps": "tokens"}.get(name)  # one replaces the other
            if other is not None and other not in overrides:
                training.pop(other, None)
        allowed = [*RUN_KEYS, *(item.name for item in fields(Recipe) if item.name not in FINE_TUNING_KEYS)]
        refuse_unknown("[training]", training, allowed)
        run = {name: training.pop(name) for name in RUN_KEYS if name in training}
        recipe = Recipe.from_mapping({"lr": 5e-4, "batch_tokens": 131_072} | training)
        if "objective" in values:
            run["objectives"] = values["objective"]
        return cls(model=model, **data, **run, recipe=recipe)

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        own = {name: getattr(self, name) for name in ("tokenizer", "corpus", "tokens", "steps", "batch_warmup")}
        model = self.model if isinstance(self.model, str) else dict(self.model)
        objectives = [dict(objective) for objective in self.objectives]
        return {"model": model, **own, "objectives": objectives, **self.recipe.as_dict()}


def _check_objective(objective: Mapping[str, Any], number: int) -> None:
    kind, kinds = objective.get("kind"), objective_keys()
    if kind not in kinds:
        raise ConfigError(f"objective {number}: kind={kind!r} must be one of {', '.join(kinds)}")
    keys = kinds[kind]
    refuse_unknown(f"objective {number} ({kind})", objective, (*COMMON_KEYS, *keys.allowed))
    share = objective.get("share", 1.0)
    if not isinstance(share, int | float) or share <= 0:
        raise ConfigError(f"objective {number}: share={share!r} must be a number above 0")
    if kind != "embedding_distillation" and not isinstance(objective.get("teacher", ""), str):
        teacher = objective["teacher"]
        raise ConfigError(f"objective {number} ({kind}): teacher={teacher!r} must be the name of a folder")
    _check_values(f"objective {number}: ", objective)
    for key in keys.required:
        if key not in objective:
            raise ConfigError(f"objective {number} ({kind}) needs {key}")


def _check_values(prefix: str, values: Mapping[str, Any]) -> None:
    """Raise for values of the wrong type."""
    for name, value in values.items():
        if value is None:
            continue
        if name in _POSITIVE_INTEGERS:
            _check_integer(prefix, name, value, 1)
        elif name in _WEIGHTS and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise ConfigError(f"{prefix}{name}={value!r} must be a number of at least 0")
        elif name in _STRINGS and not isinstance(value, str):
            raise ConfigError(f"{prefix}{name}={value!r} must be a string")
        elif name in _FOLDERS and not _is_names(value):
            raise ConfigError(f"{prefix}{name}={value!r} must be the name of a folder, or a list of them")
        elif name == "prompts" and (isinstance(value, str) or not _is_names(value)):
            raise ConfigError(f"{prefix}{name}={value!r} must be a list of strings, one per teacher")
        elif name == "generator" and not isinstance(value, Mapping):
            raise ConfigError(f"{prefix}{name}={value!r} must be a table of config.json's keys")


def _check_integer(prefix: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{prefix}{name}={value!r} must be a whole number of at least {least}")


def _is_names(value: Any) -> bool:
    names = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(name, str) for name in names)
