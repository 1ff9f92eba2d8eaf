"""What waits for the model: windows of many requests, bounded in time, handed out by turns.

Requests stand in a ring. Whoever is first gives windows for one turn (`TURN` tokens, at least one window) and goes to
the back if it has more. So a request of one window waits for one turn of each that came before it, however long those
are, and a long one gets its turn in every round, however many short ones come.

How long a newcomer would wait for its first turn is known: one turn of each, at the rate that is measured all the time.
Where that is too long it is refused at once. So the bound follows the device, and those who are let in keep their pace.

There is no torch here, and no thread: workers call `take`, those who ask call `put` and `Job.wait`.
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

TURN = 512  # tokens that a request may give before the next one's turn
WAIT = 1.0  # seconds that a request may have to wait for its first turn


class Refused(BertieError):
    """There is too much before it. Nothing was done; asking again after `retry_after` seconds may do."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Expired(BertieError, TimeoutError):
    """The deadline passed before there was an answer."""


class TokenLimitExceeded(BertieError):
    """The windows of a request have more tokens together than one request may have."""


class Cancelled(BertieError):
    """Whoever asked has left."""


class Closed(BertieError):
    """The engine stops, or has stopped. Another one, or this one once it is started again, may answer."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way through the engine; what it needed is added up here by the workers.

    `cancelled.set()` takes its windows out of the queue. `deadline` is a time of `time.monotonic()`.
    """

    id: str = ""
    deadline: float | None = None
    cancelled: Event = field(default_factory=Event)
    max_tokens: int | None = None  # that the windows of the request may have together
    submitted_tokens: int = 0  # in all windows that were put into a queue
    queue_s: float = 0.0  # from coming in until its first window was taken
    device_s: float = 0.0  # its part, by tokens, of the time that its batches took
    tokens: int = 0  # that the model read for it
    batch_tokens: int = 0  # of the largest batch that it was part of


current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


class Job:
    """What one call to the engine asks for: windows of `lengths` tokens each, to be answered together."""

    __slots__ = (
        "_answered",
        "arrived",
        "backlog",
        "error",
        "items",
        "lengths",
        "outputs",
        "taken",
        "task",
        "ticket",
        "unanswered",
    )

    def __init__(self, ticket: Ticket, task: Any, items: Sequence[Any], lengths: Sequence[int]) -> None:
        self.ticket, self.task, self.items, self.lengths = ticket, task, items, lengths
        self.outputs: list[Any] = [None] * len(items)
        self.error: BaseException | None = None
        self.arrived = 0.0
        self.taken = 0  # windows that were handed out
        self.backlog = sum(lengths)  # tokens that were not
        self.unanswered = len(items)  # windows; 0: done, or given up
        self._answered = Lock()
        self._answered.acquire()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the answer, or an error, came in time."""
        return self._answered.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


@dataclass(slots=True)
class Part:
    """Windows of one job in a batch."""

    job: Job
    first: int
    last: int  # one past


class Queue:
    """Jobs in a ring: a newcomer waits `wait` seconds at most, or is refused.

    >>> queue = Queue()
    >>> for name in "a", "b":
    ...     queue.put(Job(Ticket(name), None, range(3), [300] * 3))
    >>> [(part.job.ticket.id, part.first, part.last) for part in queue.take(600)]
    [('a', 0, 1), ('b', 0, 1)]
    """

    def __init__(self, wait: float = WAIT, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not wait > 0:
            raise ConfigError(f"wait={wait} must be above 0 seconds")
        self.wait, self.clock = wait, clock
        self.rate = 0.0  # tokens a second, as its owner measures it; 0: not known yet, and all may wait
        self.least = 0  # tokens that may wait at any rate: without full batches the rate could not be measured
        self._ring: deque[Job] = deque()
        self._waiting = 0  # tokens
        self._closed = False
        self._lock = Lock()
        self._filled = Condition(self._lock)

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._ring)

    @property
    def waiting(self) -> int:
        """The tokens that come before a newcomer: the next turn of each job."""
        return self._waiting

    @property
    def room(self) -> float:
        """The tokens that may wait."""
        return max(self.least, self.wait * self.rate) if self.rate else float("inf")

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken in."""
        return self._closed

    # --- in ---

    def put(self, job: Job) -> None:
        """Let a job wait, or refuse it at once: if it would wait too long, or if its deadline cannot be met."""
        ticket = job.ticket
        ticket.submitted_tokens += job.backlog
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")
        with self._lock:
            if self._closed:
                raise Closed("the engine takes no more requests: it is shutting down")
            job.arrived = now = self.clock()
            if self._waiting > self.room:
                self._sweep(now)  # those who left are in nobody's way
            self.check()
            self._check_deadline(job, now)
            if not job.items:
                job._answered.release()
                return
            self._ring.append(job)
            self._waiting += _turn(job)
            self._filled.notify()

    def check(self) -> None:
        """Refuse a newcomer, if it would wait too long; asked by whoever wants to know before there is a job."""
        waiting, room = self._waiting, self.room
        if waiting > room:
            raise Refused(
                f"the work before it takes about {self._seconds(waiting):.1f} s, and it may wait for {self.wait:g} s",
                self._seconds(waiting - room),
            )

    def _check_deadline(self, job: Job, now: float) -> None:
        if job.ticket.deadline is None:
            return
        left = job.ticket.deadline - now
        if left <= 0:
            raise Expired("the deadline had passed before the model was asked")
        # While it takes its turns, every other job takes as many: that is how much comes before its last window.
        mine = job.backlog
        needed = self._seconds(mine + sum(min(one.backlog, max(mine, TURN)) for one in self._ring))
        if needed > left and self._ring:
            raise Refused(
                f"the work before it takes about {needed:.1f} s, and the deadline is in {left:.1f} s", needed - left
            )

    def _seconds(self, tokens: float) -> float:
        return tokens / self.rate if self.rate else 0.0

    # --- out ---

    def take(self, budget: int, *, wait: bool = True) -> list[Part]:
        """Windows of at most `budget` tokens, or a single one; with `wait`, as soon as there are any.

        An empty list: nothing waits; with `wait`, nothing ever will.
        """
        with self._lock:
            while True:
                if found := self._formed(budget):
                    return found
                if not wait or self._closed:
                    return []
                self._filled.wait()

    def _formed(self, budget: int) -> list[Part]:
        now = self.clock()
        found: dict[Job, Part] = {}
        used = 0
        while self._ring and used < budget:
            job = self._ring.popleft()
            self._waiting -= _turn(job)
            if self._gone(job, now):
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
                part = found.setdefault(job, Part(job, first, first))
                part.last = job.taken
            if job.taken == first:  # its window does not fit: it is the first one of the next batch
                self._ring.appendleft(job)
                break
            if job.taken < len(job.lengths):
                self._ring.append(job)
        return list(found.values())

    def _sweep(self, now: float) -> None:
        """Give up the jobs that nobody waits for."""
        kept = [job for job in self._ring if not self._gone(job, now)]
        self._ring = deque(kept)
        self._waiting = sum(map(_turn, kept))

    def _gone(self, job: Job, now: float) -> bool:
        """Whether a job need not be done; if so, it is answered."""
        ticket = job.ticket
        if not job.unanswered:  # one of its windows failed, or it gave up
            return True
        if ticket.cancelled.is_set():
            self._end(job, Cancelled("whoever asked has left"))
        elif ticket.deadline is not None and ticket.deadline <= now:
            self._end(job, Expired("the deadline passed while the request waited"))
        return not job.unanswered

    # --- answers ---

    def answer(self, answers: Iterable[tuple[Job, int, Any]]) -> None:
        """Outputs of windows: a job and the number of its window. A job is done with its last one."""
        with self._lock:
            for job, number, output in answers:
                if job.unanswered:
                    job.outputs[number] = output
                    job.unanswered -= 1
                    if not job.unanswered:
                        job._answered.release()

    def fail(self, job: Job, error: BaseException) -> None:
        """An error for a whole job, if it is not done: what of it waits is dropped when its turn comes."""
        with self._lock:
            self._end(job, error)

    def _end(self, job: Job, error: BaseException) -> None:
        if job.unanswered:
            job.error, job.unanswered = error, 0
            job._answered.release()

    def close(self, *, drain: bool = True) -> None:
        """Take nothing more in. What waits is still handed out with `drain`, and answered with `Closed` without."""
        with self._lock:
            self._closed = True
            if not drain:
                for job in self._ring:
                    self._end(job, Closed("the engine stopped before the model read this"))
                self._ring.clear()
                self._waiting = 0
            self._filled.notify_all()


def _turn(job: Job) -> int:
    """The tokens of a job's next turn, at most."""
    return max(min(job.backlog, TURN), job.lengths[job.taken]) if job.backlog else 0
