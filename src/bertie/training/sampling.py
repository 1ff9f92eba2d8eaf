"""What each step of a run reads: a function of the seed and of the step's number."""

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
    """A head, what it is trained for, and on what."""

    head: str
    objective: Objective
    items: Sequence[TrainingExample]
    plan: int = 0  # of several in turn, the number of the one it is of


class BatchSampler(Protocol):
    """Which items each step reads: a function of the step's number, so that a run can go on anywhere."""

    total_steps: int
    single_head: bool  # whether all objectives are over one head's outputs, so that steps can be recorded

    @property
    def heads(self) -> Sequence[str]:
        """Those that are trained."""

    @property
    def epoch_starts(self) -> Sequence[int]:
        """The first step of each epoch, and the end."""

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""

    def schedule_position(self, step: int) -> float:
        """Where a step stands in the schedule, counted in steps of equal worth."""

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """What a step reads."""

    def fingerprint(self) -> Any:
        """What tells one plan from another, as JSON."""


class ExampleSampler:
    """Examples drawn anew each epoch, the same for the same seed."""

    single_head = True

    def __init__(self, sources: Sequence[TrainingTask], recipe: Recipe) -> None:
        if not any(source.items for source in sources):
            raise ConfigError("there is nothing to train on")
        self.sources, self.recipe = sources, recipe
        self.heads = [source.head for source in sources]
        self._epoch: tuple[int, list[tuple[int, list[int]]]] = (-1, [])
        self.epoch_starts = [0]  # the first step of each epoch
        whole, part = divmod(recipe.epochs, 1.0)
        for epoch in range(int(whole) + bool(part)):
            count = self._steps_in_epoch(epoch)
            if epoch >= whole:
                count = max(1, round(count * part))
            self.epoch_starts.append(self.epoch_starts[-1] + count)
        self.total_steps = self.epoch_starts[-1]

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return bisect_right(self.epoch_starts, step) - 1

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""
        epoch = min(self.epoch_of(step), len(self.epoch_starts) - 2)
        size = self.epoch_starts[epoch + 1] - self.epoch_starts[epoch]
        share = min(1.0, self.recipe.epochs - epoch)
        return epoch + share * (step - self.epoch_starts[epoch]) / size

    def schedule_position(self, step: int) -> float:
        """Steps are alike."""
        return step

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """What a step reads."""
        epoch = self.epoch_of(step)
        number, chosen = self._epoch_batches(epoch)[step - self.epoch_starts[epoch]]
        source = self.sources[number]
        return source, [self._sample_windows(source.items[i], epoch, i) for i in chosen]

    def fingerprint(self) -> Any:
        """How many items each head has."""
        return [(source.head, len(source.items)) for source in self.sources]

    def _steps_in_epoch(self, epoch: int) -> int:
        if self.recipe.batch_tokens is None:
            return sum(-(-len(source.items) // self.recipe.batch_size) for source in self.sources)
        return len(self._epoch_batches(epoch))

    def _epoch_batches(self, epoch: int) -> list[tuple[int, list[int]]]:
        """The steps of an epoch: the number of a source, and which of its items."""
        if self._epoch[0] != epoch:
            rng = np.random.default_rng([self.recipe.seed, epoch])
            steps = [
                (n, one)
                for n, source in enumerate(self.sources)
                for one in self._split_into_batches(source, epoch, rng)
            ]
            if len(self.sources) > 1:
                steps = [steps[i] for i in rng.permutation(len(steps))]
            self._epoch = (epoch, steps)
        return self._epoch[1]

    def _split_into_batches(self, source: TrainingTask, epoch: int, rng: np.random.Generator) -> Iterator[list[int]]:
        order = rng.permutation(len(source.items)).tolist()
        budget = self.recipe.batch_tokens
        if budget is None:
            size = self.recipe.batch_size
            yield from (order[i : i + size] for i in range(0, len(order), size))
            return
        yield from group_by_budget(order, lambda i: len(self._sample_windows(source.items[i], epoch, i)), budget)

    def _sample_windows(self, item: TrainingExample, epoch: int, index: int) -> TrainingExample:
        """Of a text with very many windows, as many as a step may read, others in each epoch."""
        most = self.recipe.train_windows
        if len(item.windows) <= most:
            return item
        rng = np.random.default_rng([self.recipe.seed, epoch, index, 1])
        chosen = [item.windows[i] for i in sorted(rng.choice(len(item.windows), most, replace=False))]
        whole = sum(piece.share for piece in chosen)
        return replace(item, windows=tuple(replace(piece, share=piece.share / whole) for piece in chosen))


def group_by_budget(things: Iterable[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Things in groups whose sizes add up to at most `budget`; one that is larger is a group of its own."""
    group: list[T] = []
    used = 0
    for one in things:
        more = size(one)
        if group and used + more > budget:
            yield group
            group, used = [], 0
        group.append(one)
        used += more
    if group:
        yield group
