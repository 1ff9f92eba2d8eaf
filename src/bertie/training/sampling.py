"""Batch samplers: which examples each training step reads, as a function of the seed and the step number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from bertie.errors import ConfigError
from bertie.recipe import Recipe
from bertie.training.objectives import Objective, TrainingExample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A head, its objective and its examples."""

    head: str
    objective: Objective
    examples: Sequence[TrainingExample]
    sampler: int = 0  # index of its sampler in a `MixtureSampler`


class BatchSampler(Protocol):
    """Chooses the examples of each step by the step number alone, so that a run can resume anywhere."""

    total_steps: int
    single_head: bool  # whether all objectives read one head's outputs, so that CUDA graphs can record a step

    @property
    def heads(self) -> Sequence[str]:
        """The heads that are trained."""

    @property
    def epoch_starts(self) -> Sequence[int]:
        """The first step of each epoch, and the total number of steps."""

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, from 0."""

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""

    def schedule_position(self, step: int) -> float:
        """The position of a step in the learning-rate schedule, in steps of equal size."""

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the examples of a step."""

    def fingerprint(self) -> Any:
        """JSON that identifies the sampler: a run resumes only with the same."""


class ExampleSampler:
    """Samples examples without replacement, in a new order each epoch. Each step reads one task."""

    single_head = True

    def __init__(self, tasks: Sequence[TrainingTask], recipe: Recipe) -> None:
        if not any(task.examples for task in tasks):
            raise ConfigError("there is nothing to train on")
        self.tasks, self.recipe = tasks, recipe.resolve()
        self.heads = [task.head for task in tasks]
        self._cached_epoch: tuple[int, list[tuple[int, list[int]]]] = (-1, [])
        self.epoch_starts = [0]
        whole, fraction = divmod(self.recipe.epochs, 1.0)
        for epoch in range(int(whole) + bool(fraction)):
            count = self._steps_in_epoch(epoch)
            if epoch >= whole:
                count = max(1, round(count * fraction))
            self.epoch_starts.append(self.epoch_starts[-1] + count)
        self.total_steps = self.epoch_starts[-1]

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, from 0."""
        return bisect_right(self.epoch_starts, step) - 1

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""
        epoch = min(self.epoch_of(step), len(self.epoch_starts) - 2)
        size = self.epoch_starts[epoch + 1] - self.epoch_starts[epoch]
        fraction = min(1.0, self.recipe.epochs - epoch)
        return epoch + fraction * (step - self.epoch_starts[epoch]) / size

    def schedule_position(self, step: int) -> float:
        """All steps have the same size."""
        return step

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the examples of a step."""
        epoch = self.epoch_of(step)
        number, indices = self._epoch_batches(epoch)[step - self.epoch_starts[epoch]]
        task = self.tasks[number]
        return task, [self._sample_windows(task.examples[i], epoch, i) for i in indices]

    def fingerprint(self) -> Any:
        """The number of examples of each head."""
        return [(task.head, len(task.examples)) for task in self.tasks]

    def _steps_in_epoch(self, epoch: int) -> int:
        if self.recipe.batch_tokens is None:
            return sum(-(-len(task.examples) // self.recipe.batch_size) for task in self.tasks)
        return len(self._epoch_batches(epoch))

    def _epoch_batches(self, epoch: int) -> list[tuple[int, list[int]]]:
        """The steps of an epoch: the index of a task, and the indices of its examples."""
        if self._cached_epoch[0] != epoch:
            rng = np.random.default_rng([self.recipe.seed, epoch])
            batches = [
                (n, indices)
                for n, task in enumerate(self.tasks)
                for indices in self._split_into_batches(task, epoch, rng)
            ]
            if len(self.tasks) > 1:
                batches = [batches[i] for i in rng.permutation(len(batches))]
            self._cached_epoch = (epoch, batches)
        return self._cached_epoch[1]

    def _split_into_batches(self, task: TrainingTask, epoch: int, rng: np.random.Generator) -> Iterator[list[int]]:
        order = rng.permutation(len(task.examples)).tolist()
        budget = self.recipe.batch_tokens
        if budget is None:
            size = self.recipe.batch_size
            yield from (order[i : i + size] for i in range(0, len(order), size))
            return
        yield from group_by_budget(order, lambda i: len(self._sample_windows(task.examples[i], epoch, i)), budget)

    def _sample_windows(self, example: TrainingExample, epoch: int, index: int) -> TrainingExample:
        """Limit a long text to `train_windows` windows, drawn anew each epoch."""
        limit = self.recipe.train_windows
        if len(example.windows) <= limit:
            return example
        rng = np.random.default_rng([self.recipe.seed, epoch, index, 1])
        sampled = [example.windows[i] for i in sorted(rng.choice(len(example.windows), limit, replace=False))]
        total = sum(window.share for window in sampled)
        return replace(example, windows=tuple(replace(window, share=window.share / total) for window in sampled))


def group_by_budget(values: Iterable[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Group consecutive values up to a total size of `budget`; a larger value is a group of its own."""
    group: list[T] = []
    used = 0
    for value in values:
        added = size(value)
        if group and used + added > budget:
            yield group
            group, used = [], 0
        group.append(value)
        used += added
    if group:
        yield group
