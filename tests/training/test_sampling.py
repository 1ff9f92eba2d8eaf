"""Example samplers, micro-batches and shards."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.training.objectives import SingleLabelObjective, TrainingExample, TrainingWindow
from bertie.training.prefetch import shard_examples, split_micro_batches
from bertie.training.sampling import ExampleSampler, TrainingTask
from tests.training import tiny

# --- which items a step reads ---


def _numbered(count: int, lengths: list[int] | None = None) -> list[TrainingExample]:
    """Items that say their number."""
    made = []
    for i in range(count):
        n = lengths[i] if lengths else 3
        made.append(TrainingExample((TrainingWindow(np.full(n, i), np.zeros(n, dtype=np.int64)),), np.int64(0)))
    return made


def _number(item: TrainingExample) -> int:
    return int(item.windows[0].ids[0])


def _epoch(steps: ExampleSampler, epoch: int) -> list[list[int]]:
    return [
        [_number(item) for item in steps.read(s)[1]]
        for s in range(steps.epoch_starts[epoch], steps.epoch_starts[epoch + 1])
    ]


def _order(epoch: list[list[int]]) -> list[int]:
    return [number for step in epoch for number in step]


@pytest.mark.parametrize("budget", [{"batch_size": 7}, {"batch_tokens": 40, "batch_size": 1}])
def test_each_epoch_reads_every_example_once_in_another_order(budget: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    source = TrainingTask("classify", SingleLabelObjective(), _numbered(50, rng.integers(2, 20, 50).tolist()))
    steps = ExampleSampler([source], tiny.recipe(epochs=3, seed=5, **budget))
    orders = [_order(_epoch(steps, e)) for e in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    again = ExampleSampler([source], tiny.recipe(epochs=3, seed=5, **budget))
    assert [_order(_epoch(again, e)) for e in (2, 0, 1)] == [orders[2], orders[0], orders[1]]
    other = ExampleSampler([source], tiny.recipe(epochs=3, seed=6, **budget))
    assert _order(_epoch(other, 0)) != orders[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 60))
def test_token_budgets_are_kept_and_filled(lengths: list[int], budget: int) -> None:
    source = TrainingTask("classify", SingleLabelObjective(), _numbered(len(lengths), lengths))
    steps = ExampleSampler([source], tiny.recipe(epochs=1, batch_tokens=budget))
    sizes = [[len(item) for item in steps.read(s)[1]] for s in range(steps.total_steps)]
    assert all(sum(one) <= budget or len(one) == 1 for one in sizes)
    assert all(sum(a) + b[0] > budget for a, b in pairwise(sizes))
    assert sum(map(len, sizes)) == len(lengths)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(1, 7), (2, 14), (2.5, 18), (0.5, 4), (0.001, 1), (1.0001, 8), (3.999, 28)]
)
def test_epochs_may_be_fractions(epochs: float, steps: int) -> None:
    made = ExampleSampler(
        [TrainingTask("classify", SingleLabelObjective(), _numbered(50))], tiny.recipe(epochs=epochs, batch_size=8)
    )
    assert made.total_steps == steps
    assert made.epochs_done(made.total_steps) == pytest.approx(epochs)
    parts = [made.epochs_done(s) for s in range(made.total_steps + 1)]
    assert parts[0] == 0
    assert all(a < b for a, b in pairwise(parts))
    assert [made.epoch_of(s) for s in range(made.total_steps)] == [s // 7 for s in range(made.total_steps)]


def test_several_tasks_are_mixed_by_their_number_of_examples() -> None:
    sources = [
        TrainingTask("classify", SingleLabelObjective(), _numbered(40)),
        TrainingTask("tag", SingleLabelObjective(), _numbered(16)),
    ]
    steps = ExampleSampler(sources, tiny.recipe(epochs=2, batch_size=4))
    for epoch in range(2):
        read = [steps.read(s) for s in range(steps.epoch_starts[epoch], steps.epoch_starts[epoch + 1])]
        heads = [source.head for source, _ in read]
        assert Counter(heads) == {"classify": 10, "tag": 4}
        assert heads != sorted(heads)
        for source in sources:
            seen = [_number(item) for from_, items in read if from_ is source for item in items]
            assert sorted(seen) == list(range(len(source.examples)))


def test_windows_of_long_texts_are_sampled_anew_each_epoch() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(20))
    pieces = tuple(TrainingWindow(np.array([w, w]), np.array([0, 0]), float(share)) for w, share in enumerate(shares))
    source = TrainingTask(
        "classify",
        SingleLabelObjective(),
        [TrainingExample(pieces, np.int64(0)), TrainingExample(pieces[:3], np.int64(0))],
    )
    steps = ExampleSampler([source], tiny.recipe(epochs=4, batch_size=1, train_windows=5))
    drawn = []
    for s in range(steps.total_steps):
        (item,) = steps.read(s)[1]
        windows = [int(piece.ids[0]) for piece in item.windows]
        if len(windows) == 3:
            assert item is source.examples[1]
            continue
        drawn.append(windows)
        assert len(windows) == 5
        assert windows == sorted(set(windows))
        assert sum(piece.share for piece in item.windows) == pytest.approx(1.0)
        ratios = [piece.share / shares[int(piece.ids[0])] for piece in item.windows]
        assert ratios == pytest.approx([ratios[0]] * 5)
        assert [[int(p.ids[0]) for p in i.windows] for i in steps.read(s)[1]] == [windows]  # the same when asked again
    assert len(drawn) == 4
    assert len({tuple(windows) for windows in drawn}) == 4


def test_a_token_budget_counts_the_sampled_windows() -> None:
    many = TrainingExample(
        tuple(TrainingWindow(np.zeros(10, int), np.zeros(10, int), 0.1) for _ in range(10)), np.int64(0)
    )
    steps = ExampleSampler(
        [TrainingTask("classify", SingleLabelObjective(), [many] * 6)],
        tiny.recipe(epochs=1, batch_tokens=40, train_windows=2),
    )
    assert [len(steps.read(s)[1]) for s in range(steps.total_steps)] == [2, 2, 2]


lengths_of_items = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(max_examples=50, deadline=None)
@given(lengths_of_items, st.integers(1, 100))
def test_micro_batches_keep_order_and_budget(lengths: list[int], budget: int) -> None:
    items = _numbered(len(lengths), lengths)
    parts = split_micro_batches(items, budget)
    assert [item for part in parts for item in part] == items
    assert all(part and (len(part) == 1 or sum(map(len, part)) <= budget) for part in parts)
    assert all(sum(map(len, a)) + len(b[0]) > budget for a, b in pairwise(parts))
    assert split_micro_batches([], budget) == []


@settings(max_examples=50, deadline=None)
@given(lengths_of_items, st.integers(1, 5))
def test_shards_are_balanced_by_tokens(lengths: list[int], size: int) -> None:
    items = _numbered(len(lengths), lengths)
    shares = shard_examples(items, size)
    assert len(shares) == size
    assert sorted(_number(item) for share in shares for item in share) == list(range(len(items)))
    tokens = [sum(map(len, share)) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)
    if len(items) >= size:
        assert all(shares)
