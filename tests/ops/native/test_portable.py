"""The harness of `make test-emulated`, on this CPU: it must agree with the signatures and results of the libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.emulated import HARNESS, LIBRARIES

import bertie
from bertie.ops.native import encoder


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and g++")
@pytest.mark.skipif(encoder.library() is None, reason="the library was not built")
def test_every_instruction_level_of_this_cpu(tmp_path: Path) -> None:
    package = Path(bertie.__file__).parents[1]
    libraries = [package / f"{name}.so" for name in LIBRARIES]
    program = tmp_path / "harness"
    options = ["-O1", "-std=c++17", *(f"-Wl,-rpath,{path.parent}" for path in libraries[:1]), "-lpthread"]
    subprocess.run(["g++", str(HARNESS), *map(str, libraries), *options, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.endswith("WRONG")]
    assert done.returncode == 0, done.stderr
    assert lines[-1] == "all checks passed"
    assert any(line.startswith("level 0 ") for line in lines)
