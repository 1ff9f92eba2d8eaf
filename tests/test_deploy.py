"""The files in deploy/: everything pinned by a hash, limits set, and commands that parse."""

from __future__ import annotations

import re
import runpy
import shlex
from configparser import RawConfigParser
from pathlib import Path

import pytest

from bertie.cli.main import build_parser

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    return pinned((DEPLOY / "requirements.txt").read_text())


@pytest.fixture(scope="module")
def containerfile() -> str:
    lines = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def test_every_requirement_has_hashes_and_the_tested_version(locked: dict[str, str]) -> None:
    entries = re.split(r"\n(?=\S)", (DEPLOY / "requirements.txt").read_text().strip())[1:]
    assert len(entries) == len(locked)
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry), entry
    tested = pinned((ROOT / "constraints.txt").read_text())
    assert {name: version for name, version in locked.items() if name != "setuptools"} == {
        name: tested[name] for name in locked if name != "setuptools"
    }
    lock = runpy.run_path(str(DEPLOY / "lock.py"))
    needed = {canonical(re.split(r"[\s<>=!;\[]", line)[0]) for line in lock["requirements"]()}
    assert needed <= set(locked)
    assert "torch" not in locked


def test_the_container_downloads_nothing_without_a_hash(containerfile: str) -> None:
    assert set(re.findall(r"^FROM (\S+)", containerfile, re.MULTILINE)) == {"${BASE}"}
    assert "@sha256:*" in containerfile  # a base image without a digest is refused
    installs = re.findall(r"pip install [^&\n]*", containerfile)
    assert len(installs) == 3
    for install in installs:
        assert "--require-hashes" in install or "--no-index" in install, install
        assert "--no-deps" in install, install
    version = pinned((ROOT / "constraints.txt").read_text())["torch"]
    assert set(re.findall(r"torch==([\d.]+)", (DEPLOY / "Containerfile").read_text())) == {version}


def test_commands_parse(containerfile: str) -> None:
    comments = (DEPLOY / "Containerfile").read_text().replace("\\\n#", " ")
    (run,) = re.findall(r"podman run .* bertie (--.*)", comments)
    (start,) = re.findall(r"^ExecStart=\S+/bertie (.*)", (DEPLOY / "bertie.service").read_text(), re.MULTILINE)
    for command in (f"serve {run}", start, "serve --host 127.0.0.1"):
        assert build_parser().parse_args(shlex.split(command)).verb == "serve"
    for limit in ("--memory ", "--pids-limit ", "--ulimit nofile=", "--read-only", "--cap-drop all"):
        assert limit in comments


def test_the_unit_limits_memory_tasks_and_files() -> None:
    unit = RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    unit.optionxform = str
    unit.read(DEPLOY / "bertie.service")
    service = unit["Service"]
    for name in ("MemoryHigh", "MemoryMax", "MemorySwapMax", "TasksMax", "LimitNOFILE"):
        assert re.fullmatch(r"\d+[GM]?", service[name]), name
    assert int(service["TasksMax"]) > 512
