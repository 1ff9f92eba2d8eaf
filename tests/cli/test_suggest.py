"""`bertie suggest`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import bertie
from bertie.cli import main

TEXTS = ["the cat sat", "a dog ran", "the mat", "a cat sat on the mat", "the dog", "find a cat"]


def test_suggestions_are_those_of_python(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pool.jsonl").write_text("".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(TEXTS)))
    Path("done.csv").write_text("text,label\nthe dog,x\n")
    argv = ["suggest", "pool.jsonl", "--column", "body", "--labelled", "done.csv", "-k", "3", "-m", models["classify"]]
    assert main([*argv, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ours = bertie.suggest(TEXTS, 3, model=models["classify"], labelled=["the dog"])
    assert [(record["row"], record["id"], record["text"]) for record in records] == [
        (suggestion.index + 1, suggestion.index, suggestion.text) for suggestion in ours
    ]
    assert [(record["score"], record["reason"]) for record in records] == [(s.score, s.reason) for s in ours]
    assert main([*argv, "-o", "out.csv"]) == 0
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["text"], row["label"]) for row in rows] == [(suggestion.text, "") for suggestion in ours]


def test_without_a_head_and_with_a_wrong_one(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suggest", *TEXTS, "-k", "2", "-m", models["embed"], "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 2
    assert all("similar texts" in record["reason"] for record in records)
    assert main(["suggest", *TEXTS, "-k", "0", "-m", models["embed"]]) == 2
    assert main(["suggest", *TEXTS, "--head", "answer", "-m", models["answer"]]) == 1
    assert "head='answer' must be for classification or tagging: there is none" in capsys.readouterr().err
