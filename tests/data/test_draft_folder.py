"""Folders that are written atomically: complete, old or absent; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bertie.data import draft_folder as module
from bertie.data.draft_folder import draft_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_and_replaced(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with draft_folder(tmp_path / "a" / "out") as draft:
            (draft / text).write_text(text)
            assert text not in (names(tmp_path / "a" / "out") if (tmp_path / "a" / "out").exists() else [])
        assert names(tmp_path / "a") == ["out"]
        assert names(tmp_path / "a" / "out") == [text]


@pytest.mark.parametrize("exchange", [True, False])
def test_an_error_keeps_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    with draft_folder(tmp_path / "out") as draft:
        (draft / "old").touch()

    def write_half() -> None:
        with draft_folder(tmp_path / "out") as draft:
            (draft / "new").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["old"]
    with draft_folder(tmp_path / "out") as draft:
        (draft / "new").touch()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


KILLED = """
import os, pathlib, sys, time
from bertie.data.draft_folder import draft_folder
with draft_folder(pathlib.Path(sys.argv[1])) as draft:
    (draft / "half").touch()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_drafts_of_killed_processes_are_removed_and_others_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "out")]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 2
        os.kill(writers[0].pid, signal.SIGKILL)
        writers[0].wait()
        (tmp_path / ".out.notes").mkdir()  # of somebody else
        with draft_folder(tmp_path / "out") as draft:
            (draft / "whole").touch()
        assert names(tmp_path / "out") == ["whole"]
        assert len(names(tmp_path)) == 3  # with the draft of the second, which still runs
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    with draft_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".out.notes", "out"]


def test_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders cannot be exchanged, the old one is restored by the next process."""
    with draft_folder(tmp_path / "out") as draft:
        (draft / "old").touch()
    monkeypatch.setattr(module, "_exchange", lambda a, b: False)
    pid = os.fork()
    if not pid:
        real, calls = os.rename, [0]

        def rename(a: Path, b: Path) -> None:
            calls[0] += 1
            if calls[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            real(a, b)

        os.rename = rename
        with draft_folder(tmp_path / "out"):
            pass
        os._exit(0)
    os.waitpid(pid, 0)
    assert not (tmp_path / "out").exists()
    with pytest.raises(OSError, match="full"), draft_folder(tmp_path / "out"):
        raise OSError("full")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["old"]
