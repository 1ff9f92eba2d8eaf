"""Variable-length attention by the Triton kernel in half precision against grouped attention in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Causal, EmbeddingConfig, Full, Learned, Pattern, Rotary, Sliding
from bertie.nn.encoder import Encoder
from bertie.ops.contracts import AttentionInputs
from bertie.ops.dispatch import attention_backends
from bertie.ops.torch import grouped_attention
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.ops.triton import rotary, short_attention
from bertie.text.batch import Batch
from tests.ops.forced import attend, turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
SCALE = 0.1
EDGES = [1, 2, 15, 16, 17, 127, 128, 129, 512, 513]
SHAPES = [(12, 12, 32), (12, 12, 64), (16, 4, 64), (2, 2, 128), (6, 2, 24)]  # heads, key and value heads, width


@pytest.fixture(autouse=True)
def _rotary_at_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rotary embeddings would be applied by a kernel of their own."""
    monkeypatch.setattr(short_attention, "ROTARY_TILES", short_attention.TILES | short_attention.ROTARY_TILES)


def random_qkv(lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a model has them: slices of one tensor."""
    torch.manual_seed(0)
    heads, kv_heads, width = shape
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, width, device="cuda").to(dtype)
    return qkv.split([heads, kv_heads, kv_heads], dim=1)


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def cos_sin(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    return rotary_tables(Rotary((10000.0,)), positions, width)[10000.0]


def backend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], pattern: Pattern) -> str:
    """The backend that dispatch selects."""
    inputs = AttentionInputs(q, k, v, tuple(lengths), cu_seqlens(lengths), SCALE, pattern)
    return attention_backends(inputs).choose(inputs).backend


@torch.no_grad()
def compare(
    lengths: list[int], pattern: Pattern, shape: tuple[int, int, int], dtype: torch.dtype, rotary_inside: bool = False
) -> None:
    q, k, v = random_qkv(lengths, shape, dtype)
    assert backend(q, k, v, lengths, pattern) == "triton.attention.short"
    rotation = cos_sin(lengths, shape[2]) if rotary_inside else None
    fast = short_attention.attend(q, k, v, tuple(lengths), scale=SCALE, pattern=pattern, rotation=rotation)
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    slow = grouped_attention.attend(*(x.float() for x in (q, k, v)), tuple(lengths), scale=SCALE, pattern=pattern)
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
    """Texts of each tile size; one long text among many short ones."""
    compare(lengths, pattern, (12, 12, 64), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [1, 63, 64, 65, 500])
def test_windows_of_longer_texts(window: int, dtype: torch.dtype) -> None:
    compare([4096, 1, 129, 2048], Sliding(window), (4, 2, 64), dtype)
    compare([4096, 1, 129, 2048], Causal(window), (4, 2, 64), dtype)
    compare([1, 129, 700], Causal(), (4, 2, 64), dtype)


def test_longest_texts() -> None:
    q, k, v = random_qkv([3000], (4, 4, 64), torch.bfloat16)
    assert backend(q, k, v, [3000], Sliding(64)) == "triton.attention.short"
    assert backend(q, k, v, [3000], Full()) != "triton.attention.short"
    assert backend(q, k, v, [1500, 1500], Full()) == "triton.attention.short"


@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
def test_selected_for_inference_only(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with gradients or dropout, nor with upper bounds of lengths; the other backends agree."""
    lengths = [40, 3, 130]
    leaves = [x.detach().requires_grad_() for x in random_qkv(lengths, (4, 4, 64), torch.bfloat16)]
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        inferred = attend(*leaves, tuple(lengths), cu_seqlens(lengths), **call)
        assert torch.equal(inferred, short_attention.attend(*leaves, tuple(lengths), **call))
    monkeypatch.setattr(short_attention, "attend", None)
    trained = attend(*leaves, tuple(lengths), cu_seqlens(lengths), **call)
    assert trained.requires_grad
    with torch.no_grad():
        bounds = attend(*leaves, (130,) * 4, cu_seqlens([*lengths, 0]), **call)
        assert attend(*leaves, tuple(lengths), cu_seqlens(lengths), **call, dropout=0.5).isfinite().all()
        turn_off(monkeypatch, "triton.attention.short")
        off = attend(*leaves, tuple(lengths), cu_seqlens(lengths), **call)
    for other in (trained, bounds, off):
        assert_close(other, inferred, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[16, 9, 1, 3], [3, 20, 32, 17], [64, 40, 5], [70, 200, 5, 64], [65, 600, 1000]], ids=str
)
def test_a_text_does_not_depend_on_its_neighbours(lengths: list[int], pattern: Pattern, dtype: torch.dtype) -> None:
    """Bit for bit where the longest text selects the same tiles, whatever the neighbours contain."""
    q, k, v = (x.clone() for x in random_qkv(lengths, (4, 2, 64), dtype))
    start, n = lengths[0], lengths[1]
    own = slice(start, start + n)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        alone = short_attention.attend(q[own], k[own], v[own], (n,), **call)
        for x in (q, k, v):
            x[:start] = torch.inf
            x[start + n :] = torch.nan
        assert torch.equal(short_attention.attend(q, k, v, tuple(lengths), **call)[own], alone)


def test_more_than_2_31_elements() -> None:
    """64-bit offsets."""
    count = (1 << 31) // (36 * 64) // 128 + 2
    q, k, v = torch.randn(128 * count, 36, 64, device="cuda", dtype=torch.bfloat16).split(12, dim=1)
    with torch.no_grad():
        actual = short_attention.attend(q, k, v, (128,) * count, scale=SCALE, pattern=Full())[-256:]
        last = [x[-256:].float() for x in (q, k, v)]
        expected = grouped_attention.attend(*last, (128, 128), scale=SCALE, pattern=Full())
    assert_close(actual.float(), expected, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_encoder(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference by this kernel and by FlashAttention; then training with the same cached tiles."""
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
def test_rotary(shape: tuple[int, int, int], pattern: Pattern, dtype: torch.dtype) -> None:
    """Rotary embeddings applied inside the kernel, for each tile size and for all lengths at once."""
    compare(EDGES, pattern, shape, dtype, rotary_inside=True)
    for lengths in ([1], [16] * 20, [31, 32, 1], [64, 63], [128] * 64, [2048, 3]):
        compare(lengths, pattern, shape, dtype, rotary_inside=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(64)], ids=str)
def test_rotary_inside_or_before(pattern: Pattern, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly equal; inside the kernel, q and k are not overwritten."""
    lengths = [1, 2, 40, 130, 512]
    q, k, v = (x.clone() for x in random_qkv(lengths, (12, 4, 64), dtype))
    arguments = [x.clone() for x in (q, k, v)]
    rotation = cos_sin(lengths, 64)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern, "rotation": rotation}
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "_rotate_into", None)
        inside = attend(q, k, v, tuple(lengths), cu_seqlens(lengths), **call)
    assert all(torch.equal(one, other) for one, other in zip((q, k, v), arguments, strict=True))
    turn_off(monkeypatch, "triton.attention.short_rotary")
    before = attend(q, k, v, tuple(lengths), cu_seqlens(lengths), **call)
    assert_close(inside, before, atol=TOLERANCE[dtype], rtol=0)
    assert (inside.float() - before.float()).abs().mean() < TOLERANCE[dtype] / 20


@pytest.mark.parametrize("pattern", [Full(), Sliding(5)], ids=str)
@pytest.mark.parametrize("lengths", [[16, 9, 1, 3], [3, 20, 32, 17], [64, 40, 5], [70, 200, 5, 64]], ids=str)
def test_a_text_with_rotary_does_not_depend_on_its_neighbours(lengths: list[int], pattern: Pattern) -> None:
    q, k, v = (x.clone() for x in random_qkv(lengths, (4, 2, 64), torch.bfloat16))
    cos, sin = cos_sin(lengths, 64)
    start, n = lengths[0], lengths[1]
    own = slice(start, start + n)
    call: dict[str, Any] = {"scale": SCALE, "pattern": pattern}
    with torch.no_grad():
        alone = short_attention.attend(q[own], k[own], v[own], (n,), **call, rotation=(cos[own], sin[own]))
        for x in (q, k, v, cos, sin):
            x[:start] = torch.inf
            x[start + n :] = torch.nan
        actual = short_attention.attend(q, k, v, tuple(lengths), **call, rotation=(cos, sin))
    assert torch.equal(actual[own], alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_encoder_with_rotary_embeddings(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ModernBERT: applied inside the kernel, by a kernel before it, and before FlashAttention."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=2, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Rotary((10000.0, 160000.0)),), patterns=(Sliding(64), Full()), max_length=8192, pre_norm=True,
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = Encoder(cfg).eval().cuda().to(dtype)
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 16, 129, 512)]).to("cuda")
    actual = []
    with torch.inference_mode():
        actual.append(encoder(batch))
        for name in ("triton.attention.short_rotary", "triton.attention.short"):
            turn_off(monkeypatch, name)
            actual.append(encoder(batch))
    for other in actual[1:]:
        near = (6e-2 if dtype == torch.bfloat16 else 1e-2) * float(other.float().abs().max())
        assert_close(actual[0].float(), other.float(), atol=near, rtol=0)
