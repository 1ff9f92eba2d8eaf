"""Micro-batches of a training step: prepared in this process, or prefetched by worker processes."""

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

PREFETCH_FACTOR = 2  # steps that each worker prepares in advance


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """One process's part of a training step."""

    # Empty where nothing has weight. All processes have equally many: those of some end with
    # micro-batches of weight 0.
    micro_batches: list[MicroBatch]
    total: float  # weight of the whole step, over all processes
    counts: Mapping[str, float]  # of a `ModelObjective`
    texts: int
    tokens: int
    divisible: int  # tokens of the largest micro-batch that could be split


def prepare_step(
    sampler: BatchSampler, step: int, micro_tokens: int, rank: int = 0, size: int = 1
) -> tuple[TrainingTask, PreparedStep]:
    """Read a step and collate this process's micro-batches."""
    task, examples = sampler.read(step)
    objective = task.objective
    total = sum(objective.example_weight(example) for example in examples)
    counts = objective.count_step(examples) if isinstance(objective, ModelObjective) else {}
    micro_batches: list[MicroBatch] = []
    divisible = 0
    if total > 0:
        shards = [split_micro_batches(shard, micro_tokens) for shard in shard_examples(examples, size)]
        micro_batches = [objective.collate(part) for part in shards[rank]]
        missing = max(map(len, shards)) - len(micro_batches)
        micro_batches += [_zero_weights(objective.collate(examples[:1])) for _ in range(missing)]
        divisible = max((sum(map(len, part)) for part in shards[rank] if len(part) > 1), default=0)
    return task, PreparedStep(micro_batches, total, counts, len(examples), sum(map(len, examples)), divisible)


def split_micro_batches(examples: Sequence[TrainingExample], budget: int) -> list[list[TrainingExample]]:
    """Split examples into micro-batches of at most `budget` tokens; a larger example is a
    micro-batch of its own.

    >>> import numpy as np
    >>> from bertie.training.objectives import TrainingWindow
    >>> examples = [TrainingExample((TrainingWindow(np.zeros(n), np.zeros(n)),)) for n in (3, 4, 9, 2)]
    >>> [[len(example) for example in part] for part in split_micro_batches(examples, budget=8)]
    [[3, 4], [9], [2]]
    """
    return list(group_by_budget(examples, len, budget))


def shard_examples(examples: Sequence[TrainingExample], size: int) -> list[list[TrainingExample]]:
    """Distribute examples over `size` processes, balanced by tokens; with too few examples some
    shards are empty.

    >>> import numpy as np
    >>> from bertie.training.objectives import TrainingWindow
    >>> examples = [TrainingExample((TrainingWindow(np.zeros(n), np.zeros(n)),)) for n in (3, 4, 9, 2)]
    >>> [[len(example) for example in shard] for shard in shard_examples(examples, size=2)]
    [[9], [4, 3, 2]]
    """
    if size == 1:
        return [list(examples)]
    shards: list[list[TrainingExample]] = [[] for _ in range(size)]
    used = [0] * size
    for example in sorted(examples, key=len, reverse=True):
        least = used.index(min(used))
        shards[least].append(example)
        used[least] += len(example)
    return shards


def _zero_weights(micro_batch: MicroBatch) -> MicroBatch:
    targets = replace(micro_batch.targets, weights=torch.zeros_like(micro_batch.targets.weights))
    return replace(micro_batch, targets=targets, weight=0.0)


class Prefetcher:
    """Prepares steps in worker processes while the device computes; without workers, in this
    process on demand.

    Workers are forks, which share the memory of the data. They send micro-batches only; the
    training task is looked up by its sampler and head.
    """

    def __init__(self, sampler: BatchSampler, workers: int, rank: int = 0, size: int = 1) -> None:
        self.sampler, self.rank, self.size = sampler, rank, size
        self._tasks: dict[tuple[int, str], TrainingTask] = {}
        self._pending: deque[tuple[int, int, Connection]] = deque()  # step, micro_tokens and the worker's pipe
        self._pipes: list[Connection] = []
        for _ in range(workers if "fork" in get_all_start_methods() else 0):  # Windows cannot fork
            fork = get_context("fork")
            ours, theirs = fork.Pipe()
            self._pipes.append(ours)
            fork.Process(target=self._work, args=(theirs,), daemon=True).start()
            theirs.close()

    def __call__(self, step: int, micro_tokens: int) -> tuple[TrainingTask, PreparedStep]:
        """Return a step, and request those after it."""
        if not self._pipes:
            return prepare_step(self.sampler, step, micro_tokens, self.rank, self.size)
        while self._pending and self._pending[0][:2] != (step, micro_tokens):
            self._receive()  # discard: requested before a rollback or an out-of-memory retry
        following = self._pending[-1][0] + 1 if self._pending else step
        for number in range(following, min(step + PREFETCH_FACTOR * len(self._pipes), self.sampler.total_steps)):
            pipe = self._pipes[number % len(self._pipes)]
            self._pending.append((number, micro_tokens, pipe))
            with suppress(OSError):  # a worker that died is reported when its step is needed
                pipe.send((number, micro_tokens))
        key, prepared = self._receive()
        if key not in self._tasks:
            self._tasks[key] = self.sampler.read(step)[0]
        return self._tasks[key], prepared

    def _receive(self) -> tuple[tuple[int, str], PreparedStep]:
        step, _, pipe = self._pending.popleft()
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise TrainingError(
                f"a prefetch worker died before step {step + 1}, perhaps for lack of memory. The last checkpoint is "
                "intact"
            ) from None
        if isinstance(message, BaseException):
            raise message
        key, prepared = message
        assert isinstance(prepared, PreparedStep)
        return key, prepared

    def _work(self, pipe: Connection) -> None:
        """The loop of a worker process, until the pipe is closed."""
        self.close()  # its copies of the parent's pipes, so that it notices when the parent has exited
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        try:
            while True:
                step, micro_tokens = pipe.recv()
                try:
                    task, prepared = prepare_step(self.sampler, step, micro_tokens, self.rank, self.size)
                    message = pickle.dumps(((task.sampler, task.head), prepared), pickle.HIGHEST_PROTOCOL)
                except Exception as error:  # raised again in the training process
                    message = pickle.dumps(error)
                pipe.send_bytes(message)
        except (EOFError, OSError):
            return

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._pending.clear()
