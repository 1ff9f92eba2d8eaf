"""`bertie eval`: the scores of any checkpoint on any labelled file, and what it says of those that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie.cli import main
from bertie.tasks import Classifier, MultiTask, Reader, Tagger, registry
from tests.cli.conftest import NLI
from tests.cli.toys import write, write_toys

TASKS = ("classify", "regress", "tag", "answer", "rerank")
FEW = ["--resamples", "50"]


@pytest.fixture(scope="module")
def trained(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each task a folder with a model, and the data that it was trained on."""
    top = tmp_path_factory.mktemp("trained")
    for task in TASKS:
        (top / task).mkdir()
        write_toys(top / task, task)
        learner = registry.get(task).trainable_class(models["embed"], epochs=1, batch_size=4, lr=5e-5)
        file = str(top / task / "train.jsonl")
        learner.fit(file, dev=str(top / task / "dev.jsonl"), progress=False).save(top / task / "model")
    return {task: top / task for task in TASKS}


def evaluated(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    assert main(["eval", *map(str, argv), *FEW, "--json"]) == 0
    results: dict[str, Any] = json.loads(capsys.readouterr().out)
    return results


def failed(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that is said."""
    assert main(["eval", *map(str, argv), *FEW]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bertie: ")
    assert err.count("\n") == 1
    return err


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- the values, by other means ---


def test_classification(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    folder = trained["classify"]
    output = evaluated(capsys, folder / "test.jsonl", "-m", folder / "model")
    rows = rows_of(folder / "test.jsonl")
    gold = [row["label"] for row in rows]
    predicted = [item.label for item in Classifier.load(folder / "model").classify([row["text"] for row in rows])]
    assert output["accuracy"]["value"] == pytest.approx(accuracy_score(gold, predicted))
    assert output["macro_f1"]["value"] == pytest.approx(f1_score(gold, predicted, average="macro"))
    assert output["matthews"]["value"] == pytest.approx(matthews_corrcoef(gold, predicted))
    assert output["accuracy"]["low"] < output["accuracy"]["value"] < output["accuracy"]["high"]


def test_tagging(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from seqeval.metrics import f1_score

    folder = trained["tag"]
    output = evaluated(capsys, folder / "test.jsonl", "-m", folder / "model")
    rows = rows_of(folder / "test.jsonl")
    predicted = Tagger.load(folder / "model").predict([row["tokens"] for row in rows])
    assert output["f1"]["value"] == pytest.approx(f1_score([row["tags"] for row in rows], predicted, zero_division=0))


def test_question_answering(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained["answer"]
    output = evaluated(capsys, folder / "test.jsonl", "-m", folder / "model")
    rows = rows_of(folder / "test.jsonl")
    predicted = Reader.load(folder / "model").predict([(row["question"], row["context"]) for row in rows])
    exact = np.mean([item == row["answers"][0]["text"] for item, row in zip(predicted, rows, strict=True)])
    assert output["exact_match"]["value"] == pytest.approx(exact)


@pytest.mark.parametrize(("task", "metric"), [("regress", "spearman"), ("rerank", "map")])
def test_regression_and_ranking(
    trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str], task: str, metric: str
) -> None:
    """The task is found out from the head."""
    folder = trained[task]
    output = evaluated(capsys, folder / "test.jsonl", "-m", folder / "model")
    expected = registry.get(task).trainable_class.load(folder / "model").score(str(folder / "test.jsonl"))
    assert output[metric]["value"] == pytest.approx(expected)


# --- other people's models ---


def test_numbers_for_labels(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the model has names, numbers count them; the values are those of transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    texts = ["the cat sat", "a dog ran on the mat", "find a cat", "the mat"]
    rows = [{"text": text, "label": i % 3} for i, text in enumerate(texts)]
    write(Path("numbers.jsonl"), rows)
    Path("numbers.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    write(Path("names.jsonl"), [row | {"label": NLI[row["label"]]} for row in rows])  # type: ignore[index]
    for name in ("classify", "nli"):
        model = AutoModelForSequenceClassification.from_pretrained(models[name]).eval()
        tokenizer = AutoTokenizer.from_pretrained(models[name])
        with torch.inference_mode():
            best = [int(model(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]
        expected = np.mean([a == row["label"] for a, row in zip(best, rows, strict=True)])
        results = [evaluated(capsys, file, "-m", models[name]) for file in ("numbers.jsonl", "numbers.csv")]
        assert results[0] == results[1]
        assert results[0]["accuracy"]["value"] == pytest.approx(expected)
    assert evaluated(capsys, "names.jsonl", "-m", models["nli"]) == results[0]
    # Another model's names for the same classes are translated.
    output = evaluated(capsys, "numbers.jsonl", "-m", models["nli"], "--baseline", models["classify"])
    assert (
        output["baseline"]["scores"]["accuracy"]
        == evaluated(capsys, "numbers.jsonl", "-m", models["classify"])["accuracy"]
    )
    assert output["baseline"]["difference"]["accuracy"]["value"] == pytest.approx(0)  # the same weights


def test_labels_that_the_model_does_not_have(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count as errors, and a warning names them; data with no other label is refused."""
    for label in ("happy", 3, -1):
        known = 0 if label != "happy" else "neutral"
        write(Path("in.jsonl"), [{"text": "a cat", "label": known}, {"text": "a dog", "label": label}])
        assert main(["eval", "in.jsonl", "-m", models["nli"], "--json"]) == 0
        output = capsys.readouterr()
        assert f"bertie: in.jsonl, row 2: the label '{label}' is not one of " in output.err
        assert json.loads(output.out)["accuracy"]["value"] <= 0.5
    write(Path("in.jsonl"), [{"text": "a cat", "label": "happy"}])
    assert "'contradiction', 'neutral', 'entailment'" in failed(capsys, "in.jsonl", "-m", models["nli"])
    write(Path("in.jsonl"), [{"text": "a cat", "label": ["neutral"]}])
    assert "in.jsonl has lists of labels" in failed(capsys, "in.jsonl", "-m", models["nli"])


def test_numbers_for_tags(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["O", "B-PER", "I-PER"]
    rows = [{"tokens": ["the", "cat", "sat"], "tags": [0, 1, 2]}, {"tokens": ["a", "mat"], "tags": [0, 0]}]
    write(Path("numbers.jsonl"), rows)
    write(Path("names.jsonl"), [row | {"tags": [names[tag] for tag in row["tags"]]} for row in rows])  # type: ignore[attr-defined]
    first, second = (evaluated(capsys, file, "-m", models["tag"]) for file in ("numbers.jsonl", "names.jsonl"))
    assert first == second


def test_one_output_needs_a_task(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"query": "find a cat", "text": f"the {who} ran", "score": int(who == "cat")} for who in ("dog", "cat")]
    write(Path("in.jsonl"), rows)
    assert "--task rerank or regress" in failed(capsys, "in.jsonl", "-m", models["rerank"])
    assert set(evaluated(capsys, "in.jsonl", "-m", models["rerank"], "--task", "rerank")) == {"map", "mrr", "ndcg_10"}
    assert "spearman" in evaluated(capsys, "in.jsonl", "-m", models["rerank"], "--task", "regress")


@pytest.mark.parametrize("name", ["fill", "embed"])
def test_models_without_a_head(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write(Path("in.jsonl"), [{"text": "a cat", "label": 0}])
    assert "has no head that can be evaluated on labelled texts" in failed(capsys, "in.jsonl", "-m", models[name])
    assert "no head 'tag'" in failed(capsys, "in.jsonl", "-m", models[name], "--task", "tag")


def test_named_heads(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = MultiTask(models["embed"], {"pets": "classify", "names": "tag"}, epochs=1, lr=5e-5)
    data = {}
    for head, task in (("pets", "classify"), ("names", "tag")):
        Path(head).mkdir()
        write_toys(Path(head), task)
        data[head] = f"{head}/train.jsonl"
    heads.fit(data, progress=False).save("both")
    assert "select one with --head: names, pets" in failed(capsys, "pets/test.jsonl", "-m", "both")
    assert "none" in failed(capsys, "pets/test.jsonl", "-m", "both", "--head", "none")
    assert "accuracy" in evaluated(capsys, "pets/test.jsonl", "-m", "both", "--head", "pets")
    assert "recall" in evaluated(capsys, "names/test.jsonl", "-m", "both", "--head", "names")


# --- reports ---


def test_a_report(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With texts of the training data among those of the test data, and against itself."""
    folder = trained["classify"]
    leaked = rows_of(folder / "train.jsonl")[:5]
    fresh = [{"text": f"query : find {who} " * 3, "label": who} for who in ("cat", "dog") * 3]
    write(Path("test.jsonl"), leaked + fresh)
    argv = ["test.jsonl", "-m", folder / "model", "--train", folder / "train.jsonl", "--baseline", folder / "model"]
    output = evaluated(capsys, *argv, "-o", "report")
    assert output["leaks"]["rows"] == 5
    write(Path("rest.jsonl"), fresh)
    assert (
        output["leaks"]["scores"]["accuracy"]["value"]
        == (evaluated(capsys, "rest.jsonl", "-m", folder / "model")["accuracy"]["value"])
    )
    assert output["baseline"]["difference"]["accuracy"] == {"value": 0, "low": 0, "high": 0, "p": 1}
    files = {"report.md", "report.html", "report.json", "predictions.jsonl"}
    assert {file.name for file in Path("report").iterdir()} == files
    assert set(output["cheap_baselines"]) >= {"majority class", "TF-IDF + logistic regression"}
    report = json.loads(Path("report/report.json").read_text())
    assert report["evaluations"]["test"]["scores"]["accuracy"] == output["accuracy"]
    assert str(folder) not in Path("report/report.md").read_text()
    assert "report already contains a report; pass --overwrite" in failed(capsys, *argv, "-o", "report")
    argv += ["--no-baselines"]
    assert "cheap_baselines" not in evaluated(capsys, *argv, "-o", "report", "--overwrite")
    Path("letter.txt").write_text("dear")
    assert "is a file" in failed(capsys, *argv, "-o", "letter.txt")
    assert main(["eval", *map(str, argv), "-o", "test.jsonl"]) == 2
    assert "test.jsonl is the input" in capsys.readouterr().err


def test_the_printed_table(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained["classify"]
    assert main(["eval", str(folder / "test.jsonl"), "-m", str(folder / "model"), *FEW]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["metric", "test", "95%"]
    assert lines[1].startswith("accuracy")


def test_columns_by_other_names(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained["classify"]
    rows = rows_of(folder / "test.jsonl")
    write(Path("in.jsonl"), [{"review": row["text"], "stars": row["label"]} for row in rows])
    output = evaluated(capsys, "in.jsonl", "--columns", "text=review", "label=stars", "-m", folder / "model")
    assert output == evaluated(capsys, folder / "test.jsonl", "-m", folder / "model")
    assert "name the right one with --columns text=…" in failed(capsys, "in.jsonl", "-m", folder / "model")


def test_bad_input(trained: dict[str, Path], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained["classify"] / "model"
    write(Path("hole.jsonl"), [{"text": "a cat", "label": "cat"}, {"text": "a dog", "label": None}])
    assert "hole.jsonl, row 2: " in failed(capsys, "hole.jsonl", "-m", model)
    assert "no such file: 'none.jsonl'" in failed(capsys, "none.jsonl", "-m", model)
    assert "no/such" in failed(capsys, trained["classify"] / "test.jsonl", "-m", model, "--baseline", "/no/such")
    assert main(["eval", "none.jsonl", "-m", str(model), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "NotFoundError"
    assert main(["eval", "-m", str(model)]) == 2
    assert "FILE" in capsys.readouterr().err


def test_no_model_was_named(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.checkpoints.hub.built_in", list)
    write(Path("in.jsonl"), [{"text": "a cat", "label": "cat"}])
    assert main(["eval", "in.jsonl"]) == 2
    assert "pass a folder or a hub id with -m" in capsys.readouterr().err


def test_a_missing_file_is_named_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model, whose heads would be asked about."""
    Path("test.jsonl").write_text("{}")
    assert main(["eval", "tset.jsonl"]) == 1
    assert "no such file: 'tset.jsonl' (did you mean test.jsonl?)" in capsys.readouterr().err
