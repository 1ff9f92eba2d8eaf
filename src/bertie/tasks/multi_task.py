"""Several tasks over one encoder: trained together, kept in one checkpoint, read in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint, default_model
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.tasks.answer import Reader
from bertie.tasks.base import Overflow, Task, TaskInput, singles
from bertie.tasks.classify import Classifier, Regressor, entailing
from bertie.tasks.embed import Embedder
from bertie.tasks.learn import Learner, main_metric, run_fingerprint, start
from bertie.tasks.rerank import Reranker
from bertie.tasks.tag import Tagger
from bertie.text.batch import Batch
from bertie.text.windows import Window
from bertie.training.finetune.data import Labelled, labelled, split
from bertie.training.recipe import Recipe

if TYPE_CHECKING:
    from bertie.training.distributed import Strategy
    from bertie.training.loop import TrainingHistory

LEARNERS: dict[str, type[Learner[Any, Any, Any]]] = {
    "classify": Classifier,
    "regress": Regressor,
    "tag": Tagger,
    "answer": Reader,
    "rerank": Reranker,
}
TRAINED: dict[str, type[Learner[Any, Any, Any]]] = {**LEARNERS, "embed": Embedder}  # with what needs no head
_OF_ONE_TEXT = (Classifier, Regressor, Tagger)


class Heads:
    """Tasks by name over one encoder.

    Freeze the encoder (`freeze="encoder"`), or let all tasks move it together, with or without LoRA:

    >>> heads = Heads("path/to/any/encoder", {"mood": "classify", "names": "tag"}, lora=8)     # doctest: +SKIP
    >>> heads.fit({"mood": "reviews.jsonl", "names": "names.jsonl"}).save("my-model")          # doctest: +SKIP
    >>> Heads.load("my-model").read(["Ada adored London."])[0]["mood"].label                   # doctest: +SKIP
    'positive'
    >>> Tagger.load("my-model", head="names")                                                  # doctest: +SKIP
    """

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        tasks: Mapping[str, str],
        *,
        overflow: Overflow = "window",
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        for name, task in tasks.items():
            if task not in LEARNERS:
                raise ConfigError(f"tasks[{name!r}]={task!r} must be one of {', '.join(LEARNERS)}")
        if not tasks:
            raise ConfigError("tasks={} must name at least one head")
        self.recipe = Recipe.from_mapping(training)
        self.overflow: Overflow = overflow
        self._given, self._device = checkpoint, device
        self._kinds = dict(tasks)
        self._tasks: dict[str, Learner[Any, Any, Any]] = {}

    @classmethod
    def load(cls, name: str | Path | None = None, *, overflow: Overflow = "window", **options: Any) -> Self:
        """Load a checkpoint with all heads that can be trained, the built-in model if none is named.

        `options` are those of `Checkpoint.load`.
        """
        checkpoint = Checkpoint.load(default_model() if name is None else name, **options)
        kinds = {head: kind for head in checkpoint.heads if (kind := task_of(checkpoint, head)) is not None}
        if not kinds:
            have = ", ".join(checkpoint.heads) or "none"
            raise NotFoundError(f"{checkpoint.source} has no heads for {', '.join(LEARNERS)}; it has: {have}")
        heads = cls(checkpoint, kinds, overflow=overflow)
        heads._use(checkpoint)
        return heads

    def _use(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._tasks = {
            name: LEARNERS[kind](checkpoint, overflow=self.overflow, head=name, **self.recipe.as_dict())
            for name, kind in self._kinds.items()
        }

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the checkpoint with all its heads."""
        self._fitted().checkpoint.save(folder, overwrite=overwrite)

    def _fitted(self) -> Self:
        if not self._tasks:
            raise NotFoundError("these heads are not trained yet: call fit first")
        return self

    def __getitem__(self, name: str) -> Learner[Any, Any, Any]:
        """One task."""
        if name not in self._fitted()._tasks:
            raise NotFoundError(f"there is no head {name!r}; there are: {', '.join(self._tasks)}")
        return self._tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def read(self, texts: Iterable[str]) -> list[dict[str, Any]]:
        """What every head for single texts says of each text, from one pass of the encoder."""
        return list(self.read_each(texts))

    def read_each(self, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
        """As `read`, one by one."""
        several = {
            name: task
            for name, task in self._fitted()._tasks.items()
            if isinstance(task, _OF_ONE_TEXT) and entailing(task.info) is None
        }
        if not several:
            raise InputError(f"read() is for heads over single texts; these are for pairs: {', '.join(self._tasks)}")
        options = tuple(task.options() if isinstance(task, Tagger) else None for task in several.values())
        return _Together(self.checkpoint, several, overflow=self.overflow).run(singles(texts, "read", options))

    # --- training ---

    def fit(
        self,
        data: Mapping[str, Any],
        *,
        dev: Mapping[str, Any] | None = None,
        columns: Mapping[str, Mapping[str, str]] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        strategy: Strategy = "ddp",
        quiet: bool = False,
    ) -> Self:
        """Train all heads, a step of one after a step of another, in proportion to their data.

        `data` and `dev` by head: a table, a file, or a pair (X, y). The rest is as in `Classifier.fit`.
        """
        from bertie.training.loop import Trainer
        from bertie.training.sampling import TrainingTask

        unknown = sorted(set(data) ^ set(self._kinds))
        if unknown:
            raise InputError(f"data must be given for each head and no other: {', '.join(unknown)}")
        for text in self.recipe.warnings():
            warnings.warn(text, stacklevel=2)
        trained, held = self._read(data, dev or {}, columns or {})
        checkpoint = start(self._given, self._device)
        makers = {name: LEARNERS[kind](checkpoint, head=None) for name, kind in self._kinds.items()}
        for name, maker in makers.items():
            if name in held:
                maker.check_scorable(held[name])
            checkpoint.add_head(name, maker.head_for(trained[name]), seed=self.recipe.seed)
        if self.recipe.max_length is not None:
            checkpoint = checkpoint.with_max_length(self.recipe.max_length)
        self._use(checkpoint)
        sources = [
            TrainingTask(name, task.objective(trained[name]), list(task.items(trained[name])))
            for name, task in self._tasks.items()
        ]
        trainer = Trainer(
            checkpoint.model,
            sources,
            self.recipe,
            evaluate=(lambda: self._judged(held)) if held else None,
            metric="mean",
            folder=None if folder is None else Path(folder),
            resume=resume,
            save_steps=save_steps,
            fingerprint=run_fingerprint(checkpoint, self.recipe, self.overflow, [*trained.values(), *held.values()]),
            strategy=strategy,
            quiet=quiet,
        )
        self.history_: TrainingHistory = trainer.run()
        for name, one in held.items():
            self._tasks[name].calibrate(one)
        return self

    def _read(
        self, data: Mapping[str, Any], dev: Mapping[str, Any], columns: Mapping[str, Mapping[str, str]]
    ) -> tuple[dict[str, Labelled], dict[str, Labelled]]:
        trained, held = {}, {}
        for name, kind in self._kinds.items():
            kind_: Any = kind
            one = labelled(kind_, *_two(data[name]), columns=columns.get(name), name=f"the data of {name}")
            if name in dev:
                known = one.labels or None
                held[name] = labelled(
                    kind_,
                    *_two(dev[name]),
                    columns=columns.get(name),
                    name=f"the dev data of {name}",
                    known=known,
                    training=False,
                )
            elif self.recipe.dev_share:
                one, held[name] = split(one, self.recipe.dev_share, self.recipe.seed)
            trained[name] = one
        return trained, held

    def _judged(self, held: Mapping[str, Labelled]) -> dict[str, float]:
        """The main metric of each head, and the mean of all."""
        found = {}
        for name, one in held.items():
            task = self._tasks[name]
            found[name] = task.quick(one)[main_metric(one)]
        return found | {"mean": float(np.mean(list(found.values())))}


def _two(given: Any) -> tuple[Any, Any]:
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


def task_of(checkpoint: Checkpoint, head: str) -> str | None:
    """The task that a head is for."""
    info = checkpoint.heads[head]
    if info.task is not None:
        return info.task if info.task in LEARNERS else None
    if info.kind == "classify" and info.problem == "regression":
        return "regress"
    return info.kind if info.kind in LEARNERS else None


class _Together(Task[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]):
    """Several heads over one pass."""

    def __init__(self, checkpoint: Checkpoint, tasks: Mapping[str, Task[Any, Any, Any]], *, overflow: Overflow) -> None:
        super().__init__(checkpoint, overflow=overflow)
        if checkpoint.model.config.global_tokens:
            raise InputError("heads of a model with global tokens cannot share a pass: each wants other tokens global")
        self.tasks = tasks

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[tuple[Any, ...]]], group: Sequence[Window]
    ) -> Sequence[tuple[Any, ...]]:
        said = [
            task.outputs(hidden, batch, [replace(ask, options=ask.options[i]) for ask in asks], group)
            for i, task in enumerate(self.tasks.values())
        ]
        return list(zip(*said, strict=True))

    def decode(
        self, ask: TaskInput[tuple[Any, ...]], found: Sequence[Window], outputs: Sequence[tuple[Any, ...]]
    ) -> dict[str, Any]:
        return {
            name: task.decode(replace(ask, options=ask.options[i]), found, [one[i] for one in outputs])
            for i, (name, task) in enumerate(self.tasks.items())
        }
