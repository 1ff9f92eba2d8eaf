"""From a model and labelled data to a report: each part against the same thing done in another way."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bertie.config import Calibration
from bertie.errors import BertieWarning, InputError
from bertie.evaluation.model_report import label_slices
from bertie.evaluation.report import write_report
from bertie.recipe import Recipe
from bertie.tasks import Classifier, Reranker
from bertie.training.callbacks import TrainingHistory
from bertie.training.finetune.base import training_for
from bertie.training.finetune.comparison import Baseline, compare, with_labels_of
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.reports import (
    TrainingRecord,
    build_report,
    calibration_report,
    check_leaks,
    evaluate,
    save_report,
)
from bertie.training.finetune.runs import RunResult
from tests.checkpoints.tiny_sentence import save_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, and weights large enough to be sure of something."""
    folder = tmp_path_factory.mktemp("models") / "pets"
    labels = {0: "cat", 1: "dog", 2: "mat"}
    numbers = {name: i for i, name in labels.items()}
    return save_bert(folder, labels=3, id2label=labels, label2id=numbers, initializer_range=1.0)


@pytest.fixture
def task(folder: Path) -> Classifier:
    return Classifier.load(folder)


@pytest.fixture(scope="module")
def data() -> LabelledDataset:
    """Labels at random: the model knows nothing, and is sure of it."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices("a the cat dog sat ran on mat find query".split(), k=8)) for _ in range(80)]
    return read_dataset("classify", texts, draw.choices(["cat", "dog", "mat"], k=80), name="toys.jsonl")


def sentence(number: int, words: int = 8) -> str:
    """One that shares no word with those of other numbers."""
    return " ".join(f"w{number}x{i}" for i in range(words))


def test_an_evaluation(task: Classifier, data: LabelledDataset) -> None:
    from sklearn.metrics import accuracy_score

    result = evaluate(task, data, resamples=20)
    assert result.scores["accuracy"].value == pytest.approx(accuracy_score(result.gold, result.predicted))
    assert list(result.labels) == ["cat", "dog", "mat"]
    assert result.texts is not None
    assert result.texts[3] == data.examples[3].texts[0]
    assert np.asarray(result.lengths)[3] == 8


# --- calibration and abstention ---


@pytest.mark.parametrize("several", [False, True])
def test_calibration_before_and_after(folder: Path, data: LabelledDataset, several: bool) -> None:
    """Before is what the model says at a temperature of 1; it is not asked again for that."""
    task = Classifier.load(folder)
    if several:
        info = replace(task.info, problem="multi_label_classification")
        task.checkpoint.heads["classify"] = info
        data = replace(
            data, multi_label=True, examples=[replace(item, target=(item.target,)) for item in data.examples]
        )
        assert task.problem == "multi_label_classification"
    plain = training_for(task).scores(training_for(task).predict_labelled(data), resamples=50)
    task.checkpoint.set_calibration("classify", Calibration(temperature=2.5))
    predictions = training_for(task).predict_labelled(data)
    result = calibration_report(task, predictions, "test", resamples=50)
    assert result is not None
    for item, expected in (
        (result.before, plain["ece"]),
        (result.after, training_for(task).scores(predictions, resamples=50)["ece"]),
    ):
        assert [item.value, item.low, item.high] == pytest.approx(
            [expected.value, expected.low, expected.high], abs=1e-4
        )
    assert result.before.value > result.after.value + 0.05
    assert sum(item.count for item in result.bins_before) == len(data.examples) * (3 if several else 1)
    task.checkpoint.set_calibration("classify", Calibration())
    assert calibration_report(task, training_for(task).predict_labelled(data), "test") is None


def test_abstention(task: Classifier, data: LabelledDataset) -> None:
    task.checkpoint.set_calibration("classify", Calibration(temperature=2.0, abstain_below=0.6, precision=0.9))
    predictions = training_for(task).predict_labelled(data)
    assert predictions.confidence is not None
    held = predictions.confidence >= 0.6
    assert 0 < held.sum() < len(held)
    right = np.array(predictions.gold) == np.array(predictions.predicted)
    made = build_report(task, {"dev": predictions, "test": predictions}, title="x", model="y", resamples=10)
    assert made.abstention is not None
    assert made.abstention.precision.value == pytest.approx(right[held].mean())
    assert made.abstention.coverage == pytest.approx(held.mean())
    assert made.abstention.target == 0.9


# --- leaks ---


def test_leaks_of_pairs(task: Classifier) -> None:
    """Both texts of a pair have to be known; the scores without them are those of the others."""
    pairs = [(sentence(i), sentence(100 + i)) for i in range(20)]
    labels = ["cat", "dog"] * 10
    train = read_dataset("classify", pairs[:10], labels[:10])
    mixed = [pairs[2], (pairs[3][0], pairs[11][1]), *pairs[10:]]
    test = read_dataset("classify", mixed, labels[:12], known=train.labels)
    rest = replace(test, examples=test.examples[1:])
    result = check_leaks(task, train, training_for(task).predict_labelled(test), resamples=20)
    assert [(item.test_index, item.train_index, item.kind) for item in result.leaks] == [(0, 2, "exact")]
    assert result.rows == 12
    assert result.scores_without == training_for(task).scores(training_for(task).predict_labelled(rest), resamples=20)
    assert result.texts[0][0] == "\n".join(pairs[2])


def test_leaks_of_queries(tmp_path: Path) -> None:
    """All passages of a query that was trained on are leaks, whatever the passages are."""
    task = Reranker.load(save_bert(tmp_path / "model", labels=1))
    queries = [sentence(i) for i in range(4)]
    train = read_dataset("rerank", [(query, "the mat") for query in queries[:2]], [1, 0])
    pairs = [(query, f"the {who} ran") for query in queries[1:] for who in ("cat", "dog")]
    test = read_dataset("rerank", pairs, [1, 0] * 3)
    result = check_leaks(task, train, training_for(task).predict_labelled(test), resamples=20)
    assert [(item.test_index, item.train_index) for item in result.leaks] == [(0, 1), (1, 1)]
    assert result.scores_without is not None
    everything = check_leaks(task, replace(test, name="all"), training_for(task).predict_labelled(test), resamples=20)
    assert len(everything.leaks) == 6
    assert everything.scores_without is None


def test_leaks_of_questions(task: Classifier) -> None:
    """A question is known with its context; one context with several questions is the same text, lightly edited."""
    contexts = [sentence(i, 40) for i in range(2)]
    train = read_dataset("answer", [("who is w0x1", contexts[0])], [["w0x1"]])
    requested = [("who is w0x1", contexts[0]), ("what w0x2 is", contexts[0]), ("who is w1x1", contexts[1])]
    test = read_dataset("answer", requested, [["w0x1"], ["w0x2"], ["w1x1"]])
    predictions = training_for(task).predict_labelled(
        read_dataset("classify", ["a cat"] * 3, ["cat"] * 3, training=False)
    )
    result = check_leaks(task, train, replace(predictions, data=test), resamples=5)
    assert [(item.test_index, item.kind) for item in result.leaks] == [(0, "exact"), (1, "near")]


# --- comparisons ---


def test_a_baseline_with_other_label_names(task: Classifier, data: LabelledDataset) -> None:
    """The same weights under other names, in numbers: no difference. Weights of the opposite: all the difference."""
    numbers = {"cat": "0", "dog": "1", "mat": "2"}
    given = replace(data, examples=[replace(item, target=numbers[item.target]) for item in data.examples])
    other = Classifier.load(task.checkpoint.source)
    names = {0: "mat", 1: "cat", 2: "bird"}  # some of this model's names, for other classes
    other.checkpoint.heads["classify"] = replace(other.info, labels=names)
    predictions = training_for(task).predict_labelled(with_labels_of(task, given))
    other_predictions = training_for(other).predict_labelled(with_labels_of(other, given))
    same = compare(task, predictions, Baseline("other", other, other_predictions), resamples=30)
    assert same.mcnemar == 1.0
    for gap in same.differences.values():
        assert (gap.value, gap.low, gap.high) == pytest.approx((0, 0, 0))
    with torch.no_grad():
        out = other.model.head("classify").out
        assert out is not None
        out.weight.neg_()
    other_predictions = training_for(other).predict_labelled(with_labels_of(other, given))
    opposite = compare(task, predictions, Baseline("other", other, other_predictions), resamples=30)
    own, theirs = (np.array(item.gold) == np.array(item.predicted) for item in (predictions, other_predictions))
    assert opposite.differences["accuracy"].value == pytest.approx(own.mean() - theirs.mean())
    assert opposite.scores["accuracy"].value == pytest.approx(theirs.mean())
    assert opposite.mcnemar is not None
    assert opposite.mcnemar < 1


def test_multi_label_baselines(folder: Path, data: LabelledDataset) -> None:
    """Their labels may stand in another order."""
    tasks = []
    for order in (["cat", "dog", "mat"], ["mat", "cat", "dog"]):
        task = Classifier.load(folder)
        info = replace(task.info, labels=dict(enumerate(order)), problem="multi_label_classification")
        task.checkpoint.heads["classify"] = info
        with torch.no_grad():
            out = task.model.head("classify").out
            assert out is not None
            rows = [["cat", "dog", "mat"].index(label) for label in order]
            out.weight.copy_(out.weight[rows].clone())
            assert out.bias is not None
            out.bias.copy_(out.bias[rows].clone())
        tasks.append(task)
    data = replace(data, multi_label=True, examples=[replace(item, target=(item.target,)) for item in data.examples])
    first, second = (training_for(task).predict_labelled(with_labels_of(task, data)) for task in tasks)
    result = compare(tasks[0], first, Baseline("other", tasks[1], second), resamples=30)
    assert {name: gap.value for name, gap in result.differences.items()} == pytest.approx(
        dict.fromkeys(result.differences, 0), abs=1e-7
    )


def test_labels_of_a_model(task: Classifier) -> None:
    known = ("cat", "dog", "mat")
    by_name = read_dataset("classify", ["x", "y"], ["dog", "cat"], training=False)
    by_number = read_dataset("classify", ["x", "y"], [1, 0], training=False)
    result = with_labels_of(task, by_name), with_labels_of(task, by_number)
    assert result[0].examples == result[1].examples == by_name.examples
    assert result[0].labels == result[1].labels == known
    with pytest.warns(BertieWarning, match=r"y.jsonl, row 2: the label '3' is not one of '0', '1', '2'"):
        assert with_labels_of(task, read_dataset("classify", ["x", "y"], [1, 3], name="y.jsonl")).labels[3:] == ("3",)
    with pytest.raises(InputError, match=r"labels 'cow', 'hen', but the model has 'cat', 'dog', 'mat'"):
        with_labels_of(task, read_dataset("classify", ["x", "y"], ["cow", "hen"], name="y.jsonl"))


def test_unseen_labels_are_errors(task: Classifier, tmp_path: Path) -> None:
    """Of a label of their own, in every part of the report."""
    texts, labels = ["a cat", "the dog", "on the mat", "a cat sat"] * 3, ["cat", "dog", "cow", "cat"] * 3
    with pytest.warns(BertieWarning, match=r"cow \(3 rows\)' of 12"):
        data = with_labels_of(task, read_dataset("classify", texts, labels))
    predictions = training_for(task).predict_labelled(data)
    report = build_report(task, {"test": predictions}, title="t", model="m", train=data, resamples=50)
    test = report.evaluations["test"]
    right = sum(a == b for a, b in zip(predictions.predicted, labels, strict=True))
    assert test.scores["accuracy"].value == pytest.approx(right / 12)
    assert list(test.labels) == ["cat", "dog", "mat", "cow"]
    write_report(tmp_path, report)
    assert "cow" in (tmp_path / "report.md").read_text()
    slices = {row.label: row for row in label_slices("classify", test)}
    assert (slices["cow"].support, slices["cow"].recall.value) == (3, 0.0)
    training_for(task).calibrate(data)


# --- all of it ---


def test_a_full_report(task: Classifier, data: LabelledDataset, tmp_path: Path) -> None:
    task.checkpoint.set_calibration("classify", Calibration(temperature=2.0))
    task.save(tmp_path / "model")
    predictions = training_for(task).predict_labelled(data)
    runs = [
        RunResult(
            seed,
            TrainingHistory(
                curve=[{"step": 10.0, "epoch": 1.0, "loss": 0.5, "lr": 1e-5, "tokens": 99.0}],
                evaluations=[{"step": 10, "epoch": 1.0, "accuracy": 0.5}],
                best_step=10, steps=10, tokens=99, seconds=1.5,
            ),
            {"accuracy": 0.5},
            {"accuracy": 0.4 + seed / 10},
        )
        for seed in (1, 2)
    ]  # fmt: skip
    made = build_report(
        task,
        {"dev": predictions, "test": predictions},
        title="Toys",
        model=str(tmp_path / "model"),
        train=data,
        training=TrainingRecord(Recipe(epochs=1), runs, best_seed=2, metric="accuracy"),
        baseline=Baseline("other", task, predictions),
        files={"train": ["/home/me/secret/train.jsonl"]},
        resamples=20,
    )
    assert made.model == "model"
    assert made.base is None
    assert made.recipe is not None
    assert made.recipe["seed"] == 2
    assert made.seeds == [{"accuracy": 0.5}, {"accuracy": pytest.approx(0.6)}]
    assert made.dev == [{"step": 10, "epoch": 1.0, "metric": "accuracy", "value": 0.5}]
    assert made.leaks is not None
    assert set(made.leaks) == {"test"}  # the dev data is the training's own affair
    assert len(made.leaks["test"].leaks) == 80
    assert made.label_issues is not None
    assert made.label_issues["test"]
    assert made.token_coverage is not None
    assert made.token_coverage["test"].tokens_total == 80 * 8
    save_report(tmp_path / "model", made)
    assert (
        training_for(Classifier.load(tmp_path / "model")).predict_labelled(data).predicted == predictions.predicted
    )  # checksums still hold
    report = json.loads((tmp_path / "model" / "report.json").read_text())
    assert report["evaluations"]["test"]["scores"]["accuracy"] == made.evaluations["test"].scores["accuracy"].as_dict()
    for name in ("README.md", "report.md", "report.html", "report.json"):
        text = (tmp_path / "model" / name).read_text()
        assert "secret" not in text
        assert str(tmp_path) not in text
    assert (tmp_path / "model" / "README.md").read_text().startswith("---\n")
