"""Folders that are written atomically: a draft beside the final folder is put in its place when it is complete.

A draft is locked by the process that writes it. The next process that writes the same folder removes
the drafts of processes that were killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertie.data.atomic import fsync

SUFFIX = ".draft"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def draft_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; when the block ends without an error, it replaces `folder`.

    A folder that exists is exchanged with the draft, so that there is a complete one at any time.
    """
    folder = Path(os.path.abspath(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent):
        _remove_abandoned(folder)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=SUFFIX, dir=folder.parent))
        handle = os.open(draft, os.O_RDONLY)
        _lock(handle)
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp creates it with mode 700
        _flush(draft)
        _put_in_place(draft, folder)
    finally:
        os.close(handle)
        shutil.rmtree(draft, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove drafts that no process has locked."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.\w{{8}}{re.escape(SUFFIX)}")
    for name in os.listdir(folder.parent):
        if pattern.fullmatch(name):
            with suppress(OSError):  # removed by another process, or not ours
                handle = os.open(folder.parent / name, os.O_RDONLY)
                try:
                    if _lock(handle):
                        if not folder.exists() and (folder.parent / name / _backup(folder)).exists():
                            os.rename(folder.parent / name / _backup(folder), folder)
                        shutil.rmtree(folder.parent / name, ignore_errors=True)
                finally:
                    os.close(handle)


def _flush(folder: Path) -> None:
    """Flush all files to disk: a rename may reach it before they do."""
    for path in (*(path for path in folder.rglob("*") if path.is_file()), folder):
        fsync(path)


def _put_in_place(draft: Path, folder: Path) -> None:
    if not folder.exists():
        os.rename(draft, folder)
        return
    if _exchange(draft, folder):
        return
    backup = draft / _backup(folder)  # nothing exchanges two folders on this system
    os.rename(folder, backup)
    try:
        os.rename(draft, folder)
    except BaseException:
        os.rename(backup, folder)
        raise
    shutil.rmtree(folder / backup.name, ignore_errors=True)


def _backup(folder: Path) -> str:
    return f".{folder.name}.old"


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders atomically; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(b))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, so that no draft is taken for abandoned before it is locked."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, wait=True)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool = False) -> bool:
    """Lock an open folder; False if another process has, or if locks are not supported."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
