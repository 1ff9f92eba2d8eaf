"""Resumed outputs: the input is the same as when the run was interrupted, and nobody else writes them."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from bertie.cli import main
from bertie.data.journal import ResumableFile

TEXTS = [f"the cat {i} sat on a mat" for i in range(12)]


def parquet_bytes(texts: list[str]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), file, compression="none", use_dictionary=False)
    return file.getvalue()


def lines(texts: list[str]) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


# Each gives files of the same size for texts of the same lengths.
FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "in.txt": lines,
    "in.txt.gz": lambda texts: gzip.compress(lines(texts), compresslevel=0, mtime=0),
    "in.csv": lambda texts: lines(["text", *texts]),
    "in.jsonl": lambda texts: lines([json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)]),
    "in.parquet": parquet_bytes,
}


def interrupt_after(monkeypatch: pytest.MonkeyPatch, chunks: int, argv: list[str]) -> None:
    """Run a command that is interrupted after some chunks."""
    append = ResumableFile.append

    def count(file: ResumableFile, *args: object) -> None:
        nonlocal chunks
        append(file, *args)  # type: ignore[arg-type]
        chunks -= 1
        if not chunks:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFile, "append", count)
        assert main(argv) == 130


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.cli.stream.CHUNK_ROWS", 4)
    monkeypatch.setattr("bertie.data.journal.COMMIT_INTERVAL", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", FORMATS)
def test_an_edited_input_is_not_resumed(
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    original = FORMATS[name](TEXTS)
    Path(name).write_bytes(original)
    argv = ["tokenize", name, "-m", models["tokenize"], "-o"]
    interrupt_after(monkeypatch, 2, [*argv, "out.jsonl"])
    edited = FORMATS[name]([TEXTS[0].replace("cat", "dog"), *TEXTS[1:]])
    assert len(edited) == len(original)
    Path(name).write_bytes(edited)
    capsys.readouterr()
    assert main([*argv, "out.jsonl", "--resume"]) == 1
    err = capsys.readouterr().err
    assert f"{name} has changed since out.jsonl.part was started: its first 8 rows differ from those" in err
    assert not Path("out.jsonl").exists()
    Path(name).write_bytes(original)
    assert main([*argv, "out.jsonl", "--resume"]) == 0
    assert main([*argv, "whole.jsonl"]) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert sorted(os.listdir()) == sorted([name, "out.jsonl", "whole.jsonl"])


@pytest.mark.usefixtures("small_chunks")
def test_fewer_rows_and_other_ids_are_not_resumed(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f'{{"id": {i}, "text": "cat"}}' for i in range(10, 22)]
    Path("in.jsonl").write_bytes(lines(rows))
    argv = ["tokenize", "in.jsonl", "-m", models["tokenize"], "-o", "out.jsonl"]
    interrupt_after(monkeypatch, 2, argv)
    fewer = lines(rows[:5])
    for changed in (fewer + b" " * (len(lines(rows)) - len(fewer)), lines(["".join(rows[0].split("0", 1)), *rows[1:]])):
        Path("in.jsonl").write_bytes(changed.ljust(len(lines(rows))))
        assert main([*argv, "--resume"]) == 1
        assert "its first 8 rows differ from those of the interrupted run" in capsys.readouterr().err


@pytest.mark.usefixtures("small_chunks")
def test_other_texts_and_another_context_are_not_resumed(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["-m", models["tokenize"], "-o", "out.jsonl"]
    interrupt_after(monkeypatch, 1, ["tokenize", *TEXTS, *argv])
    assert main(["tokenize", "a dog", *TEXTS[1:], *argv, "--resume"]) == 1
    assert "was started with input=" in capsys.readouterr().err
    Path("context.txt").write_text("a cat sat on the mat")
    questions = ["answer", *["the cat"] * 9, "--context", "context.txt", "-m", models["answer"], "-o", "answers.jsonl"]
    interrupt_after(monkeypatch, 1, questions)
    Path("context.txt").write_text("a dog sat on the mat")
    assert main([*questions, "--resume"]) == 1
    assert "was started with context_digest=" in capsys.readouterr().err


def test_the_second_of_two_writers_is_refused(models: dict[str, str], here: Path) -> None:
    """At once, before its model is loaded; the first one is not disturbed."""
    argv = [sys.executable, "-m", "bertie", "tokenize", "-", "-m", models["tokenize"], "-o", "out.jsonl", "--resume"]
    first = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdin is not None
    first.stdin.write("the cat\n")
    first.stdin.flush()
    deadline = time.monotonic() + 60
    while not Path("out.jsonl.part.lock").exists():
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for flag in ("--resume", "--overwrite"):
        second = subprocess.run([*argv[:-1], flag], input="a dog\n", capture_output=True, text=True)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr == "bertie: out.jsonl is being written by another process\n"
    first.communicate("a dog\n")
    assert first.returncode == 0
    assert [json.loads(line)["row"] for line in Path("out.jsonl").read_text().splitlines()] == [1, 2]
    assert os.listdir() == ["out.jsonl"]


def test_the_titles_of_a_table_stand_out(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["tokenize", "the cat", "-m", models["tokenize"]]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(argv) == 0
    first, rest = plain.split("\n", 1)
    assert capsys.readouterr().out == f"\x1b[1m{first}\x1b[0m\n{rest}"


def test_progress_is_for_files(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bertie.data.progress.FIRST", 0)
    Path("in.txt").write_text("the cat\n")
    for source, shown in (("in.txt", True), ("the cat", False)):
        assert main(["tokenize", source, "-m", models["tokenize"]]) == 0
        assert ("tokenize: 1 rows" in capsys.readouterr().err) == shown
