"""Tiles of a flat batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertie.ops.triton.tiles import tiles_from_cu_seqlens, tiles_from_lengths
from bertie.text.batch import Batch
from bertie.training.graphed_step import micro_batch_size


@pytest.mark.parametrize("lengths", [[1], [16, 17, 1, 64], [0, 5, 0, 0, 200, 64, 0]], ids=str)
@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_cover_each_token_once(lengths: list[int], tile: int) -> None:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    expected = {(int(start), n, first) for start, n in zip(cu, lengths, strict=False) for first in range(0, n, tile)}
    exact = tiles_from_lengths(tuple(lengths), tile, torch.device("cpu")).tolist()
    assert {tuple(row) for row in exact} == expected
    assert len(exact) == len(expected)
    assert [n for _, n, _ in exact] == sorted((n for _, n, _ in exact), reverse=True)
    padded = tiles_from_cu_seqlens(cu, sum(lengths), tile, max(lengths)).tolist()
    assert {tuple(row) for row in padded if row[1]} == expected
    assert len([row for row in padded if row[1]]) == len(expected)


@pytest.mark.parametrize("max_length", [64, 128, 512])
@pytest.mark.parametrize(
    "lengths",
    [[1], [64] * 8, [128] * 4, [64] * 100, [3, 60, 1], [17] * 333],
    ids=lambda one: f"{len(one)} up to {max(one)}",
)
def test_upper_bounds_are_never_mistaken_for_lengths(lengths: list[int], max_length: int) -> None:
    """`lengths` that sum to the number of tokens are taken as exact."""
    batch = Batch.from_ids([[1] * min(n, max_length) for n in lengths])
    mini: Any = SimpleNamespace(batch=batch, targets=SimpleNamespace(rows=None))
    size = micro_batch_size(mini, max_length)
    assert batch.max_len <= size.longest
    assert size.texts * size.longest > size.tokens
