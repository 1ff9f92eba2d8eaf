"""`fit` of every labelled task: reads the data, chooses what the recipe leaves open, and trains."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertie.errors import ConfigError
from bertie.recipe import Recipe
from bertie.training.distributed import Strategy
from bertie.training.finetune.base import TaskT, starting_checkpoint, training_for
from bertie.training.finetune.data import Kind, LabelledDataset, read_dataset, split
from bertie.training.finetune.defaults import choose, dev_fraction, print_reasons
from bertie.training.loop import Trainer


def fit(
    task: TaskT,
    X: Any,
    y: Any = None,
    *,
    dev: Any = None,
    columns: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    save_steps: int | None = None,
    strategy: Strategy = "ddp",
    progress: bool = True,
) -> TaskT:
    """Train a task on labelled data, as `Trainable.fit` documents."""
    kind, recipe = training_for(task).data_kind, task.recipe
    data = read_dataset(kind, X, y, columns=columns)
    data, held_out = with_dev(data, dev, recipe, kind=kind, columns=columns, name="the dev data")
    return fit_labelled(
        task,
        data,
        held_out,
        folder=folder,
        resume=resume,
        save_steps=save_steps,
        strategy=strategy,
        progress=progress,
    )


def with_dev(
    data: LabelledDataset, dev: Any, recipe: Recipe, *, kind: Kind, columns: Mapping[str, str] | None, name: str
) -> tuple[LabelledDataset, LabelledDataset | None]:
    """The training data and the dev data: read as given, or split off by `recipe.dev_fraction`."""
    if dev is None:
        fraction = dev_fraction(recipe, data)
        return split(data, fraction, recipe.seed) if fraction else (data, None)
    X, y = dev if isinstance(dev, tuple) and len(dev) == 2 else (dev, None)
    known = data.labels or None
    return data, read_dataset(kind, X, y, columns=columns, name=name, known=known, training=False)


def fit_labelled(
    task: TaskT,
    data: LabelledDataset,
    dev: LabelledDataset | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    save_steps: int | None = None,
    strategy: Strategy = "ddp",
    progress: bool = True,
) -> TaskT:
    """Train a task on data that has been read already."""
    training, recipe, arguments = training_for(task), task.recipe, task.get_params()
    if (head := arguments.get("head")) is not None:
        raise ConfigError(
            f"head={head!r}: fit() trains a checkpoint with one head; train several heads over one encoder together "
            "with bertie.MultiTask"
        )
    training.check_data(data, dev)
    checkpoint = training.prepare(starting_checkpoint(arguments["model"], arguments["device"]), data)
    chosen = choose(recipe, checkpoint.model.config, data, has_dev=dev is not None)
    recipe = task.recipe_ = chosen.recipe
    for text in (*recipe.warnings(), *chosen.warnings):
        warnings.warn(text, stacklevel=4)
    if progress:
        print_reasons(chosen.reasons)
    if recipe.max_length is not None:
        checkpoint = checkpoint.with_max_length(recipe.max_length)
    task._use(checkpoint, None)
    try:
        task.history_ = Trainer(
            task.model,
            training.plan(data),
            recipe,
            evaluate=None if dev is None else lambda: training.metrics(dev),
            metric=recipe.metric or training.main_metric(data if dev is None else dev),
            folder=None if folder is None else Path(folder),
            resume=resume,
            save_steps=save_steps,
            fingerprint=training.fingerprint([data] if dev is None else [data, dev]),
            strategy=strategy,
            progress=progress,
        ).run()
        task.original_ = data.original
        if dev is not None:
            training.calibrate(dev)
    finally:
        training.finish()
    return task
