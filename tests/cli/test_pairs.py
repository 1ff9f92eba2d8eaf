"""`bertie pairs`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import bertie
from bertie.cli import main
from bertie.tasks import paraphrases

TEXTS = ["the cat sat", "a dog ran", "the mat", "a cat sat on the mat", "the dog", "find a cat"]


def test_pairs_are_those_of_python(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("\n".join(TEXTS))
    argv = ["pairs", "in.txt", "--threshold", "-0.5", "-k", "2", "-m", models["embed"]]
    assert main([*argv, "-o", "out.csv", "--json"]) == 0
    expected = bertie.paraphrase_pairs(TEXTS, -0.5, 2, embedder=bertie.Embedder(models["embed"]))
    assert json.loads(capsys.readouterr().out) == {"output": "out.csv", "texts": 6, "pairs": len(expected)}
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["row_a"]) - 1, int(row["row_b"]) - 1) for row in rows] == [(p.a, p.b) for p in expected]
    assert [(row["text_a"], row["text_b"]) for row in rows] == [(TEXTS[p.a], TEXTS[p.b]) for p in expected]
    assert sorted(path.name for path in here.iterdir()) == ["in.txt", "out.csv"]
    assert main(argv) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(expected) + 1
    assert main([*argv, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["row_a"], record["row_b"]) for record in records] == [(p.a + 1, p.b + 1) for p in expected]


def test_an_interrupted_run_is_resumed(
    models: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in.txt").write_text("\n".join(TEXTS))
    argv = ["pairs", "in.txt", "-m", models["embed"], "-o", "out.jsonl"]

    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(paraphrases, "mine_pairs", interrupt)
        assert main(argv) == 130
    with monkeypatch.context() as patch:
        patch.setattr(bertie.Embedder, "embed_each", lambda self, texts: iter(()))  # nothing is left to embed
        assert main([*argv, "--resume", "--threshold", "-1"]) == 0
    assert len(Path("out.jsonl").read_text().splitlines()) == 15
    assert [path.name for path in here.glob("*.part*")] == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-k", "0"], "-k 0 must be at least 1"),
        (["--threshold", "2"], "--threshold 2.0 must lie between -1 and 1"),
        (["--resume"], "--resume needs an output file"),
        (["--method", "fast"], "must be one of auto, exact, approximate"),
    ],
)
def test_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["pairs", *TEXTS, *argv])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert message in capsys.readouterr().err
