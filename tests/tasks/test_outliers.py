"""Outliers: scores beside scikit-learn's neighbours, p-values, and the rate of false alarms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

import bertie
from bertie.tasks import neighbours
from bertie.tasks.outliers import outliers_of

DRAW = np.random.default_rng(0)


def directions(count: int, centres: int = 8, spread: float = 0.3, seed: int = 0) -> np.ndarray:
    """Unit vectors around a few centres."""
    draw = np.random.default_rng(seed)
    centre = np.random.default_rng(7).normal(size=(centres, 16))
    rows = centre[draw.integers(centres, size=count)] + spread * draw.normal(size=(count, 16)) * 2
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_scores_are_mean_distances_to_the_nearest() -> None:
    vectors = directions(300)
    result = outliers_of(3 * vectors, neighbours=5)  # lengths do not matter
    distances, indices = NearestNeighbors(n_neighbors=6, metric="cosine").fit(vectors).kneighbors(vectors)
    np.testing.assert_allclose(result.scores, distances[:, 1:].mean(1), atol=1e-5)
    np.testing.assert_allclose(result.similarity, 1 - distances[:, 1], atol=1e-5)
    assert (result.nearest == indices[:, 1]).mean() > 0.99
    other = directions(40, seed=1)
    reference = outliers_of(other, vectors, neighbours=5, false_alarms=0.05)
    distances, _ = NearestNeighbors(n_neighbors=5, metric="cosine").fit(vectors).kneighbors(other)
    np.testing.assert_allclose(reference.scores, distances.mean(1), atol=1e-5)


def test_outliers_are_found_and_ordinary_texts_rarely() -> None:
    ordinary, strange = directions(2000), DRAW.normal(size=(10, 16)).astype(np.float32)
    result = outliers_of(np.concatenate([ordinary, strange]))
    found = {outlier.index for outlier in result.texts}
    assert len(found & set(range(2000, 2010))) >= 8
    assert len(found) < 100
    assert [outlier.score for outlier in result.texts] == sorted((o.score for o in result.texts), reverse=True)
    assert all(outlier.score > result.threshold for outlier in result.texts)
    assert (result.p_values <= 0.01).sum() == len(found)
    assert result.share.low < result.share.value < result.share.high


def test_the_false_alarm_rate_of_a_reference_holds() -> None:
    reference = directions(1000)
    for rate in (0.01, 0.05, 0.2):
        result = outliers_of(directions(5000, seed=5), reference, false_alarms=rate)
        actual = len(result.texts) / 5000
        assert rate / 2 - 0.005 < actual < 1.5 * rate + 0.01
        assert result.false_alarms.low < rate < result.false_alarms.high
        assert all(outlier.p_value <= rate for outlier in result.texts)


@pytest.mark.parametrize("method", ["exact", "approximate"])
def test_embeddings_of_a_file_are_read_by_blocks(
    tmp_path: Path, method: neighbours.SearchMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "approximate":
        pytest.importorskip("faiss")
    monkeypatch.setattr(neighbours, "ROWS", 64)
    monkeypatch.setattr(neighbours, "TILE", 100)
    vectors = directions(700)
    np.save(tmp_path / "v.npy", vectors)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    read: list[int] = []
    to_unit = neighbours.to_unit
    monkeypatch.setattr(neighbours, "to_unit", lambda rows: read.append(len(rows)) or to_unit(rows))
    result = outliers_of(mapped, method=method)
    assert max(read) < 700 or method == "approximate"
    np.testing.assert_allclose(result.scores, outliers_of(vectors).scores, atol=1e-5 if method == "exact" else 0.02)


def test_texts() -> None:
    nouns = "password card address name limit phone email bank account plan".split()
    questions = [f"How do I {verb} my {noun}?" for verb in ("reset", "change") for noun in nouns]
    strange = "The volcano erupted again at dawn."
    result = bertie.find_outliers([*questions, strange], neighbours=3)
    first = result.texts[0]
    assert (first.text, first.index) == (strange, 20)
    assert first.nearest_text == questions[first.nearest]
    result = bertie.find_outliers([strange], questions, neighbours=3, false_alarms=0.1)
    assert [outlier.text for outlier in result.texts] == [strange]


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (10, {}, "neighbours=10 needs at least 20 texts, but got 10"),
        (30, {"neighbours": 40}, "needs at least 41"),
        (30, {"neighbours": 0}, "neighbours=0 must be at least 1"),
        (30, {"false_alarms": 1.0}, "false_alarms=1.0 must be a rate between 0 and 1"),
        (30, {"method": "fast"}, "method='fast' must be one of auto, exact, approximate"),
        (30, {"reference": ["a"] * 30}, "too few for false_alarms=0.01: pass 99 or more"),
    ],
)
def test_errors(count: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(bertie.InputError, match=message):
        bertie.find_outliers(["a"] * count, **options)  # type: ignore[arg-type]


def test_equal_texts_have_no_outliers() -> None:
    assert bertie.find_outliers(["the same text"] * 25).texts == ()
