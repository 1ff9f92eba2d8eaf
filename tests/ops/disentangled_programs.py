"""The programs for relative terms, and without them, against the slow, obvious twin, there and back: interpreted.

Run by test_disentangled.py in a process of its own: what interprets Triton's programs must be told so before it is
imported. (On a GPU as they are: tests/gpu/test_disentangled.py. The interpreter knows no products of bfloat16.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter

from bertie.config import Full
from bertie.ops import Relative, reference
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.triton import disentangled_attention as disentangled

R = 9  # rows of the tables
SCALE = 0.3


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    patch = interpreter._patch_lang_tensor  # Triton 3.6 makes no number of its scalars with numpy 2.4

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds the worst."""
    for name in ("empty", "empty_like"):
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, plain=plain, **k: plain(*a, **k).fill_(torch.nan))


def drawn(
    lengths: list[int], heads: int, width: int, terms: str, dtype: torch.dtype
) -> tuple[list[Tensor], Relative | None]:
    """q, k, v and the tables; and the relative terms that are made of these, if there are any."""
    fused = torch.randn(sum(lengths), 3 * heads, width).to(dtype)  # as a model has them, side by side
    leaves = [x.requires_grad_() for x in fused.split(heads, dim=1)]
    shapes = {"keys": (R, heads, width), "queries": (R, heads, width), "scores": (R, heads)}
    tables = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items() if name in terms}
    rows = torch.randint(0, R, (2 * max(lengths) - 1,))
    return [*leaves, *tables.values()], Relative(rows, **tables) if terms else None


def compare(
    lengths: list[int], terms: str, *, heads: int = 1, width: int = 16, dtype: torch.dtype = torch.float32,
    bounds: bool = False, loud: float = 1.0, twin: Any = reference,
) -> None:  # fmt: skip
    leaves, relative = drawn(lengths, heads, width, terms, dtype)
    with torch.no_grad():
        leaves[0] *= loud
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    known = (max(lengths),) * len(lengths) if bounds else tuple(lengths)
    fast = disentangled.attend(*leaves[:3], known, cu, scale=SCALE / loud, relative=relative)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    names = [name for name in ("keys", "queries", "scores") if name in terms]
    same = None if relative is None else Relative(relative.rows, **dict(zip(names, wide[3:], strict=True)))
    real = tuple(n for n in lengths if n)
    slow = twin.attend(*wide[:3], real, scale=SCALE / loud, pattern=Full(), relative=same)
    atol = 2e-5 if dtype == torch.float32 else 5e-3
    assert fast.dtype == dtype
    assert_close(fast.float(), slow, atol=atol, rtol=0)
    up = torch.randn_like(slow)
    ours = torch.autograd.grad(fast, leaves, up.to(dtype))
    for one, other in zip(ours, torch.autograd.grad(slow, wide, up), strict=True):
        assert one.dtype == dtype
        assert_close(one.float(), other, atol=atol * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize("terms", ["keys", "queries", "scores", "keys queries", "keys scores", "keys queries scores"])
def test_each_term(terms: str) -> None:
    compare([17, 3], terms)


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_lengths_and_heads(terms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled, "ROWS", (16, 16))
    monkeypatch.setattr(disentangled, "PLAIN_ROWS", (16, 16))
    compare([1, 2, 15, 16, 17], terms, heads=2)


@pytest.mark.parametrize("terms", ["keys queries", ""])
@pytest.mark.parametrize(
    ("rows", "lengths"), [((64, 32), [127, 1]), ((32, 64), [1, 129]), ((64, 64), [1, 2, 1, 70, 1])]
)
def test_longer_texts(terms: str, rows: tuple[int, int], lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled, "ROWS", rows)
    monkeypatch.setattr(disentangled, "PLAIN_ROWS", rows)
    compare(lengths, terms, twin=grouped)


@pytest.mark.parametrize("terms", ["keys queries scores", ""])
def test_a_width_that_fills_no_tile(terms: str) -> None:
    compare([5, 20], terms, width=24)


def test_half_precision_and_large_values() -> None:
    """Both terms as one word; products alone are past the largest number of float16."""
    compare([16, 18], "keys queries", dtype=torch.float16)
    compare([9], "keys queries", dtype=torch.float16, loud=3000.0)


def test_half_precision_without_terms() -> None:
    compare([16, 18, 1], "", heads=2, dtype=torch.float16)


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_lengths_that_are_bounds(terms: str) -> None:
    compare([3, 0, 21, 0, 9, 0], terms, bounds=True)


def test_layers_share_the_tiles_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found once in a pass, for each number of rows; but of lengths that are known, not at all."""
    monkeypatch.setattr(disentangled, "PLAIN_ROWS", (32, 16))
    leaves, _ = drawn([3, 21], 1, 16, "", torch.float32)
    cu = torch.tensor([0, 3, 24]).int()
    kept: dict[Any, Tensor] = {}
    call: dict[str, Any] = {"scale": SCALE, "relative": None, "cache": kept}
    exact = disentangled.attend(*leaves, (3, 21), cu, **call)
    assert not kept
    first = disentangled.attend(*leaves, (21, 21), cu, **call)
    assert set(kept) == {("tiles", 32), ("tiles", 16)}
    monkeypatch.setattr(disentangled, "_tiles_of", None)
    second = disentangled.attend(*leaves, (21, 21), cu, **call)
    assert torch.equal(first, exact)
    assert torch.equal(second, exact)


# --- dropout ---


@pytest.mark.parametrize("terms", ["keys queries", ""])
def test_dropout(terms: str) -> None:
    """Values of a unit matrix show what is dropped. With the same dropped, all gradients are those of plain ones."""
    lengths, heads, width, dropout = [30, 1, 32], 2, 32, 0.25
    leaves, relative = drawn(lengths, heads, width, terms, torch.float32)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()

    def call(values: Tensor, seed: int, rate: float = dropout) -> Tensor:
        torch.manual_seed(seed)
        return disentangled.attend(
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

    up = torch.randn_like(leaves[2])
    ours = torch.autograd.grad(call(leaves[2], 1), leaves, up)
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
    for got, wanted in zip(ours, torch.autograd.grad(torch.cat(pieces), leaves, up), strict=True):
        assert_close(got, wanted, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_is_dropped_follows_no_pattern(rate: float) -> None:
    """Rows, columns and heads differ from each other by as much as independent ones do."""
    n, heads = 64, 3
    leaves, _ = drawn([n], heads, n, "", torch.float32)
    units = torch.eye(n)[:, None].expand(-1, heads, -1)
    cu = torch.tensor([0, n]).int()
    with torch.no_grad():
        out = disentangled.attend(*leaves[:2], units, (n,), cu, scale=0.01, relative=None, dropout=rate)
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
    leaves, relative = drawn([12], 1, 16, terms, torch.float32)
    cu = torch.tensor([0, 12]).int()
    call = {"scale": SCALE, "relative": relative}
    plain = disentangled.attend(*leaves[:3], (12,), cu, **call).detach()
    torch.manual_seed(1)
    many = torch.stack([disentangled.attend(*leaves[:3], (12,), cu, **call, dropout=0.5).detach() for _ in range(30)])
    error = many.std(0) / len(many) ** 0.5
    assert ((many.mean(0) - plain).abs() <= 5 * error + 1e-3).all()
