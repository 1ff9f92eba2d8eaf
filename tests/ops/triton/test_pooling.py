"""Fused pooling against its definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.nn.pooling import Pooling
from bertie.ops import disable
from bertie.ops.triton import pooling
from bertie.text.batch import Batch
from tests.ops.triton.helpers import DEVICE, random_tensor

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "fused_backends", "nan_memory"),
]


LENGTHS = [1, 2, 0, 17, 129, 300, 0, 0]  # batches of CUDA graphs have empty texts


def pool_one(hidden: Tensor, mode: str) -> Tensor:
    """One text, by definition."""
    n = torch.arange(1, len(hidden) + 1, dtype=hidden.dtype, device=DEVICE)[:, None]
    if not len(hidden):
        return hidden.new_zeros(hidden.shape[1])
    if mode == "max":
        return hidden.max(dim=0).values
    if mode == "weightedmean":
        return (hidden * n).sum(0) / n.sum()
    return hidden.sum(0) / (len(hidden) if mode == "mean" else math.sqrt(len(hidden)))


@pytest.mark.parametrize("width", [5, 200])
@pytest.mark.parametrize("mode", pooling.MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_pool(dtype: torch.dtype, mode: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = random_tensor(sum(LENGTHS), width, dtype=dtype).detach()
    ends = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).int()
    fast = pooling.pool(hidden, ends, mode)
    assert (fast.dtype, fast.shape) == (dtype, (len(LENGTHS), width))
    slow = torch.stack([pool_one(one, mode) for one in hidden.double().split(LENGTHS)])
    near = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]  # one rounding of values up to 5
    assert_close(fast.double(), slow, atol=near, rtol=near)
    strided = hidden.T.contiguous().T
    assert torch.equal(pooling.pool(strided, ends, mode), fast)
    for one, actual in zip(hidden.split(LENGTHS), fast, strict=True):  # bit for bit
        alone = pooling.pool(one, torch.tensor([0, len(one)], device=DEVICE).int(), mode)
        assert torch.equal(alone[0], actual)


@pytest.mark.parametrize("mode", pooling.MODES)
def test_pool_does_not_depend_on_neighbours(mode: str) -> None:
    """And propagates NaN and infinity within a text."""
    hidden = random_tensor(40, 8).detach()
    ends = torch.tensor([0, 3, 3, 20, 40], device=DEVICE).int()
    expected = pooling.pool(hidden, ends, mode)
    hidden[1], hidden[39] = torch.nan, torch.inf
    actual = pooling.pool(hidden, ends, mode)
    assert torch.equal(actual[1:3], expected[1:3])
    assert actual[0].isnan().all()
    assert not actual[3].isfinite().any()


@pytest.mark.parametrize("modes", ["max", ("mean", "weightedmean"), pooling.MODES], ids=str)
def test_pooling_module(modes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads cu_seqlens only: `lengths` may be upper bounds. Prompts are excluded by the eager code."""
    batch = Batch.from_ids([[1] * n for n in (3, 1, 18)]).to(DEVICE)
    ends = F.pad(batch.cu_seqlens, (0, 2), value=22)
    roomy = replace(batch, cu_seqlens=ends, lengths=(32,) * 5)
    hidden = random_tensor(22, 6).detach()
    with disable("triton.fused.pooling"):
        expected = Pooling(modes)(hidden.double(), roomy)
        skipped = Pooling(modes, include_prompt=False)(hidden, batch, [1, 0, 2])
    assert torch.equal(Pooling(modes, include_prompt=False)(hidden, batch, [1, 0, 2]), skipped)
    monkeypatch.setattr(Batch, "text_of_token", None)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(
            Pooling, "means", lambda self, hidden, batch: pooling.pool(hidden, batch.cu_seqlens, "mean").numpy()
        )
    for pool in (Pooling(modes), Pooling(modes, include_prompt=False)):
        assert_close(pool(hidden, roomy).double(), expected, atol=2e-6, rtol=2e-6)
