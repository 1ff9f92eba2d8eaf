"""Fine-tuning of `Classifier` and `Regressor`: they learn, predict, save and load here and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.config import Calibration
from bertie.errors import InputError
from tests.tasks import tiny
from tests.training.finetune.toys import (
    FAST,
    MOODS,
    TEXTS,
    assert_same_logits_in_transformers,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_classifier(encoder: Path, tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, abstain=0.9, **FAST)
    fitted = task.fit(TEXTS, MOODS, dev=(TEXTS, MOODS), progress=False)
    assert fitted is task
    assert task.score(TEXTS, MOODS) > 0.9
    assert task.history_.evaluations[-1]["accuracy"] > 0.9
    assert list(task.classes_) == ["bad", "good"]
    table = task.predict_proba(TEXTS[:7])
    assert table.dtype == np.float32
    assert table.shape == (7, 2)
    assert table.sum(1) == pytest.approx(1.0, abs=1e-6)
    assert task.predict(TEXTS[:7]).tolist() == [task.classes_[i] for i in table.argmax(1)]
    temperature = task.info.calibration
    assert temperature.temperature != 1.0
    assert temperature.precision == 0.9
    assert {item.confident for item in task.classify(TEXTS)} <= {True, False}
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Classifier)
    assert loaded.info == task.info
    assert loaded.classify(TEXTS[:3]) == task.classify(TEXTS[:3])
    assert_same_logits_in_transformers(loaded.checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0])


def test_probabilities_use_the_fitted_temperature(encoder: Path) -> None:
    task = bertie.Classifier(encoder, **FAST).fit(TEXTS, MOODS, progress=False)
    plain = task.predict_proba(TEXTS[:5])
    task.checkpoint.set_calibration("classify", Calibration(temperature=3.0))
    expected = plain ** (1 / 3)
    assert task.predict_proba(TEXTS[:5]) == pytest.approx(expected / expected.sum(1, keepdims=True), abs=1e-5)
    assert task.predict(TEXTS[:5]).tolist() == [task.classes_[i] for i in plain.argmax(1)]
    assert task.classify(TEXTS[0]).confident is None  # there is no threshold


def test_labels_keep_their_type(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, dev_fraction=0)
    numbers = [int(mood == "good") for mood in MOODS]
    results = task.fit(TEXTS, numbers, progress=False).predict(TEXTS[:4])
    assert results.dtype.kind == "i"
    assert set(results.tolist()) <= {0, 1}


def test_multi_label(encoder: Path, tmp_path: Path) -> None:
    wanted = [[mood, "short"] if len(text.split()) < 6 else [mood] for text, mood in zip(TEXTS, MOODS, strict=True)]
    task = bertie.Classifier(encoder, **FAST).fit(TEXTS, wanted, dev=(TEXTS, wanted), progress=False)
    assert task.problem == "multi_label_classification"
    assert task.info.calibration.threshold is not None
    assert task.score(TEXTS, wanted) > 0.8
    assert isinstance(task.predict(TEXTS[:2])[0], tuple)
    task.save(tmp_path / "out")
    assert bertie.Classifier.load(tmp_path / "out").predict(TEXTS).tolist() == task.predict(TEXTS).tolist()


def test_pairs(encoder: Path) -> None:
    pairs = [(text, "a river") for text in TEXTS]
    assert bertie.Classifier(encoder, **FAST).fit(pairs, MOODS, progress=False).score(pairs, MOODS) > 0.85


def test_long_texts_are_trained_in_windows(encoder: Path) -> None:
    texts = [f"{tiny.document(12, i)} {'Emma' if i % 2 else 'Berlin'} {tiny.document(12, i + 50)}" for i in range(24)]
    labels = [i % 2 for i in range(24)]
    task = bertie.Classifier(encoder, epochs=2, batch_size=4, dev_fraction=0).fit(texts, labels, progress=False)
    assert task.classify(texts[:1])[0].windows > 3
    whole = sum(item.tokens_total for item in task.classify(texts))
    assert task.history_.tokens / 2 > whole  # every token in each epoch, and overlaps
    options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "dev_fraction": 0}
    cut = bertie.Classifier(encoder, **options, overflow="truncate").fit(texts, labels, progress=False)
    assert cut.history_.tokens / 2 <= 24 * tiny.REACH
    with pytest.raises(InputError, match="row 1 has"):
        bertie.Classifier(encoder, overflow="error").fit(texts, labels, progress=False)


def test_windows_are_pooled_in_training_as_in_inference(encoder: Path) -> None:
    """The loss that training sees is that of the probabilities that the classifier gives."""
    texts, labels = [tiny.document(20, i) for i in range(4)], ["a", "b", "a", "b"]
    task = bertie.Classifier(encoder, epochs=1, lr=1e-12, batch_size=4, dropout=0.0)
    task.fit(texts, labels, progress=False)
    table = task.predict_proba(texts)
    expected = -np.log([row[int(label == "b")] for row, label in zip(table, labels, strict=True)]).mean()
    assert task.history_.curve[-1]["loss"] == pytest.approx(expected, rel=1e-4)


def test_regressor(encoder: Path, tmp_path: Path) -> None:
    values = [3.0 + 2.0 * (mood == "good") + 0.01 * len(text) for text, mood in zip(TEXTS, MOODS, strict=True)]
    task = bertie.Regressor(encoder, **FAST | {"epochs": 15}).fit(TEXTS, values, dev=(TEXTS, values), progress=False)
    assert task.score(TEXTS, values) > 0.9
    assert task.predict(TEXTS).mean() == pytest.approx(np.mean(values), abs=0.3)
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Regressor)
    assert loaded.predict(TEXTS[:5]) == pytest.approx(task.predict(TEXTS[:5]))
    assert_same_logits_in_transformers(loaded.checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0])
