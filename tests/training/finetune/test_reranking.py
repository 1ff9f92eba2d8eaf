"""Fine-tuning of `Reranker`."""

from __future__ import annotations

from pathlib import Path

import pytest

import bertie
from tests.training.finetune.toys import (
    FAST,
    MOODS,
    TEXTS,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_reranker(encoder: Path, tmp_path: Path) -> None:
    pairs, labels = [(str(i // 4), text) for i, text in enumerate(TEXTS)], [int(mood == "good") for mood in MOODS]
    task = bertie.Reranker(encoder, **FAST).fit(pairs, labels, dev=(pairs, labels), progress=False)
    assert task.score(pairs, labels) > 0.85
    best = task.rerank("0", TEXTS[:20])[0]
    assert MOODS[best.index] == "good"
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Reranker)
    assert loaded.predict(pairs[:5]) == pytest.approx(task.predict(pairs[:5]))
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(tmp_path / "out"), device="cpu").predict(pairs[:5])
    assert task.predict(pairs[:5]) == pytest.approx(theirs, abs=1e-5)
