"""A residual sum and the norm after it by one program, at real sizes. (Small ones: tests/kernels/fused_programs.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.config import Embeddings, Full, Rotary, Sliding
from bertie.kernels import fused
from bertie.nn.encoder import Encoder
from bertie.text.batch import Batch
from tests.test_config import GOOD

pytest.importorskip("triton", reason="the programs are Triton's")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "sums", True)
    torch.manual_seed(0)


def near(one: Tensor, other: Tensor, share: float) -> None:
    assert one.dtype == other.dtype
    atol = share * max(1e-3, float(other.detach().float().abs().max()))
    assert_close(one.float(), other.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768)])
def test_sum_and_norm(tokens: int, width: int, residual_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    residual = torch.randn(tokens, width, device="cuda").to(residual_dtype).requires_grad_()
    norm = nn.LayerNorm(width, bias=False, device="cuda", dtype=residual_dtype)
    up = [torch.randn(tokens, width, device="cuda") for _ in range(2)]

    def step() -> tuple[Tensor, ...]:
        total, normed = fused.add_norms(x, residual, nn.Identity(), norm, 0.0)
        both = total, normed.bfloat16()  # single without the program
        grads = torch.autograd.grad(both, (x, residual, norm.weight), [u.to(b.dtype) for u, b in zip(up, both)])  # noqa: B905
        return *both, *grads

    fast = step()
    monkeypatch.setattr(fused, "sums", False)
    slow = step()
    assert torch.equal(fast[0], slow[0])
    for one, other in zip(fast, slow, strict=True):
        near(one, other, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights in half precision, and in single precision under autocast."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=4, head_width=64, ff_width=512, embeddings=Embeddings(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), reach=8192, pre_norm=True, gated=True,
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
    monkeypatch.setattr(fused, "sums", False)
    slow = step()
    for one, other in zip(fast, slow, strict=True):
        near(one, other, 6e-2)
