"""Fused residual + LayerNorm and embeddings + LayerNorm at real sizes. (Small sizes: tests/ops/triton/test_norm.py.)"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, Full, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.ops.torch import eager
from bertie.ops.triton import norm as triton_norm
from bertie.ops.triton.launch import HALF
from bertie.text.batch import Batch
from tests.ops.forced import turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_near(actual: Tensor, expected: Tensor, share: float) -> None:
    assert actual.dtype == expected.dtype
    atol = share * max(1e-3, float(expected.detach().float().abs().max()))
    assert_close(actual.float(), expected.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768)])
def test_add_norms(tokens: int, width: int, residual_dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    residual = torch.randn(tokens, width, device="cuda").to(residual_dtype).requires_grad_()
    norm = nn.LayerNorm(width, bias=False, device="cuda", dtype=residual_dtype)
    dout = [torch.randn(tokens, width, device="cuda") for _ in range(2)]

    def step(ops: Any) -> tuple[Tensor, ...]:
        total, normed = ops.add_norms(x, residual, nn.Identity(), norm, 0.0)
        both = total, normed.bfloat16()  # float32 without the kernel
        grads = torch.autograd.grad(both, (x, residual, norm.weight), [u.to(b.dtype) for u, b in zip(dout, both)])  # noqa: B905
        return *both, *grads

    fast, slow = step(triton_norm), step(eager)
    assert torch.equal(fast[0], slow[0])
    for one, other in zip(fast, slow, strict=True):
        assert_near(one, other, 2e-2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768), (9, 5000)])
def test_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Against float64."""
    x = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)
    dout = torch.randn(tokens, width, device="cuda").to(dtype)
    leaves = [x, *norm.parameters()]
    out = triton_norm.norm(x, norm)
    fast = out, *torch.autograd.grad(out, leaves, dout)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact = F.layer_norm(wide[0], (width,), *wide[1:], norm.eps)
    for one, other in zip(fast, (exact, *torch.autograd.grad(exact, wide, dout.double())), strict=True):
        assert one.dtype == dtype
        assert_near(one.double(), other, 1e-2)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768)])
@torch.no_grad()
def test_embed_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Against float64."""
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)
    tables = [
        (nn.Embedding(size, width, device="cuda", dtype=dtype), torch.randint(size, (tokens,), device="cuda"))
        for size in (30522, 2, 512)
    ]
    for count in (1, 2, 3):
        fast = triton_norm.embed_norm(tables[:count], norm)
        total = torch.stack([table.weight[rows].double() for table, rows in tables[:count]]).sum(0)
        assert fast.dtype == dtype
        assert_near(fast.double(), F.layer_norm(total, (width,), eps=norm.eps), 1e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("width", [384, 768, 1024, 5000])
def test_inference_equals_training(width: int, dtype: torch.dtype, dropout: float) -> None:
    x, residual = (torch.randn(999, width, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)

    def step() -> tuple[Tensor, ...]:
        torch.cuda.manual_seed(1)
        both = triton_norm.add_norms(x, residual, nn.Identity(), norm, dropout)
        return triton_norm.norm(x, norm), triton_norm.add_norm(x, residual, norm, dropout), *both

    trained = step()
    with torch.no_grad():
        inferred = step()
    # Bit for bit; for rows wider than 1,024 up to the last bit, as the two are compiled separately.
    last = torch.finfo(dtype).eps if width > 1024 else 0.0
    for one, other in zip(trained, inferred, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        assert_close(one.detach(), other, rtol=last, atol=last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bfloat16 weights, and with float32 weights under autocast."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=4, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), max_length=8192, pre_norm=True,
        gated=True,
    )  # fmt: skip
    encoder = Encoder(cfg).cuda().to(dtype)
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 129, 513, 1000)]).to("cuda")

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32, cache_enabled=False):
            out = encoder(batch)
            grads = torch.autograd.grad(out.float().sin().sum(), list(encoder.parameters()))
            with torch.no_grad():
                return encoder(batch), out, *grads

    fast = step()
    turn_off(monkeypatch, "triton.triton_norm.norm", "triton.fused.embedding")
    slow = step()
    for one, other in zip(fast, slow, strict=True):
        assert_near(one, other, 6e-2)
