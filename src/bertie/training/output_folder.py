"""The folder that a training run writes: checked before the run starts, and put in place when it is
complete.

Until then the run's state is beside it, in OUT.training.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from bertie.data.atomic import PathLock
from bertie.data.journal import AlreadyComplete
from bertie.errors import ExistsError, InputError

RESULT, MODEL = "result.json", "model"  # of a finished run, in a folder of the state


def lock_output(out: Path) -> PathLock:
    """Refuse an output folder that another run is writing. The lock ends with the process, at the latest."""
    state = state_folder(out)
    parent = next(path for path in state.parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"{out} cannot be written: no permission in {parent}")
    state.parent.mkdir(parents=True, exist_ok=True)
    return PathLock(state.with_name(f"{state.name}.lock"), out)


def check_output(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse an output folder that holds something else, before any work is done, while it is locked."""
    state = state_folder(out)
    exists = out.is_dir() and any(out.iterdir())
    if out.exists() and not out.is_dir():
        raise ExistsError(f"{out} is a file; a model is a folder")
    if exists and not any((out / name).is_file() for name in ("config.json", "modules.json")):
        raise ExistsError(f"{out} is not empty and holds no model; choose another folder")
    # Killed after its model was put in place, but before its state was removed.
    published = any(state.glob(f"*/{RESULT}")) and not any(state.glob(f"*/{MODEL}"))
    if resume and state.is_dir() and not (exists and published):
        return
    if exists and resume and not overwrite:
        remove_state(state)
        raise AlreadyComplete(f"{out} is complete: there is nothing to resume")
    if exists and not overwrite:
        raise ExistsError(f"{out} holds a model already; pass --overwrite, or another name")
    if state.exists() and not overwrite:
        raise ExistsError(
            f"{state} holds an interrupted run; pass --resume to resume it, or --overwrite to start again"
        )


def state_folder(out: Path) -> Path:
    """Where the state of a run with this output folder is kept."""
    return out.absolute().with_name(out.absolute().name + ".training")


def publish(model: Path, out: Path, state: Path) -> None:
    """Move a finished model to the output folder, replacing what is there, and remove the run's state."""
    out.parent.mkdir(parents=True, exist_ok=True)
    replaced = state / "replaced"
    if out.exists():
        os.rename(out, replaced)
    try:
        os.rename(model, out)
    except BaseException:
        if replaced.exists():
            os.rename(replaced, out)
        raise
    remove_state(state)


def remove_state(state: Path) -> None:
    """Remove a state. It is renamed first: half of one must not be taken for a run that can be resumed."""
    trash = state.with_name(f".{state.name}")
    shutil.rmtree(trash, ignore_errors=True)
    with suppress(FileNotFoundError):  # another process of the same job was faster
        os.rename(state, trash)
    shutil.rmtree(trash, ignore_errors=True)
