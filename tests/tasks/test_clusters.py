"""Clusters of any number of texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.tasks import clusters as module
from bertie.tasks.clusters import cluster_texts, cluster_vectors, map_sample, texts_at


def groups(sizes: list[int], width: int = 64, noise: float = 0.05) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Vectors around as many centres, shuffled."""
    draw = np.random.default_rng(0)
    group = draw.permutation(np.repeat(np.arange(len(sizes)), sizes))
    vectors = np.eye(width)[group] + noise * draw.normal(size=(len(group), width))
    return (3 * vectors).astype(np.float32), group


@pytest.mark.parametrize("sizes", [[90, 60], [50, 40, 30, 20], [30 - i for i in range(14)]])
def test_the_number_and_the_members_are_found(sizes: list[int]) -> None:
    vectors, group = groups(sizes)
    result = cluster_vectors(vectors, [f"word{'abcdefghijklmn'[i]} common" for i in group])
    assert [own.size for own in result.clusters] == sizes  # the largest first
    assert result.assigned.tolist() == group.tolist()
    assert [own.label.split(",")[0] for own in result.clusters] == [f"word{c}" for c in "abcdefghijklmn"[: len(sizes)]]
    assert 0.5 < result.silhouette.low < result.silhouette.value < result.silhouette.high <= 1.01
    for number, own in enumerate(result.clusters):
        best = max(result.similarity[group == number])
        assert result.similarity[own.examples[0]] == pytest.approx(best)
        assert len(own.examples) == 3


def test_texts_outside_of_the_sample_join_the_nearest_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, group = groups([120, 80, 50])
    for name, value in (("SAMPLE", 60), ("SILHOUETTE_SAMPLE", 40), ("BLOCK", 7)):
        monkeypatch.setattr(module, name, value)
    result = cluster_vectors(vectors, ["a"] * len(group))
    assert result.assigned.tolist() == group.tolist()


def test_a_given_number_and_few_texts() -> None:
    vectors, _ = groups([20, 20])
    assert len(cluster_vectors(vectors, ["a"] * 40, clusters=5).clusters) == 5
    one = cluster_vectors(vectors, ["a"] * 40, clusters=1)
    assert len(one.clusters) == 1
    assert np.isnan(one.silhouette.value)
    for count in (2, 3):
        assert sum(own.size for own in cluster_vectors(vectors[:count], ["a"] * count).clusters) == count
    same = cluster_vectors(np.ones((9, 8), np.float32), ["a"] * 9)
    assert [own.size for own in same.clusters] == [9]


def test_the_map_is_of_a_sample() -> None:
    vectors, group = groups([400, 300], width=8)
    rows, points = map_sample(vectors)
    assert len(rows) == len(points) == 500
    assert (np.diff(rows) > 0).all()
    near = np.linalg.norm(points[:, None] - points[None], axis=-1) + 9 * np.eye(500)
    assert (group[rows][near.argmin(1)] == group[rows]).mean() > 0.99
    assert dict(texts_at("abc", [2, 0])) == {0: "a", 2: "c"}


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2 texts, but got 1"):
        cluster_texts(["a"])
    with pytest.raises(InputError, match="clusters=4 must lie between 1 and the number of texts, 3"):
        cluster_texts(["a", "b", "c"], clusters=4)
