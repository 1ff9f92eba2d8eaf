"""Resumable files under concurrent writers and kills: the bytes of an uninterrupted run, or an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.data.journal import ResumableFile, RowDigest
from bertie.data.writers import JsonlWriter, make_writer
from bertie.errors import BertieError, InputError

SETTINGS = {"model": "m"}


def write(file: ResumableFile, last: int = 10) -> None:
    writer = JsonlWriter()
    with file:
        file.start(writer)
        for row in range(file.rows, last):
            file.append(writer.encode([{"row": row}]), 1)
        file.finish()


def interrupt(final: Path, rows: int = 5) -> None:
    """Leave the files of a run that was killed after some rows."""
    writer = make_writer(final.name, {"vector": [np.float32]}, 4)
    file = ResumableFile(final, SETTINGS, resume=False, overwrite=False)
    file.start(writer)
    for row in range(rows):
        file.append(writer.encode([{"row": row, "vector": np.full(4, row, np.float32)}]), 1)
    file.commit()
    assert file._file is not None
    file._file.close()
    getattr(file, "close", lambda: None)()


def test_two_resumed_runs_do_not_corrupt_the_output(tmp_path: Path) -> None:
    """The second is created while the first one runs; without a lock it would start after it, and overwrite it."""
    final = tmp_path / "out.jsonl"
    interrupt(final)
    first = ResumableFile(final, SETTINGS, resume=True, overwrite=False)
    with pytest.raises(InputError, match=r"out\.jsonl is being written by another process"):
        ResumableFile(final, SETTINGS, resume=True, overwrite=False)
    write(first)
    assert [json.loads(line)["row"] for line in final.read_bytes().splitlines()] == list(range(10))
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def test_the_lock_is_held_until_the_journal_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts while another one renames its file is refused, at each step of it."""
    final = tmp_path / "out.jsonl"
    refused: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            try:
                ResumableFile(final, SETTINGS, resume=True, overwrite=False)
            except BertieError as error:
                refused.append(str(error))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, call)

    interrupt(final)
    watch(os, "replace")
    watch(Path, "unlink")
    write(ResumableFile(final, SETTINGS, resume=True, overwrite=False))
    assert len(refused) >= 4
    assert set(refused) == {f"{final} is being written by another process"}


def test_a_lock_file_that_was_removed_is_not_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened the lock file just before its owner removed it locks the new one."""
    from bertie.data import atomic

    removed: list[bool] = []
    original = atomic.lock_file

    def lock(handle: int, path: Path) -> None:
        original(handle, path)
        if not removed:
            removed.append(True)
            os.unlink(tmp_path / "lock")

    monkeypatch.setattr(atomic, "lock_file", lock)
    held = atomic.PathLock(tmp_path / "lock", tmp_path)
    assert (tmp_path / "lock").exists()
    with pytest.raises(InputError, match="another process"):
        atomic.PathLock(tmp_path / "lock", tmp_path)
    held.release()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("name", ["out.jsonl", "out.npy", "out.csv.gz"])
def test_changed_rows_are_noticed(tmp_path: Path, name: str) -> None:
    final = tmp_path / name
    interrupt(final)
    part = tmp_path / f"{name}.part"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(InputError, match=r"is corrupt: its 5 rows differ from the checksum"):
        ResumableFile(final, SETTINGS, resume=True, overwrite=False)
    assert not (tmp_path / f"{name}.part.lock").exists()


def test_killed_between_the_header_of_an_array_and_its_rename(tmp_path: Path) -> None:
    final = tmp_path / "out.npy"
    interrupt(final)
    writer = make_writer(final.name, {}, 4)
    writer.finalize(tmp_path / "out.npy.part")
    with ResumableFile(final, SETTINGS, resume=True, overwrite=False) as file:
        file.start(writer)
        file.finish()
    assert np.array_equal(np.load(final), np.repeat(np.arange(5, dtype=np.float32)[:, None], 4, 1))


@pytest.mark.parametrize("journal", ["{}", "[]", '{"rows": -1}', '{"rows": "x"}', "null", "\0\0"])
def test_corrupt_journals(tmp_path: Path, journal: str) -> None:
    final = tmp_path / "out.jsonl"
    interrupt(final)
    (tmp_path / "out.jsonl.part.json").write_text(journal)
    with pytest.raises(InputError, match="is corrupt"):
        ResumableFile(final, SETTINGS, resume=True, overwrite=False)


def test_row_digest_does_not_depend_on_the_grouping() -> None:
    one, other, joined = RowDigest(), RowDigest(), RowDigest()
    one.update(["a", "b\ud800", "c"])
    other.update(["a"])
    other.update(["b\ud800", "c"])
    joined.update(["ab\ud800", "c"])
    assert one.hexdigest() == other.hexdigest() != joined.hexdigest()


# Processes that resume the same output at once and are killed at random, until one of them completes it.
WRITERS = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from bertie.data import journal
from bertie.data.journal import AlreadyComplete, ResumableFile
from bertie.data.writers import make_writer
from bertie.errors import BertieError

journal.COMMIT_INTERVAL = 0
seed, rounds, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
draw = random.Random(seed)
SCHEMA = {"row": int, "text": str, "vector": [np.float32]}
ROWS = [{"row": i, "text": "x" * (i * 7 % 40), "vector": np.full(4, i, np.float32)} for i in range(24)]

def run(final, loading, pause):
    try:
        file = ResumableFile(final, {"a": 1}, resume=True, overwrite=False)
        time.sleep(loading)
        writer = make_writer(final.name, SCHEMA, 4)
        with file:
            file.start(writer)
            for i in range(file.rows, len(ROWS), 2):
                file.append(writer.encode(ROWS[i : i + 2]), 2)
                time.sleep(pause)
            file.finish()
    except AlreadyComplete:
        return 0
    except BertieError as error:
        return 3 if "being written by another process" in str(error) else 4
    return 0

def start(*args):
    child = os.fork()
    if not child:
        code = 5
        try:
            code = run(*args)
        finally:
            os._exit(code)
    return child

totals = {}
for round in range(rounds):
    suffix = draw.choice([".jsonl", ".npy", ".csv.gz", ".parquet", ".jsonl"])
    whole, final = folder / f"whole{suffix}", folder / f"{round}{suffix}"
    if not whole.exists():
        assert run(whole, 0, 0) == 0
    expected, done, running = whole.read_bytes(), False, {}
    while not done or running:
        if not done and len(running) < 4:
            child = start(final, draw.choice([0, 0, draw.uniform(0, 0.05)]), draw.choice([0, 0, 0.002]))
            running[child] = time.monotonic() + draw.uniform(0, 0.06) if draw.random() < 0.7 else None
        time.sleep(draw.uniform(0, 0.012))
        for child, deadline in list(running.items()):
            if deadline is not None and time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            del running[child]
            code = os.waitstatus_to_exitcode(status)
            totals[code] = totals.get(code, 0) + 1
            if code == 0:
                done = True
            assert code in (0, 3, -signal.SIGKILL), f"seed {seed}, round {round}: exit status {code}"
            assert not done or final.read_bytes() == expected, f"seed {seed}, round {round}: {final.name} is corrupt"
    assert run(final, 0, 0) == 0 and final.read_bytes() == expected
    left = [name for name in os.listdir(folder) if name.startswith(f"{round}.") and name != final.name]
    assert not left, f"seed {seed}, round {round}: {left} left"
print(totals)
"""


def test_many_writers_killed_and_resumed_at_random(tmp_path: Path) -> None:
    seed, rounds = "1", "15"
    argv = [sys.executable, "-c", WRITERS, seed, rounds, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
