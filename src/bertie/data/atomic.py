"""Atomic file writes that survive a crash or a power failure."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
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
    """Write a file atomically: readers see the old content or the new one, even if other processes write it too."""
    temporary = path.with_name(draft_name(path.name))
    with named_errors(temporary), _open_draft(temporary) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def draft_name(name: str) -> str:
    """Return the name under which `atomic_write` writes a file; a process that is killed may leave it behind."""
    return f".{name}.draft"


def _open_draft(path: Path) -> BinaryIO:
    """Open an empty file, locked: another process that writes it waits until it is renamed.

    A process that was killed may have left it behind.
    """
    while True:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            with suppress(ImportError, OSError):  # Windows, or a file system without locks
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                file.truncate(0)
                return file
        except FileNotFoundError:  # renamed since
            pass
        except BaseException:
            file.close()
            raise
        file.close()


@contextmanager
def named_errors(path: str | Path) -> Iterator[None]:
    """Name the file in errors of the operating system that name none: those of write, flush and close."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not error.filename:
            error.filename = str(path)
        raise


def lock_file(file: BinaryIO | int, path: Path) -> None:
    """Acquire an exclusive lock, which the operating system releases when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path} is being written by another process") from None
    except OSError as error:  # such as a network file system without locks
        raise InputError(f"{path} cannot be locked: {error.strerror}") from None


class PathLock:
    """An exclusive lock by a file of its own, beside the file or folder that it protects.

    The lock ends with `release`, with the object or with the process, even one that is killed. The lock
    file is removed while the lock is held; a process that opened it before that notices and tries again.
    """

    def __init__(self, path: Path, protects: Path) -> None:
        self._handle = self._acquire(path, protects)
        self._finalizer = weakref.finalize(self, _release, self._handle, path)
        _held.add(self)
        _close_in_forks()

    @staticmethod
    def _acquire(path: Path, protects: Path) -> int:
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            except OSError as error:
                raise InputError(f"{protects} cannot be written: {path}: {error.strerror}") from None
            try:
                lock_file(handle, protects)
                if is_at(handle, path):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def release(self) -> None:
        """Remove the lock file and release the lock."""
        self._finalizer()

    def drop(self) -> None:
        """Close the lock in a fork, which would hold it beyond the end of the process that acquired it."""
        if self._finalizer.detach() is not None:
            os.close(self._handle)


_held: weakref.WeakSet[PathLock] = weakref.WeakSet()


@cache
def _close_in_forks() -> None:
    def drop_all() -> None:
        for lock in list(_held):
            lock.drop()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=drop_all)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file still has this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _release(handle: int, path: Path) -> None:
    with suppress(OSError):
        os.unlink(path)
    os.close(handle)
