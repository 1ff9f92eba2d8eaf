"""`bertie export`: flags, the report as text and JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertie.cli import main
from tests.cli.test_quantize import some_texts, texts_file


def test_export(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = texts_file(tmp_path, some_texts())
    argv = ["export", models["classify"], "-o", "out", "--texts", texts]
    assert main([*argv, "--precision", "fp32", "int8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out" / "export.json").read_text())
    assert [file["file"] for file in report["files"]] == ["onnx/model.onnx", "onnx/model_quantized.onnx"]
    assert (report["task"], report["texts"]) == ("classify", 41)  # and a long one
    assert main(argv) == 1
    assert "out already exists; pass --overwrite" in capsys.readouterr().err
    assert main([*argv, "--overwrite", "--task", "tag"]) == 1
    assert "has no head 'tag'" in capsys.readouterr().err
    assert (tmp_path / "out" / "onnx" / "model.onnx").is_file()


def test_refused(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", models["embed"], "-o", str(out), "--max-error", "1e-12"]) == 1
    assert "relative error" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_usage(models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert main(["export", "-o", out]) == 2
    assert "pass the model to export" in capsys.readouterr().err
    assert main(["export", models["embed"], "-o", out, "--column", "text"]) == 2
    assert main(["export", models["embed"], "-o", out, "--max-error", "-1"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["export", models["embed"], "-o", out, "--to", "tensorrt"])
