"""Whitening as the last layer of an embedder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder
from bertie.errors import InputError
from bertie.evaluation.isotropy import Whitening, isotropy
from bertie.tasks.whitening import whiten
from tests.checkpoints.tiny_sentence import WORDS, save_bert


@pytest.mark.parametrize("normalize", [False, True])
def test_saved_as_a_dense_layer(tmp_path: Path, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer

    embedder = Embedder.load(save_bert(tmp_path / "base"), normalize=normalize)
    texts = [f"{a} {b} {c}" for a in WORDS[5:] for b in WORDS[6:9] for c in WORDS[9:12]]
    vectors = embedder.embed(texts)
    whitening = Whitening.fit(vectors, 6)
    white = whiten(embedder, whitening)
    expected = whitening.apply(vectors)
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(white.embed(texts), expected, atol=2e-3)
    assert isotropy(white.embed(texts)).mean_cosine < isotropy(vectors).mean_cosine
    white.save(tmp_path / "white")
    ours = Embedder.load(tmp_path / "white").embed(texts)
    np.testing.assert_array_equal(ours, white.embed(texts))
    theirs = SentenceTransformer(str(tmp_path / "white"), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # The result can be whitened again, and the original is unchanged.
    assert whiten(Embedder.load(tmp_path / "white"), Whitening.fit(ours, 4)).dimension == 4
    np.testing.assert_array_equal(embedder.embed(texts), vectors)


def test_the_width_must_match(tmp_path: Path) -> None:
    embedder = Embedder.load(save_bert(tmp_path / "base"))
    with pytest.raises(InputError, match="untruncated embeddings of dimension 8, not 16"):
        whiten(embedder, Whitening.fit(np.random.default_rng(0).standard_normal((20, 8))))
