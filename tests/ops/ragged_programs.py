"""The program for attention without relative terms against the slow, obvious twin: interpreted, on the CPU.

Run by test_ragged.py in a process of its own: what interprets Triton's programs must be told so before it is imported.
(On a GPU as it is: tests/gpu/test_ragged.py. The interpreter knows no products of bfloat16.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from triton.runtime import interpreter

from bertie.config import Full, Pattern, Rotary, Sliding
from bertie.ops import reference
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import short_attention as ragged

NEAR = {torch.float32: 2e-6, torch.float16: 3e-3}
SCALE = 0.3
EDGES = [1, 2, 15, 16, 17, 127, 128, 129]


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
def _all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that would be turned before."""
    monkeypatch.setattr(ragged, "TURNED_SIZES", ragged.SIZES | ragged.TURNED_SIZES)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds the worst."""
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain(*a, **k).fill_(torch.nan))


def drawn(lengths: list[int], heads: int, key_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a model has them, side by side."""
    fused = torch.randn(sum(lengths), heads + 2 * key_heads, width).to(dtype)
    return fused.split([heads, key_heads, key_heads], dim=1)


def rotation_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])
    return rotary_tables(Rotary((100.0,)), positions, width)[100.0]


def compare(
    lengths: list[int], pattern: Pattern, *, heads: int = 1, key_heads: int = 1, width: int = 16,
    dtype: torch.dtype = torch.float32, twin: Any = reference, turn: bool = False,
) -> None:  # fmt: skip
    given = drawn(lengths, heads, key_heads, width, dtype)
    kept = [x.clone() for x in given]
    rotation = rotation_of(lengths, width) if turn else None
    q, k, v = kept if rotation is None else (*(rotate(x, *rotation) for x in kept[:2]), kept[2])
    slow = twin.attend(*(x.float() for x in (q, k, v)), tuple(lengths), scale=SCALE, pattern=pattern)
    for table in rotation or ():
        table[:, width // 2 :] = torch.nan  # the first half says it all
    fast = ragged.attend(*given, tuple(lengths), scale=SCALE, pattern=pattern, rotation=rotation)
    assert (fast.dtype, fast.shape) == (dtype, (sum(lengths), heads, width))
    assert_close(fast.float(), slow, atol=NEAR[dtype], rtol=0)
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


@pytest.mark.parametrize("longest", EDGES)
def test_lengths(longest: int) -> None:
    """Each with the tiles that are its own, shorter texts before it and behind it."""
    compare([min(3, longest), longest, 1], Full())


def test_all_lengths_at_once() -> None:
    compare(EDGES, Full())


@pytest.mark.parametrize("max_length", [1, 5, 63, 64, 65, 500])
def test_windows(max_length: int) -> None:
    compare([1, 17, 129, 2], Sliding(max_length))


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (32, 16)], ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
def test_tiles(sizes: tuple[int, int], pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose window begins after the first keys that their tile meets see nothing at first."""
    monkeypatch.setattr(ragged, "SIZES", {ragged.LONGEST: (*sizes, *ragged.SIZES[16][2:])})
    compare([70, 1, 33], pattern)


def test_longer_than_any_size_is_for() -> None:
    """By a window, texts may have any length."""
    compare([ragged.LONGEST + 5, 3], Sliding(7), twin=grouped)


@pytest.mark.parametrize("pattern", [Full(), Sliding(3)], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
def test_shared_key_heads(heads: int, key_heads: int, pattern: Pattern) -> None:
    compare([5, 18, 1], pattern, heads=heads, key_heads=key_heads)


@pytest.mark.parametrize("width", [16, 24, 32])
def test_widths_and_half_precision(width: int) -> None:
    compare([15, 17, 1], Full(), heads=2, key_heads=1, width=width, dtype=torch.float16)
    compare([15, 17, 1], Sliding(4), heads=2, key_heads=1, width=width, dtype=torch.float16)


def test_other_layouts() -> None:
    """Queries from elsewhere, as those of an enhanced decoder; heads that do not lie side by side are copied."""
    _, k, v = drawn([7, 9], 2, 2, 16, torch.float32)
    q = torch.randn(16, 2, 16)
    scattered = q.transpose(0, 1).contiguous().transpose(0, 1)
    wanted = reference.attend(q, k, v, (7, 9), scale=SCALE, pattern=Full())
    for queries in (q, scattered):
        assert_close(ragged.attend(queries, k, v, (7, 9), scale=SCALE, pattern=Full()), wanted, atol=2e-6, rtol=0)


def test_large_scores() -> None:
    """One key takes all. Powers of two of such scores would be past every number."""
    q, k, v = drawn([20], 1, 1, 16, torch.float32)
    found = ragged.attend(q * 1e4, k, v, (20,), scale=1.0, pattern=Full())
    best = torch.einsum("ihd,jhd->ij", q, k).argmax(1)
    assert_close(found, v[best], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pattern", [Full(), Sliding(4)], ids=str)
def test_a_text_does_not_depend_on_its_neighbours(pattern: Pattern) -> None:
    """To the bit where the longest text leads to the same tiles; whatever its neighbours hold."""
    lengths = [40, 5, 50, 64]
    q, k, v = (x.clone() for x in drawn(lengths, 2, 1, 16, torch.float16))
    alone = ragged.attend(q[45:95], k[45:95], v[45:95], (50,), scale=SCALE, pattern=pattern)
    for x in (q, k, v):
        x[:45] = torch.inf
        x[95:] = torch.nan
    assert torch.equal(ragged.attend(q, k, v, tuple(lengths), scale=SCALE, pattern=pattern)[45:95], alone)


@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Sliding(64)], ids=str)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_turned(dtype: torch.dtype, pattern: Pattern) -> None:
    """All lengths at once, and each with the tiles that are its own."""
    compare(EDGES, pattern, width=32, dtype=dtype, turn=True)
    for longest in EDGES[:5]:
        compare([min(3, longest), longest, 1], pattern, width=32, dtype=dtype, turn=True)


@pytest.mark.parametrize("pattern", [Full(), Sliding(3)], ids=str)
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(4, 4, 32), (4, 2, 64), (3, 1, 32), (2, 1, 128)])
def test_turned_heads(heads: int, key_heads: int, width: int, pattern: Pattern) -> None:
    compare([5, 18, 1], pattern, heads=heads, key_heads=key_heads, width=width, dtype=torch.float16, turn=True)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (128, 32)], ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
def test_turned_tiles(sizes: tuple[int, int], pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "TURNED_SIZES", {ragged.LONGEST: (*sizes, *ragged.SIZES[16][2:])})
    monkeypatch.setattr(ragged, "SIZES", None)
    compare([70, 1, 33], pattern, width=32, turn=True)


def test_turned_is_rounded_as_if_written() -> None:
    """What comes of queries and keys turned before, but for the order of a product's sum."""
    q, k, v = drawn([33, 2], 2, 1, 32, torch.float16)
    rotation = rotation_of([33, 2], 32)
    call: dict[str, Any] = {"scale": SCALE, "pattern": Full()}
    before = ragged.attend(*(rotate(x, *rotation) for x in (q, k)), v, (33, 2), **call)
    assert_close(ragged.attend(q, k, v, (33, 2), **call, rotation=rotation), before, atol=1e-3, rtol=0)


def test_turned_layouts() -> None:
    """Queries from elsewhere; tables that are parts of larger ones."""
    _, k, v = drawn([7, 9], 2, 2, 32, torch.float32)
    q = torch.randn(16, 2, 32)
    rotation = rotation_of([7, 9], 32)
    cut = tuple(torch.cat((one, one), 1)[:, :32] for one in rotation)
    wanted = reference.attend(*(rotate(x, *rotation) for x in (q, k)), v, (7, 9), scale=SCALE, pattern=Full())
    for tables in (rotation, cut):
        found = ragged.attend(q, k, v, (7, 9), scale=SCALE, pattern=Full(), rotation=tables)
        assert_close(found, wanted, atol=2e-6, rtol=0)


@pytest.mark.parametrize("pattern", [Full(), Sliding(4)], ids=str)
def test_a_turned_text_does_not_depend_on_its_neighbours(pattern: Pattern) -> None:
    lengths = [40, 5, 50, 64]
    q, k, v = (x.clone() for x in drawn(lengths, 2, 1, 32, torch.float16))
    cos, sin = rotation_of(lengths, 32)
    own = slice(45, 95)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    alone = ragged.attend(q[own], k[own], v[own], (50,), **call, rotation=(cos[own], sin[own]))
    for x in (q, k, v, cos, sin):
        x[:45] = torch.inf
        x[95:] = torch.nan
    assert torch.equal(ragged.attend(q, k, v, tuple(lengths), **call, rotation=(cos, sin))[own], alone)
