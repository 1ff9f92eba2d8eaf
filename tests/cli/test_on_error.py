"""Rows that cannot be processed: --skip-empty and --on-error stop, skip and null."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from bertie.cli import main
from tests.cli.test_stream import interrupt_after

LONG = "the cat " * 60
ROWS: list[Any] = ["the cat", None, "", LONG, "a dog", 7, "  ", "the mat"]
GOOD = [1, 5, 8]


@pytest.fixture
def rows(here: Path) -> Path:
    (here / "in.jsonl").write_text(
        "".join(json.dumps({"id": f"r{i}", "text": text}) + "\n" for i, text in enumerate(ROWS))
    )
    return here


def embed(models: dict[str, str], *flags: str) -> int:
    return main(["embed", "in.jsonl", "-m", models["embed"], "--overflow", "error", *flags])


@pytest.mark.usefixtures("rows")
def test_stop_is_the_default(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(models, "-o", "out.jsonl") == 1
    assert "in.jsonl, row 2: no value in column 'text'" in (message := capsys.readouterr().err)
    assert message.endswith("; --on-error skip leaves such rows out\n")
    assert main(["pairs", "in.jsonl", "-m", models["embed"]]) == 1
    assert "--on-error" not in capsys.readouterr().err, "it has no such flag"
    assert embed(models, "-o", "out.jsonl", "--skip-empty") == 1
    assert "in.jsonl, row 6: int 7, not text" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


@pytest.mark.usefixtures("rows")
def test_skip(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(models, "-o", "out.jsonl", "--skip-empty", "--on-error", "skip") == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(record["row"], record["id"]) for record in records] == [(1, "r0"), (5, "r4"), (8, "r7")]
    assert "error" not in records[0]
    error = capsys.readouterr().err
    assert "in.jsonl, row 4: the text has" in error
    assert "rows without text: 3 skipped; rows with errors: 2 skipped" in error
    assert embed(models, "-o", "out.npy", "--skip-empty", "--on-error", "skip", "-q") == 0
    assert capsys.readouterr().err == ""
    vectors = np.load("out.npy")
    assert vectors.tolist() == [pytest.approx(record["vector"]) for record in records]
    assert embed(models, "--skip-empty", "--on-error", "skip") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["row", "1", "5", "8"]


@pytest.mark.usefixtures("rows")
def test_null(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert embed(models, "-o", "out.jsonl", "--on-error", "null") == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == list(range(1, 9))
    failed = [record["row"] for record in records if record["vector"] is None]
    assert failed == [2, 4, 6]  # empty texts have embeddings
    assert all((record["error"] is None) == (record["vector"] is not None) for record in records)
    assert "row 4: the text has" in records[3]["error"]
    assert "rows with errors: 3 without a result" in capsys.readouterr().err
    for name in ("out.csv", "out.parquet", "out.npy"):
        assert embed(models, "-o", name, "--on-error", "null") == 0
    with open("out.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["row"] for row in table if row["error"]] == ["2", "4", "6"]
    assert [i + 1 for i, row in enumerate(np.load("out.npy")) if np.isnan(row).all()] == failed
    assert parquet.read_table("out.parquet")["error"].null_count == 5


@pytest.mark.usefixtures("rows")
def test_resumed(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.cli.stream.CHUNK_ROWS", 3)
    monkeypatch.setattr("bertie.data.journal.COMMIT_INTERVAL", 0)
    for flags in (["--on-error", "null"], ["--on-error", "skip", "--skip-empty"]):
        for name in ("out.jsonl", "out.npy", "out.parquet"):
            assert embed(models, "-o", name, *flags, "--overwrite") == 0
            whole = Path(name).read_bytes()
            argv = ["embed", "in.jsonl", "-m", models["embed"], "--overflow", "error", "-o", name, *flags]
            interrupt_after(monkeypatch, 2, [*argv, "--overwrite"])
            Path(name).unlink()
            assert main([*argv, "--resume"]) == 0
            assert Path(name).read_bytes() == whole, (flags, name)


def test_many_failures_are_found(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than are retried one by one; the first are listed."""
    Path("in.jsonl").write_text("".join(json.dumps({"text": LONG if i % 3 else f"cat {i}"}) + "\n" for i in range(40)))
    assert embed(models, "--json", "--on-error", "skip") == 0
    output = capsys.readouterr()
    assert [json.loads(line)["row"] for line in output.out.splitlines()] == list(range(1, 41, 3))
    assert len(output.err.splitlines()) == 6
    assert "rows with errors: 26 skipped" in output.err


def test_pairs(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.csv").write_text("query,passage\nthe cat,a dog\nthe cat,\n,a dog\n")
    argv = ["rerank", "in.csv", "--json", "-m", models["rerank"]]
    assert main([*argv, "--skip-empty"]) == 0
    assert [json.loads(line)["row"] for line in capsys.readouterr().out.splitlines()] == [1]
    assert main([*argv, "--on-error", "null"]) == 0
    assert [json.loads(line)["score"] is None for line in capsys.readouterr().out.splitlines()] == [False, True, True]


def test_what_cannot_be_null(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["rerank", "a query", "a", "b"], ["similarity", "a", "b"]):
        assert main([*argv, "--on-error", "null", "-m", models[argv[0]]]) == 2
        assert "--on-error null is for a file of pairs" in capsys.readouterr().err


def test_errors_that_no_row_has_are_raised(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.jsonl").write_text('{"text": "the [MASK] sat"}\n')
    assert main(["fill", "in.jsonl", "-m", models["fill"], "--candidates", "xyzzy", "--on-error", "skip"]) == 1
    assert "xyzzy" in capsys.readouterr().err


LINES = [b'{"text": oops', b'{"id": 1, "text": "the cat"}', b"[1]", b'{"id": 2, "text": "caf\xe9"}', b'"a dog"', b"{}"]


def test_lines_that_cannot_be_read(here: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (here / "in.jsonl").write_bytes(b"\n".join(LINES) + b"\n")
    assert embed(models, "-o", "out.jsonl") == 1
    assert "in.jsonl, line 1 is not JSON" in capsys.readouterr().err
    assert embed(models, "-o", "out.jsonl", "--on-error", "skip") == 0
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [(record["row"], record["id"]) for record in records] == [(2, 1), (5, None)]
    error = capsys.readouterr().err
    for message in ("line 1 is not JSON", "line 3 is list", "line 4 is not UTF-8", "row 6: no value", "4 skipped"):
        assert message in error
    assert embed(models, "-o", "null.jsonl", "--on-error", "null") == 0
    records = [json.loads(line) for line in Path("null.jsonl").read_text().splitlines()]
    assert [bool(record["error"]) for record in records] == [True, False, True, True, False, True]
    (here / "in.jsonl").write_bytes(b"oops\n[]\n")
    capsys.readouterr()
    assert embed(models, "--on-error", "skip") == 1
    assert "in.jsonl, line 2 is list" in capsys.readouterr().err, "there is nothing that can be read"


def test_rows_of_other_lengths(here: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (here / "in.csv").write_text("text,label\na cat,1,2\nthe dog,1\n")
    assert main(["embed", "in.csv", "-m", models["embed"]]) == 1
    assert "in.csv, row 1 (line 2) has 3 fields and the header 2" in capsys.readouterr().err
    assert main(["embed", "in.csv", "-m", models["embed"], "--json", "--on-error", "skip"]) == 0
    assert json.loads(capsys.readouterr().out)["row"] == 2
