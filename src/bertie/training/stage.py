"""One of several training runs that belong together, such as the folds of a cross-validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bertie.data.progress import Progress
from bertie.training.pace import WARM_STEPS


@dataclass(frozen=True, slots=True)
class Stage:
    """The name of a run, and how much work comes before and after it, relative to its own.

    >>> Stage("fold 2 of 3", before=1, after=1).fraction(0.5)
    0.5
    """

    label: str = "train"
    before: float = 0.0
    after: float = 0.0
    deadline: float | None = None  # a time of `time.monotonic` that the run has to end before
    warm_steps: int = WARM_STEPS  # after which the speed is measured, for the deadline

    def fraction(self, done: float) -> float:
        """The share of all work that is done, by the share of this run."""
        return (self.before + done) / (self.before + 1 + self.after)

    def progress_bar(self, done: Callable[[], float], texts: int, *, show: bool) -> Progress:
        """A progress bar over all runs, after so many texts of this one."""
        return Progress(
            self.label, lambda: self.fraction(done()), initial=texts, start=self.fraction(done()), show=show
        )


WHOLE = Stage()  # a run by itself
