"""Similarity of aligned pairs, by every similarity function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.tasks import Embedder
from bertie.tasks.pairwise import compare_pairwise, similarity_pairwise
from tests.tasks import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers folder."""
    top = tmp_path_factory.mktemp("model")
    embedder = Embedder.load(tiny.save(top / "bare", "wordpiece", ""))
    embedder.checkpoint.sentence = SentenceModules.create(32)
    embedder.save(top / "sentence")
    return top / "sentence"


@pytest.mark.parametrize("how", ["cosine", "dot", "euclidean", "manhattan"])
def test_rows_are_compared_by_the_checkpoints_similarity(model: Path, how: str) -> None:
    embedder = Embedder.load(model)
    embedder.modules.similarity = how
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 150, 32)).astype(np.float32)
    expected = {
        "cosine": (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1),
        "dot": (a * b).sum(1),
        "euclidean": -np.linalg.norm(a - b, axis=1),
        "manhattan": -np.abs(a - b).sum(1),
    }[how]
    np.testing.assert_allclose(compare_pairwise(embedder, a, b), expected, rtol=1e-4, atol=1e-4)
    assert compare_pairwise(embedder, a[:0], b[:0]).shape == (0,)


def test_pairs_equal_the_diagonal_of_the_similarity_matrix(model: Path) -> None:
    embedder = Embedder.load(model)
    a, b = tiny.sentences(70, seed=1), tiny.sentences(70, seed=2)
    b[3] = a[3]
    similarities = similarity_pairwise(embedder, list(zip(a, b, strict=True)))
    np.testing.assert_allclose(similarities, np.diagonal(embedder.similarity(a, b)), atol=1e-5)
    assert similarities[3] == pytest.approx(1.0, abs=1e-5)
