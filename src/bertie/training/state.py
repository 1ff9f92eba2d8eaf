"""The training state on disk, written to a temporary file and renamed, so that there is always a
complete one.

A folder holds `state.pt`, the weights of the best evaluation so far as `best-STEP.pt`, and
`log.csv`. A step follows from the seed and the step number alone, so the number is all that a
resumed run needs to know about random states and its position in the data. The state also holds the
rows of the log: rows after the last checkpoint are dropped on resume.
"""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertie.data.atomic import PathLock
from bertie.errors import CheckpointError, ExistsError, TrainingError

STATE, LOG = "state.pt", "log.csv"


@dataclass(slots=True)
class TrainState:
    """Progress of a run, besides its weights and optimizer."""

    step: int = 0  # steps done
    micro_tokens: int = 0  # 0: the recipe's; lower after the device ran out of memory
    loss: float = 0.0  # summed since the last row of the log
    weight: float = 0.0  # of these losses
    texts: int = 0
    tokens: int = 0
    best_step: int = -1
    best: float | None = None
    stale: int = 0  # evaluations since the best one
    stopped: bool = False  # early, by patience
    evaluations: list[dict[str, float]] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # of the log
    recent_losses: dict[str, list[float]] = field(default_factory=dict)  # per task, for spike detection
    pace: list[float] = field(default_factory=list)  # of a run that was shortened: `bertie.training.pace`
    skipped: list[list[int]] = field(default_factory=list)  # ranges of steps that were rolled back: [from, to]

    def is_best(self, score: float, patience: int) -> bool:
        """Whether an evaluation is the best so far; the run stops after `patience` that are not, unless it is 0."""
        score = -math.inf if math.isnan(score) else score  # NaN: such as the correlation with a constant
        if self.best is None or score > self.best:
            self.best, self.best_step, self.stale = score, self.step, 0
            return True
        self.stale += 1
        self.stopped = bool(patience) and self.stale >= patience
        return False

    @property
    def consecutive_rollbacks(self) -> int:
        """Rollbacks without a step trained in between."""
        count, end = 0, self.step
        for first, last in reversed(self.skipped):
            if last < end:
                break
            count, end = count + 1, first
        return count


class StateFolder:
    """The folder of a run's training state. With `path=None` nothing is written, and the run cannot be resumed."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._best: dict[str, Tensor] = {}
        self._lock: PathLock | None = None
        if path is not None:
            with _write_errors(path):
                path.mkdir(parents=True, exist_ok=True)

    def open(self, resume: bool, restart: bool = False) -> dict[str, Any] | None:
        """Lock the folder, return the state to resume from, if there is one, and remove the partial
        files of a killed run.

        `restart` discards a state that exists.
        """
        if self.path is None:
            return None
        self._lock = PathLock(self.path / ".lock", self.path)
        file = self.path / STATE
        if restart:
            file.unlink(missing_ok=True)
        if file.exists() and not resume:
            raise ExistsError(f"{self.path} holds an unfinished run; resume it, or choose or empty the folder")
        state = self._read() if file.exists() else None
        for draft in self.path.glob(".*.pt.draft"):
            draft.unlink(missing_ok=True)
        self._remove_best(None if state is None else state["progress"]["best_step"])
        rows = [] if state is None else state["progress"]["rows"]
        with _write_errors(self.path / LOG):
            (self.path / LOG).write_text("".join(f"{row}\n" for row in rows))
        return state

    def close(self) -> None:
        """Let another process use the folder."""
        if self._lock is not None:
            self._lock.release()

    def _read(self) -> dict[str, Any]:
        assert self.path is not None
        state = _load(self.path / STATE, "remove it to start again")
        if state.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"{self.path} holds a run with another recipe, other data or another model, "
                "and can only be resumed with its own. Choose another folder, or remove this one"
            )
        return state

    def save(
        self, progress: TrainState, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], scaler: dict[str, Any]
    ) -> None:
        """Write the state, then remove the files that it no longer needs."""
        if self.path is None:
            return
        state = {
            "fingerprint": self.fingerprint,
            "progress": asdict(progress),
            "model": dict(model),
            "optimizer": dict(optimizer),
            "scaler": scaler,
        }
        _write(self.path / STATE, state)
        self._remove_best(progress.best_step)

    def last(self) -> dict[str, Any] | None:
        """The state that was written last."""
        return None if self.path is None or not (self.path / STATE).exists() else self._read()

    def _remove_best(self, keep: int | None) -> None:
        """Remove other best weights, once the state is saved: a run killed before that resumes with the old ones."""
        assert self.path is not None
        for file in self.path.glob("best-*.pt"):
            if re.fullmatch(r"best-\d+", file.stem) and file.stem != f"best-{keep}":
                file.unlink(missing_ok=True)

    def save_best(self, step: int, model: Mapping[str, Tensor]) -> None:
        """Save the best weights so far."""
        if self.path is None:
            self._best = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()}
        else:
            _write(self.path / f"best-{step}.pt", dict(model))

    def load_best(self, step: int) -> dict[str, Tensor]:
        """Load the best weights."""
        if self.path is None:
            return self._best
        return _load(self.path / f"best-{step}.pt", "train again in another folder")

    def log(self, row: str) -> None:
        """Append a row to the log."""
        if self.path is None:
            return
        with _write_errors(self.path / LOG), (self.path / LOG).open("a") as log:
            log.write(f"{row}\n")


def _load(file: Path, hint: str) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # an unpickler raises anything on a corrupt file
        raise CheckpointError(f"{file} cannot be read: {str(error)[:200]}; {hint}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} is not a training state: it holds a {type(state).__name__}; {hint}")
    return state


def _write(path: Path, value: Any) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with _write_errors(path):
        try:
            with draft.open("wb") as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn a failed write into an error that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch's writer may raise a RuntimeError of its own from the OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        reason = "the disk is full" if cause.errno in (errno.ENOSPC, errno.EDQUOT) else cause.strerror or str(cause)
        raise TrainingError(
            f"{path.name} could not be written to {path.parent}: {reason}. The last checkpoint is intact: fix this and "
            "resume"
        ) from None
