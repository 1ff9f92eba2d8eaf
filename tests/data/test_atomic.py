"""Files that are written atomically, by several processes at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertie.data.atomic import atomic_write


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
