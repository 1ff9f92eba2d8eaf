"""Rows of a step share no text, and steps are full."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.training.embedding import losses
from bertie.training.embedding.objective import EmbeddingObjective, make_row
from bertie.training.embedding.row_sampler import RowSampler
from bertie.training.sampling import TrainingTask
from tests.training import tiny

words = st.lists(st.tuples(*[st.sampled_from("abcdefghij")] * 3), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(words, st.integers(1, 8), st.integers(2, 3))
def test_no_step_has_a_right_text_twice(texts: list[tuple[str, ...]], size: int, columns: int) -> None:
    texts = [one[:columns] for one in texts]
    piece = tiny.piece(np.random.default_rng(0), 0, 4)
    items = [make_row([[piece]] * columns) for _ in texts]
    source = TrainingTask("", EmbeddingObjective(losses.InfoNCELoss()), items)
    plan = RowSampler(source, tiny.recipe(batch_size=size, epochs=2), texts)
    assert plan.epoch_starts[-1] == plan.total_steps
    for epoch in range(2):
        steps = [chosen for _, chosen in plan._epoch_batches(epoch)]
        assert sorted(i for chosen in steps for i in chosen) == list(range(len(texts)))
        for chosen in steps:
            assert 1 <= len(chosen) <= size
            for i in chosen:
                others = {text for j in chosen if j != i for text in texts[j]}
                assert others.isdisjoint(texts[i][:2])


def test_steps_are_full_where_nothing_clashes() -> None:
    texts = [(f"a{i}", f"b{i}", "the same") for i in range(20)]
    piece = tiny.piece(np.random.default_rng(0), 0, 4)
    source = TrainingTask("", EmbeddingObjective(losses.InfoNCELoss()), [make_row([[piece]] * 3) for _ in texts])
    plan = RowSampler(source, tiny.recipe(batch_size=8, epochs=1), texts)
    assert [len(plan.read(step)[1]) for step in range(plan.total_steps)] == [8, 8, 4]
    by_tokens = RowSampler(source, tiny.recipe(batch_tokens=36, epochs=1), texts)
    assert [len(by_tokens.read(step)[1]) for step in range(by_tokens.total_steps)] == [3] * 6 + [2]


def test_of_long_texts_some_windows_are_read() -> None:
    rng = np.random.default_rng(0)
    long = [tiny.piece(rng, 0, 4, 0.1) for _ in range(10)]
    source = TrainingTask(
        "", EmbeddingObjective(losses.InfoNCELoss()), [make_row([long, [tiny.piece(rng, 0, 4)], long])]
    )
    plan = RowSampler(source, tiny.recipe(train_windows=3, epochs=1))
    (item,) = plan.read(0)[1]
    assert item.extras["windows"].tolist() == [3, 1, 3]
    assert [round(piece.share, 3) for piece in item.windows] == [0.333] * 3 + [1.0] + [0.333] * 3
