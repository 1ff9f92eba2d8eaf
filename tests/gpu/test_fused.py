"""Norms, residual sums with the norm after them, and pooling, by one program at real sizes; how exact activations are.

(Small sizes: tests/ops/fused_programs.py.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import Activation, EmbeddingConfig, Full, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.nn.norms import activation as function
from bertie.nn.pooling import Pooling
from bertie.ops.dispatch import row_for
from bertie.ops.torch import eager
from bertie.ops.triton import fused
from bertie.text.batch import Batch
from tests.ops.forced import turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="the programs are Triton's")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def near(one: Tensor, other: Tensor, share: float) -> None:
    assert one.dtype == other.dtype
    atol = share * max(1e-3, float(other.detach().float().abs().max()))
    assert_close(one.float(), other.float(), atol=atol, rtol=0)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768)])
def test_sum_and_norm(tokens: int, width: int, residual_dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    residual = torch.randn(tokens, width, device="cuda").to(residual_dtype).requires_grad_()
    norm = nn.LayerNorm(width, bias=False, device="cuda", dtype=residual_dtype)
    up = [torch.randn(tokens, width, device="cuda") for _ in range(2)]

    def step(ops: Any) -> tuple[Tensor, ...]:
        total, normed = ops.add_norms(x, residual, nn.Identity(), norm, 0.0)
        both = total, normed.bfloat16()  # single without the program
        grads = torch.autograd.grad(both, (x, residual, norm.weight), [u.to(b.dtype) for u, b in zip(up, both)])  # noqa: B905
        return *both, *grads

    fast, slow = step(fused), step(eager)
    assert torch.equal(fast[0], slow[0])
    for one, other in zip(fast, slow, strict=True):
        near(one, other, 2e-2)


@pytest.mark.parametrize("dtype", fused.HALF, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768), (9, 5000)])
def test_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Against the same in double precision."""
    x = torch.randn(tokens, width, device="cuda").to(dtype).requires_grad_()
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)
    up = torch.randn(tokens, width, device="cuda").to(dtype)
    leaves = [x, *norm.parameters()]
    out = fused.norm(x, norm)
    fast = out, *torch.autograd.grad(out, leaves, up)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    exact = F.layer_norm(wide[0], (width,), *wide[1:], norm.eps)
    for one, other in zip(fast, (exact, *torch.autograd.grad(exact, wide, up.double())), strict=True):
        assert one.dtype == dtype
        near(one.double(), other, 1e-2)


@pytest.mark.parametrize("dtype", fused.HALF, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768)])
@torch.no_grad()
def test_embed_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Against the same in double precision."""
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)
    tables = [
        (nn.Embedding(size, width, device="cuda", dtype=dtype), torch.randint(size, (tokens,), device="cuda"))
        for size in (30522, 2, 512)
    ]
    for count in (1, 2, 3):
        fast = fused.embed_norm(tables[:count], norm)
        total = torch.stack([table.weight[rows].double() for table, rows in tables[:count]]).sum(0)
        assert fast.dtype == dtype
        near(fast.double(), F.layer_norm(total, (width,), eps=norm.eps), 1e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", fused.HALF, ids=str)
@pytest.mark.parametrize("width", [384, 768, 1024, 5000])
def test_without_gradients_it_is_the_same(width: int, dtype: torch.dtype, dropout: float) -> None:
    x, residual = (torch.randn(999, width, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    norm = nn.LayerNorm(width, device="cuda", dtype=dtype)

    def step() -> tuple[Tensor, ...]:
        torch.cuda.manual_seed(1)
        both = fused.add_norms(x, residual, nn.Identity(), norm, dropout)
        return fused.norm(x, norm), fused.add_norm(x, residual, norm, dropout), *both

    learnt = step()
    with torch.no_grad():
        read = step()
    # To the bit; of rows that fill no power of two but for the last one, as the compiler makes two programs of it.
    last = torch.finfo(dtype).eps if width > 1024 else 0.0
    for one, other in zip(learnt, read, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        assert_close(one.detach(), other, rtol=last, atol=last)


def test_a_product_that_ends_with_its_gelu_is_nearer_to_the_exact_one() -> None:
    """Than one that is rounded, read again and passed through the exact GELU: on average, in bfloat16."""
    x, linear = torch.randn(4096, 768, device="cuda").bfloat16(), nn.Linear(768, 3072, device="cuda").bfloat16()
    with torch.no_grad():
        linear.weight *= 3.0  # so that values are of the order of 1
        exact = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()))
        assert fused._in_the_product(x, linear, "gelu")
        one = fused.expand(x, linear, "gelu", gated=False)
        two = fused._Activate.run(F.linear(x, linear.weight), linear.bias, "gelu", False)
        three = F.gelu(linear(x))
    errors = [float((way.double() - exact).abs().mean()) for way in (one, two, three)]
    assert errors[0] < min(errors[1:]), errors
    assert_close(one.double(), exact, atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("dtype", fused.HALF, ids=str)
def test_activations_without_gradients(dtype: torch.dtype, activation: Activation) -> None:
    """By whichever way, within a rounding or two of the exact one."""
    x, linear = torch.randn(513, 384, device="cuda").to(dtype), nn.Linear(384, 1536, device="cuda").to(dtype)
    with torch.no_grad():
        wide = F.linear(*(one.double() for one in (x, *linear.parameters())))
        found = fused.expand(x, linear, activation, gated=False)
        wanted = function(activation)(wide)
    near = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert found.dtype == dtype
    assert_close(found.double(), wanted, atol=near, rtol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights in half precision, and in single precision under autocast."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=4, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), max_length=8192, pre_norm=True, gated=True,
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
    turn_off(monkeypatch, "triton.fused.norm", "triton.fused.embedding")
    slow = step()
    for one, other in zip(fast, slow, strict=True):
        near(one, other, 6e-2)


@pytest.mark.parametrize("width", [384, 768, 1000])
@pytest.mark.parametrize("mode", fused.POOLS)
@pytest.mark.parametrize("dtype", [*fused.HALF, torch.float32], ids=str)
def test_pooling(dtype: torch.dtype, mode: str, width: int) -> None:
    """Against the plain expressions in double precision; each text alone gives the same bits."""
    lengths = [1, 2, 17, 129, 300, 8192, *[117] * 300]
    batch = Batch.from_ids([[1] * n for n in lengths]).to("cuda")
    hidden = torch.randn(sum(lengths), width, device="cuda").to(dtype)
    assert row_for("pooling", hidden).backend == "triton.fused.pooling"
    fast = Pooling(mode)(hidden, batch)
    assert fast.dtype == dtype
    wanted = Pooling(mode)(hidden.double(), batch)
    share = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    near(fast.double(), wanted, share)
    for one, n, found in zip(hidden.split(lengths)[:8], lengths, fast, strict=False):
        alone = Pooling(mode)(one.clone(), Batch.from_ids([[1] * n]).to("cuda"))
        assert torch.equal(alone[0], found)
        assert torch.equal(fused.pool(one, torch.tensor([0, n], device="cuda").int(), mode)[0], found)


@pytest.mark.parametrize("mode", fused.POOLS)
def test_pooling_in_a_recorded_graph(mode: str) -> None:
    """Played again, it goes by the ends that lie there then; texts of no tokens give zeros."""
    hidden = torch.randn(200, 768, device="cuda").bfloat16()
    ends = torch.tensor([0, 50, 60, 200, 200], device="cuda").int()
    fused.pool(hidden, ends, mode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.pool(hidden, ends, mode)
    for other in ([0, 50, 60, 200, 200], [0, 0, 1, 130, 200]):
        ends.copy_(torch.tensor(other))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, fused.pool(hidden, ends, mode))
        assert (out[[a == b for a, b in pairwise(other)]] == 0).all()


def test_pooling_past_the_largest_number_of_32_bits() -> None:
    hidden = torch.zeros((1 << 31) // 1024 + 50, 1024, device="cuda", dtype=torch.bfloat16)
    hidden[-50:] = 3.0
    ends = torch.tensor([0, len(hidden) - 50, len(hidden)], device="cuda").int()
    assert fused.pool(hidden, ends, "mean").float().mean(1).tolist() == [0.0, 3.0]
