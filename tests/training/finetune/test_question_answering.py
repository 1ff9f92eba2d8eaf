"""Fine-tuning of `Reader`."""

from __future__ import annotations

from pathlib import Path

import pytest

import bertie
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.training.finetune.toys import (
    FAST,
    questions,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_reader(encoder: Path, tmp_path: Path) -> None:
    pairs, answers = questions()
    task = bertie.Reader(encoder, **FAST).fit(pairs, answers, dev=(pairs, answers), progress=False)
    assert task.score(pairs, answers) > 0.75
    assert task.info.calibration.temperature != 1.0
    right = [result.best.text in answer for result, answer in zip(task.answer(pairs), answers, strict=True)]
    confidence = [result.best.score for result in task.answer(pairs)]
    assert sum(confidence) / len(confidence) == pytest.approx(sum(right) / len(right), abs=0.1)
    task.save(tmp_path / "out")
    assert bertie.Reader.load(tmp_path / "out").predict(pairs[:5]) == task.predict(pairs[:5])


def test_unanswerable_questions(encoder: Path, tmp_path: Path) -> None:
    """Fitted: the probability of no answer and its threshold; evaluated: SQuAD 2's scores."""
    pairs, answers = questions()
    mixed = pairs + [(question, "Nothing is here.") for question, _ in pairs]
    gold = answers + [[] for _ in pairs]
    task = bertie.Reader(encoder, **FAST).fit(mixed, gold, dev=(mixed, gold), progress=False)
    values = task.info.calibration
    assert values.no_answer_scale is not None
    assert values.no_answer_scale > 0
    training = training_for(task)
    data = read_dataset("answer", mixed, gold, name="the data", training=False)
    scores = {name: score.value for name, score in training.scores(training.predict_labelled(data)).items()}
    assert scores["no_answer_auroc"] > 0.9
    assert scores["unanswerable_accuracy"] > 0.9
    assert scores["f1"] == pytest.approx((scores["answerable_f1"] + scores["unanswerable_accuracy"]) / 2)
    task.save(tmp_path / "out")
    loaded = bertie.Reader.load(tmp_path / "out")
    results = loaded.answer(mixed)
    assert [result.has_answer for result in results] == [
        result.no_answer_score <= values.no_answer_threshold for result in results
    ]
    assert sum(result.has_answer for result in results[len(pairs) :]) < 0.1 * len(pairs)
    mean = sum(result.no_answer_score for result in results) / len(results)
    assert mean == pytest.approx(0.5, abs=0.05)  # half of the questions have no answer
