"""Attention with and without relative position terms by the Triton kernels against the reference, forward and backward:
interpreted on the CPU.

On a GPU: tests/gpu/test_disentangled_attention.py. (The interpreter has no bfloat16 matrix multiplication.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Full
from bertie.ops import Relative, reference
from bertie.ops.torch import grouped_attention
from bertie.ops.triton import disentangled_attention

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("interpreter", "nan_memory")]
R = 9  # rows of the tables
SCALE = 0.3


def random_inputs(
    lengths: list[int], heads: int, width: int, terms: str, dtype: torch.dtype
) -> tuple[list[Tensor], Relative | None]:
    """q, k, v and the relative position tables, as leaves; and the `Relative` of these tables."""
    qkv = torch.randn(sum(lengths), 3 * heads, width).to(dtype)  # slices of one tensor, as in a model
    leaves = [x.requires_grad_() for x in qkv.split(heads, dim=1)]
    shapes = {"keys": (R, heads, width), "queries": (R, heads, width), "scores": (R, heads)}
    tables = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items() if name in terms}
    rows = torch.randint(0, R, (2 * max(lengths) - 1,))
    return [*leaves, *tables.values()], Relative(rows, **tables) if terms else None


def compare(
    lengths: list[int], terms: str, *, heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float32,
    bounds: bool = False, magnitude: float = 1.0, expected_by: Any = reference,
) -> None:  # fmt: skip
    leaves, relative = random_inputs(lengths, heads, width, terms, dtype)
    with torch.no_grad():
        leaves[0] *= magnitude
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    known = (max(lengths),) * len(lengths) if bounds else tuple(lengths)
    fast = disentangled_attention.attend(*leaves[:3], known, cu, scale=SCALE / magnitude, relative=relative)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    names = [name for name in ("keys", "queries", "scores") if name in terms]
    same = None if relative is None else Relative(relative.rows, **dict(zip(names, wide[3:], strict=True)))
    real = tuple(n for n in lengths if n)
    slow = expected_by.attend(*wide[:3], real, scale=SCALE / magnitude, pattern=Full(), relative=same)
    atol = 2e-5 if dtype == torch.float32 else 5e-3
    assert fast.dtype == dtype
    assert_close(fast.float(), slow, atol=atol, rtol=0)
    dout = torch.randn_like(slow)
    ours = torch.autograd.grad(fast, leaves, dout.to(dtype))
    for one, other in zip(ours, torch.autograd.grad(slow, wide, dout), strict=True):
        assert one.dtype == dtype
        assert_close(one.float(), other, atol=atol * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize("terms", ["keys", "queries", "scores", "keys queries", "keys scores", "keys queries scores"])
def test_each_term(terms: str) -> None:
    compare([17, 3], terms)


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_lengths_and_heads(terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled_attention, "MAX_TILES", (16, 16))
    monkeypatch.setattr(disentangled_attention, "PLAIN_MAX_TILES", (16, 16))
    compare([1, 2, 15, 16, 17], terms, heads=2)


@pytest.mark.parametrize("terms", ["keys queries", ""])
@pytest.mark.parametrize(
    ("rows", "lengths"), [((64, 32), [127, 1]), ((32, 64), [1, 129]), ((64, 64), [1, 2, 1, 70, 1])]
)
def test_longer_texts(terms: str, rows: tuple[int, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled_attention, "MAX_TILES", rows)
    monkeypatch.setattr(disentangled_attention, "PLAIN_MAX_TILES", rows)
    compare(lengths, terms, expected_by=grouped_attention)


@pytest.mark.parametrize("terms", ["keys queries scores", ""])
def test_head_width_that_is_no_power_of_two(terms: str) -> None:
    compare([5, 20], terms, width=24)


def test_half_precision_and_large_values() -> None:
    """Both terms packed into one word; the terms alone overflow float16."""
    compare([16, 18], "keys queries", dtype=torch.float16)
    compare([9], "keys queries", dtype=torch.float16, magnitude=3000.0)


def test_half_precision_without_terms() -> None:
    compare([16, 18, 1], "", heads=2, dtype=torch.float16)


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_upper_bounds_of_lengths(terms: str) -> None:
    compare([3, 0, 21, 0, 9, 0], terms, bounds=True)


def test_layers_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With upper bounds of lengths, tiles are computed once per forward pass and tile size, and cached."""
    monkeypatch.setattr(disentangled_attention, "PLAIN_MAX_TILES", (32, 16))
    leaves, _ = random_inputs([3, 21], 1, 16, "", torch.float32)
    cu = torch.tensor([0, 3, 24]).int()
    cache: dict[Any, Tensor] = {}
    call: dict[str, Any] = {"scale": SCALE, "relative": None, "cache": cache}
    exact = disentangled_attention.attend(*leaves, (3, 21), cu, **call)
    assert not cache
    first = disentangled_attention.attend(*leaves, (21, 21), cu, **call)
    assert set(cache) == {("tiles", 32), ("tiles", 16)}
    monkeypatch.setattr(disentangled_attention, "tiles_from_cu_seqlens", None)
    second = disentangled_attention.attend(*leaves, (21, 21), cu, **call)
    assert torch.equal(first, exact)
    assert torch.equal(second, exact)


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_dropout(terms: str) -> None:
    """Values that are unit vectors reveal the dropout mask; with it, gradients equal those of plain PyTorch."""
    lengths, heads, width, dropout = [30, 1, 32], 2, 32, 0.25
    leaves, relative = random_inputs(lengths, heads, width, terms, torch.float32)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()

    def call(values: Tensor, seed: int, rate: float = dropout) -> Tensor:
        torch.manual_seed(seed)
        return disentangled_attention.attend(
            *leaves[:2], values, tuple(lengths), cu, scale=SCALE, relative=relative, dropout=rate
        )

    units = torch.cat([torch.eye(n, width) for n in lengths])[:, None].expand(-1, heads, -1)
    plain, one = call(units, 1, 0.0).detach(), call(units, 1).detach()  # (T, H, 32): query, head, key
    assert torch.equal(one, call(units, 1))
    assert not torch.equal(one, call(units, 2))
    kept = one > 0
    assert_close(one[kept], plain[kept] / (1 - dropout))
    there = plain > 0
    count = int(there.sum())
    assert abs(float(kept[there].float().mean()) - (1 - dropout)) < 4 * (dropout * (1 - dropout) / count) ** 0.5
    first = kept[:30, :, :30].float()
    assert first.std(0).min() > 0  # no key, query or head is dropped as a whole
    assert first.std(2).min() > 0
    assert not torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(first[:, 0, :29], kept[31:61, 0, :29].float())

    dout = torch.randn_like(leaves[2])
    ours = torch.autograd.grad(call(leaves[2], 1), leaves, dout)
    pieces, start = [], 0
    for n in lengths:
        own = slice(start, start + n)
        q, k, v = (x[own] for x in leaves[:3])
        scores = torch.einsum("ihd,jhd->hij", q, k)
        if relative is not None:
            at = torch.arange(n)
            row = relative.rows[at[:, None] - at + len(relative.rows) // 2]
            scores = scores + torch.einsum("ihd,ijhd->hij", q, leaves[3][row])
            scores = scores + torch.einsum("jhd,ijhd->hij", k, leaves[4][row])
        weights = torch.softmax(scores * SCALE, -1) * kept[own, :, :n].transpose(0, 1) / (1 - dropout)
        pieces.append(torch.einsum("hij,jhd->ihd", weights, v))
        start += n
    for got, expected in zip(ours, torch.autograd.grad(torch.cat(pieces), leaves, dout), strict=True):
        assert_close(got, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_masks_are_independent(rate: float) -> None:
    """Masks of two rows, columns or heads agree as often as independent ones."""
    n, heads = 64, 3
    leaves, _ = random_inputs([n], heads, n, "", torch.float32)
    units = torch.eye(n)[:, None].expand(-1, heads, -1)
    cu = torch.tensor([0, n]).int()
    with torch.no_grad():
        out = disentangled_attention.attend(*leaves[:2], units, (n,), cu, scale=0.01, relative=None, dropout=rate)
    kept = (out > 0).transpose(0, 1)  # (H, n, n): head, query, key
    error = (rate * (1 - rate)) ** 0.5
    assert abs(float(kept.float().mean()) - (1 - rate)) < 4 * error / (heads * n * n) ** 0.5
    alike = rate**2 + (1 - rate) ** 2
    for one in (*kept, *kept.mT):
        shares = one.float().mean(1)
        assert abs(float(shares.std()) / (error / n**0.5) - 1) < 0.4
        same = (one[:, None] == one[None]).float().mean(-1)[~torch.eye(n, dtype=torch.bool)]
        assert abs(float(same.mean()) - alike) < 0.03
        assert same.max() < 1
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((kept[one] == kept[other]).float().mean()) - alike) < 5 * (alike * (1 - alike)) ** 0.5 / n


@pytest.mark.parametrize("terms", ["scores", ""])
def test_dropout_is_unbiased(terms: str) -> None:
    leaves, relative = random_inputs([12], 1, 16, terms, torch.float32)
    cu = torch.tensor([0, 12]).int()
    call = {"scale": SCALE, "relative": relative}
    plain = disentangled_attention.attend(*leaves[:3], (12,), cu, **call).detach()
    torch.manual_seed(1)
    many = torch.stack(
        [disentangled_attention.attend(*leaves[:3], (12,), cu, **call, dropout=0.5).detach() for _ in range(30)]
    )
    error = many.std(0) / len(many) ** 0.5
    assert ((many.mean(0) - plain).abs() <= 5 * error + 1e-3).all()
