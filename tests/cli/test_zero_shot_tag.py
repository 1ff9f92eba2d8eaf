"""`bertie tag --labels`, and training and evaluating such a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertie import ZeroShotTagger
from bertie.cli.main import main
from tests.parity.gliner_reference import FOLDER, LABELS, TEXTS

MODEL = str(FOLDER / "lstm")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_tag_with_labels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The same spans as in Python."""
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    options = ("--labels", ", ".join(LABELS[0]), "--threshold", "0.6", "-m", MODEL, "--json")
    code, out, _ = run(capsys, "tag", str(file), *options)
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    expected = ZeroShotTagger.load(MODEL).tag(TEXTS, LABELS[0], threshold=0.6)
    for row, result in zip(rows, expected, strict=True):
        assert [(span["label"], span["text"]) for span in row["spans"]] == [(s.label, s.text) for s in result.spans]
        assert row["tokens_read"] == row["tokens_total"] == result.tokens_total
    _, nested, _ = run(capsys, "tag", str(file), *options, "--nested", "--multi-label")
    assert sum(len(json.loads(line)["spans"]) for line in nested.splitlines()) > sum(len(r.spans) for r in expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nested",), "--threshold, --nested and --multi-label need --labels"),
        (("--labels", "a", "--ignore-labels", "X"), "leave out --labels"),
        (("--labels", " , "), "one or more"),
        (("--labels", "a", "--threshold", "2"), "threshold=2.0 must be a number from 0 to 1"),
        ((), "has no fixed labels"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, "tag", "Ada", "-m", MODEL, *arguments)
    assert code != 0
    assert message in err


def test_train_and_evaluate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"tokens": ["Ada", "saw", "London"], "tags": ["B-person", "O", "B-place"]}]
    rows.append({"tokens": ["Yes"], "tags": ["O"]})
    for name, count in (("train", 8), ("dev", 2)):
        lines = [json.dumps(row) + "\n" for row in rows * count]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    data, out = str(tmp_path / "train.jsonl"), str(tmp_path / "model")
    options = ("--epochs", "1", "-m", str(FOLDER / "plain"), "-o", out, "--no-baselines", "--json")
    code, text, _ = run(capsys, "train", "zero-shot-tag", data, "--dev", str(tmp_path / "dev.jsonl"), *options)
    assert code == 0
    assert json.loads(text)["task"] == "zero-shot-tag"
    card = (Path(out) / "README.md").read_text("utf-8")
    assert "bertie.ZeroShotTagger.load" in card
    assert "from gliner import GLiNER" in card
    other = (tmp_path / "dev.jsonl").read_text("utf-8").replace("person", "writer").replace("place", "city")
    (tmp_path / "other.jsonl").write_text(other, encoding="utf-8")
    code, text, _ = run(capsys, "eval", str(tmp_path / "other.jsonl"), "-m", out, "--no-baselines", "--json")
    assert code == 0
    assert 0 <= json.loads(text)["f1"]["value"] <= 1


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", MODEL, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["heads"]["span"]["kind"] == "span"
    assert facts["zero_shot_entities"] == {"max_width": 4, "width": 12, "lstm_layers": 1}
    _, out, _ = run(capsys, "inspect", MODEL)
    assert "spans of up to 4 words, with the labels of each call" in out
