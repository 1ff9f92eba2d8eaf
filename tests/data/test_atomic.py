"""Atomic writes by several processes at once, locks that end with their process, and errors that name their file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertie.data.atomic import PathLock, atomic_write, named_errors
from bertie.errors import InputError


def test_writers_at_once(tmp_path: Path) -> None:
    """Any reader sees the whole content of one writer."""
    path = tmp_path / "out"
    children = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                for _ in range(60):
                    atomic_write(path, b"%d" % number * 50_000)
                    seen = path.read_bytes()
                    assert len(seen) == 50_000
                    assert len(set(seen)) == 1
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert os.listdir(tmp_path) == ["out"]


def test_a_draft_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    (tmp_path / ".out.draft").write_bytes(b"x" * 1000)
    atomic_write(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


def test_an_error_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"\.out\.draft"):
        atomic_write(tmp_path / "out", b"new")
    assert os.listdir(tmp_path) == []


HOLDER = """
import os, sys, time
from pathlib import Path
from bertie.data.atomic import PathLock
lock = PathLock(Path(sys.argv[1]), Path("out"))
if not os.fork():
    print(os.getpid(), flush=True)  # by the fork, so that its handlers have run
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_the_lock_of_a_killed_process_vanishes_although_its_fork_lives(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        fork = int(holder.stdout.readline())
        try:
            with pytest.raises(InputError, match="out is being written by another process"):
                PathLock(tmp_path / "lock", Path("out"))
            holder.kill()
            holder.wait()
            os.kill(fork, 0)  # it lives
            PathLock(tmp_path / "lock", Path("out")).release()
        finally:
            holder.kill()
            os.kill(fork, 9)
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="lock"):
        PathLock(tmp_path / "lock", Path("out"))
    assert not (tmp_path / "elsewhere").exists()


def test_errors_name_their_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="x") as caught, named_errors("a.txt"):
        raise OSError(errno.ENOSPC, "x")
    assert caught.value.filename == "a.txt"
    with pytest.raises(FileNotFoundError) as missing, named_errors("a.txt"):
        (tmp_path / "none").read_text()
    assert missing.value.filename == str(tmp_path / "none")
