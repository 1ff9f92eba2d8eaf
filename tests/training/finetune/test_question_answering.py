"""Fine-tuning of `Reader`."""

from __future__ import annotations

from pathlib import Path

import pytest

import bertie
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
