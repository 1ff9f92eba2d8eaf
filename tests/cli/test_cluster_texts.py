"""`bertie cluster`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import bertie
from bertie.cli import main

TEXTS = ["the cat sat", "a dog ran", "the mat", "a cat sat on the mat", "the dog", "find a cat"]


def test_clusters_are_those_of_python(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    argv = ["cluster", "in.jsonl", "--clusters", "2", "-m", models["embed"], "-o", "out.csv"]
    assert main([*argv, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    expected = bertie.cluster_texts(TEXTS, bertie.Embedder(models["embed"]), clusters=2)
    assert [(own["texts"], own["label"]) for own in summary["clusters"]] == [
        (own.size, own.label) for own in expected.clusters
    ]
    assert summary["map"] == "out.html"
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["cluster"]) - 1 for row in rows] == expected.assigned.tolist()
    assert [row["text"] for row in rows] == TEXTS
    assert Path("out.html").read_text("utf-8").count("<circle") == len(TEXTS)
    assert sorted(path.name for path in here.iterdir()) == ["in.jsonl", "out.csv", "out.html"]
    assert main(argv) == 1
    assert "out.csv already exists" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0


def test_clusters_are_printed(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *TEXTS, "-m", models["embed"]]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split() == ["cluster", "texts", "label", "example"]
    assert "texts: 6; clusters: 2; silhouette: " in output.err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["--clusters", "0"], 2, "--clusters 0 must be at least 1"),
        (["--clusters", "9"], 1, "clusters=9 must lie between 1 and the number of texts, 6"),
        (["-o", "out.txt"], 1, "out.txt: the suffix must be one of"),
        (["--resume"], 2, "--resume needs an output file"),
    ],
)
def test_errors(
    models: dict[str, str],
    here: Path,
    argv: list[str],
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["cluster", *TEXTS, "-m", models["embed"], *argv]) == status
    assert message in capsys.readouterr().err
