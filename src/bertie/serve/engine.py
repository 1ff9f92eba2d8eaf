"""The engine: runs the windows of all requests through one model, in batches shared by requests, tasks and heads.

A worker takes what is queued, up to the token budget, and runs the encoder once over it; then each task computes its
head on its own part of the batch. A batch that fails is retried in halves, so that an error, or a lack of memory, is
reported to the request that causes it and to no other. Workers never die. On a CPU, a small request that is alone runs
on the event loop, without waking a worker.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from threading import Lock, Thread, current_thread, get_native_id
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.errors import BertieWarning, ConfigError
from bertie.nn.model import Model
from bertie.pipeline.pipeline import NonFiniteError
from bertie.serve.batch_budget import BudgetMeasurement, cores, is_out_of_memory, measure_budget, warm_up
from bertie.serve.engine_load import EngineLoad
from bertie.serve.engine_stats import BatchStats, EngineStats, task_name
from bertie.serve.lanes import LONG_CHARACTERS, JobSlice, Lane, QueuedJob
from bertie.serve.loop_runner import current_runner
from bertie.serve.queue import WAIT, Queue
from bertie.serve.tickets import Cancelled, Closed, Expired, Ticket, current_ticket
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings

ALONE_SECONDS = 0.01  # that a request which is alone may keep the event loop from others
LONG_NICE = 5  # added to the niceness of the threads for long jobs: short ones come first where cores are short

Answer = tuple[QueuedJob, int, Any]  # a job, the index of one of its windows, and the window's output


@dataclass(slots=True, eq=False)
class _QueuedWindow:
    """One window of a job."""

    job: QueuedJob
    index: int
    start: int  # of its tokens

    @property
    def length(self) -> int:
        return self.job.lengths[self.index]

    def tokens(self, array: np.ndarray) -> np.ndarray:
        """The window's part of an array over all tokens of the job."""
        return array[self.start : self.start + self.length]

    @property
    def parameters(self) -> Any:
        return None if self.job.parameters is None else self.job.parameters[self.index]


class Engine:
    """Runs one model for many concurrent requests.

    `budget`: tokens per batch; measured at startup if None. 1 gives each window a batch of its own. `max_wait`: seconds
    that a request may wait for its first turn. `replicas`: the same model on other devices. `workers`: concurrent
    batches per device. Two keep a GPU busy: one batch is prepared while the other runs. On a CPU the cores are divided
    among up to four, because threads that share a batch wait for each other in every layer. `on_batch` is called with
    the statistics of each batch.

    >>> embedder = Embedder.load()                                                         # doctest: +SKIP
    >>> engine = Engine(embedder.model)                                                    # doctest: +SKIP
    >>> embedder.pipeline.executor = engine                                                # doctest: +SKIP
    >>> embedder.embed(["Now many threads may call this at once."]).shape                  # doctest: +SKIP
    (1, 384)
    >>> engine.close()                                                                     # doctest: +SKIP
    """

    def __init__(
        self,
        model: Model,
        *,
        budget: int | None = None,
        max_wait: float = WAIT,
        replicas: Sequence[Model] = (),
        workers: int | None = None,
        on_batch: Callable[[BatchStats], None] | None = None,
    ) -> None:
        if budget is not None and budget < 1:
            raise ConfigError(f"budget={budget} must be at least 1 token")
        self.model, self.models, self.on_batch = model, (model, *replicas), on_batch
        self.workers = workers or (2 if model.device.type == "cuda" else min(4, cores()))
        self.budget = budget or 0
        self.measurement: BudgetMeasurement | None = None
        self.queue = Queue(max_wait)
        self._stats = EngineStats()
        self._lock = Lock()  # of the following fields and the statistics
        self._last_end = 0.0  # when the last batch ended
        self._long_text = Lock()  # held while one is tokenized
        rate = 0.0
        if not self.budget:
            self.measurement = measure_budget(model, workers=self.workers, devices=len(self.models))
            self.budget, rate = self.measurement.budget, self.measurement.rate
        self.queue.expect(rate, least=2 * self.budget * len(self.models) * self.workers)
        self._running: dict[Thread, list[JobSlice]] = {}
        self._threads = [
            Thread(
                target=self._work,
                args=(replica, long),
                name=f"bertie-{replica.device}-{'long' if long else 'short'}-{i}",
                daemon=True,
            )
            for replica in self.models
            for long in (False, True)
            for i in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()
        self.warm = model.device.type != "cuda"
        self._runs_alone = model.device.type == "cpu"
        if not self.warm:
            Thread(target=self._warm_up, name="bertie-warm-up", daemon=True).start()

    # --- for callers ---

    version = 0  # of the weights: they never change

    def compute(
        self, task: Any, windows: Encodings, parameters: Sequence[Any] | None = None, *, ticket: Ticket | None = None
    ) -> list[Any]:
        """Compute a task's outputs for windows, given by their token ids; blocks until they are ready.

        The ticket is that of the context (`current_ticket`) by default. Raises `Refused`, `Expired`, `Cancelled`,
        `Closed`, or whatever the model raises for these windows.
        """
        ticket, runner = ticket or current_ticket.get() or Ticket(), current_runner()
        job = self.make_job(ticket, task, windows, parameters, None if runner is None else runner.wake)
        alone = runner is not None and self._runs_alone and self.queue.is_empty
        self.put(job, notify=not alone)
        if runner is not None:
            if alone:
                runner.soon(self._run_alone)
            runner.wait(job, self._give_up)
        elif not job.wait(None if ticket.deadline is None else ticket.deadline - self.queue.clock()):
            self._give_up(job)
        if job.error is not None:
            raise job.error
        return job.outputs

    @staticmethod
    def make_job(
        ticket: Ticket,
        task: Any,
        windows: Encodings,
        parameters: Sequence[Any] | None,
        on_done: Callable[[QueuedJob], None] | None,
    ) -> QueuedJob:
        """A job for a task's outputs."""
        lengths, outputs = windows.lengths.tolist(), task.output_costs(windows, parameters)
        costs = None if outputs is None else [n + cost for n, cost in zip(lengths, outputs, strict=True)]
        return QueuedJob(ticket, task, lengths, windows, parameters, costs, on_done)

    def put(self, job: QueuedJob, *, notify: bool = True) -> None:
        """Enqueue a job, or raise the error with which it is refused."""
        job.ticket.queued = job.ticket.queued or time.perf_counter()
        try:
            self.queue.put(job, notify=notify)
        except Exception:
            with self._lock:
                self._stats.refused += 1
            raise

    def _give_up(self, job: QueuedJob) -> None:
        self.queue.fail(job, job.ticket.error())

    def admit(self, characters: int) -> AbstractContextManager[None]:
        """A context to tokenize texts of so many characters in. Long ones are refused if their job would be."""
        return self._admit_long() if characters > LONG_CHARACTERS else nullcontext()

    @contextmanager
    def _admit_long(self) -> Iterator[None]:
        ticket = current_ticket.get()
        owner = "" if ticket is None else ticket.owner
        self.queue.check_long(owner)
        # One at a time: each of several would take its share of the interpreter from the short requests.
        while not self._long_text.acquire(timeout=0.1):
            self.check()
        try:
            self.queue.check_long(owner)
            yield
        finally:
            self._long_text.release()

    def check(self) -> None:
        """Raise `Cancelled` or `Expired` if nobody waits for the result of this thread's request any more."""
        ticket = current_ticket.get()
        if ticket is not None:
            ticket.check()

    def stats(self) -> EngineStats:
        """Totals so far, and the state of the queue."""
        with self._lock:
            stats = copy(self._stats)
            stats.task_tokens, stats.task_s = dict(stats.task_tokens), dict(stats.task_s)
        stats.waiting_tokens, stats.waiting_requests = self.queue.waiting, len(self.queue)
        stats.budget, stats.rate = self.budget, self.queue.short.rate
        return stats

    def load(self) -> EngineLoad:
        """How busy it is."""
        short, long = self.queue.short, self.queue.long
        return EngineLoad(
            self.queue.waiting,
            len(self.queue),
            self.budget,
            short.rate,
            self.queue.full_owners(short),
            self.queue.full_owners(long),
            self.warm,
        )

    def is_full(self, owner: str = "") -> bool:
        """Whether any new job of an owner would be refused."""
        return self.queue.is_full(owner)

    @property
    def ready(self) -> bool:
        """Whether it accepts requests and its workers are alive."""
        return not self.queue.closed and all(thread.is_alive() for thread in self._threads)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Accept no more requests, finish those that wait (without `drain`: fail them with `Closed`), and stop.

        Requests that are not done after `timeout` seconds fail with `Closed` as well.
        """
        self.queue.close(drain=drain)
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        self.queue.close(drain=False)
        for part in [part for slices in list(self._running.values()) for part in slices]:
            self.queue.fail(part.job, Closed("the engine stopped during the forward pass"))

    # --- workers ---

    def _warm_up(self) -> None:
        """Run batches of common sizes in the background, so that the first requests need not wait for them."""
        try:
            for model in self.models:
                warm_up(model)
        except Exception as error:  # requests will tell
            warnings.warn(f"the warm-up failed: {type(error).__name__}", BertieWarning, stacklevel=1)
        self.warm = True

    def _work(self, model: Model, long: bool) -> None:
        share = max(1, cores() // self.workers)
        torch.set_num_threads(share)  # of this thread
        if long and model.device.type == "cpu":
            _lower_priority()
        while slices := self.queue.take(self.budget, long=long):
            if model.device.type == "cpu":  # a batch alone gets all cores: the latency of a single request
                torch.set_num_threads(cores() if self.queue.is_idle else share)
            self._run(model, slices, long)
            slices = []  # nothing is kept alive while it waits for the next batch

    def _run_alone(self) -> None:
        """Run the only waiting job in this thread, the event loop's, if it is small: two threads need not be woken."""
        if slices := self.queue.take_alone(ALONE_SECONDS * self.queue.short.rate):
            self._run(self.model, slices, long=False)

    def _run(self, model: Model, slices: list[JobSlice], long: bool) -> None:
        """Run a batch; whatever happens is reported to its requests."""
        thread = current_thread()
        self._running[thread] = slices
        try:
            start = time.perf_counter()
            answers: list[Answer] = []
            for windows in _shared_passes(slices):
                answers += self._forward(model, windows)
            stats = self._count(slices, start, self.queue.long if long else self.queue.short)
            self.queue.answer(answers)
            if self.on_batch is not None:
                with suppress(Exception):  # a failing observer must not fail the requests
                    self.on_batch(stats)
        except BaseException as error:
            for part in slices:
                self.queue.fail(part.job, error)
        self.queue.finish(long=long)
        self._running[thread] = []

    @torch.inference_mode()
    def _forward(self, model: Model, windows: list[_QueuedWindow]) -> list[Answer]:
        """Run windows that can share a forward pass; those that fail are retried in halves."""
        windows = [window for window in windows if window.job.unanswered]
        if not windows:
            return []
        answers: list[Answer] = []
        try:
            batch = _make_batch(windows).to(model.device)
            hidden = model.hidden(batch, _pass_head(windows[0].job.task))  # (T, D)
            bad = _non_finite(hidden, batch)
        except Exception as caught:
            return self._retry(model, windows, _drop_traceback(caught))
        for b in bad:
            self.queue.fail(windows[b].job, NonFiniteError(windows[b].index))
        failed: list[_QueuedWindow] = []
        first, error = 0, None
        for _, own in groupby(windows, key=lambda window: id(window.job.task)):
            group = list(own)
            last = first + len(group)
            try:
                answers += _head_outputs(model, group, batch.slice(first, last), hidden[_tokens(batch, first, last)])
            except Exception as caught:
                failed, error = failed + group, _drop_traceback(caught)
            first = last
        return answers if error is None else answers + self._retry(model, failed, error)

    def _retry(self, model: Model, windows: list[_QueuedWindow], error: Exception) -> list[Answer]:
        """Run failed windows again in halves, or report the error if they belong to one request."""
        if not isinstance(error, Cancelled | Expired):
            with self._lock:
                self._stats.failed += 1
        jobs = {window.job for window in windows}
        memory = is_out_of_memory(error)
        if len(windows) == 1 or (len(jobs) == 1 and not memory):
            for job in jobs:
                self.queue.fail(job, error)
            return []
        if memory and model.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(windows) // 2
        return self._forward(model, windows[:half]) + self._forward(model, windows[half:])

    def _count(self, slices: Sequence[JobSlice], start: float, lane: Lane) -> BatchStats:
        now = time.perf_counter()
        lengths = [length for part in slices for length in part.job.lengths[part.first : part.last]]
        tokens = sum(lengths)
        padding = max(lengths) * len(lengths) - tokens
        by_task: dict[str, int] = {}
        for part in slices:
            name = task_name(part.job.task.__class__)
            by_task[name] = by_task.get(name, 0) + sum(part.job.lengths[part.first : part.last])
        with self._lock:
            # Of concurrent batches, each counts only the time that no other one has counted.
            seconds = max(1e-6, now - max(start, self._last_end))
            self._last_end = now
            per_token = seconds / tokens
            for part in slices:
                ticket, own = part.job.ticket, sum(part.job.lengths[part.first : part.last])
                ticket.device_s += per_token * own
                ticket.tokens += own
                ticket.batch_tokens = max(ticket.batch_tokens, tokens)
            stats = self._stats
            stats.requests += sum(not part.first for part in slices)
            stats.batches += 1
            stats.windows += len(lengths)
            stats.tokens += tokens
            stats.padding_avoided += padding
            stats.device_s += seconds
            for name, count in by_task.items():
                stats.task_tokens[name] = stats.task_tokens.get(name, 0) + count
                stats.task_s[name] = stats.task_s.get(name, 0.0) + per_token * count
            # Small batches take longer per token, and do not show how fast a full queue is processed.
            cost = sum(cost for part in slices for cost in part.job.costs[part.first : part.last])
            if cost >= self.budget / 2 and lane.waiting:
                lane.record(cost, start, now)
        return BatchStats(
            len(lengths), tokens, padding, seconds, {name: (n, per_token * n) for name, n in by_task.items()}
        )


def _lower_priority() -> None:
    """Let this thread yield to others where there are more threads than cores. On Linux each thread has a priority."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), os.nice(0) + LONG_NICE)


def _shared_passes(slices: Sequence[JobSlice]) -> Iterator[list[_QueuedWindow]]:
    """Windows grouped by forward pass. Within one, a task's windows are adjacent, sorted by length."""
    windows: list[tuple[tuple[str, int, int], _QueuedWindow]] = []
    for part in slices:
        task, starts = part.job.task, part.job.windows.starts
        head = _pass_head(task) or ""
        for index in range(part.first, part.last):
            window = _QueuedWindow(part.job, index, int(starts[index]))
            # The CPU attention kernel is faster with texts of equal length next to each other.
            windows.append(((head, id(task), window.length), window))
    windows.sort(key=lambda pair: pair[0])
    for _, group in groupby(windows, key=lambda pair: pair[0][0]):
        yield [window for _, window in group]


def _pass_head(task: Any) -> str | None:
    """The name of a head that needs a forward pass of its own; None: it can share one."""
    if task.head is None:
        return None
    head = task.model.head(task.head).cfg
    own = head.segments != "given" or (task.model.config.global_tokens and head.globals != "none")
    return task.head if own else None


def _make_batch(windows: Sequence[_QueuedWindow]) -> Batch:
    ids = np.concatenate([window.tokens(window.job.windows.ids) for window in windows])
    segments = np.concatenate([window.tokens(window.job.windows.segments) for window in windows])
    return Batch.select(Encodings(ids, segments, np.array([window.length for window in windows])))


def _head_outputs(model: Model, windows: Sequence[_QueuedWindow], batch: Batch, hidden: Tensor) -> list[Answer]:
    """The outputs of one task's windows."""
    parameters = [window.parameters for window in windows]
    used = None if all(value is None for value in parameters) else parameters
    # Outputs of a single request may be cancelled while they are computed.
    tickets = {id(window.job.ticket): window.job.ticket for window in windows}
    reset = current_ticket.set(windows[0].job.ticket if len(tickets) == 1 else None)
    try:
        outputs = windows[0].job.task.outputs(model, hidden, batch, used)
    finally:
        current_ticket.reset(reset)
    return [(window.job, window.index, output) for window, output in zip(windows, outputs, strict=True)]


def _tokens(batch: Batch, first: int, last: int) -> slice:
    """The tokens of texts `first` to `last`."""
    start = sum(batch.lengths[:first])
    return slice(start, start + sum(batch.lengths[first:last]))


def _non_finite(hidden: Tensor, batch: Batch) -> list[int]:
    """The texts whose hidden states are not all finite."""
    if bool(hidden.sum().isfinite()):  # of a sum that is, all are: one pass over them instead of three
        return []
    finite = hidden.isfinite()
    return sorted({int(b) for b in batch.text_of_token()[~finite.all(-1)]})


def _drop_traceback(error: Exception) -> Exception:
    """Remove the traceback of an out-of-memory error: it keeps alive the tensors that there was no memory for."""
    return error.with_traceback(None) if is_out_of_memory(error) else error
