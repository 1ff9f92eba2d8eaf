"""The state of a run on disk: written to a temporary name, then renamed, so that there is always a whole one.

A folder holds `state.pt`, the weights of the best evaluation so far as `best-STEP.pt`, and `log.csv`. What a step does
follows from the seed and the step's number alone, so the number is all there is to know of randomness and of the place
in the data. The state holds the rows of the log: what a run wrote after its last state is gone when it goes on.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertie.errors import CheckpointError, ExistsError, TrainingError

STATE, LOG = "state.pt", "log.csv"


@dataclass(slots=True)
class TrainState:
    """How far a run is, besides its weights."""

    step: int = 0  # done
    micro_tokens: int = 0  # 0: as the recipe says; less after the device ran out of memory
    loss: float = 0.0  # summed over what was asked since the log's last row
    weight: float = 0.0  # of that
    texts: int = 0
    tokens: int = 0
    best_step: int = -1
    best: float | None = None
    stale: int = 0  # evaluations since the best one
    stopped: bool = False  # by patience
    evaluations: list[dict[str, float]] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)  # of the log
    recent: dict[str, list[float]] = field(default_factory=dict)  # of each head, losses that the next is compared with
    skipped: list[list[int]] = field(default_factory=list)  # steps that were taken back: from, to


class Folder:
    """A run's folder. With `None` for a path nothing is written, and nothing can go on."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._best: dict[str, Tensor] = {}
        if path is not None:
            with _writing(path):
                path.mkdir(parents=True, exist_ok=True)

    def begin(self, resume: bool, restart: bool = False) -> dict[str, Any] | None:
        """The state to go on with, if there is one and it is wanted. What a killed run left half done is removed.

        `restart`: a state that is there is of a run that nobody wants to go on with.
        """
        if self.path is None:
            return None
        file = self.path / STATE
        if restart:
            file.unlink(missing_ok=True)
        if file.exists() and not resume:
            raise ExistsError(
                f"{self.path} holds a run that was begun; go on with it (resume), or choose or empty the folder"
            )
        state = self._read() if file.exists() else None
        for draft in self.path.glob(".*.pt.draft"):
            draft.unlink(missing_ok=True)
        self._forget_bests(None if state is None else state["progressed"]["best_step"])
        rows = [] if state is None else state["progressed"]["rows"]
        with _writing(self.path / LOG):
            (self.path / LOG).write_text("".join(f"{row}\n" for row in rows))
        return state

    def _read(self) -> dict[str, Any]:
        assert self.path is not None
        file = self.path / STATE
        state = _loaded(file, "remove it to begin anew")
        if state.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"{self.path} holds a run with another recipe, other data or another model; it can go on only with its "
                "own. Choose another folder, or remove this one"
            )
        return state

    def save(
        self, progressed: TrainState, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], scaler: dict[str, Any]
    ) -> None:
        """Write the state, then let go of what it no longer needs."""
        if self.path is None:
            return
        state = {
            "fingerprint": self.fingerprint,
            "progressed": asdict(progressed),
            "model": dict(model),
            "optimizer": dict(optimizer),
            "scaler": scaler,
        }
        _write(self.path / STATE, state)
        self._forget_bests(progressed.best_step)

    def last(self) -> dict[str, Any] | None:
        """The state that was written last."""
        return None if self.path is None or not (self.path / STATE).exists() else self._read()

    def _forget_bests(self, but: int | None) -> None:
        """Only after the state that names another was written: a kill in between must find what the old one names."""
        assert self.path is not None
        for file in self.path.glob("best-*.pt"):
            if re.fullmatch(r"best-\d+", file.stem) and file.stem != f"best-{but}":
                file.unlink(missing_ok=True)

    def keep_best(self, step: int, model: Mapping[str, Tensor]) -> None:
        """These weights are the best so far."""
        if self.path is None:
            self._best = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.items()}
        else:
            _write(self.path / f"best-{step}.pt", dict(model))

    def best(self, step: int) -> dict[str, Tensor]:
        """The best weights."""
        if self.path is None:
            return self._best
        return _loaded(self.path / f"best-{step}.pt", "train anew in another folder")

    def log(self, row: str) -> None:
        """Add a row to the log."""
        if self.path is None:
            return
        with _writing(self.path / LOG), (self.path / LOG).open("a") as log:
            log.write(f"{row}\n")


def _loaded(file: Path, hint: str) -> dict[str, Any]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler meets in a broken file
        raise CheckpointError(f"{file} cannot be read: {str(error)[:200]}; {hint}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is not of a run: it holds a {type(found).__name__}; {hint}")
    return found


def _write(path: Path, value: Any) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with _writing(path):
        try:
            with draft.open("wb") as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What goes wrong with writing a file, as an error that says what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch's writer may hide what the disk says behind an error of its own.
        said = error if isinstance(error, OSError) else error.__context__
        if not isinstance(said, OSError):
            raise
        why = "the disk is full" if said.errno in (errno.ENOSPC, errno.EDQUOT) else said.strerror or str(said)
        raise TrainingError(
            f"{path.name} could not be written to {path.parent}: {why}. The last state that was written is whole: mend "
            "this, and go on with resume"
        ) from None
