"""Training of several heads over one encoder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bertie.errors import ConfigError, InputError
from bertie.tasks.multi_task import MultiTask
from bertie.training.distributed import Strategy
from bertie.training.finetune.base import (
    AnyTrainable,
    TaskTraining,
    run_fingerprint,
    starting_checkpoint,
    training_for,
)
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.defaults import choose, print_reasons
from bertie.training.finetune.fit import with_dev
from bertie.training.loop import Trainer

ModelT = TypeVar("ModelT", bound=MultiTask)
Adapters = dict[str, TaskTraining[AnyTrainable]]


def fit(
    model: ModelT,
    data: Mapping[str, Any],
    *,
    dev: Mapping[str, Any],
    columns: Mapping[str, Mapping[str, str]],
    folder: str | Path | None = None,
    resume: bool = False,
    save_steps: int | None = None,
    strategy: Strategy = "ddp",
    progress: bool = True,
) -> ModelT:
    """Train all heads, as `MultiTask.fit` documents."""
    mismatched = sorted(set(data) ^ set(model.rows))
    if mismatched:
        raise InputError(f"data must be given for each head and no other: {', '.join(mismatched)}")
    for name in ("folds", "refit", "budget"):
        if value := getattr(model.recipe, name):
            raise ConfigError(f"{name}={value!r} is for training one task; leave it out for several heads")
    train, held_out = _read(model, data, dev, columns)
    checkpoint = starting_checkpoint(model.model_argument, model.device_argument)
    largest = max(train.values(), key=lambda part: len(part.examples))
    # The losses of the heads are not comparable, so none of them ends the run.
    chosen = choose(model.recipe.fill(stop_loss=0.0), checkpoint.model.config, largest, has_dev=bool(held_out))
    recipe = model.recipe_ = chosen.recipe
    for text in (*recipe.warnings(), *chosen.warnings):
        warnings.warn(text, stacklevel=3)
    if progress:
        print_reasons(chosen.reasons)
    for name, row in model.rows.items():
        training = training_for(row.trainable_class(checkpoint))
        if name in held_out:
            training.check_metrics(held_out[name])
        checkpoint.add_head(name, training.head_for(train[name]), seed=recipe.seed)
    if recipe.max_length is not None:
        checkpoint = checkpoint.with_max_length(recipe.max_length)
    model.use(checkpoint)
    adapters: Adapters = {name: training_for(model[name]) for name in model}
    model.history_ = Trainer(
        checkpoint.model,
        [training.source(train[name]) for name, training in adapters.items()],
        recipe,
        evaluate=(lambda: _evaluate(adapters, held_out)) if held_out else None,
        metric="mean",
        folder=None if folder is None else Path(folder),
        resume=resume,
        save_steps=save_steps,
        fingerprint=run_fingerprint(checkpoint, recipe, model.overflow, [*train.values(), *held_out.values()]),
        strategy=strategy,
        progress=progress,
    ).run()
    for name, held in held_out.items():
        adapters[name].calibrate(held)
    return model


def _read(
    model: MultiTask, data: Mapping[str, Any], dev: Mapping[str, Any], columns: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, LabelledDataset], dict[str, LabelledDataset]]:
    train: dict[str, LabelledDataset] = {}
    held_out: dict[str, LabelledDataset] = {}
    for name, row in model.rows.items():
        kind: Any = row.data_kind
        X, y = data[name] if isinstance(data[name], tuple) and len(data[name]) == 2 else (data[name], None)
        names = columns.get(name)
        whole = read_dataset(kind, X, y, columns=names, name=f"the data of {name}")
        train[name], held = with_dev(
            whole, dev.get(name), model.recipe, kind=kind, columns=names, name=f"the dev data of {name}"
        )
        if held is not None:
            held_out[name] = held
    return train, held_out


def _evaluate(adapters: Adapters, held_out: Mapping[str, LabelledDataset]) -> dict[str, float]:
    """The main metric of each head, and their mean."""
    values = {name: adapters[name].metrics(held)[adapters[name].main_metric(held)] for name, held in held_out.items()}
    return values | {"mean": float(np.mean(list(values.values())))}
