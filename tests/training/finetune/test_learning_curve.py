"""Learning curves: nested stratified parts, the same rows to evaluate on, and what is written."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bertie.errors import InputError
from bertie.tasks import Classifier, Tagger
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.learning_curve import CurveData, save_curve, subset
from tests.training.finetune.toys import FAST, MOODS, TEXTS, tagged_words


def data(rows: int = 200) -> LabelledDataset:
    labels = ["rare" if i % 10 == 0 else "common" for i in range(rows)]
    return read_dataset("classify", [f"text number {i}" for i in range(rows)], labels)


def test_subsets_are_nested_and_stratified() -> None:
    parts = [subset(data(), rows, seed=1) for rows in (20, 60, 200)]
    texts = [{example.texts for example in part.examples} for part in parts]
    assert [len(part.examples) for part in parts] == [20, 60, 200]
    assert texts[0] < texts[1] < texts[2]
    assert [Counter(e.target for e in part.examples)["rare"] for part in parts] == [2, 6, 20]
    assert {e.texts for e in subset(data(), 20, seed=2).examples} != texts[0]


def test_what_is_evaluated_on() -> None:
    train, other = data(), data(50)
    assert CurveData.choose(train, other, train, 0).split == "test"
    assert CurveData.choose(train, other, None, 0).held_out is other
    chosen = CurveData.choose(train, None, None, 0)
    assert (chosen.split, len(chosen.held_out.examples), len(chosen.train.examples)) == ("held-out", 40, 160)
    kept = {example.texts for example in chosen.train.examples}
    assert kept.isdisjoint(example.texts for example in chosen.held_out.examples)


def test_a_curve_of_a_classifier(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classifier = Classifier(encoder, **FAST)
    test = (TEXTS[:32], MOODS[:32])
    curve = classifier.learning_curve(TEXTS[32:], MOODS[32:], test=test, fractions=(0.15, 0.4, 1.0), draws=2)
    assert [(point.rows, len(point.draws)) for point in curve.points] == [(10, 2), (26, 2), (64, 1)]
    assert (curve.metric, curve.split, curve.held_out) == ("accuracy", "test", 32)
    assert curve.twice is not None
    assert curve.twice.rows == 128
    again = Classifier(encoder, **FAST).fit(TEXTS[32:], MOODS[32:], progress=False)
    assert curve.points[-1].score.value == pytest.approx(again.score(*test))
    assert not classifier.__sklearn_is_fitted__()
    assert "learning curve: 10 of 64 rows, accuracy" in capsys.readouterr().err
    save_curve(tmp_path, curve, "moods")
    saved = json.loads((tmp_path / "learning_curve.json").read_text())
    assert [point["rows"] for point in saved["points"]] == [10, 26, 64]
    assert "<svg" in (tmp_path / "learning_curve.html").read_text()


def test_a_curve_of_a_tagger_without_test_data(encoder: Path) -> None:
    options = FAST | {"epochs": 0.5}
    curve = Tagger(encoder, **options).learning_curve(*tagged_words(), fractions=(0.2, 1.0), progress=False)
    assert (curve.split, curve.held_out, [point.rows for point in curve.points]) == ("held-out", 13, [10, 51])
    assert curve.twice is None


def test_wrong_arguments(encoder: Path) -> None:
    classifier = Classifier(encoder, **FAST)
    for options, message in (
        ({"fractions": [0.5, 2]}, "must be between 0 and 1"),
        ({"draws": 0}, "draws=0 must be at least 1"),
        ({"fractions": [0.01]}, "77 rows, too few"),
    ):
        with pytest.raises(InputError, match=message):
            classifier.learning_curve(TEXTS, MOODS, **options)
