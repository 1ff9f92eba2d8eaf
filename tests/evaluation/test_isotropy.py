"""Isotropy measures and whitening against independent implementations."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.evaluation.isotropy import PAIRS, Whitening, isotropy

RNG = np.random.default_rng(0)


def anisotropic(count: int, width: int) -> np.ndarray:
    """A narrow cone."""
    return RNG.standard_normal((count, width)) @ RNG.standard_normal((width, width)) + 5 * RNG.random(width)


def isoscore(vectors: np.ndarray) -> float:
    """Algorithm 1 of Rudman et al., step by step: points by their principal components, and so on."""
    points = vectors - vectors.mean(0)
    rotated = points @ np.linalg.svd(points, full_matrices=False)[2].T
    variances = np.diag(np.cov(rotated.T))
    n = len(variances)
    normed = np.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normed - np.ones(n)) / np.sqrt(2 * (n - np.sqrt(n)))
    k = (n - defect**2 * (n - np.sqrt(n))) ** 2 / n
    return float((k - 1) / (n - 1))


def test_measures_from_their_definitions() -> None:
    vectors = anisotropic(60, 7)
    measured = isotropy(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i in range(60) for j in range(i)]
    assert measured.mean_cosine == pytest.approx(np.mean(cosines))
    assert measured.std_cosine == pytest.approx(np.std(cosines))
    values = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False) ** 2
    assert measured.top_variance == pytest.approx(values[0] / values.sum())
    shares = values / values.sum()
    assert measured.effective_dimension == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))
    assert measured.isoscore == pytest.approx(isoscore(vectors))
    scaled = vectors / np.linalg.norm(vectors, axis=1).mean()
    sums = [np.exp(sign * scaled @ c).sum() for c in np.linalg.svd(scaled)[2] for sign in (1, -1)]
    assert measured.partition == pytest.approx(min(sums) / max(sums))


def test_large_sets_are_sampled() -> None:
    vectors = anisotropic(2000, 4)
    assert PAIRS < 2000 * 1999 // 2
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    table = unit @ unit.T
    whole = (table.sum() - 2000) / (2000 * 1999)
    assert isotropy(vectors).mean_cosine == pytest.approx(whole, abs=0.01)
    assert isotropy(vectors) == isotropy(vectors)


def test_isotropic_and_degenerate() -> None:
    even = isotropy(RNG.standard_normal((5000, 6)))
    line = isotropy(np.outer(RNG.standard_normal(100), RNG.standard_normal(6)) + 1e-9 * RNG.standard_normal((100, 6)))
    assert even.isoscore > 0.98
    assert even.partition > 0.9
    assert even.effective_dimension > 5.9
    assert line.isoscore < 0.01
    assert line.top_variance == pytest.approx(1)
    assert line.effective_dimension == pytest.approx(1)


@pytest.mark.parametrize("dimension", [None, 3])
def test_whitened_covariance_is_the_identity(dimension: int | None) -> None:
    vectors = anisotropic(400, 8)
    white = Whitening.fit(vectors, dimension).apply(vectors).astype(np.float64)
    width = dimension or 8
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(width), atol=1e-4)
    np.testing.assert_allclose(white.mean(0), 0, atol=1e-5)
    if dimension:  # the strongest directions
        from sklearn.decomposition import PCA

        theirs = PCA(3, whiten=True).fit_transform(vectors) * np.sqrt(400 / 399)
        np.testing.assert_allclose(np.abs(white), np.abs(theirs), atol=1e-4)


def test_refusals() -> None:
    with pytest.raises(InputError, match="5 vectors are too few to whiten 8 dimensions"):
        Whitening.fit(anisotropic(5, 8))
    with pytest.raises(InputError, match="dimension=9 must be between 1 and 8"):
        Whitening.fit(anisotropic(20, 8), 9)
    with pytest.raises(InputError, match="all vectors are the same"):
        isotropy(np.ones((4, 2)))
    with pytest.raises(InputError, match="the shape"):
        isotropy([1.0, 2.0])
    with pytest.raises(InputError, match="not finite"):
        isotropy([[1.0, np.nan], [0.0, 1.0]])
