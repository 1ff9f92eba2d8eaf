from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bertie.errors import InputError
from bertie.text.batch import Batch, pack
from bertie.text.encoding import Encodings


def test_flat() -> None:
    batch = Batch.from_ids([[5, 6, 7], [8]], [[0, 0, 1], [0]])
    assert batch.ids.tolist() == [5, 6, 7, 8]
    assert batch.segments.tolist() == [0, 0, 1, 0]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4]
    assert (batch.lengths, batch.max_len, len(batch)) == ((3, 1), 3, 2)
    assert batch.text_of_token().tolist() == [0, 0, 0, 1]
    assert batch.cu_seqlens.dtype == torch.int32


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.randoms())
def test_select(lengths: list[int], draw: Any) -> None:
    total = sum(lengths)
    flat = Encodings(np.arange(total), np.arange(total) % 2, np.array(lengths))
    texts = draw.sample(range(len(lengths)), draw.randint(1, len(lengths)))
    ids = np.split(flat.ids, np.cumsum(lengths)[:-1])
    one, other = Batch.select(flat, texts), Batch.from_ids([ids[i] for i in texts], [ids[i] % 2 for i in texts])
    assert one.lengths == other.lengths
    for name in ("ids", "segments", "positions", "cu_seqlens"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_ranges_are_computed_on_the_host() -> None:
    batch = Batch.from_ids([[5, 6, 7], [2]], [[0, 0, 1], [0]])
    away = batch.to("meta").with_globals(None)  # a tensor there has no values to ask for
    assert away.ranges() == batch.ranges() == ((2, 7), (0, 1))
    by_hand = Batch(batch.ids, batch.segments, batch.positions, batch.cu_seqlens, batch.lengths)
    assert by_hand.ranges() == ((2, 7), (0, 1))
    assert replace(batch, ids=batch.ids + 1).ranges() == ((3, 8), (0, 1))


def test_empty_texts_own_no_tokens() -> None:
    batch = Batch.from_ids([[5, 6, 7], [8]])
    spare = replace(batch, cu_seqlens=torch.tensor([0, 0, 3, 3, 4, 4], dtype=torch.int32), lengths=(3,) * 5)
    assert spare.text_of_token().tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("ids", "segments", "named"),
    [
        ([], None, "the batch is empty"),
        ([[1], []], None, "text 1 of the batch has no tokens"),
        ([[1, 2]], [[0]], "text 0 of the batch has 2 ids but 1 segments"),
    ],
)
def test_invalid_batches(ids: list[list[int]], segments: list[list[int]] | None, named: str) -> None:
    with pytest.raises(InputError, match=named):
        Batch.from_ids(ids, segments)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_packing_keeps_every_text_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = list(pack(lengths, budget))
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)


def test_a_budget_of_zero() -> None:
    with pytest.raises(InputError, match="budget=0"):
        list(pack([1], 0))
