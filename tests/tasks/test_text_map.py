"""Maps of texts: groups of vectors stay together, whatever the number of texts, and clusters have names."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.tasks.text_map import MAX_TEXTS, check_texts, cluster, label_clusters, map_vectors, project


def groups(sizes: list[int], width: int = 32, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    group = np.repeat(np.arange(len(sizes)), sizes)
    centres = np.eye(width)[: len(sizes)]
    vectors = centres[group] + noise * draw.normal(size=(len(group), width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32), group


@pytest.mark.parametrize("sizes", [[4, 4, 4], [10, 20, 5, 15], [60, 60]])
def test_groups_stay_together(sizes: list[int]) -> None:
    vectors, group = groups(sizes)
    found = map_vectors(vectors, ["word"] * len(group), clusters=len(sizes))
    assert found.clusters == tuple(group.tolist())
    distances = np.linalg.norm(found.points[:, None] - found.points[None], axis=-1) + 9 * np.eye(len(group))
    assert (group[distances.argmin(1)] == group).all()
    assert found.points.min() >= 0
    assert found.points.max() == pytest.approx(1)
    again = map_vectors(vectors, ["word"] * len(group), clusters=len(sizes))
    np.testing.assert_array_equal(found.points, again.points)


def test_the_number_of_clusters_is_found() -> None:
    vectors, group = groups([12, 12, 12, 12])
    assert cluster(project(vectors)).tolist() == group.tolist()


@pytest.mark.parametrize("count", [2, 3, 4])
def test_few_texts_and_equal_texts(count: int) -> None:
    vectors, _ = groups([1] * count)
    assert np.isfinite(map_vectors(vectors, ["a"] * count).points).all()
    same = map_vectors(np.tile(vectors[:1], (count, 1)), ["a"] * count)
    assert np.isfinite(same.points).all()
    assert len(same.clusters) == count


def test_labels_are_the_words_that_distinguish() -> None:
    texts = ["the cat and the milk", "a cat with milk", "the shares and the milk", "shares of milk"]
    first, second = label_clusters(texts, [0, 0, 1, 1])
    assert first.startswith("cat")
    assert second.startswith("shares")
    assert label_clusters(["the of", "cat"], [0, 1]) == ["cluster 1", "cat"]


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="a map takes 2 to 500 texts, but got 501"):
        check_texts(MAX_TEXTS + 1, None)
    with pytest.raises(InputError, match="clusters=4 must lie between 1 and the number of texts, 3"):
        check_texts(3, 4)


def test_it_can_be_interrupted() -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        map_vectors(groups([20, 20])[0], ["a"] * 40, check=check)
