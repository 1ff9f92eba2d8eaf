"""Recipe files: the data, the model and the hyperparameters of a fine-tuning run, in TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertie.errors import ConfigError, NotFoundError
from bertie.recipe import Recipe, check_seed, refuse_unknown
from bertie.tasks import registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """The contents of a recipe file."""

    title: str
    task: str  # a trainable one of `bertie.tasks.registry`
    model: str | None  # a folder, a built-in name or a hub id; None: chosen by the caller
    train: list[str]  # paths
    dev: str | None
    test: str | None
    columns: dict[str, str]  # from Bertie's column names to those of the files
    seeds: list[int]  # one run each
    training: Recipe


def read_recipe(path: str | Path, data_root: str | Path | None = None) -> RecipeFile:
    """Read a recipe file.

        title = "SST-2: sentence sentiment"
        task = "classify"
        model = "sentence-transformers/all-MiniLM-L6-v2"
        seeds = [1, 2, 3]           # or `seed` in [training]

        [data]
        train = ["sst2/train.jsonl.gz"]
        test = "sst2/dev.jsonl.gz"
        columns = { text = "sentence" }

        [training]                  # fields of Recipe
        epochs = 3
        dev_fraction = 0.05

    Paths are relative to `data_root`, or to the folder of the recipe.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    try:
        return _parse(raw, path.parent if data_root is None else Path(data_root), path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _parse(raw: dict[str, Any], root: Path, title: str) -> RecipeFile:
    refuse_unknown("the file", raw, ["title", "task", "model", "seeds", "data", "training"])
    data, training = _table(raw, "data"), _table(raw, "training")
    refuse_unknown("[data]", data, ["train", "dev", "test", "columns"])
    recipe = Recipe.from_mapping(training)
    if "seeds" in raw and "seed" in training:
        raise ConfigError("set seeds, or seed in [training], not both")
    seeds = raw.get("seeds", [recipe.seed])
    if not isinstance(seeds, list) or not seeds or len(set(map(str, seeds))) < len(seeds):
        raise ConfigError(f"seeds={seeds!r} must be a list of different whole numbers")
    train = data.get("train")
    names = [train] if isinstance(train, str) else train
    task = registry.get(_text(raw, "task")).name
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"[data] train={train!r} must be a path or a list of paths")
    columns = _table(data, "columns")
    dev, test = (_text(data, name) for name in ("dev", "test"))
    return RecipeFile(
        title=_text(raw, "title") or title,
        task=task,
        model=_text(raw, "model"),
        train=[str(root / name) for name in names],
        dev=None if dev is None else str(root / dev),
        test=None if test is None else str(root / test),
        columns={key: str(_text(columns, key)) for key in columns},
        seeds=[check_seed(f"seeds[{i}]", seed) for i, seed in enumerate(seeds)],
        training=recipe,
    )


def _table(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={value!r} must be a table")
    return value


def _text(raw: Mapping[str, Any], name: str) -> str | None:
    value = raw.get(name)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ConfigError(f"{name}={value!r} must be a string")
    return value
