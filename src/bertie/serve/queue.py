"""The request queue: windows of many requests, with bounded waiting times, scheduled round-robin.

Jobs stand in a ring. The first one gives windows for one turn (`TURN` tokens, at least one window) and moves to the
back if it has more. So a job of one window waits for one turn of each job before it, however long those are, and a long
job gets its turn in every round, however many short ones arrive.

The waiting time of a new job until its first turn is known: one turn of each job, at the throughput that is measured
all the time. If that is too long, the job is refused at once. So the limit adapts to the device, and accepted jobs keep
their pace.

This module uses no torch and starts no threads: workers call `take`, callers call `put` and `QueuedJob.wait`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Condition, Event, Lock
from typing import Any

from bertie.errors import BertieError, ConfigError

TURN = 512  # tokens that a job may give before the next job's turn
WAIT = 1.0  # seconds that a job may have to wait for its first turn


class Refused(BertieError):
    """The queue is full. Nothing was done; a retry after `retry_after` seconds may succeed."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Expired(BertieError, TimeoutError):
    """The deadline passed before the result was ready."""


class Cancelled(BertieError):
    """The request was cancelled by its caller."""


class Closed(BertieError):
    """The engine is stopping or has stopped. Another one, or this one after a restart, may accept the request."""


class TokenLimitExceeded(BertieError):
    """The windows of a request have more tokens together than one request may have."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way through the engine; the workers add up what it used.

    `cancelled.set()` removes its windows from the queue. `deadline` is a time of `time.monotonic()`.
    """

    id: str = ""
    deadline: float | None = None
    max_tokens: int | None = None  # that the windows of the request may have together
    cancelled: Event = field(default_factory=Event)
    submitted_tokens: int = 0  # in all windows that were put into a queue
    queue_s: float = 0.0  # from arrival until its first window was taken
    device_s: float = 0.0  # its share, by tokens, of the time of its batches
    tokens: int = 0  # that the model read for it
    batch_tokens: int = 0  # of the largest batch that it was part of

    def check(self) -> None:
        """Raise `Cancelled` or `Expired` if nobody waits for the result any more. Long work calls it now and then."""
        if self.cancelled.is_set():
            raise Cancelled("the request was cancelled")
        if self.deadline is not None and self.deadline <= time.monotonic():
            raise Expired("the deadline passed before the result was ready")


current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


class QueuedJob:
    """One call of the engine: windows with so many tokens each, whose outputs are returned together."""

    __slots__ = (
        "_answered",
        "arrived",
        "backlog",
        "error",
        "lengths",
        "outputs",
        "parameters",
        "taken",
        "task",
        "ticket",
        "unanswered",
        "windows",
    )

    def __init__(
        self,
        ticket: Ticket,
        task: Any,
        lengths: Sequence[int],
        windows: Any = None,
        parameters: Sequence[Any] | None = None,
    ) -> None:
        self.ticket, self.task, self.lengths = ticket, task, lengths
        self.windows, self.parameters = windows, parameters  # for the engine
        self.outputs: list[Any] = [None] * len(lengths)
        self.error: BaseException | None = None
        self.arrived = 0.0
        self.taken = 0  # windows that were taken
        self.backlog = sum(lengths)  # tokens that were not
        self.unanswered = len(lengths)  # windows without output; 0: done, or failed
        self._answered = Lock()
        self._answered.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the outputs or an error; False if neither came in time."""
        return self._answered.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


@dataclass(slots=True)
class JobSlice:
    """The windows `first` to `last` of a job in a batch."""

    job: QueuedJob
    first: int
    last: int  # exclusive


class Queue:
    """Jobs in a ring. A new job waits at most `wait` seconds for its first turn, or is refused.

    >>> queue = Queue()
    >>> for name in "a", "b":
    ...     queue.put(QueuedJob(Ticket(name), None, [300] * 3))
    >>> [(part.job.ticket.id, part.first, part.last) for part in queue.take(600)]
    [('a', 0, 1), ('b', 0, 1)]
    """

    def __init__(self, wait: float = WAIT, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not wait > 0:
            raise ConfigError(f"wait={wait} must be above 0 seconds")
        self.wait, self.clock = wait, clock
        self.rate = 0.0  # throughput in tokens per second, set by the engine; 0: not known yet, nothing is refused
        self.least = 0  # tokens that may wait at any rate: the rate can only be measured with full batches
        self._ring: deque[QueuedJob] = deque()
        self._waiting = 0  # tokens
        self._closed = False
        self._lock = Lock()
        self._filled = Condition(self._lock)

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return len(self._ring)

    @property
    def waiting(self) -> int:
        """Tokens ahead of a new job: the next turn of each waiting job."""
        return self._waiting

    @property
    def room(self) -> float:
        """Tokens that may wait."""
        return max(self.least, self.wait * self.rate) if self.rate else float("inf")

    @property
    def closed(self) -> bool:
        """Whether no more jobs are accepted."""
        return self._closed

    # --- in ---

    def put(self, job: QueuedJob) -> None:
        """Enqueue a job, or refuse it at once if it would wait too long or its deadline cannot be met."""
        ticket = job.ticket
        ticket.submitted_tokens += job.backlog
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")
        with self._lock:
            if self._closed:
                raise Closed("the engine takes no more requests: it is shutting down")
            job.arrived = now = self.clock()
            if self._waiting > self.room:
                self._sweep(now)  # cancelled and expired jobs need not be waited for
            self.check()
            self._check_deadline(job, now)
            if not job.lengths:
                job._answered.release()
                return
            self._ring.append(job)
            self._waiting += _turn(job)
            self._filled.notify()

    def check(self) -> None:
        """Raise `Refused` if a new job would wait too long. May be called before there is a job."""
        waiting, room = self._waiting, self.room
        if waiting > room:
            raise Refused(
                f"the work before it takes about {self._seconds(waiting):.1f} s, and it may wait for {self.wait:g} s",
                self._seconds(waiting - room),
            )

    def _check_deadline(self, job: QueuedJob, now: float) -> None:
        if job.ticket.deadline is None:
            return
        left = job.ticket.deadline - now
        if left <= 0:
            raise Expired("the deadline had passed before the request was queued")
        # While it takes its turns, every other job takes as many: that is what comes before its last window.
        own = job.backlog
        needed = self._seconds(own + sum(min(other.backlog, max(own, TURN)) for other in self._ring))
        if needed > left and self._ring:
            raise Refused(
                f"the work before it takes about {needed:.1f} s, and the deadline is in {left:.1f} s", needed - left
            )

    def _seconds(self, tokens: float) -> float:
        return tokens / self.rate if self.rate else 0.0

    # --- out ---

    def take(self, budget: int, *, wait: bool = True) -> list[JobSlice]:
        """Take windows of at most `budget` tokens, or a single longer one; with `wait`, block until there are any.

        An empty list means that nothing waits; with `wait`, that the queue is closed and empty.
        """
        with self._lock:
            while True:
                if slices := self._take(budget):
                    return slices
                if not wait or self._closed:
                    return []
                self._filled.wait()

    def _take(self, budget: int) -> list[JobSlice]:
        now = self.clock()
        slices: dict[QueuedJob, JobSlice] = {}
        used = 0
        while self._ring and used < budget:
            job = self._ring.popleft()
            self._waiting -= _turn(job)
            if self._is_over(job, now):
                continue
            first, turn = job.taken, 0
            while job.taken < len(job.lengths):
                size = job.lengths[job.taken]
                if (turn and turn + size > TURN) or (used and used + size > budget):
                    break
                job.taken, turn, used = job.taken + 1, turn + size, used + size
            job.backlog -= turn
            self._waiting += _turn(job)
            if job.taken > first:
                if not first:
                    job.ticket.queue_s += now - job.arrived
                slices.setdefault(job, JobSlice(job, first, first)).last = job.taken
            if job.taken == first:  # its window does not fit: it begins the next batch
                self._ring.appendleft(job)
                break
            if job.taken < len(job.lengths):
                self._ring.append(job)
        return list(slices.values())

    def _sweep(self, now: float) -> None:
        """Drop jobs that are cancelled, expired or failed."""
        kept = [job for job in self._ring if not self._is_over(job, now)]
        self._ring = deque(kept)
        self._waiting = sum(map(_turn, kept))

    def _is_over(self, job: QueuedJob, now: float) -> bool:
        """Whether a job need not be run any more; one that is cancelled or expired is ended here."""
        ticket = job.ticket
        if not job.unanswered:  # one of its windows failed, or its caller gave up
            return True
        if ticket.cancelled.is_set():
            self._end(job, Cancelled("the request was cancelled"))
        elif ticket.deadline is not None and ticket.deadline <= now:
            self._end(job, Expired("the deadline passed while the request waited"))
        return not job.unanswered

    # --- results ---

    def answer(self, answers: Iterable[tuple[QueuedJob, int, Any]]) -> None:
        """Store outputs of windows, given by job and index. A job is done with its last one."""
        with self._lock:
            for job, index, output in answers:
                if job.unanswered:
                    job.outputs[index] = output
                    job.unanswered -= 1
                    if not job.unanswered:
                        job._answered.release()

    def fail(self, job: QueuedJob, error: BaseException) -> None:
        """End a job with an error unless it is done; its waiting windows are dropped when their turn comes."""
        with self._lock:
            self._end(job, error)

    def _end(self, job: QueuedJob, error: BaseException) -> None:
        if job.unanswered:
            job.error, job.unanswered = error, 0
            job._answered.release()

    def close(self, *, drain: bool = True) -> None:
        """Accept no more jobs. With `drain` those that wait are still run; without, they fail with `Closed`."""
        with self._lock:
            self._closed = True
            if not drain:
                for job in self._ring:
                    self._end(job, Closed("the engine stopped before the model read this"))
                self._ring.clear()
                self._waiting = 0
            self._filled.notify_all()


def _turn(job: QueuedJob) -> int:
    """Tokens of a job's next turn, at most."""
    return max(min(job.backlog, TURN), job.lengths[job.taken]) if job.backlog else 0
