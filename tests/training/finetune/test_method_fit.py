"""`fit` by several methods: the best on held-out rows is kept, and the score is not that of the luckiest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bertie
from bertie.training.finetune import defaults
from bertie.training.finetune.base import Predictions
from bertie.training.finetune.data import read_dataset
from bertie.training.finetune.method_fit import compare_methods
from tests.training.finetune.toys import sentiment_texts

TEXTS, MOODS = sentiment_texts(32, seed=3)
TEST, TEST_MOODS = sentiment_texts(64, seed=4)


def test_auto_compares_and_says_so(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = bertie.Classifier(encoder).fit(TEXTS, MOODS, folder=tmp_path / "state")
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"method: {task.recipe_.method} (cross-validated accuracy ")
    assert line.endswith("full not tried: 32 rows)")
    assert task.history_.method == line.removeprefix("method: ")
    assert len(task.validation_.predictions.gold) == 32
    assert task.info.calibration.temperature != 1.0
    task.save(tmp_path / "out")
    assert bertie.Classifier.load(tmp_path / "out").predict_proba(TEST[:3]) == pytest.approx(
        task.predict_proba(TEST[:3]), abs=1e-6
    )


def test_explicit_methods(encoder: Path) -> None:
    for method in ("frozen", "few-shot"):
        task = bertie.Classifier(encoder, method=method, dev_fraction=0.0)
        assert task.fit(TEXTS, MOODS, progress=False).score(TEST, TEST_MOODS) > 0.8
        assert task.history_.method == method
        assert task.validation_ is None


def test_dev_data_chooses(encoder: Path) -> None:
    task = bertie.Classifier(encoder).fit(TEXTS, MOODS, dev=(TEST, TEST_MOODS), progress=False)
    assert "dev accuracy" in task.history_.method
    assert task.history_.evaluations[-1]["accuracy"] == task.score(TEST, TEST_MOODS)


@pytest.mark.parametrize("has_dev", [False, True], ids=["folds", "dev"])
def test_full_fine_tuning_is_compared_with_a_frozen_encoder(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_dev: bool
) -> None:
    """The default where rows are not few, whichever of the two wins."""
    monkeypatch.setattr(defaults, "STEPS", 20)
    texts, moods = sentiment_texts(140, seed=5)
    dev = (TEST, TEST_MOODS) if has_dev else None
    task = bertie.Classifier(encoder).fit(texts, moods, dev=dev, folder=tmp_path / "state", progress=False)
    method, _, scores = task.history_.method.partition(" (")
    assert method in ("frozen", "full")
    assert scores.startswith("dev accuracy" if has_dev else "cross-validated accuracy")
    assert ("frozen" if method == "full" else "full") in scores
    assert task.score(TEST, TEST_MOODS) > 0.8
    assert has_dev == (task.validation_ is None)
    if task.validation_ is not None:
        assert len(task.validation_.predictions.gold) == 140
    task.save(tmp_path / "out")
    assert list(bertie.Classifier.load(tmp_path / "out").predict(TEST[:8])) == list(task.predict(TEST[:8]))


def test_multi_label(encoder: Path) -> None:
    labels = [[mood, "short"] if len(text) < 35 else [mood] for text, mood in zip(TEXTS, MOODS, strict=True)]
    task = bertie.Classifier(encoder).fit(TEXTS, labels, progress=False)
    assert task.recipe_.method == "frozen"
    assert task.problem == "multi_label_classification"
    assert 0 < task.info.calibration.threshold < 1


def test_the_score_is_that_of_the_choice_of_the_other_folds(encoder: Path) -> None:
    """Each of two methods is right in one fold only: choosing by the other fold is wrong in both."""
    task = bertie.Classifier(encoder, method="frozen", dev_fraction=0.0).fit(TEXTS, MOODS, progress=False)

    def part(start: int, right: bool) -> Predictions:
        rows = read_dataset("classify", [f"text {i}" for i in range(8)], ["bad", "good"] * 4)
        rows.examples[:] = rows.examples[start : start + 4]
        gold = [example.target for example in rows.examples]
        p = np.array([[0.9, 0.1] if (label == "bad") == right else [0.1, 0.9] for label in gold], dtype=np.float32)
        predicted = [("bad", "good")[i] for i in p.argmax(1)]
        ones = np.ones(4, dtype=np.int64)
        return Predictions("classify", rows, gold, predicted, p, p.max(1), ones, ones, ones)

    folds = {"frozen": [part(0, True), part(4, False)], "few-shot": [part(0, False), part(4, True)]}
    choice = compare_methods(task, folds, "accuracy", {}, "cross-validated")
    assert choice.scores == {"frozen": 0.5, "few-shot": 0.5}
    assert choice.predictions is not None
    assert all(a != b for a, b in zip(choice.predictions.gold, choice.predictions.predicted, strict=True))
