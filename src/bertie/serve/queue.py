"""The request queue: windows of many requests, with bounded waiting times, scheduled in two lanes.

A job of at most `TURN` tokens is short, any other is long. Short jobs and long jobs have separate lanes and separate
workers, so that a short job never waits for the windows of a long one; and while short jobs wait or run, at most one
batch of long jobs is started at a time. Within a lane jobs stand in a ring: the first one gives windows for one turn
(`TURN` tokens, at least one window) and moves to the back if it has more. So each long job gets its turn in every
round, however many there are.

The waiting time of a new job until its first turn is known: one turn of each job of its lane, at the throughput of the
lane, which is measured all the time. If that is too long, the job is refused at once. So the limit adapts to the
device, and accepted jobs keep their pace.

Costs are in tokens: those that the model reads, plus an equivalent for outputs that take longer to compute than they
take to read, such as thousands of candidates for masks.

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

TURN = 512  # tokens that a job may give before the next job's turn; a job with more is long
WAIT = 1.0  # seconds that a job may have to wait for its first turn
DECAY = 0.95  # weight of earlier batches in the moving average of the throughput


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
    """One call of the engine: windows with so many tokens each, whose outputs are returned together.

    `costs`: what each window costs, in tokens; its own tokens if None.
    """

    __slots__ = (
        "_answered",
        "arrived",
        "backlog",
        "costs",
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
        costs: Sequence[int] | None = None,
    ) -> None:
        self.ticket, self.task, self.lengths = ticket, task, lengths
        self.costs = lengths if costs is None else costs
        self.windows, self.parameters = windows, parameters  # for the engine
        self.outputs: list[Any] = [None] * len(lengths)
        self.error: BaseException | None = None
        self.arrived = 0.0
        self.taken = 0  # windows that were taken
        self.backlog = sum(self.costs)  # of windows that were not
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


class Lane:
    """Jobs in a ring, and how fast they are processed. Part of a `Queue`, whose lock guards it."""

    def __init__(self, wait: float, lock: Lock) -> None:
        self.wait = wait
        self.least = 0  # cost that may wait at any rate: the rate can only be measured with full batches
        self.ring: deque[QueuedJob] = deque()
        self.waiting = 0  # cost of what comes before a new job: the next turn of each waiting job
        self.running = 0  # batches
        self.filled = Condition(lock)
        self._cost = self._seconds = 0.0  # of recent batches: sums with decay
        self._last_end = 0.0

    @property
    def rate(self) -> float:
        """Throughput in tokens per second; 0: not known yet, nothing is refused."""
        return self._cost / self._seconds if self._seconds else 0.0

    @rate.setter
    def rate(self, rate: float) -> None:
        self._cost, self._seconds = rate, float(rate > 0)

    def record(self, cost: int, start: float, end: float) -> None:
        """Count a batch that was full. Of concurrent ones, each counts only the time that no other has counted."""
        self._cost = DECAY * self._cost + cost
        self._seconds = DECAY * self._seconds + max(1e-6, end - max(start, self._last_end))
        self._last_end = end

    @property
    def room(self) -> float:
        """Cost that may wait."""
        return max(self.least, self.wait * self.rate) if self.rate else float("inf")

    @property
    def is_full(self) -> bool:
        """Whether a new job would wait too long."""
        return self.waiting > self.room

    def check(self) -> None:
        """Raise `Refused` if a new job would wait too long."""
        waiting, room = self.waiting, self.room
        if waiting > room:
            raise Refused(
                f"the work before it takes about {self.seconds(waiting):.1f} s, and it may wait for {self.wait:g} s",
                self.seconds(waiting - room),
            )

    def check_deadline(self, job: QueuedJob, left: float) -> None:
        """Refuse a job that would not be done in `left` seconds."""
        # While it takes its turns, every other job takes as many: that is what comes before its last window.
        own = job.backlog
        needed = self.seconds(own + sum(min(other.backlog, max(own, TURN)) for other in self.ring))
        if needed > left and self.ring:
            raise Refused(
                f"the work before it takes about {needed:.1f} s, and the deadline is in {left:.1f} s", needed - left
            )

    def seconds(self, cost: float) -> float:
        """How long work takes."""
        return cost / self.rate if self.rate else 0.0

    def take(self, budget: int, now: float, is_over: Callable[[QueuedJob, float], bool]) -> list[JobSlice]:
        """Take windows that cost at most `budget`, or a single one that costs more."""
        slices: dict[QueuedJob, JobSlice] = {}
        used = 0
        while self.ring and used < budget:
            job = self.ring.popleft()
            self.waiting -= _turn(job)
            if is_over(job, now):
                continue
            first, turn = job.taken, 0
            while job.taken < len(job.costs):
                cost = job.costs[job.taken]
                if (turn and turn + cost > TURN) or (used and used + cost > budget):
                    break
                job.taken, turn, used = job.taken + 1, turn + cost, used + cost
            job.backlog -= turn
            self.waiting += _turn(job)
            if job.taken > first:
                if not first:
                    job.ticket.queue_s += now - job.arrived
                slices.setdefault(job, JobSlice(job, first, first)).last = job.taken
            if job.taken == first:  # its window does not fit: it begins the next batch
                self.ring.appendleft(job)
                break
            if job.taken < len(job.costs):
                self.ring.append(job)
        return list(slices.values())

    def keep(self, jobs: Iterable[QueuedJob]) -> None:
        """Replace the jobs."""
        self.ring = deque(jobs)
        self.waiting = sum(map(_turn, self.ring))


class Queue:
    """Jobs in two lanes, short and long. A new job waits at most `wait` seconds for its first turn, or is refused.

    >>> queue = Queue()
    >>> for name in "a", "b":
    ...     queue.put(QueuedJob(Ticket(name), None, [300] * 3))
    >>> [(part.job.ticket.id, part.first, part.last) for part in queue.take(600, long=True)]
    [('a', 0, 1), ('b', 0, 1)]
    """

    def __init__(self, wait: float = WAIT, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not wait > 0:
            raise ConfigError(f"wait={wait} must be above 0 seconds")
        self.clock = clock
        self._closed = False
        self._lock = Lock()
        self.short, self.long = self._lanes = (Lane(wait, self._lock), Lane(wait, self._lock))

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return sum(len(lane.ring) for lane in self._lanes)

    @property
    def waiting(self) -> int:
        """Cost of the next turn of each waiting job, in both lanes."""
        return sum(lane.waiting for lane in self._lanes)

    def expect(self, rate: float, least: int) -> None:
        """Set the expected throughput in tokens per second, and the cost that may wait in each lane at any rate."""
        for lane in self._lanes:
            lane.rate, lane.least = rate, least

    @property
    def is_full(self) -> bool:
        """Whether any new job would be refused."""
        return all(lane.is_full for lane in self._lanes)

    @property
    def closed(self) -> bool:
        """Whether no more jobs are accepted."""
        return self._closed

    def lane(self, job: QueuedJob) -> Lane:
        """The lane that a new job stands in."""
        return self.long if job.backlog > TURN else self.short

    # --- in ---

    def put(self, job: QueuedJob) -> None:
        """Enqueue a job, or refuse it at once if it would wait too long or its deadline cannot be met."""
        ticket = job.ticket
        ticket.submitted_tokens += sum(job.lengths)
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")
        with self._lock:
            if self._closed:
                raise Closed("the engine takes no more requests: it is shutting down")
            lane = self.lane(job)
            job.arrived = now = self.clock()
            self._check(lane, now)
            if ticket.deadline is not None:
                if ticket.deadline <= now:
                    raise Expired("the deadline had passed before the request was queued")
                lane.check_deadline(job, ticket.deadline - now)
            if not job.lengths:
                job._answered.release()
                return
            lane.ring.append(job)
            lane.waiting += _turn(job)
            lane.filled.notify()

    def _check(self, lane: Lane, now: float) -> None:
        if lane.is_full:  # cancelled and expired jobs need not be waited for
            lane.keep([job for job in lane.ring if not self._is_over(job, now)])
        lane.check()

    def check_long(self) -> None:
        """Raise `Refused` if a new long job would be refused. May be called before there is a job."""
        with self._lock:
            self._check(self.long, self.clock())

    def check(self) -> None:
        """Raise `Refused` if any new job would be refused, short or long."""
        if self.is_full:
            min(self._lanes, key=lambda lane: lane.seconds(lane.waiting - lane.room)).check()

    # --- out ---

    def take(self, budget: int, *, long: bool = False, wait: bool = True) -> list[JobSlice]:
        """Take windows of short jobs, or of long ones, that cost at most `budget`, or a single one that costs more.

        With `wait`, block until there are any. An empty list means that nothing may be taken; with `wait`, that the
        queue is closed and the lane empty. Each batch must be followed by a call of `finish`.
        """
        lane = self.long if long else self.short
        with self._lock:
            while True:
                if not (long and self._yields()) and (slices := lane.take(budget, self.clock(), self._is_over)):
                    lane.running += 1
                    return slices
                if not wait or (self._closed and not lane.ring):
                    return []
                lane.filled.wait()

    def _yields(self) -> bool:
        """Whether long jobs must wait: one batch of theirs runs, and there are short jobs."""
        return bool(self.long.running and (self.short.running or self.short.ring))

    def finish(self, *, long: bool = False) -> None:
        """Tell that a batch of this lane is done."""
        with self._lock:
            (self.long if long else self.short).running -= 1
            if self.long.ring or self._closed:
                self.long.filled.notify_all()

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
            for lane in self._lanes:
                if not drain:
                    for job in lane.ring:
                        self._end(job, Closed("the engine stopped before the model read this"))
                    lane.keep([])
                lane.filled.notify_all()


def _turn(job: QueuedJob) -> int:
    """Cost of a job's next turn, at most."""
    return max(min(job.backlog, TURN), job.costs[job.taken]) if job.backlog else 0
