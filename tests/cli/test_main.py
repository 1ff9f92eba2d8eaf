"""What an interrupted command prints: the command that continues it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import pytest

from bertie.cli import main
from bertie.cli.main import build_parser, resume_command
from tests.cli.test_stream import interrupt_after


def test_the_command_that_continues(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bertie.cli.stream.CHUNK_ROWS", 2)
    monkeypatch.setattr("bertie.data.journal.COMMIT_INTERVAL", 0)
    Path("my texts.txt").write_text("the cat\n" * 8)
    argv = ["tokenize", "my texts.txt", "-m", models["tokenize"], "-o", "out.jsonl"]
    interrupt_after(monkeypatch, 2, argv)
    error = capsys.readouterr().err
    assert error.startswith("bertie: interrupted; 4 rows are safe in out.jsonl.part; continue with: bertie tokenize ")
    assert "--resume continues" not in error
    _, *again = shlex.split(error.partition("continue with: ")[2])
    assert main(again) == 0
    assert len(Path("out.jsonl").read_text().splitlines()) == 8


def test_nothing_to_continue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    parser = build_parser()
    monkeypatch.setattr(sys.modules["bertie.cli.main"], "build_parser", lambda: parser)
    for leaf in parser._subparsers._group_actions[0].choices.values():
        leaf.set_defaults(run=interrupt)
    assert main(["embed", "a cat"]) == 130
    assert capsys.readouterr().err == "bertie: interrupted\n"


def test_commands() -> None:
    assert resume_command(["index", "d", "-o", "i"], "--refresh") == "bertie index d -o i --refresh"
    assert resume_command(["embed", "-o", "x.npy", "--resume", "--", "-a"], "--resume").endswith("x.npy --resume -- -a")
    assert resume_command(["embed", "-", "-o", "x.npy"], "--resume").endswith("--resume, with the same standard input")
