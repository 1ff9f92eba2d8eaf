"""Variable-length attention without a GPU: PyTorch still accepts the arguments, and which calls it gets.

tests/gpu compares values.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from bertie.config import BlockSparse, Causal, Full, Pattern, Sliding
from bertie.ops import reference
from bertie.ops.contracts import AttentionInputs, Relative
from bertie.ops.dispatch import select
from bertie.ops.site import Site
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch import varlen_attention as gpu
from tests.ops.forced import hardware

HALF = (torch.bfloat16, torch.float16)
FULL = Full()


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    with hardware():
        yield


def heads(dtype: torch.dtype, width: int = 16) -> tuple[torch.Tensor, ...]:
    fused = torch.zeros(10, 6, width, dtype=dtype, device="meta", requires_grad=True)
    return fused, *fused.split((4, 1, 1), dim=1)  # four heads of queries share one of keys


def can(q: torch.Tensor, pattern: Pattern = FULL, globals_: torch.Tensor | None = None, dropout: float = 0.0) -> bool:
    return takes(q, (7, 2, 1), pattern, globals_, dropout)


def takes(
    q: torch.Tensor, lengths: tuple[int, ...], pattern: Pattern, globals_: torch.Tensor | None, dropout: float
) -> bool:
    """Whether variable-length attention takes a batch of such queries on a GPU."""
    site = Site(torch.device("cuda", 0), q.dtype, heads=4, kv_heads=1, head_width=q.shape[2], patterns=(pattern,))
    call = AttentionInputs(q, q, q, lengths, q, 0.1, pattern, None, None, globals_, dropout, None)
    rows = [row for row in select("attention", site) if row.backend == "torch.attention.varlen"]
    return any(row.accepts is not None and row.accepts(call) for row in rows)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(2), Causal(), Causal(2)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_pytorch_accepts_the_call(dtype: torch.dtype, pattern: Pattern, dropout: float) -> None:
    fused, q, k, v = heads(dtype)
    if not can(q, pattern, dropout=dropout):
        assert dtype == torch.float32
        assert pattern in (Sliding(2), Causal(2))
        return
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    out = gpu.attend(q, k, v, (7, 7, 7), cu, scale=0.1, pattern=pattern, dropout=dropout)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert out.requires_grad
    if dtype in HALF:  # torch 2.13's stand-in for the way back of the other kernel is broken
        (grad,) = torch.autograd.grad(out.sum(), fused)
        assert grad.shape == fused.shape
    with torch.no_grad():
        assert gpu.attend(q, k, v, (7, 7, 7), cu, scale=0.1, pattern=pattern).shape == q.shape


def test_supported_calls() -> None:
    half, single = heads(torch.bfloat16)[1], heads(torch.float32)[1]
    for dropout in (0.0, 0.1):
        assert can(half, dropout=dropout)
        assert can(half, Sliding(2), dropout=dropout)
        assert can(single, dropout=dropout)
        assert not can(single, Sliding(2), dropout=dropout)
        assert can(half, Causal(2), dropout=dropout)
        assert can(single, Causal(), dropout=dropout)
        assert not can(single, Causal(2), dropout=dropout)
    assert not can(half, BlockSparse(4, 1))
    assert not can(half, globals_=torch.zeros(10, dtype=torch.bool))
    assert not can(heads(torch.float64)[1])
    assert not can(heads(torch.bfloat16, 12)[1])
    assert not can(heads(torch.bfloat16, 200)[1], Sliding(2))
    # One long text among many short ones would leave most of a rectangle empty.
    assert takes(single, (5, 1, 1, 1, 1, 1), Full(), None, 0.1)
    assert not takes(single, (9, 1, 1, 1, 1, 1), Full(), None, 0.1)
    assert takes(single, (9, 1, 1, 1, 1, 1), Full(), None, 0.0)
    with hardware(flash=False):
        assert can(heads(torch.float16)[1])
        assert not can(half)


@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_padded_attention(key_heads: int, pattern: Pattern) -> None:
    """Attention with dropout in float32; no GPU is needed. (At 1e-9 nothing is dropped.)"""
    torch.manual_seed(0)
    lengths = [0, 3, 1, 0, 7, 5, 0]
    q, k, v = (torch.randn(16, h, 8, requires_grad=True) for h in (4, key_heads, key_heads))
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    fast = gpu.attend(q, k, v, (20,) * 7, cu, scale=0.3, pattern=pattern, dropout=1e-9)
    slow = reference.attend(q, k, v, (3, 1, 7, 5), scale=0.3, pattern=pattern)
    assert_close(fast, slow, atol=1e-5, rtol=0)
    upstream = torch.randn_like(slow)
    for one, other in zip(
        torch.autograd.grad(fast, (q, k, v), upstream), torch.autograd.grad(slow, (q, k, v), upstream), strict=True
    ):
        assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [(5,), (1, 2, 33, 64, 31, 32, 100), (7,) * 5, (512, 3, 480)])
def test_bucketed_scores_in_padded_batches(lengths: tuple[int, ...]) -> None:
    """Similar lengths padded together give what each length gives alone."""
    torch.manual_seed(0)
    tokens, longest = sum(lengths), max(lengths)
    q, k, v = (torch.randn(tokens, 4, 16) for _ in range(3))
    relative = Relative(torch.randint(0, 9, (2 * longest - 1,)), scores=torch.randn(9, 4))
    with torch.no_grad():
        found = gpu.attend_biased(q, k, v, lengths, scale=0.25, relative=relative)
        wanted = grouped.attend(q, k, v, lengths, scale=0.25, pattern=Full(), relative=relative)
    assert_close(found, wanted, atol=1e-5, rtol=1e-5)
