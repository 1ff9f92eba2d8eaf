"""Attention without relative terms by our own program, in half precision, against the plain path in single."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, Full, Learned, Pattern, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.ops.torch import grouped_attention as grouped
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import rotary
from bertie.ops.triton import short_attention as ragged
from bertie.text.batch import Batch
from tests.ops.forced import attend, turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="the program is Triton's")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.1
EDGES = [1, 2, 15, 16, 17, 127, 128, 129, 512, 513]
SHAPES = [(12, 12, 32), (12, 12, 64), (16, 4, 64), (2, 2, 128), (6, 2, 24)]  # heads of queries and of keys, their width


@pytest.fixture(autouse=True)
def _all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those too that would be turned before."""
    monkeypatch.setattr(ragged, "TURNED_SIZES", ragged.SIZES | ragged.TURNED_SIZES)


def drawn(lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a model has them, side by side."""
    torch.manual_seed(0)
    heads, key_heads, width = shape
    fused = torch.randn(sum(lengths), heads + 2 * key_heads, width, device="cuda").to(dtype)
    return fused.split([heads, key_heads, key_heads], dim=1)


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def angles(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    return rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]


@torch.no_grad()
def compare(
    lengths: list[int], pattern: Pattern, shape: tuple[int, int, int], dtype: torch.dtype, turn: bool = False
) -> None:
    q, k, v = drawn(lengths, shape, dtype)
    assert ragged.can(q, k, v, tuple(lengths), pattern, None, 0.0)
    rotation = angles(lengths, shape[2]) if turn else None
    fast = ragged.attend(q, k, v, tuple(lengths), scale=SCALE, pattern=pattern, rotation=rotation)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    slow = grouped.attend(*(x.float() for x in (q, k, v)), tuple(lengths), scale=SCALE, pattern=pattern)
    assert (fast.dtype, fast.shape) == (dtype, q.shape)
    assert_close(fast.float(), slow, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(64), Sliding(5)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int], pattern: Pattern, dtype: torch.dtype) -> None:
    compare(EDGES, pattern, shape, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1], [16] * 20, [31, 32, 1], [64, 63], [65, 2], [2048, 512, 513], [1] * 50 + [2048] + [7] * 50, [128] * 512],
    ids=lambda lengths: f"{len(lengths)} up to {max(lengths)}",
)
def test_lengths(lengths: list[int], pattern: Pattern, dtype: torch.dtype) -> None:
    """Texts of each size of tiles; one long among many short."""
    compare(lengths, pattern, (12, 12, 64), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("max_length", [1, 63, 64, 65, 500])
def test_windows_of_longer_texts(max_length: int, dtype: torch.dtype) -> None:
    compare([4096, 1, 129, 2048], Sliding(max_length), (4, 2, 64), dtype)


def test_who_goes_there() -> None:
    q, k, v = drawn([3000], (4, 4, 64), torch.bfloat16)
    assert ragged.can(q, k, v, (3000,), Sliding(64), None, 0.0)
    assert not ragged.can(q, k, v, (3000,), Full(), None, 0.0)
    assert ragged.can(q, k, v, (1500, 1500), Full(), None, 0.0)


@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
def test_the_door_leads_here_to_read_alone(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with gradients or dropout, nor by lengths that are bounds; and what goes elsewhere says the same."""
    lengths = [40, 3, 130]
    leaves = [x.detach().requires_grad_() for x in drawn(lengths, (4, 4, 64), torch.bfloat16)]
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        read = attend(*leaves, tuple(lengths), ends(lengths), **call)
        assert torch.equal(read, ragged.attend(*leaves, tuple(lengths), **call))
    monkeypatch.setattr(ragged, "attend", None)
    learnt = attend(*leaves, tuple(lengths), ends(lengths), **call)
    assert learnt.requires_grad
    with torch.no_grad():
        bounds = attend(*leaves, (130,) * 4, ends([*lengths, 0]), **call)
        assert attend(*leaves, tuple(lengths), ends(lengths), **call, dropout=0.5).isfinite().all()
        turn_off(monkeypatch, "triton.attention.short")
        off = attend(*leaves, tuple(lengths), ends(lengths), **call)
    for other in (learnt, bounds, off):
        assert_close(other, read, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[16, 9, 1, 3], [3, 20, 32, 17], [64, 40, 5], [70, 200, 5, 64], [65, 600, 1000]], ids=str
)
def test_a_text_does_not_depend_on_its_neighbours(lengths: list[int], pattern: Pattern, dtype: torch.dtype) -> None:
    """To the bit where the longest text leads to the same tiles; whatever its neighbours hold."""
    q, k, v = (x.clone() for x in drawn(lengths, (4, 2, 64), dtype))
    start, n = lengths[0], lengths[1]
    own = slice(start, start + n)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        alone = ragged.attend(q[own], k[own], v[own], (n,), **call)
        for x in (q, k, v):
            x[:start] = torch.inf
            x[start + n :] = torch.nan
        assert torch.equal(ragged.attend(q, k, v, tuple(lengths), **call)[own], alone)


def test_past_the_largest_number_of_32_bits() -> None:
    """The last of 2^31 values and more are read where they lie."""
    count = (1 << 31) // (36 * 64) // 128 + 2
    q, k, v = torch.randn(128 * count, 36, 64, device="cuda", dtype=torch.bfloat16).split(12, dim=1)
    with torch.no_grad():
        found = ragged.attend(q, k, v, (128,) * count, scale=SCALE, pattern=Full())[-256:]
        last = [x[-256:].float() for x in (q, k, v)]
        wanted = grouped.attend(*last, (128, 128), scale=SCALE, pattern=Full())
    assert_close(found.float(), wanted, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by our program and by the framework's; then trained, by what was found out of the same lengths."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=4, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Learned(512),), patterns=(Sliding(64), Full()), max_length=512,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = Encoder(cfg).eval().cuda().to(dtype)
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 16, 129, 512)]).to("cuda")
    with torch.inference_mode():
        ours = encoder(batch)
    trained = encoder(batch)
    grads = torch.autograd.grad(trained.float().sin().sum(), list(encoder.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    turn_off(monkeypatch, "triton.attention.short")
    with torch.inference_mode():
        theirs = encoder(batch)
    for other in (theirs, trained.detach()):
        near = (6e-2 if dtype == torch.bfloat16 else 1e-2) * float(other.float().abs().max())
        assert_close(ours.float(), other.float(), atol=near, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(64), Sliding(5)], ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] != 24], ids=str)
def test_turned(shape: tuple[int, int, int], pattern: Pattern, dtype: torch.dtype) -> None:
    """Queries and keys turned by the program, for each size of tiles and all lengths at once."""
    compare(EDGES, pattern, shape, dtype, turn=True)
    for lengths in ([1], [16] * 20, [31, 32, 1], [64, 63], [128] * 64, [2048, 3]):
        compare(lengths, pattern, shape, dtype, turn=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(64)], ids=str)
def test_turned_by_the_program_or_before(pattern: Pattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the door: nearly all is the same, and what was given stays as it is where the program turns."""
    lengths = [1, 2, 40, 130, 512]
    q, k, v = (x.clone() for x in drawn(lengths, (12, 4, 64), dtype))
    given = [x.clone() for x in (q, k, v)]
    rotation = angles(lengths, 64)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern, "rotation": rotation}
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "_turn", None)
        inside = attend(q, k, v, tuple(lengths), ends(lengths), **call)
    assert all(torch.equal(one, other) for one, other in zip((q, k, v), given, strict=True))
    turn_off(monkeypatch, "triton.attention.short_rotary")
    before = attend(q, k, v, tuple(lengths), ends(lengths), **call)
    assert_close(inside, before, atol=TOLERANCE[dtype], rtol=0)
    assert (inside.float() - before.float()).abs().mean() < TOLERANCE[dtype] / 20


@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
@pytest.mark.parametrize("lengths", [[16, 9, 1, 3], [3, 20, 32, 17], [64, 40, 5], [70, 200, 5, 64]], ids=str)
def test_a_turned_text_does_not_depend_on_its_neighbours(lengths: list[int], pattern: Pattern) -> None:
    q, k, v = (x.clone() for x in drawn(lengths, (4, 2, 64), torch.bfloat16))
    cos, sin = angles(lengths, 64)
    start, n = lengths[0], lengths[1]
    own = slice(start, start + n)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        alone = ragged.attend(q[own], k[own], v[own], (n,), **call, rotation=(cos[own], sin[own]))
        for x in (q, k, v, cos, sin):
            x[:start] = torch.inf
            x[start + n :] = torch.nan
        found = ragged.attend(q, k, v, tuple(lengths), **call, rotation=(cos, sin))
    assert torch.equal(found[own], alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_an_encoder_with_rotary_positions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ModernBERT's: turned by the program, by a pass before it, and by the framework's attention."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=2, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), max_length=8192, pre_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = Encoder(cfg).eval().cuda().to(dtype)
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 16, 129, 512)]).to("cuda")
    found = []
    with torch.inference_mode():
        found.append(encoder(batch))
        for name in ("triton.attention.short_rotary", "triton.attention.short"):
            turn_off(monkeypatch, name)
            found.append(encoder(batch))
    for other in found[1:]:
        near = (6e-2 if dtype == torch.bfloat16 else 1e-2) * float(other.float().abs().max())
        assert_close(found[0].float(), other.float(), atol=near, rtol=0)
