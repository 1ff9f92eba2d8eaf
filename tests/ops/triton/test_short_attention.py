"""Variable-length attention by the Triton kernel against the reference: interpreted on the CPU.

On a GPU: tests/gpu/test_short_attention.py. (The interpreter has no bfloat16 matrix multiplication.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Causal, Full, Pattern, Rotary, Sliding
from bertie.ops import reference
from bertie.ops.torch import grouped_attention
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import short_attention
from bertie.ops.triton.short_attention import TileConfig

pytestmark = [pytest.mark.interpreted, pytest.mark.usefixtures("interpreter", "nan_memory")]
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3}
SCALE = 0.3
EDGES = [1, 2, 15, 16, 17, 127, 128, 129]


@pytest.fixture(autouse=True)
def _rotary_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rotary embeddings would be applied by a kernel of their own."""
    monkeypatch.setattr(short_attention, "ROTARY_TILES", short_attention.TILES | short_attention.ROTARY_TILES)


def random_qkv(lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a model has them: slices of one tensor."""
    fused = torch.randn(sum(lengths), heads + 2 * kv_heads, width).to(dtype)
    return fused.split([heads, kv_heads, kv_heads], dim=1)


def rotary_tables_of(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])
    return rotary_tables(Rotary((100.0,)), positions, width)[100.0]


def compare(
    lengths: list[int], pattern: Pattern, *, heads: int = 1, kv_heads: int = 1, width: int = 16,
    dtype: torch.dtype = torch.float32, expected_by: Any = reference, rotary: bool = False,
) -> None:  # fmt: skip
    qkv = random_qkv(lengths, heads, kv_heads, width, dtype)
    copies = [x.clone() for x in qkv]
    rotation = rotary_tables_of(lengths, width) if rotary else None
    q, k, v = copies if rotation is None else (*(rotate(x, *rotation) for x in copies[:2]), copies[2])
    slow = expected_by.attend(*(x.float() for x in (q, k, v)), tuple(lengths), scale=SCALE, pattern=pattern)
    for table in rotation or ():
        table[:, width // 2 :] = torch.nan  # the kernel reads the first half only
    fast = short_attention.attend(*qkv, tuple(lengths), scale=SCALE, pattern=pattern, rotation=rotation)
    assert (fast.dtype, fast.shape) == (dtype, (sum(lengths), heads, width))
    assert_close(fast.float(), slow, atol=TOLERANCES[dtype], rtol=0)
    assert all(torch.equal(one, other) for one, other in zip(qkv, copies, strict=True))


@pytest.mark.parametrize("longest", EDGES)
def test_lengths(longest: int) -> None:
    """Each with its own tile size, and shorter texts before and after it."""
    compare([min(3, longest), longest, 1], Full())


def test_all_lengths_at_once() -> None:
    compare(EDGES, Full())


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 500])
def test_windows(window: int) -> None:
    compare([1, 17, 129, 2], Sliding(window))


@pytest.mark.parametrize("window", [None, 0, 5, 64, 500])
def test_causal(window: int | None) -> None:
    compare([1, 17, 129, 2], Causal(window))
    compare([20, 1, 33], Causal(window), heads=4, kv_heads=2, width=32, rotary=True)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (32, 16)], ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Causal(), Causal(20)], ids=str)
def test_tiles(sizes: tuple[int, int], pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key blocks of a tile may be masked for some of its rows."""
    monkeypatch.setattr(
        short_attention, "TILES", {short_attention.MAX_LENGTH: TileConfig(*sizes, *short_attention.TILES[16][2:])}
    )
    compare([70, 1, 33], pattern)


def test_window_over_a_long_text() -> None:
    """With a sliding window, texts may have any length."""
    compare([short_attention.MAX_LENGTH + 5, 3], Sliding(7), expected_by=grouped_attention)


@pytest.mark.parametrize("pattern", [Full(), Sliding(3)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_shared_key_heads(heads: int, kv_heads: int, pattern: Pattern) -> None:
    compare([5, 18, 1], pattern, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("width", [16, 24, 32])
def test_widths_and_half_precision(width: int) -> None:
    compare([15, 17, 1], Full(), heads=2, kv_heads=1, width=width, dtype=torch.float16)
    compare([15, 17, 1], Sliding(4), heads=2, kv_heads=1, width=width, dtype=torch.float16)


def test_other_layouts() -> None:
    """Separate queries, as in an enhanced mask decoder; heads that are not contiguous are copied."""
    _, k, v = random_qkv([7, 9], 2, 2, 16, torch.float32)
    q = torch.randn(16, 2, 16)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    expected = reference.attend(q, k, v, (7, 9), scale=SCALE, pattern=Full())
    for queries in (q, strided):
        assert_close(
            short_attention.attend(queries, k, v, (7, 9), scale=SCALE, pattern=Full()), expected, atol=2e-6, rtol=0
        )


def test_large_scores() -> None:
    """Softmax saturates; exp2 of the raw scores would overflow."""
    q, k, v = random_qkv([20], 1, 1, 16, torch.float32)
    actual = short_attention.attend(q * 1e4, k, v, (20,), scale=1.0, pattern=Full())
    best = torch.einsum("ihd,jhd->ij", q, k).argmax(1)
    assert_close(actual, v[best], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pattern", [Full(), Sliding(4)], ids=str)
def test_a_text_does_not_depend_on_its_neighbours(pattern: Pattern) -> None:
    """Bit for bit where the longest text selects the same tiles, whatever the neighbours contain."""
    lengths = [40, 5, 50, 64]
    q, k, v = (x.clone() for x in random_qkv(lengths, 2, 1, 16, torch.float16))
    alone = short_attention.attend(q[45:95], k[45:95], v[45:95], (50,), scale=SCALE, pattern=pattern)
    for x in (q, k, v):
        x[:45] = torch.inf
        x[95:] = torch.nan
    assert torch.equal(short_attention.attend(q, k, v, tuple(lengths), scale=SCALE, pattern=pattern)[45:95], alone)


@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Sliding(64)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotary(dtype: torch.dtype, pattern: Pattern) -> None:
    """All lengths at once, and each with its own tile size."""
    compare(EDGES, pattern, width=32, dtype=dtype, rotary=True)
    for longest in EDGES[:5]:
        compare([min(3, longest), longest, 1], pattern, width=32, dtype=dtype, rotary=True)


@pytest.mark.parametrize("pattern", [Full(), Sliding(3)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 32), (4, 2, 64), (3, 1, 32), (2, 1, 128)])
def test_rotary_heads(heads: int, kv_heads: int, width: int, pattern: Pattern) -> None:
    compare([5, 18, 1], pattern, heads=heads, kv_heads=kv_heads, width=width, dtype=torch.float16, rotary=True)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (128, 32)], ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
def test_rotary_tiles(sizes: tuple[int, int], pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        short_attention,
        "ROTARY_TILES",
        {short_attention.MAX_LENGTH: TileConfig(*sizes, *short_attention.TILES[16][2:])},
    )
    monkeypatch.setattr(short_attention, "TILES", None)
    compare([70, 1, 33], pattern, width=32, rotary=True)


def test_rotary_is_rounded_as_if_stored() -> None:
    """As with queries and keys rotated before, up to the order of summation."""
    q, k, v = random_qkv([33, 2], 2, 1, 32, torch.float16)
    rotation = rotary_tables_of([33, 2], 32)
    call: dict[str, Any] = {"scale": SCALE, "pattern": Full()}
    before = short_attention.attend(*(rotate(x, *rotation) for x in (q, k)), v, (33, 2), **call)
    assert_close(short_attention.attend(q, k, v, (33, 2), **call, rotation=rotation), before, atol=1e-3, rtol=0)


def test_rotary_layouts() -> None:
    """Separate queries; cos and sin that are slices of larger tables."""
    _, k, v = random_qkv([7, 9], 2, 2, 32, torch.float32)
    q = torch.randn(16, 2, 32)
    rotation = rotary_tables_of([7, 9], 32)
    sliced = tuple(torch.cat((one, one), 1)[:, :32] for one in rotation)
    expected = reference.attend(*(rotate(x, *rotation) for x in (q, k)), v, (7, 9), scale=SCALE, pattern=Full())
    for tables in (rotation, sliced):
        actual = short_attention.attend(q, k, v, (7, 9), scale=SCALE, pattern=Full(), rotation=tables)
        assert_close(actual, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("pattern", [Full(), Sliding(4)], ids=str)
def test_a_text_with_rotary_does_not_depend_on_its_neighbours(pattern: Pattern) -> None:
    lengths = [40, 5, 50, 64]
    q, k, v = (x.clone() for x in random_qkv(lengths, 2, 1, 32, torch.float16))
    cos, sin = rotary_tables_of(lengths, 32)
    own = slice(45, 95)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    alone = short_attention.attend(q[own], k[own], v[own], (50,), **call, rotation=(cos[own], sin[own]))
    for x in (q, k, v, cos, sin):
        x[:45] = torch.inf
        x[95:] = torch.nan
    assert torch.equal(short_attention.attend(q, k, v, tuple(lengths), **call, rotation=(cos, sin))[own], alone)
