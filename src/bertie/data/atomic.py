"""Files that are whole or not there, whatever ends the process or the power."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from bertie.errors import InputError


def fsync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_rename(draft: Path, path: Path) -> None:
    """Give a file its name when all of it is on the disk."""
    fsync(draft)
    os.replace(draft, path)
    fsync(path.parent)


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def lock_file(file: BinaryIO | int, path: Path) -> None:
    """Keep other processes from writing to a path. The lock goes with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{path} is being written by another process") from None
