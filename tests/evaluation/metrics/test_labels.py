"""Classification metrics against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as sk

from bertie.evaluation.metrics import classification, multi_label
from tests.evaluation.metric_data import LABELS, classified, values


@pytest.mark.parametrize("labels", [LABELS, ["no", "yes"]])
def test_classification_is_scikit_learns(labels: list[str]) -> None:
    gold, table = classified(300, labels)
    output = [labels[i] for i in table.argmax(1)]
    expected = {
        "accuracy": sk.accuracy_score(gold, output),
        "macro_f1": sk.f1_score(gold, output, average="macro"),
        "matthews": sk.matthews_corrcoef(gold, output),
        "log_loss": sk.log_loss(gold, table, labels=labels),
    }
    if len(labels) == 2:
        expected |= {
            name: getattr(sk, f"{name}_score")(gold, output, pos_label="yes") for name in ("f1", "precision", "recall")
        }
    result = values(classification(gold, table, labels, resamples=0))
    assert result.pop("ece") == pytest.approx(plain_ece(table.max(1), np.array(gold) == np.array(output)))
    assert result == pytest.approx(expected)


def plain_ece(confidence: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return total


def test_labels_that_never_occur() -> None:
    """scikit-learn's macro-F1 is over the labels that are there; Matthews is 0 for a constant."""
    gold, table = ["a", "b", "a"], np.array([[0.9, 0.1, 0, 0], [0.8, 0.2, 0, 0], [1, 0, 0, 0]])
    result = values(classification(gold, table, LABELS))
    assert result["macro_f1"] == pytest.approx(sk.f1_score(gold, ["a"] * 3, average="macro"))
    assert result["matthews"] == 0
    assert result["log_loss"] == pytest.approx(sk.log_loss(gold, table, labels=LABELS))


def test_a_sure_error_costs_as_much_as_in_scikit_learn() -> None:
    table = np.array([[1, 0], [1, 0]], dtype=np.float32)
    expected = sk.log_loss(["a", "b"], table, labels=["a", "b"])
    assert values(classification(["a", "b"], table, ["a", "b"]))["log_loss"] == pytest.approx(expected, rel=1e-6)


def test_multi_label_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    table = rng.random((200, 5)) ** 2
    gold = rng.random((200, 5)) < table
    gold[:, 4] = False  # never occurs, and is never given: scikit-learn counts it as 0
    table[:, 4] = 0.01
    output = table >= 0.4
    result = values(multi_label(gold, table, 0.4, resamples=0))
    assert result.pop("ece") == pytest.approx(plain_ece(table.ravel(), gold.ravel()))
    assert result == pytest.approx(
        {
            "micro_f1": sk.f1_score(gold, output, average="micro"),
            "macro_f1": sk.f1_score(gold, output, average="macro", zero_division=0),
            "exact": sk.accuracy_score(gold, output),
        }
    )


def test_unseen_gold_labels_are_errors() -> None:
    gold, table = ["a", "b", "c", "a"], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]
    scores = classification(gold, table, ["a", "b"])
    assert scores["accuracy"].value == pytest.approx(3 / 4)
    expected = sk.f1_score(gold, ["a", "b", "a", "a"], average="macro", zero_division=0)
    assert scores["macro_f1"].value == pytest.approx(expected)
