"""`bertie calibrate`: fits a head's calibration, and changes nothing else in the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertie import Classifier, Reader
from bertie.checkpoints.hub import resolve
from bertie.cli import main
from bertie.config import Calibration

EMMA = "Emma is a novel by Jane Austen, published in 1815."
PARIS = "Paris is the capital of France and lies on the Seine."


def questions_file(folder: Path) -> str:
    pairs = [("Who wrote Emma?", "Jane Austen", EMMA, PARIS), ("What is the capital of France?", "Paris", PARIS, EMMA)]
    rows = []
    for question, answer, context, other in pairs:
        answers = [{"text": answer, "answer_start": context.index(answer)}]
        rows += [{"question": question, "context": context, "answers": answers}]
        rows += [{"question": question, "context": other, "answers": []}]
    path = folder / "dev.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_question_answering(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["calibrate", questions_file(tmp_path), "-m", "bertie-small", "-o", str(out), "--json"]) == 1
    assert "--head" in capsys.readouterr().out
    arguments = ["calibrate", questions_file(tmp_path), "-m", "bertie-small", "--head", "qa", "-o", str(out)]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    reader = Reader.load(out)  # whose checksums are verified
    saved = reader.info.calibration
    assert printed["calibration"]["no_answer_threshold"] == saved.no_answer_threshold is not None
    assert printed["scores"]["no_answer_auroc"]["value"] == 1.0
    assert not reader.answer("Who wrote Emma?", PARIS).has_answer
    assert reader.answer("Who wrote Emma?", EMMA).best.text == "Jane Austen"
    source = resolve("bertie-small")
    for file in source.rglob("*"):
        if file.is_file() and file.name not in ("config.json", "checksums.json"):
            assert (out / file.relative_to(source)).read_bytes() == file.read_bytes()
    assert main(arguments) == 1  # the folder exists
    assert main(["answer", "Who wrote Emma?", "--context", PARIS, "-m", str(out)]) == 0
    assert "no answer (p = " in capsys.readouterr().out


def test_classification_and_tasks_without_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("A delight.", "positive"), ("Dull.", "negative"), ("Good fun.", "positive"), ("Awful film.", "negative")]
    (tmp_path / "dev.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    arguments = ["calibrate", str(tmp_path / "dev.csv"), "-m", "bertie-small", "-o", str(tmp_path / "out")]
    assert main([*arguments, "--head", "sentiment"]) == 0
    printed = capsys.readouterr()
    assert "temperature" in printed.err
    assert "no_answer" not in printed.err
    assert "dev" in printed.out.split("\n")[0]
    fitted = Classifier.load(tmp_path / "out", head="sentiment").info.calibration
    assert fitted not in (Calibration(), Classifier.load("bertie-small", head="sentiment").info.calibration)
    (tmp_path / "tags.jsonl").write_text('{"tokens": ["Ada", "ran"], "tags": ["B-PER", "O"]}\n')
    arguments[1] = str(tmp_path / "tags.jsonl")
    assert main([*arguments, "--head", "ner", "--overwrite"]) == 2
    assert "has no calibration" in capsys.readouterr().err
