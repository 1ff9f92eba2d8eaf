"""The log and history of a run, and callbacks that follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

LogRow = Mapping[str, float]

LOG_HEADER = "step,epoch,loss,lr,tokens"


def parse_row(row: str) -> dict[str, float]:
    """Parse a line of the log.

    >>> parse_row("10,0.5,2.25,0.0001,4096")
    {'step': 10.0, 'epoch': 0.5, 'loss': 2.25, 'lr': 0.0001, 'tokens': 4096.0}
    """
    return dict(zip(LOG_HEADER.split(","), map(float, row.split(",")), strict=True))


@dataclass(slots=True)
class TrainingHistory:
    """The curve, evaluations and totals of a run."""

    curve: list[dict[str, float]] = field(default_factory=list)  # rows of the log
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best_step: int = -1
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of this process; a resumed run took longer
    stopped_early: bool = False
    shortened: str = ""  # "converged" or "budget": fewer steps than planned, with the schedule compressed
    method: str = ""  # classifiers: the chosen one, with the scores of all that were compared


class TrainingCallback(Protocol):
    """Hooks that a run calls in its main process."""

    def on_start(self, rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> None:
        """Called when the run starts, resumes or is rolled back, with the rows so far."""

    def on_log(self, row: LogRow) -> None:
        """Called after a row is added to the log."""

    def on_evaluation(self, row: LogRow) -> None:
        """Called after an evaluation."""

    def on_save(self) -> None:
        """Called before a checkpoint is written."""
