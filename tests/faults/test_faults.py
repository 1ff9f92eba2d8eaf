"""A few random schedules of the fault injection; `make test-faults` runs hundreds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import shim

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or os.uname().sysname != "Linux", reason="the fault injection needs Linux and cc"
)


def test_schedules(tmp_path: Path) -> None:
    """Every result of an interrupted or failing command is absent, complete and old, or complete and new."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.faults", "--schedules", "8", "--seed", "1", "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["schedules"] == 8


ATTEMPTS = """
import errno, os, sys
errors = []
for name in sys.argv[1:]:
    try:
        with open(name, "wb", buffering=0) as file:
            errors.append(file.write(b"12345678"))
            os.fsync(file.fileno())
        os.rename(name, name + ".new")
        os.unlink(name + ".new")
    except OSError as error:
        errors.append(errno.errorcode[error.errno])
print(*errors)
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"CALLS": "write", "AT": 2, "ERRNO": 28}, "8 ENOSPC 8"),
        ({"CALLS": "write", "AT": 2, "ERRNO": 28, "TIMES": -1}, "8 ENOSPC ENOSPC"),
        ({"CALLS": "write", "AT": 1, "SHORT": 1}, "4 8 8"),
        ({"CALLS": "sync", "AT": 3, "ERRNO": 5}, "8 8 8 EIO"),
        ({"CALLS": "rename", "AT": 1, "ERRNO": 13}, "8 EACCES 8 8"),
        ({"CALLS": "unlink", "AT": 1, "ERRNO": 30}, "8 EROFS 8 8"),
        ({"CALLS": "open", "AT": 1, "ERRNO": 24}, "EMFILE 8 8"),
        ({"CALLS": "write,sync", "AT": 0}, "8 8 8"),
    ],
)
def test_the_shim(tmp_path: Path, settings: dict[str, object], expected: str) -> None:
    """It fails the calls that it is told to, and only those."""
    library = shim.compile_shim(tmp_path)
    names = [str(tmp_path / name) for name in "abc"]
    env = {f"FAULTS_{name}": str(value) for name, value in (settings | {"PATH": tmp_path}).items()}
    env |= {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, *names], env=os.environ | env, capture_output=True, text=True
    )
    assert done.stdout.split() == expected.split(), done.stderr


def test_a_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    library = shim.compile_shim(tmp_path)
    env = {"FAULTS_CALLS": "write", "FAULTS_AT": "1", "FAULTS_SIGNAL": "9", "FAULTS_WHEN": "middle"}
    env |= {"LD_PRELOAD": str(library), "FAULTS_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ATTEMPTS, str(tmp_path / "a")], env=os.environ | env)
    assert done.returncode == -9
    assert (tmp_path / "a").read_bytes() == b"1234"
