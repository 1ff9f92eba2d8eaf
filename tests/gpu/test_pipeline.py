"""From text on a GPU: tokenized ahead by threads, fetched while the next block runs; in order, and as on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertie import Classifier, Embedder
from bertie.pipeline import pipeline
from tests.checkpoints.tiny_sentence import save_bert
from tests.tasks.test_embed import many

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, folder = many(300), save_bert(tmp_path, limit=10)
    expected = Embedder.load(folder, device="cpu").embed(texts)
    embedder = Embedder.load(folder, device="cuda")
    for items, tokens in ((1024, 1 << 16), (20, 64), (7, 40)):
        monkeypatch.setattr(pipeline, "CHUNK_ITEMS", items)
        monkeypatch.setattr(pipeline, "GPU_BATCH_TOKENS", tokens)
        np.testing.assert_allclose(embedder.embed(texts), expected, atol=2e-5)


def test_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, folder = many(100), save_bert(tmp_path, labels=3, limit=10)
    expected = Classifier.load(folder, device="cpu").predict_proba(texts)
    monkeypatch.setattr(pipeline, "GPU_BATCH_TOKENS", 64)
    np.testing.assert_allclose(Classifier.load(folder, device="cuda").predict_proba(texts), expected, atol=2e-5)
