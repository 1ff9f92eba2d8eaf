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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from threading import Lock, Thread, current_thread, get_native_id
from typing import Any

import torch

from bertie.errors import BertieWarning, ConfigError
from bertie.nn.model import Model
from bertie.pipeline.pipeline import NonFiniteError
from bertie.serve.batch_budget import (
    MAX_GRAPHS,
    MAX_SPARE,
    RECORD_AFTER,
    BudgetMeasurement,
    cores,
    is_out_of_memory,
    measure_budget,
    warm_up,
)
from bertie.serve.engine_load import EngineLoad
from bertie.serve.engine_stats import BatchStats, EngineStats, task_name
from bertie.serve.forward_pass import (
    Answer,
    ForwardPass,
    QueuedWindow,
    RunningBatch,
    drop_traceback,
    is_lost,
    launch,
    shared_passes,
)
from bertie.serve.lanes import LONG_CHARACTERS, JobSlice, Lane, QueuedJob
from bertie.serve.loop_runner import current_runner
from bertie.serve.queue import WAIT, Queue
from bertie.serve.tickets import Cancelled, Closed, Expired, Ticket, current_ticket
from bertie.text.encoding import Encodings

ALONE_SECONDS = 0.01  # that a request which is alone may keep the event loop from others
LONG_NICE = 5  # added to the niceness of the threads for long jobs: short ones come first where cores are short
WARM_SECONDS = 0.25  # between passes of the warm-up of a server that is never idle
DEPTH = 2  # batches in flight on a GPU: one is prepared while the other runs


class Engine:
    """Runs one model for many concurrent requests.

    `budget`: tokens per batch; measured at startup if None. 1 gives each window a batch of its own. `max_wait`: seconds
    that a request may wait for its first turn. `replicas`: the same model on other devices. `workers`: concurrent
    batches per device. Two keep a GPU busy: one batch is prepared while the other runs. On a CPU the cores are divided
    among up to four, because threads that share a batch wait for each other in every layer. 0: there are no threads,
    and an event loop calls `advance`. `on_batch` is called with the statistics of each batch.

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
        default = 2 if model.device.type == "cuda" else min(4, cores())
        self.workers = default if workers is None else workers
        self.budget = budget or 0
        self.measurement: BudgetMeasurement | None = None
        self.queue = Queue(max_wait)
        self._stats = EngineStats()
        self._lock = Lock()  # of the following fields and the statistics
        self._last_end = 0.0  # when the last batch ended
        self._long_text = Lock()  # held while one is tokenized
        for graphs in [replica.graphs for replica in self.models]:
            graphs.record_after, graphs.max_graphs, graphs.max_spare = RECORD_AFTER, MAX_GRAPHS, MAX_SPARE
        rate = 0.0
        if not self.budget:
            self.measurement = measure_budget(model, workers=self.workers or 1, devices=len(self.models))
            self.budget, rate = self.measurement.budget, self.measurement.rate
        self.queue.expect(rate, least=2 * self.budget * len(self.models) * (self.workers or DEPTH))
        self._running: dict[Thread, list[JobSlice]] = {}
        self._launched: deque[RunningBatch] = deque()  # by `advance`, the oldest first
        self._driver: Thread | None = None  # the thread that calls it
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
        self.warm, self._last_warm_pass = model.device.type != "cuda", 0.0
        self._passes_to_warm = iter(()) if self.warm else self._warm_up()
        self._runs_alone = model.device.type == "cpu" and self.workers > 0
        if not self.warm and self.workers:
            Thread(target=list, args=(self._passes_to_warm,), name="bertie-warm-up", daemon=True).start()

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
        if not self._threads:
            self._finish(until)
        self.queue.close(drain=False)
        for slices in [*self._running.values(), *(running.slices for running in self._launched)]:
            self._fail(slices, Closed("the engine stopped during the forward pass"))

    # --- without threads ---

    def advance(self) -> bool:
        """Collect the batches that are done, and launch others; return whether anything is left to do.

        Without threads of its own, the engine runs on an event loop, which calls this again and again. On a GPU,
        threads would mostly wait for each other: each operation of torch releases the GIL and waits to get it back.
        """
        self._driver = current_thread()
        while self._launched and self._launched[0].is_done:
            self._collect(self.model, self._launched.popleft())
        while len(self._launched) < DEPTH:
            long_first = self.queue.short.running > 0  # one batch of each kind, if there are jobs of both
            for long in (long_first, not long_first):
                if self._is_growing(long):
                    continue
                if slices := self.queue.take(self.budget, long=long, wait=False):
                    self._launched.append(self._launch(self.model, slices, long))
                    break
            else:
                break
        if not self.warm and (not self._launched or time.monotonic() >= self._last_warm_pass + WARM_SECONDS):
            next(self._passes_to_warm, None)
            self._last_warm_pass = time.monotonic()
        return bool(self._launched) or not self.queue.is_empty or not self.warm

    def _is_growing(self, long: bool) -> bool:
        """Whether the next batch should take more jobs before it is launched.

        While a batch of short jobs runs, the next one waits until it is as large, or the first one is done: launching
        many small batches would take this thread longer than the device takes to run them.
        """
        if long or not self._launched or self._launched[-1].long:
            return False
        return self.queue.short.waiting < min(self._launched[-1].cost, self.budget)

    def finish_warm_up(self) -> None:
        """Warm up in this thread, before an event loop calls `advance`: it need not run these passes among requests."""
        if not self.workers:
            list(self._passes_to_warm)

    def _finish(self, until: float | None) -> None:
        """Wait for the jobs that are left, or run them if no event loop does."""
        while not self.queue.is_empty and (until is None or time.monotonic() < until):
            if self._driver is None or self._driver is current_thread() or not self._driver.is_alive():
                self.advance()
            else:
                time.sleep(0.01)

    # --- workers ---

    def _warm_up(self) -> Iterator[None]:
        """Run batches of common sizes in the background, so that the first requests need not wait for them."""
        try:
            for model in self.models:
                yield from warm_up(model)
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
        self._collect(model, self._launch(model, slices, long))
        self._running[thread] = []

    def _launch(self, model: Model, slices: list[JobSlice], long: bool) -> RunningBatch:
        """Launch a batch, which must be collected; errors are reported to its requests."""
        running = RunningBatch(slices, long)
        try:
            for windows in shared_passes(slices):
                if windows := [window for window in windows if window.job.unanswered]:
                    try:
                        running.passes.append(launch(model, windows))
                    except Exception as caught:
                        running.answers += self._retry(model, windows, drop_traceback(caught))
            if model.device.type == "cuda":
                running.launched = torch.cuda.Event()  # type: ignore[no-untyped-call]
                running.launched.record(torch.cuda.current_stream(model.device))
        except BaseException as error:
            self._fail(slices, error)
        return running

    def _collect(self, model: Model, running: RunningBatch) -> None:
        """Give the outputs of a batch to its requests."""
        lane = self.queue.long if running.long else self.queue.short
        try:
            answers = running.answers
            for forward_pass in running.passes:
                answers += self._collect_pass(model, forward_pass)
            stats = self._count(running.slices, running.start, lane)
            self.queue.answer(answers)
            if self.on_batch is not None:
                with suppress(Exception):  # a failing observer must not fail the requests
                    self.on_batch(stats)
        except BaseException as error:
            self._fail(running.slices, error)
        self.queue.finish(long=running.long)

    def _fail(self, slices: Sequence[JobSlice], error: BaseException) -> None:
        if is_lost(self.model.device, error):  # a server starts another process when this engine is not `ready`
            self.queue.close(drain=False)
        for part in slices:
            self.queue.fail(part.job, error)

    def _collect_pass(self, model: Model, forward_pass: ForwardPass) -> list[Answer]:
        for b in forward_pass.non_finite():
            window = forward_pass.windows[b]
            self.queue.fail(window.job, NonFiniteError(window.index))
        answers, error = forward_pass.answers(), forward_pass.error
        return answers if error is None else answers + self._retry(model, forward_pass.failed, error)

    def _forward(self, model: Model, windows: list[QueuedWindow]) -> list[Answer]:
        """Run windows that can share a forward pass; those that fail are retried in halves."""
        windows = [window for window in windows if window.job.unanswered]
        if not windows:
            return []
        try:
            return self._collect_pass(model, launch(model, windows))
        except Exception as caught:
            return self._retry(model, windows, drop_traceback(caught))

    def _retry(self, model: Model, windows: list[QueuedWindow], error: Exception) -> list[Answer]:
        """Run failed windows again in halves, or report the error if they belong to one request."""
        if not isinstance(error, Cancelled | Expired):
            with self._lock:
                self._stats.failed += 1
        if is_lost(model.device, error):
            self.queue.close(drain=False)
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
