"""`bertie weight-tokens`: the saved folder, unchanged heads, and refused arguments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.cli import main
from tests.checkpoints.tiny_sentence import save_bert

TEXTS = ["the cat sat on the mat", "the dog ran", "find the cat"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_bert(tmp_path / "model")
    Path("one.txt").write_text("\n".join(TEXTS[:2]) + "\n")
    Path("two.txt").write_text(TEXTS[2] + "\n")
    Path("rows.jsonl").write_text("".join(json.dumps({"n": 1, "body": text}) + "\n" for text in TEXTS))
    return tmp_path


def test_same_embeddings_as_in_python(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weight-tokens", "one.txt", "two.txt", "-m", "model", "-o", "new", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {key: result[key] for key in ("output", "texts", "tokens")} == {"output": "new", "texts": 3, "tokens": 16}
    assert list(result["lowest"])[:3] == ["[CLS]", "[SEP]", "the"]
    assert result["lowest"]["the"] == pytest.approx(0.1 / 1.1, abs=1e-3)
    assert (
        main(["weight-tokens", "rows.jsonl", "--column", "body", "-m", "model", "-o", "rows", "--smoothing", "0.5"])
        == 0
    )
    assert "rows: 16 token weights from 3 texts; lowest: [CLS] 0.33" in capsys.readouterr().err
    for folder, smoothing in (("new", 0.1), ("rows", 0.5)):
        expected = Embedder.load("model").weight_tokens(TEXTS, smoothing=smoothing).embed(TEXTS)
        np.testing.assert_array_equal(Embedder.load(folder).embed(TEXTS), expected)
    assert main(["embed", TEXTS[0], "-m", "new", "--json"]) == 0
    embedding = json.loads(capsys.readouterr().out)["vector"]
    np.testing.assert_allclose(embedding, Embedder.load("new").embed(TEXTS[:1])[0], atol=1e-6)


def test_heads_are_unchanged(here: Path) -> None:
    assert main(["weight-tokens", "one.txt", "-o", "new"]) == 0  # the built-in model
    before, after = Checkpoint.load("bertie-small"), Checkpoint.load("new")
    assert after.heads == before.heads
    weights = before.model.state_dict()
    assert all(tensor.equal(weights[name]) for name, tensor in after.model.state_dict().items())


def test_refusals(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.txt").write_text("")
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    for argv, message in (
        (["one.txt", "-o", "full"], "full already exists; pass --overwrite"),
        (["nowhere.txt", "-o", "new"], "nowhere.txt"),
        (["empty.txt", "-o", "new"], "empty.txt"),
        (["rows.jsonl", "-o", "new", "--column", "title"], "title"),
        (["one.txt", "-o", "new", "--smoothing", "0"], "smoothing=0.0 must be a number above 0"),
    ):
        assert main(["weight-tokens", *argv, "-m", "model"]) != 0
        assert message in capsys.readouterr().err
    assert not Path("new").exists()
    assert Path("full/file").read_text() == "mine"
    assert main(["weight-tokens", "one.txt", "-m", "model", "-o", "full", "--overwrite"]) == 0
    assert not Path("full/file").exists()
