"""`bertie outliers`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import bertie
from bertie.cli import main
from bertie.tasks import outliers

PLACES = ("a mat", "the mat", "mat", "a a mat")
TEXTS = [f"the {noun} {verb} on {at}" for noun in ("cat", "dog") for verb in ("sat", "ran", "sat sat") for at in PLACES]


def test_outliers_are_those_of_python(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("\n".join(TEXTS))
    argv = ["outliers", "in.txt", "--neighbours", "3", "--false-alarms", "0.3", "-m", models["embed"]]
    assert main([*argv, "-o", "out.csv", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    embedder = bertie.Embedder(models["embed"])
    expected = bertie.find_outliers(TEXTS, neighbours=3, false_alarms=0.3, embedder=embedder)
    assert expected.texts
    assert summary["outliers"] == len(expected.texts)
    assert [row["row"] for row in summary["shown"]] == [outlier.index + 1 for outlier in expected.texts]
    assert [row["nearest_text"] for row in summary["shown"]] == [outlier.nearest_text for outlier in expected.texts]
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == TEXTS
    assert [float(row["score"]) for row in rows] == pytest.approx(expected.scores.tolist(), abs=1e-4)
    assert [row["outlier"] for row in rows].count("True") == len(expected.texts)
    assert sorted(path.name for path in here.iterdir()) == ["in.txt", "out.csv"]
    assert main([*argv, "-k", "1"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert "false-alarm rate 30.00%" in printed.err


def test_a_reference(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("find . find :\nthe cat sat on a mat\n")
    Path("known.txt").write_text("\n".join(TEXTS))
    argv = ["outliers", "in.txt", "--reference", "known.txt", "--neighbours", "3", "--false-alarms", "0.2"]
    assert main([*argv, "-m", models["embed"], "-o", "out.jsonl", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["shown"]
    expected = bertie.find_outliers(
        ["find . find :", "the cat sat on a mat"],
        TEXTS,
        neighbours=3,
        false_alarms=0.2,
        embedder=bertie.Embedder(models["embed"]),
    )
    assert [(row["row"], row["nearest_text"]) for row in shown] == [
        (o.index + 1, o.nearest_text) for o in expected.texts
    ]
    assert sorted(path.name for path in here.iterdir()) == ["in.txt", "known.txt", "out.jsonl"]


def test_an_interrupted_run_is_resumed(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("\n".join(TEXTS))
    argv = ["outliers", "in.txt", "--reference", "in.txt", "-m", models["embed"], "-o", "out.jsonl"]
    argv += ["--false-alarms", "0.1", "--neighbours", "3"]
    assert main([*argv[:-1], "2", "-o", "whole.jsonl"]) == 0

    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outliers, "outliers_of", interrupt)
        assert main(argv) == 130
    with monkeypatch.context() as patch:
        patch.setattr(bertie.Embedder, "embed_each", lambda self, texts: iter(()))  # nothing is left to embed
        assert main([*argv[:-1], "2", "--resume"]) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert [path.name for path in here.glob("*.part*")] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--neighbours", "0"], "--neighbours 0 must be at least 1"),
        (["--false-alarms", "2"], "--false-alarms 2 must be a rate between 0 and 1"),
        (["--resume"], "--resume needs an output file"),
        (["--method", "fast"], "must be one of auto, exact, approximate"),
    ],
)
def test_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["outliers", *TEXTS, *argv])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert message in capsys.readouterr().err
