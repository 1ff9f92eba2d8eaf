"""The program for rotary positions against the plain expression, there and back: on the GPU, or interpreted.

Run by test_rotary.py in a process of its own: what interprets Triton's programs must be told so before it is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.ops.forced import forced
from tests.test_config import GOOD

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}  # a rounding, of values of up to 5


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    torch.manual_seed(0)
    with forced("triton.rotary"):
        yield


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds the worst."""
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(torch.nan))


def drawn(lengths: list[int], heads: int, key_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a model has them, side by side; and cos and sin."""
    fused = torch.randn(sum(lengths), heads + 2 * key_heads, width, device=HERE).to(dtype)
    positions = torch.cat([torch.arange(n, device=HERE) for n in lengths])
    return fused, *rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]


def compare(
    lengths: list[int], heads: int = 2, key_heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float32
) -> None:
    fused, cos, sin = drawn(lengths, heads, key_heads, width, dtype)
    sizes = [heads, key_heads, key_heads]
    slow = [rotate(x.double(), cos, sin) for x in fused.split(sizes, 1)[:2]]
    near = {"atol": NEAR[dtype], "rtol": 0}

    leaf = fused.clone().requires_grad_()
    q, k, v = leaf.split(sizes, dim=1)
    fast = rotary.rotate_pair(q, k, cos, sin)
    up = [torch.randn(x.shape, device=HERE).to(dtype) for x in (*fast, v)]
    (down,) = torch.autograd.grad((*fast, v), leaf, up)
    wide = fused.double().requires_grad_()
    plain = wide.split(sizes, dim=1)
    turned = [rotate_exactly(x, cos, sin) for x in plain[:2]]
    (wanted,) = torch.autograd.grad((*turned, plain[2]), wide, [x.double() for x in up])
    assert torch.equal(leaf, fused)  # with gradients, nothing is written over
    for one, other, exact in zip(fast, slow, turned, strict=True):
        assert one.dtype == dtype
        assert_close(one.double(), other.double(), **near)
        assert_close(one.double(), exact, **near)
    assert down.dtype == dtype
    assert_close(down.double(), wanted, **near)

    kept = fused.clone()
    with torch.no_grad():
        q, k, v = kept.split(sizes, dim=1)
        again = rotary.rotate_pair(q, k, cos, sin)
    for one, other, given in zip(again, fast, (q, k), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() == given.data_ptr()
        assert one.stride() == given.stride()
    assert torch.equal(v, fused.split(sizes, 1)[2])


def rotate_exactly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    c, s = (one.double()[:, None, : x.shape[-1] // 2] for one in (cos, sin))
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 127, 128, 129, 513])
def test_lengths(tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "ROWS", 8)
    compare([tokens], dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_texts_of_a_batch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "ROWS", rows)
    compare([3, 1, 17, 2], heads=4, key_heads=4, width=32)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (6, 2), (12, 1), (12, 12)])
@pytest.mark.parametrize("width", [16, 18, 24, 64, 80, 128])
def test_heads_and_widths(heads: int, key_heads: int, width: int) -> None:
    compare([5, 4], heads, key_heads, width, torch.float16)


def test_other_layouts() -> None:
    """Queries from elsewhere, as those of an enhanced decoder; heads that do not lie side by side are copied."""
    fused, cos, sin = drawn([7], 2, 2, 16, torch.float32)
    q, k = torch.randn(7, 4, 16, device=HERE), fused[:, 2:4]
    scattered = q.transpose(0, 1).contiguous().transpose(0, 1)
    wanted = rotate(q, cos, sin), rotate(k, cos, sin)
    with torch.no_grad():
        found = rotary.rotate_pair(scattered, k, cos, sin)
    assert torch.equal(scattered, q)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=2e-6, rtol=0)


def test_without_gradients_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, cos, sin = drawn([7], 2, 1, 16, torch.float32)
    for name in ("empty", "empty_like", "zeros"):
        monkeypatch.setattr(torch, name, None)
    with torch.no_grad():
        rotary.rotate_pair(*fused.split([2, 1, 1], dim=1)[:2], cos, sin)
    frozen = fused.clone()
    rotary.rotate_pair(*frozen.split([2, 1, 1], dim=1)[:2], cos, sin)  # nor where none is wanted


@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_model(key_heads: int) -> None:
    sizes: dict[str, Any] = {"width": 32, "heads": 2, "kv_heads": key_heads, "head_width": 16}
    cfg = replace(
        GOOD, **sizes, embeddings=EmbeddingConfig(width=32), positions=(Rotary((10.0, 100.0)),), pre_norm=True
    )
    model = Model(cfg, {}).to(HERE)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(HERE)

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


@pytest.mark.skipif(HERE.type != "cuda", reason="graphs are a GPU's")
def test_a_recorded_graph() -> None:
    """Played again, it turns what lies there then."""
    fused, cos, sin = drawn([50, 3], 4, 4, 64, torch.bfloat16)
    static = fused.clone()

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            made = static * 1.0  # stands in for the product that queries and keys come from
            return rotary.rotate_pair(*made.split(4, dim=1)[:2], cos, sin)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    static.mul_(2.0)
    for _ in range(2):
        graph.replay()
        for one, other in zip(found, fused.split(4, dim=1), strict=False):
            assert_close(one, rotate(2.0 * other, cos, sin), atol=8e-2, rtol=0)
