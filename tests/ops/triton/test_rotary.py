"""Rotary embeddings by the Triton kernel against the eager reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, Rotary
from bertie.nn.model import Model
from bertie.ops import disable
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import rotary
from bertie.text.batch import Batch
from tests.ops.triton.helpers import DEVICE
from tests.test_config import GOOD

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "rotary_backend", "nan_memory"),
]
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # one rounding of values up to 5


def random_qkv(lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Fused queries, keys and values, as a model has them; and cos and sin."""
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, width, device=DEVICE).to(dtype)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
    return qkv, *rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]


def compare(
    lengths: list[int], heads: int = 2, kv_heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float32
) -> None:
    qkv, cos, sin = random_qkv(lengths, heads, kv_heads, width, dtype)
    sizes = [heads, kv_heads, kv_heads]
    slow = [rotate(x.double(), cos, sin) for x in qkv.split(sizes, 1)[:2]]
    near = {"atol": TOLERANCES[dtype], "rtol": 0}

    leaf = qkv.clone().requires_grad_()
    q, k, v = leaf.split(sizes, dim=1)
    fast = rotary.apply_rotary(q, k, cos, sin)
    dout = [torch.randn(x.shape, device=DEVICE).to(dtype) for x in (*fast, v)]
    (gradient,) = torch.autograd.grad((*fast, v), leaf, dout)
    wide = qkv.double().requires_grad_()
    plain = wide.split(sizes, dim=1)
    exact_rotated = [rotate_exactly(x, cos, sin) for x in plain[:2]]
    (expected,) = torch.autograd.grad((*exact_rotated, plain[2]), wide, [x.double() for x in dout])
    assert torch.equal(leaf, qkv)  # with gradients, out of place
    for one, other, exact in zip(fast, slow, exact_rotated, strict=True):
        assert one.dtype == dtype
        assert_close(one.double(), other.double(), **near)
        assert_close(one.double(), exact, **near)
    assert gradient.dtype == dtype
    assert_close(gradient.double(), expected, **near)

    kept = qkv.clone()
    with torch.no_grad():
        q, k, v = kept.split(sizes, dim=1)
        again = rotary.apply_rotary(q, k, cos, sin)
    for one, other, arguments in zip(again, fast, (q, k), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() == arguments.data_ptr()
        assert one.stride() == arguments.stride()
    assert torch.equal(v, qkv.split(sizes, 1)[2])


def rotate_exactly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = (one.double()[:, None, : x.shape[-1] // 2] for one in (cos, sin))
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 127, 128, 129, 513])
def test_lengths(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "ROWS", 8)
    compare([tokens], dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_tokens_per_program(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "ROWS", rows)
    compare([3, 1, 17, 2], heads=4, kv_heads=4, width=32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (12, 1), (12, 12)])
@pytest.mark.parametrize("width", [16, 18, 24, 64, 80, 128])
def test_heads_and_widths(heads: int, kv_heads: int, width: int) -> None:
    compare([5, 4], heads, kv_heads, width, torch.float16)


def test_other_layouts() -> None:
    """Separate queries, as in an enhanced mask decoder; heads that are not contiguous are copied."""
    qkv, cos, sin = random_qkv([7], 2, 2, 16, torch.float32)
    q, k = torch.randn(7, 4, 16, device=DEVICE), qkv[:, 2:4]
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    expected = rotate(q, cos, sin), rotate(k, cos, sin)
    with torch.no_grad():
        actual = rotary.apply_rotary(strided, k, cos, sin)
    assert torch.equal(strided, q)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, atol=2e-6, rtol=0)


def test_inference_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, cos, sin = random_qkv([7], 2, 1, 16, torch.float32)
    for name in ("empty", "empty_like", "zeros"):
        monkeypatch.setattr(torch, name, None)
    with torch.no_grad():
        rotary.apply_rotary(*qkv.split([2, 1, 1], dim=1)[:2], cos, sin)
    frozen = qkv.clone()
    rotary.apply_rotary(*frozen.split([2, 1, 1], dim=1)[:2], cos, sin)  # inputs without gradients


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_model(kv_heads: int) -> None:
    sizes: dict[str, Any] = {"width": 32, "heads": 2, "kv_heads": kv_heads, "head_width": 16}
    cfg = replace(
        GOOD, **sizes, embeddings=EmbeddingConfig(width=32), positions=(Rotary((10.0, 100.0)),), pre_norm=True
    )
    model = Model(cfg, {}).to(DEVICE)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(DEVICE)

    def step() -> tuple[Tensor, ...]:
        hidden = model.encoder(batch)
        grads = torch.autograd.grad(hidden.sin().sum(), list(model.parameters()), allow_unused=True)
        with torch.no_grad():
            return model.encoder(batch), hidden, *(grad for grad in grads if grad is not None)

    fast = step()
    with disable("triton.rotary"):
        slow = step()
    for one, other in zip(fast, slow, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_cuda_graph() -> None:
    """Replays rotate the current contents."""
    qkv, cos, sin = random_qkv([50, 3], 4, 4, 64, torch.bfloat16)
    static = qkv.clone()

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            made = static * 1.0  # in place of the GEMM that computes queries and keys
            return rotary.apply_rotary(*made.split(4, dim=1)[:2], cos, sin)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = step()
    static.mul_(2.0)
    for _ in range(2):
        graph.replay()
        for one, other in zip(actual, qkv.split(4, dim=1), strict=False):
            assert_close(one, rotate(2.0 * other, cos, sin), atol=8e-2, rtol=0)
