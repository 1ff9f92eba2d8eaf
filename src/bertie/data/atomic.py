"""Atomic file writes that survive a crash or a power failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from bertie.errors import InputError


def fsync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_rename(temporary: Path, path: Path) -> None:
    """Flush a file to disk, then rename it."""
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}.draft")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def lock_file(file: BinaryIO | int, path: Path) -> None:
    """Acquire an exclusive lock, which the operating system releases when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError(f"{path} is being written by another process") from None
