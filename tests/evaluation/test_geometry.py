"""How vectors lie in their space, and whitening."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder
from bertie.errors import InputError
from bertie.evaluation.geometry import PAIRS, Whitening, figures
from tests.checkpoints.sentence.tiny import WORDS, save_bert

RNG = np.random.default_rng(0)


def crooked(count: int, width: int) -> np.ndarray:
    """A narrow cone."""
    return RNG.standard_normal((count, width)) @ RNG.standard_normal((width, width)) + 5 * RNG.random(width)


def isoscore(vectors: np.ndarray) -> float:
    """Algorithm 1 of Rudman et al., step by step: points by their principal components, and so on."""
    points = vectors - vectors.mean(0)
    turned = points @ np.linalg.svd(points, full_matrices=False)[2].T
    variances = np.diag(np.cov(turned.T))
    n = len(variances)
    normed = np.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normed - np.ones(n)) / np.sqrt(2 * (n - np.sqrt(n)))
    k = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n
    return float((k - 1) / (n - 1))


def test_figures_by_hand() -> None:
    vectors = crooked(60, 7)
    found = figures(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i in range(60) for j in range(i)]
    assert found.cosine == pytest.approx(np.mean(cosines))
    assert found.spread == pytest.approx(np.std(cosines))
    values = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False) ** 2
    assert found.top == pytest.approx(values[0] / values.sum())
    shares = values / values.sum()
    assert found.effective == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert found.isoscore == pytest.approx(isoscore(vectors))
    scaled = vectors / np.linalg.norm(vectors, axis=1).mean()
    sums = [np.exp(sign * scaled @ c).sum() for c in np.linalg.svd(scaled)[2] for sign in (1, -1)]
    assert found.partition == pytest.approx(min(sums) / max(sums))


def test_many_vectors_are_drawn_from() -> None:
    vectors = crooked(2000, 4)
    assert PAIRS < 2000 * 1999 // 2
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    table = unit @ unit.T
    whole = (table.sum() - 2000) / (2000 * 1999)
    assert figures(vectors).cosine == pytest.approx(whole, abs=0.01)
    assert figures(vectors) == figures(vectors)


def test_even_and_uneven() -> None:
    even = figures(RNG.standard_normal((5000, 6)))
    line = figures(np.outer(RNG.standard_normal(100), RNG.standard_normal(6)) + 1e-9 * RNG.standard_normal((100, 6)))
    assert even.isoscore > 0.98
    assert even.partition > 0.9
    assert even.effective > 5.9
    assert line.isoscore < 0.01
    assert line.top == pytest.approx(1)
    assert line.effective == pytest.approx(1)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_whitened_vectors_have_the_identity_as_covariance(dimensions: int | None) -> None:
    vectors = crooked(400, 8)
    white = Whitening.fit(vectors, dimensions).apply(vectors).astype(np.float64)
    width = dimensions or 8
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(width), atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-5)
    if dimensions:  # the strongest directions
        from sklearn.decomposition import PCA

        theirs = PCA(3, whiten=True).fit_transform(vectors) * np.sqrt(400 / 399)
        np.testing.assert_allclose(np.abs(white), np.abs(theirs), atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_as_a_layer_of_a_folder(tmp_path: Path, normalize: bool) -> None:
    from sentence_transformers import SentenceTransformer

    embedder = Embedder.load(save_bert(tmp_path / "base"), normalize=normalize)
    texts = [f"{a} {b} {c}" for a in WORDS[5:] for b in WORDS[6:9] for c in WORDS[9:12]]
    vectors = embedder.embed(texts)
    whitening = Whitening.fit(vectors, 6)
    white = whitening.into(embedder)
    wanted = whitening.apply(vectors)
    if normalize:
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(white.embed(texts), wanted, atol=2e-3)
    assert figures(white.embed(texts)).cosine < figures(vectors).cosine
    white.save(tmp_path / "white")
    ours = Embedder.load(tmp_path / "white").embed(texts)
    np.testing.assert_array_equal(ours, white.embed(texts))
    theirs = SentenceTransformer(str(tmp_path / "white"), device="cpu").encode(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    # It may be whitened and trained on like any other.
    assert Whitening.fit(ours, 4).into(Embedder.load(tmp_path / "white")).dimension == 4
    np.testing.assert_array_equal(embedder.embed(texts), vectors)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="5 vectors are too few to whiten 8 dimensions"):
        Whitening.fit(crooked(5, 8))
    with pytest.raises(InputError, match="dimensions=9 must lie between 1 and 8"):
        Whitening.fit(crooked(20, 8), 9)
    with pytest.raises(InputError, match="all vectors are the same"):
        figures(np.ones((4, 2)))
    with pytest.raises(InputError, match="the shape"):
        figures([1.0, 2.0])
    with pytest.raises(InputError, match="not finite"):
        figures([[1.0, np.nan], [0.0, 1.0]])
    embedder = Embedder.load(save_bert(tmp_path / "base"))
    with pytest.raises(InputError, match="whole vectors of 8; the embedder's have 16"):
        Whitening.fit(crooked(20, 8)).into(embedder)
