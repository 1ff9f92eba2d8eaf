"""The choice of texts to label: different ones, uncertain ones, and none that is labelled already."""

from __future__ import annotations

import numpy as np

from bertie.tasks.selection import choose, cluster, unit_rows

CENTRES = unit_rows(np.random.default_rng(0).normal(size=(4, 16)))


def groups(sizes: tuple[int, ...]) -> np.ndarray:
    """Tight groups of rows around the centres."""
    draw = np.random.default_rng(1)
    return np.concatenate([CENTRES[[i]] + 0.02 * draw.normal(size=(n, 16)) for i, n in enumerate(sizes)])


def group_of(row: int, sizes: tuple[int, ...]) -> int:
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def test_one_of_each_group_the_largest_first() -> None:
    sizes = (50, 20, 5, 2)
    choices = choose(groups(sizes), 4)
    assert [group_of(choice.row, sizes) for choice in choices] == [0, 1, 2, 3]
    assert [choice.size for choice in choices] == list(sizes)
    assert len(choose(groups(sizes), 100)) == len({choice.row for choice in choose(groups(sizes), 100)})


def test_labelled_groups_come_last() -> None:
    sizes = (50, 20, 5, 2)
    choices = choose(groups(sizes), 2, labelled=CENTRES[[0, 1]])
    assert [group_of(choice.row, sizes) for choice in choices] == [2, 3]


def test_uncertain_groups_come_first_with_one_of_their_duplicates() -> None:
    sizes = (50, 20, 5, 2)
    uncertainty = np.repeat([0.001, 0.001, 0.9, 0.001], sizes)
    choices = choose(groups(sizes), 4, uncertainty=uncertainty)
    assert group_of(choices[0].row, sizes) == 2
    assert len({group_of(choice.row, sizes) for choice in choices}) == 4
    one = uncertainty.copy()
    one[70:75] = [0.1, 0.1, 1.0, 0.1, 0.1]
    assert 72 in [choice.row for choice in choose(groups(sizes), 4, uncertainty=one)]


def test_equal_rows_are_one_cluster() -> None:
    rows = np.ones((5, 3))
    assert [members.tolist() for members in cluster(unit_rows(rows), 3, np.ones(5))] == [[0, 1, 2, 3, 4]]
    assert len(choose(rows, 3)) == 1


def test_of_two_rows_the_first() -> None:
    draw = np.random.default_rng(2)
    for _ in range(50):  # the norms of the rows, and so their products with themselves, are rounded differently
        assert choose(draw.normal(size=(2, 16)), 1) == [(0, 2)]
