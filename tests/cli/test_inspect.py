from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bertie.cli import main
from tests.parity.tiny import build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("bert", "ForSequenceClassification").save_pretrained(tmp_path)
    return tmp_path


def test_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^labels +LABEL_0, LABEL_1, LABEL_2$", out, re.M)
    assert re.search(r"^dispatch: attention +torch.attention.grouped$", out, re.M)
    for part in ("bert", "2 layers", "width 16", "classify (3)", "48 tokens", "fp32", "transformers_version"):
        assert part in out


def test_for_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["family"] == "bert"
    labels = ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert facts["heads"] == {"classify": {"kind": "text", "outputs": 3, "task": "classify", "labels": labels}}
    assert facts["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    theirs = build("bert", "ForSequenceClassification")
    assert facts["parameters"]["total"] == sum(p.numel() for p in theirs.parameters())
    assert facts["memory_bytes"]["fp32"] == 4 * facts["parameters"]["total"]
    assert facts["max_length"] == 48
    assert facts["tokenizer"] is None


def test_a_failure_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bertie: ")
    assert captured.err.count("\n") == 1


def test_a_failure_for_scripts_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "NotFoundError"


def test_an_unknown_key_can_be_ignored_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"novelty": 3}
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["inspect", str(folder)]) == 1
    assert "novelty=3" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--ignore", "novelty", "--json"]) == 0
    assert "novelty" in json.loads(capsys.readouterr().out)["ignored"]["config_keys"]


@pytest.mark.parametrize("argv", [[], ["inspect", "a", "b"], ["nonsense"], ["inspect", "x", "--nonsense"]])
def test_wrong_use_is_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
