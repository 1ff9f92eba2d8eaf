"""The number of steps of a run: as planned, or fewer with the learning-rate schedule compressed."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

WARM_STEPS = 2  # the first steps of a run are slower
CONVERGED_STEPS = 20  # at least, with a loss below `stop_loss`


class Pace:
    """The number of steps of a run. Shortening it compresses the rest of its learning-rate schedule.

    A run is fitted to end before `deadline`, a time of `time.monotonic`, once the seconds per step are known: they are
    measured after the first `warm_steps` steps, over at least `warm_steps` − 1 more. If its steps become faster, it is
    lengthened again. It is also shortened if the loss has been below `stop_loss` for an epoch, to end after one more.

    >>> pace = Pace(100, epoch=10)
    >>> pace.shorten(40, 60, "converged")
    >>> pace.total, [pace.position(step) for step in (40, 50, 60)]
    (60, [40.0, 70.0, 100.0])
    """

    def __init__(
        self,
        planned: int,
        epoch: int,
        deadline: float | None = None,
        stop_loss: float = 0.0,
        warm_steps: int = WARM_STEPS,
    ) -> None:
        self.total = self.planned = planned
        self.warm_steps = warm_steps
        self.epoch, self.deadline, self.stop_loss = epoch, deadline, stop_loss
        self.reason = ""  # why the run was shortened: "converged" or "budget"
        self._since = self._from = 0.0  # the step and the position of the last change
        self._start: tuple[int, float] | None = None  # of the measurement of the speed: step and time
        self.seconds: float | None = None  # per step, as last measured
        self._paused, self._pauses = 0.0, 0  # seconds of evaluations, and their number

    def position(self, step: float) -> float:
        """The position of a step in the schedule that was planned."""
        if not self.reason:
            return step
        return self._from + (step - self._since) * (self.planned - self._from) / max(1.0, self.total - self._since)

    def shorten(self, step: int, total: int, reason: str) -> None:
        """End after `total` steps, if that is earlier than planned."""
        if max(total, step + 1) < self.total:
            self._end(step, total, reason)

    def fit(self, step: int, total: int) -> None:
        """End after `total` steps because of the deadline: fewer than planned, or more of them than thought before."""
        if self.reason == "budget" and step < min(total, self.total):
            self._end(step, min(total, self.planned), "budget")
        else:
            self.shorten(step, total, "budget")

    def _end(self, step: int, total: int, reason: str) -> None:
        self._from, self._since = self.position(step), float(step)
        self.total, self.reason = max(total, step + 1), reason

    @property
    def state(self) -> list[float]:
        """What a resumed run needs; empty if nothing was changed."""
        return [self.total, self._since, self._from, self.reason == "budget"] if self.reason else []

    def restore(self, state: Sequence[float]) -> None:
        """Restore the state of a resumed run."""
        if state:
            self.total, self._since, self._from = int(state[0]), state[1], state[2]
            self.reason = "budget" if state[3] else "converged"

    def check_loss(self, step: int, rows: Sequence[str]) -> None:
        """Shorten the run if all rows of the log have had a loss below `stop_loss` for an epoch."""
        window, losses = max(self.epoch, CONVERGED_STEPS), []
        for row in reversed(rows[1:]):
            logged, _, loss = row.split(",")[:3]
            if step - int(logged) >= window:
                break
            losses.append(float(loss))
        if self.stop_loss and step >= window and losses and max(losses) < self.stop_loss:
            self.shorten(step, step + self.epoch, "converged")

    # --- the time ---

    def evaluated(self, seconds: float) -> None:
        """Record the duration of an evaluation."""
        self._paused += seconds
        self._pauses += 1

    def step_seconds(self, step: int) -> float | None:
        """Seconds per step so far, without evaluations; None: not known yet."""
        if self._start is None and step >= self.warm_steps:
            self._start, self._paused, self._pauses = (step, time.monotonic()), 0.0, 0
        if self._start is None or step < self._start[0] + max(1, self.warm_steps - 1):
            return None
        return (time.monotonic() - self._start[1] - self._paused) / (step - self._start[0])

    def total_in_time(self, step: int, evaluations: Collection[int]) -> int:
        """The number of steps that can be done before the deadline, with evaluations after some of them."""
        seconds = self.seconds = self.step_seconds(step)
        if self.deadline is None or seconds is None:
            return self.total
        most = self.planned if self.reason == "budget" else self.total
        each = self._paused / self._pauses if self._pauses else 0.0
        left = self.deadline - time.monotonic() - each * sum(step < at <= self.total for at in evaluations)
        return min(most, step + max(0, int(left / max(seconds, 1e-9))))
