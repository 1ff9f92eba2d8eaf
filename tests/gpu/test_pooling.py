"""Fused pooling at real sizes. (Small sizes: tests/ops/triton/test_pooling.py.)"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.nn.pooling import Pooling
from bertie.ops.dispatch import row_for
from bertie.ops.triton import pooling
from bertie.ops.triton.launch import HALF
from bertie.text.batch import Batch

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_near(actual: Tensor, expected: Tensor, share: float) -> None:
    assert actual.dtype == expected.dtype
    atol = share * max(1e-3, float(expected.detach().float().abs().max()))
    assert_close(actual.float(), expected.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("width", [384, 768, 1000])
@pytest.mark.parametrize("mode", pooling.MODES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_pooling(dtype: torch.dtype, mode: str, width: int) -> None:
    """Against the eager code in float64; each text alone gives the same result, bit for bit."""
    lengths = [1, 2, 17, 129, 300, 8192, *[117] * 300]
    batch = Batch.from_ids([[1] * n for n in lengths]).to("cuda")
    hidden = torch.randn(sum(lengths), width, device="cuda").to(dtype)
    assert row_for("pooling", hidden).backend == "triton.fused.pooling"
    fast = Pooling(mode)(hidden, batch)
    assert fast.dtype == dtype
    target = Pooling(mode)(hidden.double(), batch)
    share = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    assert_near(fast.double(), target, share)
    for one, n, found in zip(hidden.split(lengths)[:8], lengths, fast, strict=False):
        alone = Pooling(mode)(one.clone(), Batch.from_ids([[1] * n]).to("cuda"))
        assert torch.equal(alone[0], found)
        assert torch.equal(pooling.pool(one, torch.tensor([0, n], device="cuda").int(), mode)[0], found)


@pytest.mark.parametrize("mode", pooling.MODES)
def test_cuda_graph(mode: str) -> None:
    """Replays read the current cu_seqlens; empty texts give zeros."""
    hidden = torch.randn(200, 768, device="cuda").bfloat16()
    cu_seqlens = torch.tensor([0, 50, 60, 200, 200], device="cuda").int()
    pooling.pool(hidden, cu_seqlens, mode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pooling.pool(hidden, cu_seqlens, mode)
    for other in ([0, 50, 60, 200, 200], [0, 0, 1, 130, 200]):
        cu_seqlens.copy_(torch.tensor(other))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, pooling.pool(hidden, cu_seqlens, mode))
        assert (out[[a == b for a, b in pairwise(other)]] == 0).all()


def test_more_than_2_31_elements() -> None:
    hidden = torch.zeros((1 << 31) // 1024 + 50, 1024, device="cuda", dtype=torch.bfloat16)
    hidden[-50:] = 3.0
    cu_seqlens = torch.tensor([0, len(hidden) - 50, len(hidden)], device="cuda").int()
    assert pooling.pool(hidden, cu_seqlens, "mean").float().mean(1).tolist() == [0.0, 3.0]
