"""`bertie drift`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bertie
from bertie.cli import main

OLD = ["the cat sat", "a dog ran", "the mat", "a cat sat on the mat", "the dog", "find a cat"]
NEW = ["the cat", "a dog", "a mat", "find the dog"]


def test_drift_is_that_of_python(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.txt").write_text("\n".join(OLD))
    Path("new.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in NEW))
    argv = ["drift", "old.txt", "new.jsonl", "-m", models["embed"], "-k", "2", "--permutations", "99"]
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    embedder = bertie.Embedder(models["embed"])
    expected = bertie.detect_drift(OLD, NEW, embedder, top_k=2, permutations=99)
    assert record["p_value"] == expected.p_value
    assert record["mmd"] == pytest.approx(expected.mmd, rel=1e-4)
    assert [item["row"] - 1 for item in record["new"]] == [item.index for item in expected.new_texts]
    assert [item["text"] for item in record["old"]] == [item.text for item in expected.old_texts]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["file", "row", "score", "text"]
    assert lines[-1].startswith(f"p = {expected.p_value:.4f}: ")


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["-", "-"], 2, "not both"),
        (["old.txt", "nothing.txt"], 1, "no such file"),
        (["old.txt", "old.txt", "--sample", "1"], 2, "--sample 1 must be at least 2"),
        (["old.txt", "old.txt", "--permutations", "5"], 2, "--permutations 5 must be at least 19"),
    ],
)
def test_errors(here: Path, argv: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.txt").write_text("\n".join(OLD))
    assert main(["drift", *argv]) == status
    assert message in capsys.readouterr().err
