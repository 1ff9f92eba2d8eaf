"""What a pretraining recipe says: every field checked, before any work is done."""

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

TAUGHT = ("words", "vectors", "similarities", "neighbours", "mlm")
MASKING = tuple(one.name for one in fields(Masking))
# What each kind of objective may say.
KINDS: dict[str, tuple[str, ...]] = {
    "mlm": (*MASKING, "static", "pairs", "enhanced"),
    "rtd": (*MASKING, "static", "generator", "sharing", "weight"),
    "triple": (*MASKING, "static", "teacher", "temperature", "soft", "mlm", "cosine", "copy_layers"),
    "relations": ("teacher", "relations", "heads", "layer", "student_layer"),
    "taught": (*MASKING, "teacher", "teacher_corpus", "layers", *TAUGHT),
} | dict.fromkeys(registry.trainable(with_head=True), ("name", "train", "dev", "batch_size", "columns"))
COMMON = ("kind", "share", "corpus", "max_length", "batch_tokens")
WHOLE = ("max_length", "batch_tokens", "batch_size", "layers", "heads")  # whole numbers of at least 1
REAL = (*TAUGHT, "soft", "cosine", "temperature", "weight")  # numbers of at least 0
NAMES = ("teacher", "name", "train", "dev", "pairs", "sharing", "tokenizer", "sentence")
FOLDERS = ("corpus", "teacher_corpus")
OWN = ("tokens", "steps", "batch_warmup", "evals", "save_steps")  # of [training], beside the fields of Recipe
NOT_HERE = ("epochs", "batch_size", "evals_per_epoch", "patience", "dev_fraction", "metric", "abstain", "class_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainRecipe:
    """What is trained, on what, and how.

    >>> plan = PretrainRecipe(model={"model_type": "bert"}, recipe=Recipe(batch_tokens=65536), tokens=10**9)
    >>> plan.steps
    15259
    """

    model: Mapping[str, Any] | str  # config.json's keys for a fresh one, or the name of a checkpoint to go on with
    tokenizer: str | None = None
    corpus: str | Sequence[str] | None = None  # one folder, or several that are read as one
    sentence: str | None = None  # pooling, for a model that is to be a sentence encoder
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=5e-4, batch_tokens=131_072))
    tokens: int | None = None
    steps: int = 0
    batch_warmup: float = 0.0  # the share of all tokens in which the batch grows to its size
    evals: int = 10
    save_steps: int | None = None
    objectives: Sequence[Mapping[str, Any]] = ({"kind": "mlm"},)

    def __post_init__(self) -> None:
        _check_values("", {"corpus": self.corpus, "tokenizer": self.tokenizer, "sentence": self.sentence})
        for name, least in (("tokens", 1), ("steps", 0), ("evals", 0)):
            if name != "tokens" or self.tokens is not None:
                _whole("", name, getattr(self, name), least)
        if (self.tokens is None) == (not self.steps):
            raise ConfigError("[training] needs tokens, or steps, and not both")
        if self.recipe.batch_tokens is None:
            raise ConfigError("[training] needs batch_tokens: the tokens of a step")
        if self.tokens is not None:
            object.__setattr__(self, "steps", max(1, math.ceil(self.tokens / self.recipe.batch_tokens)))
        if not isinstance(self.batch_warmup, int | float) or not 0 <= self.batch_warmup < 1:
            raise ConfigError(f"batch_warmup={self.batch_warmup!r} must be from 0 to below 1")
        if not self.objectives or not all(isinstance(one, Mapping) for one in self.objectives):
            raise ConfigError("objective must be one table or more: write [[objective]] above each")
        for number, one in enumerate(self.objectives, 1):
            _check(one, number)
        if self.batch_warmup and len(self.objectives) > 1:
            raise ConfigError("batch_warmup is for a single objective")

    @classmethod
    def read(cls, file: str | Path | None, **over: Any) -> PretrainRecipe:
        """From a TOML file; `over` are values that come before it, those that are None left out."""
        given: dict[str, Any] = {}
        if file is not None:
            try:
                given = tomllib.loads(Path(file).read_text("utf-8"))
            except OSError as error:
                raise NotFoundError(f"{file} cannot be read: {error.strerror}") from None
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: {error}") from None
        return cls.from_mapping(given, **over)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], **over: Any) -> PretrainRecipe:
        """From what a file says."""
        known = ("model", "tokenizer", "corpus", "sentence", "training", "objective")
        refuse_unknown("the recipe", given, known)
        top = {name: given.get(name) for name in known[:4]}
        for name in ("training", "model"):
            if not isinstance(given.get(name, {}), (Mapping, str) if name == "model" else Mapping):
                raise ConfigError(f"{name}={given[name]!r:.80} must be a table: write [{name}] above its keys")
        train = dict(given.get("training", {}))
        over = {name: value for name, value in over.items() if value is not None}
        for name, value in over.items():
            if name in top:
                top[name] = value
            else:
                train[name] = value
                other = {"tokens": "steps", "steps": "tokens"}.get(name)  # one of them is asked for
                if other is not None and other not in over:
                    train.pop(other, None)
        if not top["model"]:
            raise ConfigError("the recipe has no [model]; pass a checkpoint to go on with, or config.json's keys")
        allowed = [*OWN, *(one.name for one in fields(Recipe) if one.name not in NOT_HERE)]
        refuse_unknown("[training]", train, allowed)
        own = {name: train.pop(name) for name in OWN if name in train}
        recipe = Recipe.from_mapping({"lr": 5e-4, "batch_tokens": 131_072} | train)
        if "objective" in given:
            own["objectives"] = given["objective"]
        return cls(**{**top, **own}, recipe=recipe)

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON holds it."""
        own = {name: getattr(self, name) for name in ("tokenizer", "corpus", "sentence", "tokens", "steps")}
        more = {"batch_warmup": self.batch_warmup, "objectives": [dict(one) for one in self.objectives]}
        model = self.model if isinstance(self.model, str) else dict(self.model)
        return {"model": model, **own, **more, **self.recipe.as_dict()}


def _check(objective: Mapping[str, Any], number: int) -> None:
    kind = objective.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"objective {number}: kind={kind!r} must be one of {', '.join(KINDS)}")
    refuse_unknown(f"objective {number} ({kind})", objective, (*COMMON, *KINDS[kind]))
    share = objective.get("share", 1.0)
    if not isinstance(share, int | float) or share <= 0:
        raise ConfigError(f"objective {number}: share={share!r} must be a number above 0")
    _check_values(f"objective {number}: ", objective)
    needed = {"triple": ("teacher",), "relations": ("teacher",), "taught": ("teacher", "teacher_corpus")}
    for key in needed.get(kind, ("name", "train") if kind in registry.trainable(with_head=True) else ()):
        if key not in objective:
            raise ConfigError(f"objective {number} ({kind}) needs {key}")


def _check_values(where: str, given: Mapping[str, Any]) -> None:
    """Refuse values of the wrong kind, before any work is done."""
    for name, value in given.items():
        if value is None:
            continue
        if name in WHOLE:
            _whole(where, name, value, 1)
        elif name in REAL and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
            raise ConfigError(f"{where}{name}={value!r} must be a number of at least 0")
        elif name in NAMES and not isinstance(value, str):
            raise ConfigError(f"{where}{name}={value!r} must be a text")
        elif name in FOLDERS and not _folders(value):
            raise ConfigError(f"{where}{name}={value!r} must be the name of a folder, or a list of them")
        elif name == "generator" and not isinstance(value, Mapping):
            raise ConfigError(f"{where}{name}={value!r} must be a table of config.json's keys")


def _whole(where: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}{name}={value!r} must be a whole number of at least {least}")


def _folders(value: Any) -> bool:
    several = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(one, str) for one in several)
