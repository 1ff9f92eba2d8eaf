"""Windows of all requests through one model: flat batches shared by requests, tasks and heads.

A worker takes what waits, up to the budget, and runs the encoder once over it; then each task says what its head makes
of its own stretch of tokens. What fails is tried again in halves, so that an error, or a lack of memory, ends up with
the request that it belongs to and with no other. Workers never die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from threading import Lock, Thread
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.serve.queue import WAIT, Closed, Expired, Job, Part, Queue, Ticket, current_ticket
from bertie.tasks.base import Task, TaskInput
from bertie.text.batch import Batch
from bertie.text.windows import Window

SMALLEST, LARGEST = 512, 65_536  # budgets that are tried, in tokens
NEAR = 0.95  # of the best rate: larger batches make all wait longer, and win little
LENGTHS = (9, 14, 21, 33, 48, 75, 110, 170)  # of the texts that are measured with: short and long, no two alike
SECONDS = 0.6  # that measuring may take; on a GPU, whose first passes are slow, four times as long
NAMES = {  # of tasks, for those who watch
    "Embedder": "embed",
    "Classifier": "classify",
    "Regressor": "regress",
    "Tagger": "tag",
    "Reader": "answer",
    "Reranker": "rerank",
    "MaskedLM": "fill",
    "_Logits": "zero-shot",
    "RawReranker": "rerank",
    "RawClassifier": "classify",
    "States": "embed",
    "Sparse": "embed",
}
FADE = 0.95  # the weight of what came before in the running rate, for each batch


@cache
def cores() -> int:
    """How many torch may use: asked once, as it changes with the thread that asks."""
    return torch.get_num_threads()


@dataclass(frozen=True, slots=True)
class Measured:
    """What `Engine.measure` found."""

    budget: int  # tokens a batch
    rate: float  # tokens a second with this budget
    rates: dict[int, float]  # by tokens a batch
    seconds: float  # that it took


@dataclass(frozen=True, slots=True)
class Ran:
    """One batch, for those who watch. Seconds are shared out by tokens."""

    windows: int
    tokens: int
    padding_avoided: int  # tokens that a rectangle would have had on top
    seconds: float
    tasks: dict[str, tuple[int, float]]  # by the task's name: tokens, seconds


@dataclass(slots=True)
class Stats:
    """Sums since the engine started, and what waits now."""

    requests: int = 0
    refused: int = 0
    failed: int = 0  # batches, or halves of them, that raised an error
    batches: int = 0
    windows: int = 0
    tokens: int = 0
    padding_avoided: int = 0
    device_s: float = 0.0
    task_tokens: dict[str, int] = field(default_factory=dict)
    task_s: dict[str, float] = field(default_factory=dict)
    waiting_tokens: int = 0
    waiting_requests: int = 0
    budget: int = 0
    rate: float = 0.0  # tokens a second of late


@dataclass(slots=True, eq=False)
class _Piece:
    """One window of a batch."""

    job: Job
    number: int

    @property
    def ask(self) -> TaskInput[Any]:
        ask: TaskInput[Any] = self.job.items[self.number][0]
        return ask

    @property
    def window(self) -> Window:
        window: Window = self.job.items[self.number][1]
        return window


class Engine:
    """The one that runs a model for all who ask.

    `budget`: tokens a batch, measured at the start if None. `max_wait`: seconds that a request may have to wait for its
    first turn. `replicas`: the same model on other devices. `workers`: batches at a time on each. Two keep a GPU busy,
    as one is prepared while the other runs. On a CPU the cores are shared out among up to four, because cores that work
    on one batch wait for each other at every step.

    >>> embedder = Embedder.load()                                                         # doctest: +SKIP
    >>> engine = Engine(embedder.model)                                                    # doctest: +SKIP
    >>> embedder.compute = engine.compute                                                  # doctest: +SKIP
    >>> embedder.embed(["Now many threads may ask this at once."]).shape                   # doctest: +SKIP
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
        watch: Callable[[Ran], None] | None = None,
    ) -> None:
        if budget is not None and budget < 1:
            raise ConfigError(f"budget={budget} must be at least 1 token")
        self.model, self.models, self.watch = model, (model, *replicas), watch
        self.workers = workers or (2 if model.device.type == "cuda" else min(4, cores()))
        self.budget = budget or 0
        self.measured: Measured | None = None
        self.queue = Queue(max_wait)
        self._stats = Stats()
        self._lock = Lock()  # of what follows, and of the stats
        self._tokens = self._seconds = 0.0  # faded sums
        self._ended = self._full = 0.0  # when the last batch was done, and the last full one
        self._twins: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
        if not self.budget:
            self.budget = self.measure().budget
        homes = [one for one in self.models for _ in range(self.workers)]
        self.queue.least = 2 * self.budget * len(homes)
        self._running: list[list[Part]] = [[] for _ in homes]  # by worker
        self._threads = [
            Thread(target=self._work, args=(home, number), name=f"bertie-{home.device}-{number}", daemon=True)
            for number, home in enumerate(homes)
        ]
        for thread in self._threads:
            thread.start()

    # --- for those who ask ---

    def compute(
        self, task: Task[Any, Any, Any], items: Sequence[tuple[TaskInput[Any], Window]], *, ticket: Ticket | None = None
    ) -> list[Any]:
        """What the task's head says of each window; waits for it.

        The ticket is that of the context (`current_ticket`) unless it is given. Raises `Refused`, `Expired`,
        `Cancelled`, `Closed`, or whatever the model raised over this request's own windows.
        """
        ticket = ticket or current_ticket.get() or Ticket()
        job = Job(ticket, task, items, [len(window) for _, window in items])
        try:
            self.queue.put(job)
        except Exception:
            with self._lock:
                self._stats.refused += 1
            raise
        timeout = None if ticket.deadline is None else ticket.deadline - self.queue.clock()
        if not job.wait(timeout):
            self.queue.fail(job, Expired("the deadline passed while the model was at work"))
        if job.error is not None:
            raise job.error
        return job.outputs

    def stats(self) -> Stats:
        """Sums so far, and what waits."""
        with self._lock:
            found = copy(self._stats)
            found.task_tokens, found.task_s = dict(found.task_tokens), dict(found.task_s)
        found.waiting_tokens, found.waiting_requests = self.queue.waiting, len(self.queue)
        found.budget, found.rate = self.budget, self.queue.rate
        return found

    @property
    def ready(self) -> bool:
        """Whether it takes requests and has workers to answer them."""
        return not self.queue.closed and all(thread.is_alive() for thread in self._threads)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Take nothing more in, answer what waits (without `drain`: with `Closed`), and stop.

        What is not done after `timeout` seconds is answered with `Closed`, too.
        """
        self.queue.close(drain=drain)
        until = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        self.queue.close(drain=False)
        for part in [part for parts in self._running for part in parts]:
            self.queue.fail(part.job, Closed("the engine stopped before the model was done with this"))

    # --- workers ---

    def _work(self, model: Model, number: int) -> None:
        torch.set_num_threads(max(1, cores() // self.workers))  # of this thread
        while parts := self.queue.take(self.budget):
            self._running[number] = parts
            pieces = [_Piece(part.job, number) for part in parts for number in range(part.first, part.last)]
            try:
                self._serve(model, pieces)
            except BaseException as error:  # whatever it is: those who wait hear of it, and the next batch is taken
                for part in parts:
                    self.queue.fail(part.job, error)
            self._running[number], parts, pieces = [], [], []  # nothing is held while it waits for the next batch

    @torch.inference_mode()
    def _serve(self, model: Model, pieces: Sequence[_Piece]) -> None:
        start = time.perf_counter()
        tasks = {id(piece.job.task): piece.job.task for piece in pieces}
        places = {one: (_wish(task) or "", one) for one, task in tasks.items()}
        # Each task's windows lie together; of them, equal lengths do, as attention on a CPU likes it.
        pieces = sorted(pieces, key=lambda one: (places[id(one.job.task)], one.job.lengths[one.number]))
        answers: list[tuple[Job, int, Any]] = []
        for _, group in groupby(pieces, key=lambda one: places[id(one.job.task)][0]):
            answers += self._answers(model, list(group))
        ran = self._counted(pieces, start)
        self.queue.answer(answers)
        if self.watch is not None:
            with suppress(Exception):  # whoever watches is not to be in the way of those who wait
                self.watch(ran)

    def _answers(self, model: Model, pieces: list[_Piece]) -> list[tuple[Job, int, Any]]:
        """The outputs of windows that can share a pass; of those that fail, in halves."""
        pieces = [piece for piece in pieces if piece.job.unanswered]
        if not pieces:
            return []
        found, failed, error = self._passed(model, pieces)
        if error is None:
            return found
        with self._lock:
            self._stats.failed += 1
        memory = _out_of_memory(error)
        jobs = {piece.job for piece in failed}
        if len(failed) == 1 or (len(jobs) == 1 and not memory):
            for job in jobs:
                self.queue.fail(job, error)
            return found
        if memory and model.device.type == "cuda":
            torch.cuda.empty_cache()
        half = len(failed) // 2
        return found + self._answers(model, failed[:half]) + self._answers(model, failed[half:])

    def _passed(
        self, model: Model, pieces: list[_Piece]
    ) -> tuple[list[tuple[Job, int, Any]], list[_Piece], BaseException | None]:
        """Outputs, then the windows that had none, and the last error."""
        found: list[tuple[Job, int, Any]] = []
        failed: list[_Piece] = []
        error: BaseException | None = None
        try:
            batch = Batch.from_encodings([piece.window.encoding for piece in pieces]).to(model.device)
            hidden = model.hidden(batch, _wish(pieces[0].job.task))  # (T, D)
            spoilt = _spoilt(hidden, batch)
        except Exception as caught:
            return [], pieces, _let_go(caught)
        for b in spoilt:
            self.queue.fail(pieces[b].job, InputError(f"{pieces[b].ask.name}: the model's numbers are not finite"))
        start = 0
        for _, group in groupby(pieces, key=lambda one: id(one.job.task)):
            mine = list(group)
            task = self._twin(mine[0].job.task, model)
            try:
                own, rows = _stretch(batch, hidden, start, start + len(mine))
                said = task.outputs(rows, own, [one.ask for one in mine], [one.window for one in mine])
                found += [(one.job, one.number, output) for one, output in zip(mine, said, strict=True)]
            except Exception as caught:
                failed, error = failed + mine, _let_go(caught)
            start += len(mine)
        return found, failed, error

    def _twin(self, task: Any, model: Model) -> Any:
        """The task itself, or on another device one like it over the replica there."""
        if model is self.model:
            return task
        with self._lock:
            twins = self._twins.setdefault(task, {})
            if id(model) not in twins:
                twins[id(model)] = twin = copy(task)
                twin.model = model
            return twins[id(model)]

    def _counted(self, pieces: Sequence[_Piece], start: float) -> Ran:
        now = time.perf_counter()
        lengths = [piece.job.lengths[piece.number] for piece in pieces]
        tokens = sum(lengths)
        padding = max(lengths) * len(lengths) - tokens
        by_task: dict[str, int] = {}
        for piece, length in zip(pieces, lengths, strict=True):
            name = NAMES.get(type(piece.job.task).__name__, "other")
            by_task[name] = by_task.get(name, 0) + length
        with self._lock:
            # Of batches that run at the same time, each counts the seconds that no other one has counted.
            seconds = max(1e-6, now - max(start, self._ended))
            self._ended = now
            each = seconds / tokens
            for piece, length in zip(pieces, lengths, strict=True):
                ticket = piece.job.ticket
                ticket.device_s += each * length
                ticket.tokens += length
                ticket.batch_tokens = max(ticket.batch_tokens, tokens)
            stats = self._stats
            stats.requests += len({piece.job for piece in pieces if not piece.number})
            stats.batches += 1
            stats.windows += len(pieces)
            stats.tokens += tokens
            stats.padding_avoided += padding
            stats.device_s += seconds
            for name, count in by_task.items():
                stats.task_tokens[name] = stats.task_tokens.get(name, 0) + count
                stats.task_s[name] = stats.task_s.get(name, 0.0) + each * count
            # A small batch takes longer by its tokens, and says nothing of how fast a queue is worked off.
            if tokens >= self.budget / 2 and self.queue.waiting:
                self._tokens = FADE * self._tokens + tokens
                self._seconds = FADE * self._seconds + max(1e-6, now - max(start, self._full))
                self._full = now
                self.queue.rate = self._tokens / self._seconds
        tasks = {name: (count, each * count) for name, count in by_task.items()}
        return Ran(len(pieces), tokens, padding, seconds, tasks)

    # --- the budget ---

    def measure(self) -> Measured:
        """Run growing batches of made-up texts; the budget is the smallest whose rate is near the best."""
        torch.set_num_threads(max(1, cores() // self.workers))
        try:
            return self._measured()
        finally:
            torch.set_num_threads(cores())

    def _measured(self) -> Measured:
        cuda = self.model.device.type == "cuda"
        begun = time.perf_counter()
        until = begun + SECONDS * (4 if cuda else 1)
        rates: dict[int, float] = {}
        size, took = SMALLEST, 0.0
        self._pass(64)  # the first one loads and sets up much
        # The next size takes about twice as long as this one.
        while size <= LARGEST and (not rates or time.perf_counter() + 2 * took < until):
            try:
                took = min(self._pass(size) for _ in range(3 if cuda else 1))
            except Exception as error:
                if rates and _out_of_memory(error):
                    break
                raise
            rates[size] = size / took
            if rates[size] < NEAR * max(rates.values()):
                break  # larger ones are slower
            size *= 2
        best = max(rates.values())
        budget = min(size for size, rate in rates.items() if rate >= NEAR * best)
        several = len(self.models) * (1 if cuda else self.workers)
        self._tokens, self._seconds = rates[budget] * several, 1.0
        self.queue.rate = rates[budget] * several
        self.measured = Measured(budget, rates[budget] * several, rates, time.perf_counter() - begun)
        return self.measured

    @torch.inference_mode()
    def _pass(self, tokens: int) -> float:
        """The seconds that a pass over about so many tokens takes."""
        max_length, lengths = self.model.config.max_length, list[int]()
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(LENGTHS[len(lengths) % len(LENGTHS)], left, max_length))
        draw = np.random.default_rng(0)
        ids = [draw.integers(0, self.model.config.vocab, size=n) for n in lengths]
        # On a CPU only what this thread had of it counts: while a server starts, much else may be going on.
        clock = time.perf_counter if self.model.device.type == "cuda" else time.thread_time
        start = clock()
        hidden = self.model.hidden(Batch.from_ids(ids).to(self.model.device))
        hidden.isfinite().all().item()  # waits for the device
        return clock() - start


def _wish(task: Any) -> str | None:
    """The name of a head that wants the encoder to be run for it alone, in its own way; None: any pass will do."""
    if task.head is None:
        return None
    cfg = task.model.head(task.head).cfg
    apart = cfg.segments != "given" or (task.model.config.global_tokens and cfg.globals != "none")
    return task.head if apart else None


def _spoilt(hidden: Tensor, batch: Batch) -> list[int]:
    """The texts whose hidden states are not all finite."""
    finite = hidden.isfinite()
    if bool(finite.all()):
        return []
    return sorted({int(b) for b in batch.text_of_token()[~finite.all(-1)]})


def _stretch(batch: Batch, hidden: Tensor, first: int, last: int) -> tuple[Batch, Tensor]:
    """Texts `first` to `last` of a batch, as a batch of their own."""
    if first == 0 and last == len(batch):
        return batch, hidden
    low, size = sum(batch.lengths[:first]), sum(batch.lengths[first:last])
    at = slice(low, low + size)
    chosen = None if batch.global_tokens is None else batch.global_tokens[at]
    own = Batch(
        ids=batch.ids[at],
        segments=batch.segments[at],
        positions=batch.positions[at],
        cu_seqlens=batch.cu_seqlens[first : last + 1] - low,
        lengths=batch.lengths[first:last],
        global_tokens=chosen,
    )
    return own, hidden[at]


def _let_go(error: Exception) -> Exception:
    """An error; where memory is short, without the traceback, which holds the tensors that there was no room for."""
    return error.with_traceback(None) if _out_of_memory(error) else error


def _out_of_memory(error: BaseException) -> bool:
    """On a GPU by its class; on a CPU, torch has only words for it."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
