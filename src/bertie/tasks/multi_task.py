"""Several tasks over one encoder: trained together, saved in one checkpoint, run in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, Unpack, overload

import torch
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import DEFAULT, default_model
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, text_inputs
from bertie.pipeline.pipeline import Overflow
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.tasks.base import Task
from bertie.tasks.tag import Tagger
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.tasks.zero_shot import entailment_label
from bertie.text.batch import Batch


class MultiTask:
    """Named tasks over one encoder.

    Freeze the encoder (`freeze="encoder"`), or train it on all tasks together, with or without LoRA:

    >>> model = MultiTask("path/to/any/encoder", {"mood": "classify", "names": "tag"}, lora=8)     # doctest: +SKIP
    >>> model.fit({"mood": "reviews.jsonl", "names": "names.jsonl"}).save("my-model")              # doctest: +SKIP
    >>> MultiTask.load("my-model").read(["Ada adored London."])[0]["mood"].label                   # doctest: +SKIP
    'positive'
    >>> Tagger.load("my-model", head="names")                                                      # doctest: +SKIP
    """

    history_: Any  # the `bertie.training.callbacks.TrainingHistory` of the last `fit`
    recipe_: Recipe  # with the hyperparameters that the last `fit` chose

    def __init__(
        self,
        model: Checkpoint | str | Path | None,
        tasks: Mapping[str, str],
        *,
        overflow: Overflow = "window",
        device: str | torch.device | None = None,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        known = registry.trainable(with_head=True)
        for name, task in tasks.items():
            if task not in known:
                raise ConfigError(f"tasks[{name!r}]={task!r} must be one of {', '.join(known)}")
        if not tasks:
            raise ConfigError("tasks={} must name at least one head")
        self.recipe = Recipe.from_mapping(hyperparameters)
        self.overflow: Overflow = overflow
        self.model_argument, self.device_argument = model, device
        self.rows = {name: registry.get(task) for name, task in tasks.items()}
        self._tasks: dict[str, Trainable[Any, Any, Any]] = {}

    @classmethod
    def load(cls, name: str | Path | None = None, *, overflow: Overflow = "window", **options: Any) -> Self:
        """Load a model with all its trainable heads, by default the built-in one.

        `options` are passed to `Checkpoint.load`.
        """
        checkpoint = Checkpoint.load(default_model() if name is None else name, **options)
        rows = {head: registry.row_for_head(info) for head, info in checkpoint.heads.items()}
        tasks = {head: row.name for head, row in rows.items() if row is not None}
        if not tasks:
            heads, known = ", ".join(checkpoint.heads) or "none", ", ".join(registry.trainable(with_head=True))
            raise NotFoundError(f"{checkpoint.source} has no heads for {known}; it has: {heads}")
        model = cls(checkpoint, tasks, overflow=overflow)
        model.use(checkpoint)
        return model

    def use(self, checkpoint: Checkpoint) -> None:
        """Run all tasks on a checkpoint that has their heads."""
        self.checkpoint = checkpoint
        self._tasks = {
            name: row.trainable_class.from_recipe(checkpoint, self.recipe, overflow=self.overflow, head=name)
            for name, row in self.rows.items()
        }

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the checkpoint with all its heads."""
        self._check_fitted()
        self.checkpoint.save(folder, overwrite=overwrite)

    def _check_fitted(self) -> None:
        if not self._tasks:
            raise NotFoundError("these heads are not trained yet: call fit first")

    def __getitem__(self, name: str) -> Trainable[Any, Any, Any]:
        """The task of a head."""
        self._check_fitted()
        if name not in self._tasks:
            raise NotFoundError(f"there is no head {name!r}; the heads are: {', '.join(self._tasks)}")
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        self._check_fitted()
        return self.checkpoint.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device, in place."""
        self._check_fitted()
        self.checkpoint.to(device)
        return self

    def __repr__(self) -> str:
        tasks = ", ".join(f"{name}: {row.name}" for name, row in self.rows.items())
        model = self.checkpoint.source if self._tasks else self.model_argument or DEFAULT
        return f"MultiTask({str(model)!r}, {tasks}{'' if self._tasks else ', not trained yet'})"

    @overload
    def read(self, texts: str, *, progress: bool | None = None) -> dict[str, Any]: ...  # type: ignore[overload-overlap]
    @overload
    def read(self, texts: Iterable[str], *, progress: bool | None = None) -> list[dict[str, Any]]: ...
    @explain_arguments
    def read(self, texts: Any, *, progress: bool | None = None) -> Any:
        """Run every head on single texts, with one forward pass of the encoder per batch; returns results by head."""
        shared = self._shared_pass()
        return shared.collect(texts, lambda texts: shared.run(shared.inputs(texts), texts), "read", progress)

    def read_each(self, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Like `read`, but yield results one by one."""
        shared = self._shared_pass()
        return shared.run(shared.inputs(texts), texts)

    def _shared_pass(self) -> _SharedPass:
        self._check_fitted()
        tasks = {
            name: task
            for name, task in self._tasks.items()
            if self.rows[name].single_text and entailment_label(task.info) is None
        }
        if not tasks:
            raise InputError(f"read() is for heads over single texts; these are for pairs: {', '.join(self._tasks)}")
        return _SharedPass(self.checkpoint, tasks, overflow=self.overflow)

    def fit(
        self,
        data: Mapping[str, Any],
        *,
        dev: Mapping[str, Any] | None = None,
        columns: Mapping[str, Mapping[str, str]] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        strategy: Literal["ddp", "fsdp"] = "ddp",
        progress: bool = True,
    ) -> Self:
        """Train all heads, alternating between them step by step, in proportion to their data.

        `data` and `dev`: for each head, a table, a file or a pair (X, y). All others are as in `Trainable.fit`.
        """
        from bertie.training.finetune.multi_task import fit

        return fit(
            self,
            data,
            dev=dev or {},
            columns=columns or {},
            folder=folder,
            resume=resume,
            save_steps=save_steps,
            strategy=strategy,
            progress=progress,
        )


class _SharedPass(Task[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]):
    """Several heads over one forward pass."""

    def __init__(self, checkpoint: Checkpoint, tasks: Mapping[str, Task[Any, Any, Any]], *, overflow: Overflow) -> None:
        super().__init__(checkpoint, overflow=overflow)
        if checkpoint.model.config.global_tokens:
            raise InputError(
                "heads of a model with global tokens cannot share a forward pass: each needs other tokens to be global"
            )
        self.tasks = tasks

    def inputs(self, texts: Iterable[str]) -> Iterator[TaskInput[tuple[Any, ...]]]:
        """Texts with the options of all heads."""
        options = tuple(task.options() if isinstance(task, Tagger) else None for task in self.tasks.values())
        return text_inputs(texts, "read", options)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[Any] | None
    ) -> Sequence[tuple[Any, ...]]:
        """The outputs of all heads for each window."""
        per_task = [task.outputs(model, hidden, batch, None) for task in self.tasks.values()]
        return list(zip(*per_task, strict=True))

    def decode(self, text: WindowedText[tuple[Any, ...]], outputs: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        """The results of all heads."""
        return {
            name: task.decode(text.with_options(text.input.options[i]), [output[i] for output in outputs])
            for i, (name, task) in enumerate(self.tasks.items())
        }
