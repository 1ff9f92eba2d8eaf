"""Standard output that is closed, full or not read to its end; and other full disks, blamed on the right file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bertie.cli import main

BERTIE = f"{sys.executable} -m bertie"
FULL = Path("/dev/full")


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)


@pytest.fixture
def command(models: dict[str, str], here: Path) -> str:
    Path("in.txt").write_text("the cat sat on the mat\n" * 4000)
    return f"{BERTIE} tokenize in.txt -m {models['tokenize']}"


def test_closed_standard_output(command: str) -> None:
    message = "bertie: standard output is closed; redirect it to a file or to /dev/null\n"
    for rest in ("--json", "-o out.jsonl"):
        done = run(f"{command} {rest} >&-")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", message)
    assert not Path("out.jsonl").exists()


def test_closed_standard_error_and_input(command: str) -> None:
    """Messages do not end up among the results."""
    done = run(f"{command} --json 2>&-")
    assert done.returncode == 0
    assert [json.loads(line)["row"] for line in done.stdout.splitlines()] == list(range(1, 4001))
    done = run(f"{command.replace('in.txt', 'none.txt')} 2>&-")
    assert (done.returncode, done.stdout) == (1, "")
    done = run(f"{command.replace('in.txt', '-')} <&-")
    assert (done.returncode, done.stderr) == (1, "bertie: standard input is closed; redirect a file or a pipe to it\n")


def test_a_reader_that_stops_early(command: str) -> None:
    done = run(f"{command} --json | head -n 1; exit ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 1
    assert done.returncode == 141  # as of a program that is ended by SIGPIPE


def test_a_reader_that_reads_nothing(models: dict[str, str], here: Path) -> None:
    """The results are few, and still in the buffer when the program ends."""
    done = run(f"(sleep 1; {BERTIE} inspect {models['embed']} --json) | true; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_full_standard_output(command: str, models: dict[str, str]) -> None:
    message = "bertie: standard output: No space left on device\n"
    for rest in (command, f"{BERTIE} inspect {models['embed']}"):
        done = run(f"{rest} > /dev/full")
        assert (done.returncode, done.stderr) == (1, message), rest


@pytest.mark.parametrize(
    ("output", "full", "blamed"),
    [
        ("out.jsonl", ".part", "out.jsonl.part"),
        ("out.jsonl", ".part.json.new", "out.jsonl.part.json.new"),
        ("out.parquet", ".part.parquet", "out.parquet.part.parquet"),
    ],
)
def test_a_full_disk_is_blamed_on_its_file(
    models: dict[str, str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
    full: str,
    blamed: str,
) -> None:
    """The disk is full for files whose names end like that."""
    fsync = os.fsync

    def fail(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr("bertie.data.journal.COMMIT_INTERVAL", 0)
    Path("in.txt").write_text("the cat sat on the mat\n" * 3000)
    assert main(["tokenize", "in.txt", "-m", models["tokenize"], "-o", output]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"bertie: {blamed}: No space left on device")
    safe = [] if full != ".part.parquet" else [f"{output}.part", f"{output}.part.json"]
    assert sorted(path.name for path in here.iterdir()) == sorted(["in.txt", *safe])
