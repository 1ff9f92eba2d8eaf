"""Jobs that wait for a forward pass: in rings where their owners take turns, with a measured throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any

from bertie.serve.tickets import Refused, Ticket

TURN = 512  # tokens that a job may give before the next job's turn; a job with more is long
LONG_CHARACTERS = 8 * TURN  # a text with more has more than one turn's tokens, but for rare exceptions
OWNERS_ROOM = 8  # times the room of a lane may wait in all, if no owner has more than its share
DECAY = 0.95  # weight of earlier batches in the moving average of the throughput


class QueuedJob:
    """One call of the engine: windows with so many tokens each, whose outputs are returned together.

    `costs`: what each window costs, in tokens; its own tokens if None. `on_done` is called once, by any thread, when
    there are outputs or an error; without it, a caller may `wait`.
    """

    __slots__ = (
        "_answered",
        "arrived",
        "backlog",
        "costs",
        "error",
        "lengths",
        "on_done",
        "origin",
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
        on_done: Callable[[QueuedJob], None] | None = None,
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
        self.on_done = on_done
        self.origin: Any = None  # for `on_done`
        self._answered: Lock | None = None
        if on_done is None:
            self._answered = Lock()
            self._answered.acquire()

    def done(self) -> None:
        """Notify the waiting caller."""
        if self.on_done is not None:
            self.on_done(self)
        elif self._answered is not None:
            self._answered.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the outputs or an error; False if neither came in time."""
        assert self._answered is not None
        return self._answered.acquire(timeout=-1 if timeout is None else max(0.0, timeout))


@dataclass(slots=True)
class JobSlice:
    """The windows `first` to `last` of a job in a batch."""

    job: QueuedJob
    first: int
    last: int  # exclusive


class Ring:
    """Jobs in the order of their turns: owners take turns, and so do the jobs of each."""

    def __init__(self, jobs: Iterable[QueuedJob] = ()) -> None:
        self._owners: dict[str, deque[QueuedJob]] = {}
        self._turns: deque[str] = deque()  # owners
        for job in jobs:
            self.append(job)

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __iter__(self) -> Iterator[QueuedJob]:
        for jobs in self._owners.values():
            yield from jobs

    def append(self, job: QueuedJob) -> None:
        """Add a job behind those of its owner."""
        owner = job.ticket.owner
        if owner not in self._owners:
            self._owners[owner] = deque()
            self._turns.append(owner)
        self._owners[owner].append(job)

    def appendleft(self, job: QueuedJob) -> None:
        """Put a job back: it is the next one."""
        owner = job.ticket.owner
        if owner in self._owners:
            self._turns.remove(owner)
        self._owners.setdefault(owner, deque()).appendleft(job)
        self._turns.appendleft(owner)

    def popleft(self) -> QueuedJob:
        """Remove the next job; then it is the next owner's turn."""
        owner = self._turns.popleft()
        jobs = self._owners[owner]
        job = jobs.popleft()
        if jobs:
            self._turns.append(owner)
        else:
            del self._owners[owner]
        return job

    @property
    def owners(self) -> list[str]:
        """Those with jobs."""
        return list(self._owners)

    def ahead(self, owner: str) -> int:
        """Cost of what comes before a new job of an owner: as many turns of each other one as it has itself."""
        own = sum(map(next_turn, self._owners.get(owner, ())))
        others = (sum(map(next_turn, jobs)) for name, jobs in self._owners.items() if name != owner)
        return own + sum(min(cost, own + TURN) for cost in others)


class Lane:
    """Jobs in a ring, and how fast they are processed. Part of a `Queue`, whose lock guards it."""

    def __init__(self, wait: float, lock: Lock) -> None:
        self.wait = wait
        self.least = 0  # cost that may wait at any rate: the rate can only be measured with full batches
        self.ring = Ring()
        self.waiting = 0  # cost of the next turn of each waiting job
        self.backlog = 0  # cost of all their windows that were not taken
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

    def ahead(self, owner: str) -> int:
        """Cost of what comes before a new job of an owner; exact where it matters, which takes longer."""
        if self.waiting <= self.room or self.waiting > OWNERS_ROOM * self.room:
            return self.waiting
        return self.ring.ahead(owner)

    def is_full(self, owner: str = "") -> bool:
        """Whether a new job of an owner would wait too long."""
        return self.waiting > self.room and self.ahead(owner) > self.room

    def check(self, owner: str = "") -> None:
        """Raise `Refused` if a new job of an owner would wait too long."""
        ahead, room = self.ahead(owner), self.room
        if ahead > room:
            raise Refused(
                f"the work before it takes about {self.seconds(ahead):.1f} s, and it may wait for {self.wait:g} s",
                self.seconds(ahead - room),
            )

    def check_deadline(self, job: QueuedJob, left: float) -> None:
        """Refuse a job that would not be done in `left` seconds."""
        own = job.backlog
        if self.seconds(own + self.backlog) <= left:  # even if all that waits comes before
            return
        # While it takes its turns, every other job takes as many: that is what comes before its last window.
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
            self.waiting -= next_turn(job)
            self.backlog -= job.backlog
            if is_over(job, now):
                continue
            first, turn = job.taken, 0
            while job.taken < len(job.costs):
                cost = job.costs[job.taken]
                if (turn and turn + cost > TURN) or (used and used + cost > budget):
                    break
                job.taken, turn, used = job.taken + 1, turn + cost, used + cost
            job.backlog -= turn
            self.waiting += next_turn(job)
            self.backlog += job.backlog
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
        self.ring = Ring(jobs)
        self.waiting = sum(map(next_turn, self.ring))
        self.backlog = sum(job.backlog for job in self.ring)


def next_turn(job: QueuedJob) -> int:
    """Cost of a job's next turn, at most."""
    return max(min(job.backlog, TURN), job.costs[job.taken]) if job.backlog else 0
