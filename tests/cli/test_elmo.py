"""ELMo on the command line: `embed --tokens`, `tag`, `inspect`, and the errors of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.cli import main
from tests.tasks.tiny_elmo import TAGS, WORDS, tiny_elmo, tiny_tagger

LONG = "w" * 60
TEXTS = ["Ada lives in London.", LONG, ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("elmo") / "model"
    tiny_elmo().save(path)
    return str(path)


@pytest.fixture(scope="module")
def tagger_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("elmo") / "tagger"
    tiny_tagger().fit(WORDS, TAGS, progress=False).save(path)
    return str(path)


def records(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("layer", [None, "mean", "0", "2"])
def test_embed(layer: str | None, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [] if layer is None else ["--layer", layer]
    rows = records(capsys, "embed", *TEXTS, "--tokens", "-m", folder, *flags)
    for row, result in zip(rows, bertie.Elmo.load(folder).embed_tokens(TEXTS), strict=True):
        expected = result.mean if layer in (None, "mean") else result.layers[int(str(layer))]
        assert np.array_equal(np.array(row["vectors"], np.float32).reshape(expected.shape), expected)
        assert row["tokens"] == list(result.words)
        assert row["offsets"] == [list(span) for span in result.offsets]
    assert [row["words_cut"] for row in rows] == [0, 1, 0]
    assert [row["tokens_total"] for row in rows] == [5, 1, 0]


def test_embed_into_files(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("Ada lives in London.\nno names\n", "utf-8")
    for name in ("out.jsonl", "out.parquet"):
        argv = ["embed", str(texts), "--tokens", "-m", folder, "-o", str(tmp_path / name)]
        assert main(argv) == 0
        assert main(argv) == 1  # exists
        assert main([*argv, "--resume"]) == 0
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert [len(json.loads(line)["vectors"]) for line in lines] == [5, 2]
    assert main(["embed", "Ada lives in London.", "--tokens", "-m", folder]) == 0
    out = capsys.readouterr().out
    assert "London  13-19" in out
    assert " 96" in out


def test_tag(tagger_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = records(capsys, "tag", "in New York with Ada", "-m", tagger_folder)
    assert [(span["label"], span["text"]) for span in row["spans"]] == [("LOC", "New York"), ("PER", "Ada")]
    (row,) = records(capsys, "tag", "in New York with Ada", "-m", tagger_folder, "--ignore-labels", "O,LOC")
    assert [span["label"] for span in row["spans"]] == ["PER"]
    assert main(["tag", "in New York with Ada", "-m", tagger_folder]) == 0
    assert "3-11" in capsys.readouterr().out


def test_inspect(folder: str, tagger_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", folder]) == 0
    out = capsys.readouterr().out
    assert "3 layers of 96 dimensions" in out
    assert "with skip connections, cells clipped at 3" in out
    assert main(["inspect", tagger_folder, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["labels"] == ["O", "B-LOC", "B-PER", "I-LOC"]
    assert facts["family"] == "elmo"
    assert facts["parameters"]["total"] == sum(p.numel() for p in bertie.Elmo.load(folder).model.parameters())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["embed", "a"], "word embeddings, not text embeddings: pass --tokens"),
        (["embed", "a", "--tokens", "--layer", "3"], "--layer 3 must be mean or a number from 0 to 2"),
        (["embed", "a", "--tokens", "--layer", "-1"], "--layer -1 must be"),
        (["embed", "a", "--tokens", "--pooling", "cls"], "--pooling is not for ELMo"),
        (["embed", "a", "--tokens", "--prompt", "x"], "--prompt is not for ELMo"),
        (["embed", "a", "--tokens", "--precision", "int8"], "--precision is not for ELMo"),
        (["tag", "a"], "an ELMo model without a tagger"),
        (["classify", "a"], "is an ELMo model: use bertie.Elmo"),
        (["fill", "a [MASK]"], "is an ELMo model: use bertie.Elmo"),
    ],
)
def test_errors(argv: list[str], message: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "-m", folder]) != 0
    assert message in capsys.readouterr().err


def test_the_layers_of_other_models(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "the cat", "--tokens", "--layer", "0", "-m", models["embed"]]) == 2
    assert "--layer is for ELMo models" in capsys.readouterr().err


def test_damaged_weights(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged"
    tiny_elmo().save(path)
    (path / "checksums.json").unlink()
    (path / "weights.hdf5").write_bytes((Path(folder) / "weights.hdf5").read_bytes()[:5000])
    for argv in (["inspect", str(path)], ["embed", "a", "--tokens", "-m", str(path)]):
        assert main(argv) == 1
        err = capsys.readouterr().err
        assert err.startswith("bertie: weights.hdf5 cannot be read as HDF5")
        assert "Traceback" not in err
