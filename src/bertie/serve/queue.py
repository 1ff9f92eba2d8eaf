"""The request queue: windows of many requests, with bounded waiting times, scheduled in two lanes.

A job of at most `TURN` tokens is short, any other is long. Short jobs and long jobs have separate lanes and separate
workers, so that a short job never waits for the windows of a long one; and while short jobs wait or run, at most one
batch of long jobs is started at a time. Within a lane the owners of jobs (API keys, or client addresses) take turns,
and so do the jobs of an owner: a job gives windows for one turn (`TURN` tokens, at least one window) and moves to the
back if it has more. So each owner gets its turn in every round, however many jobs another one has, and each long job
of an owner likewise.

The waiting time of a new job until its first turn is known: one turn of each job before it, at the throughput of the
lane, which is measured all the time. If that is too long, the job is refused at once. So the limit adapts to the
device, accepted jobs keep their pace, and an owner that sends too much is refused before others are.

Costs are in tokens: those that the model reads, plus an equivalent for outputs that take longer to compute than they
take to read, such as thousands of candidates for masks.

This module uses no torch and starts no threads: workers call `take`, callers call `put` and `QueuedJob.wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

from bertie.errors import ConfigError
from bertie.serve.lanes import TURN, JobSlice, Lane, QueuedJob, next_turn
from bertie.serve.tickets import Cancelled, Closed, Expired, TokenLimitExceeded

WAIT = 1.0  # seconds that a job may have to wait for its first turn


class Queue:
    """Jobs in two lanes, short and long. A new job waits at most `wait` seconds for its first turn, or is refused.

    >>> from bertie.serve.tickets import Ticket
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

    def is_full(self, owner: str = "") -> bool:
        """Whether any new job of an owner would be refused."""
        if self.short.waiting <= self.short.room or self.long.waiting <= self.long.room:
            return False
        with self._lock:
            return self.short.is_full(owner) and self.long.is_full(owner)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and no more than one batch runs."""
        return self.short.running + self.long.running <= 1 and not self.short.ring and not self.long.ring

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or runs."""
        return not (self.short.running or self.long.running or self.short.ring or self.long.ring)

    @property
    def closed(self) -> bool:
        """Whether no more jobs are accepted."""
        return self._closed

    def lane(self, job: QueuedJob) -> Lane:
        """The lane that a new job stands in."""
        return self.long if job.backlog > TURN else self.short

    # --- in ---

    def put(self, job: QueuedJob, *, notify: bool = True) -> None:
        """Enqueue a job, or refuse it at once if it would wait too long or its deadline cannot be met.

        Without `notify` no worker is woken: the caller calls `take_alone` next.
        """
        ticket = job.ticket
        ticket.submitted_tokens += sum(job.lengths)
        if ticket.max_tokens is not None and ticket.submitted_tokens > ticket.max_tokens:
            raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")
        with self._lock:
            if self._closed:
                raise Closed("the engine takes no more requests: it is shutting down")
            lane = self.lane(job)
            job.arrived = now = self.clock()
            self._check(lane, now, ticket.owner)
            if ticket.deadline is not None:
                if ticket.deadline <= now:
                    raise Expired("the deadline had passed before the request was queued")
                lane.check_deadline(job, ticket.deadline - now)
            if not job.lengths:
                job.done()
                return
            lane.ring.append(job)
            lane.waiting += next_turn(job)
            lane.backlog += job.backlog
            if notify:
                lane.filled.notify()

    def _check(self, lane: Lane, now: float, owner: str) -> None:
        if lane.is_full(owner):  # cancelled and expired jobs need not be waited for
            lane.keep([job for job in lane.ring if not self._is_over(job, now)])
        lane.check(owner)

    def check_long(self, owner: str = "") -> None:
        """Raise `Refused` if a new long job of an owner would be refused. May be called before there is a job."""
        with self._lock:
            self._check(self.long, self.clock(), owner)

    def full_owners(self, lane: Lane) -> dict[str, float]:
        """The owners whose jobs a lane refuses, and the seconds after which they are accepted; "": those of all."""
        with self._lock:
            if lane.waiting <= lane.room:
                return {}
            names = ["", *lane.ring.owners]
            ahead = {name: lane.ahead(name) for name in names}
            return {name: lane.seconds(cost - lane.room) for name, cost in ahead.items() if cost > lane.room}

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

    def take_alone(self, budget: float) -> list[JobSlice]:
        """Take the only waiting job, if it is short, costs at most `budget`, and nothing runs.

        Otherwise wake the workers for what waits. As after `take`, a batch must be followed by a call of `finish`.
        """
        with self._lock:
            lane = self.short
            only = len(lane.ring) == 1 and not (lane.running or self.long.running or self.long.ring)
            if only and lane.waiting <= budget and (slices := lane.take(TURN, self.clock(), self._is_over)):
                lane.running += 1
                return slices
            for waiting in self._lanes:
                waiting.filled.notify(len(waiting.ring))
            return []

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
                        job.done()

    def fail(self, job: QueuedJob, error: BaseException) -> None:
        """End a job with an error unless it is done; its waiting windows are dropped when their turn comes."""
        with self._lock:
            self._end(job, error)

    def _end(self, job: QueuedJob, error: BaseException) -> None:
        if job.unanswered:
            job.error, job.unanswered = error, 0
            job.done()

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
