"""What a step puts through the model, made ready: by this process, or ahead of time by others beside it."""

from __future__ import annotations

import pickle
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection

import torch

from bertie.errors import TrainingError
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample
from bertie.training.sampling import BatchSampler, TrainingTask, group_by_budget

DEPTH = 2  # steps that each process is ahead


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step of one process, or its part of a step of several."""

    minis: list[MicroBatch]  # none where nothing is asked; all processes have as many, the last of some without weight
    total: float  # the weight of the whole step
    counts: Mapping[str, float]  # of an objective over the model
    texts: int
    tokens: int
    divisible: int  # tokens of the largest micro-batch that could be smaller


def ready(
    plan: BatchSampler, step: int, micro_tokens: int, rank: int = 0, size: int = 1
) -> tuple[TrainingTask, PreparedStep]:
    """What a step trains, and its micro-batches."""
    source, items = plan.read(step)
    objective = source.objective
    total = sum(objective.example_weight(item) for item in items)
    counts = objective.counted(items) if isinstance(objective, ModelObjective) else {}
    minis: list[MicroBatch] = []
    divisible = 0
    if total > 0:
        shares = [split_micro_batches(share, micro_tokens) for share in shard_examples(items, size)]
        minis = [objective.collate(part) for part in shares[rank]]
        missing = max(map(len, shares)) - len(minis)
        minis += [_weightless(objective.collate(items[:1])) for _ in range(missing)]
        divisible = max((sum(map(len, part)) for part in shares[rank] if len(part) > 1), default=0)
    return source, PreparedStep(minis, total, counts, len(items), sum(map(len, items)), divisible)


def split_micro_batches(items: Sequence[TrainingExample], budget: int) -> list[list[TrainingExample]]:
    """Items in parts of at most `budget` tokens; one that is larger is a part of its own.

    >>> import numpy as np
    >>> from bertie.training.objectives import TrainingWindow
    >>> items = [TrainingExample((TrainingWindow(np.zeros(n), np.zeros(n)),)) for n in (3, 4, 9, 2)]
    >>> [[len(item) for item in part] for part in split_micro_batches(items, budget=8)]
    [[3, 4], [9], [2]]
    """
    return list(group_by_budget(items, len, budget))


def shard_examples(items: Sequence[TrainingExample], size: int) -> list[list[TrainingExample]]:
    """Items for each of so many processes, of nearly as many tokens each; none for some, where there are too few.

    >>> import numpy as np
    >>> from bertie.training.objectives import TrainingWindow
    >>> items = [TrainingExample((TrainingWindow(np.zeros(n), np.zeros(n)),)) for n in (3, 4, 9, 2)]
    >>> [[len(item) for item in share] for share in shard_examples(items, size=2)]
    [[9], [4, 3, 2]]
    """
    if size == 1:
        return [list(items)]
    shares: list[list[TrainingExample]] = [[] for _ in range(size)]
    used = [0] * size
    for item in sorted(items, key=len, reverse=True):
        least = used.index(min(used))
        shares[least].append(item)
        used[least] += len(item)
    return shares


def _weightless(mini: MicroBatch) -> MicroBatch:
    targets = replace(mini.targets, weights=torch.zeros_like(mini.targets.weights))
    return replace(mini, targets=targets, weight=0.0)


class Prefetcher:
    """Makes steps ready in so many processes while the device works; with none, in this one when they are asked for.

    The processes are forks, which share the data's memory. They send micro-batches and never what is trained: a source
    is known by its plan and head.
    """

    def __init__(self, plan: BatchSampler, workers: int, rank: int = 0, size: int = 1) -> None:
        self.plan, self.rank, self.size = plan, rank, size
        self._sources: dict[tuple[int, str], TrainingTask] = {}
        self._asked: deque[tuple[int, int, Connection]] = deque()  # step, micro_tokens, and who was asked
        self._pipes: list[Connection] = []
        for _ in range(workers if "fork" in get_all_start_methods() else 0):  # not on Windows
            fork = get_context("fork")
            ours, theirs = fork.Pipe()
            self._pipes.append(ours)
            fork.Process(target=self._answer, args=(theirs,), daemon=True).start()
            theirs.close()

    def __call__(self, step: int, micro_tokens: int) -> tuple[TrainingTask, PreparedStep]:
        """A step; those after it are asked for, too."""
        if not self._pipes:
            return ready(self.plan, step, micro_tokens, self.rank, self.size)
        while self._asked and self._asked[0][:2] != (step, micro_tokens):
            self._receive()  # nobody wants it any more
        following = self._asked[-1][0] + 1 if self._asked else step
        for one in range(following, min(step + DEPTH * len(self._pipes), self.plan.total_steps)):
            pipe = self._pipes[one % len(self._pipes)]
            self._asked.append((one, micro_tokens, pipe))
            with suppress(OSError):  # of one that ended: told when its answer is wanted
                pipe.send((one, micro_tokens))
        key, found = self._receive()
        if key not in self._sources:
            self._sources[key] = self.plan.read(step)[0]
        return self._sources[key], found

    def _receive(self) -> tuple[tuple[int, str], PreparedStep]:
        step, _, pipe = self._asked.popleft()
        try:
            said = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise TrainingError(
                f"a process that reads ahead ended before step {step + 1}, maybe for lack of memory. The last state "
                "that was saved is whole"
            ) from None
        if isinstance(said, BaseException):
            raise said
        key, found = said
        assert isinstance(found, PreparedStep)
        return key, found

    def _answer(self, pipe: Connection) -> None:
        """What another process does, until nobody asks any more."""
        self.close()  # its copies of what the first process holds, so that it sees when that one has gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        try:
            while True:
                step, micro_tokens = pipe.recv()
                try:
                    source, found = ready(self.plan, step, micro_tokens, self.rank, self.size)
                    said = pickle.dumps(((source.plan, source.head), found), pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # it is raised where the step was asked for
                    said = pickle.dumps(error)
                pipe.send_bytes(said)
        except (EOFError, OSError):
            return

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._asked.clear()
