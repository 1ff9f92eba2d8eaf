"""Rotary embeddings by the Triton kernel at real sizes against the eager reference, alone and in an encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, Full, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.ops.torch import eager
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import rotary
from bertie.text.batch import Batch
from tests.ops.forced import turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # one rounding of values dout to 6


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random_qkv(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    qkv = torch.randn(tokens, heads + 2 * kv_heads, width, device="cuda").to(dtype)
    positions = torch.arange(tokens, device="cuda") % 8192
    return qkv, *rotary_tables(Rotary((160000.0,)), positions, width)[160000.0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "width"),
    [(65536, 12, 12, 64), (513, 16, 16, 64), (8193, 16, 4, 128), (129, 6, 2, 24), (127, 3, 1, 16), (1, 12, 12, 64)],
)
def test_apply_rotary(tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    qkv, cos, sin = random_qkv(tokens, heads, kv_heads, width, dtype)
    sizes = [heads, kv_heads, kv_heads]
    dout = [torch.randn(tokens, n, width, device="cuda").to(dtype) for n in sizes]

    def step(ops: Any) -> tuple[Tensor, ...]:
        leaf = qkv.clone().requires_grad_()
        q, k, v = leaf.split(sizes, dim=1)
        q, k = ops.apply_rotary(q, k, cos, sin)
        return q, k, *torch.autograd.grad((q, k, v), leaf, dout)

    fast, slow = step(rotary), step(eager)
    for one, other in zip(fast, slow, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, atol=TOLERANCE[dtype], rtol=0)
    with torch.no_grad():
        q, k, v = qkv.clone().split(sizes, dim=1)
        again = rotary.apply_rotary(q, k, cos, sin)
    for one, other, inputs in zip(again, fast[:2], (q, k), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() == inputs.data_ptr()
    assert torch.equal(v, qkv.split(sizes, 1)[2])


def test_more_than_2_31_elements() -> None:
    """64-bit offsets."""
    tokens = (1 << 31) // (36 * 64) + 100
    qkv, cos, sin = random_qkv(tokens, 12, 12, 64, torch.bfloat16)
    expected = rotate(qkv[-50:, :12].clone(), cos[-50:], sin[-50:])
    with torch.no_grad():
        q, _ = rotary.apply_rotary(*qkv.split(12, dim=1)[:2], cos, sin)
    assert_close(q[-50:], expected, atol=4e-2, rtol=0)


def test_inference_is_in_place() -> None:
    qkv, cos, sin = random_qkv(10000, 12, 12, 64, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        rotary.apply_rotary(*qkv.split(12, dim=1)[:2], cos, sin)
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before FlashAttention in training, before or inside the Triton kernel in inference."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=2, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), max_length=8192, pre_norm=True,
    )  # fmt: skip
    encoder = Encoder(cfg).cuda().to(dtype)
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 129, 513, 1000)]).to("cuda")

    def step() -> tuple[Tensor, ...]:
        out = encoder(batch)
        grads = torch.autograd.grad(out.float().sin().sum(), list(encoder.parameters()))
        with torch.no_grad():
            return encoder(batch), out, *grads

    fast = step()
    turn_off(monkeypatch, "triton.rotary")
    slow = step()
    for one, other in zip(fast, slow, strict=True):
        near = (1e-4 if dtype == torch.float32 else 6e-2) * max(1e-3, float(other.detach().float().abs().max()))
        assert_close(one.float(), other.float(), atol=near, rtol=0)
