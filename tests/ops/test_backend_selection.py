"""Selection of backends: supported sites, accepted batches, and the order of preference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bertie.config import BlockSparse, Full, Rotary, Sliding
from bertie.nn.pooling import Pooling
from bertie.ops import Relative, disable
from bertie.ops.contracts import AttentionInputs, compute_dtype, needs_grad
from bertie.ops.dispatch import AttentionBackends, attention_backends, row_for, select
from bertie.ops.site import Site
from bertie.ops.torch.eager import apply_rotary, rotary_tables
from bertie.ops.triton import disentangled_attention, short_attention
from bertie.ops.triton.launch import MAX_WIDTH
from bertie.text.batch import Batch
from tests.ops.forced import attend, forced, hardware

CUDA = torch.device("cuda", 0)
HALF = Site(CUDA, torch.bfloat16, heads=4, kv_heads=4, head_width=64)
RELATIVE = Relative(torch.zeros(5, dtype=torch.long), scores=torch.zeros(1, 2))


def attention_rows(site: Site) -> list[str]:
    """The last part of each resolved backend's name."""
    return [row.backend.rsplit(".", 1)[1] for row in select("attention", site)]


def chosen(site: Site, lengths: tuple[int, ...], **options: Any) -> str:
    """The backend for a batch of these lengths."""
    q = torch.empty(sum(lengths), 4, 64, device="meta")
    defaults: dict[str, Any] = {
        "relative": None,
        "rotation": None,
        "global_tokens": None,
        "dropout": 0.0,
        "cache": None,
    }
    call = AttentionInputs(q, q, q, lengths, q, 0.5, site.patterns[0], **(defaults | options))
    return AttentionBackends.resolve(site).choose(call).backend.rsplit(".", 1)[1]


# --- attention


def test_order_of_preference() -> None:
    with hardware():
        assert attention_rows(HALF) == ["short", "disentangled", "varlen", "grouped"]
        assert attention_rows(replace(HALF, training=True)) == ["disentangled", "varlen", "grouped"]
        assert attention_rows(replace(HALF, relative="disentangled")) == ["disentangled", "grouped"]
        bucketed = replace(HALF, relative="bucketed")
        assert attention_rows(bucketed) == ["disentangled", "bucketed", "grouped"]
        assert attention_rows(replace(bucketed, training=True)) == ["disentangled", "grouped"]
        assert attention_rows(replace(bucketed, dtype=torch.float32)) == ["bucketed", "grouped"]
        assert attention_rows(replace(HALF, device=torch.device("cpu"))) == ["grouped"]


def test_sites_of_disentangled_attention() -> None:
    with hardware():
        for site in (HALF, replace(HALF, head_width=24, dtype=torch.float16), replace(HALF, training=True)):
            for relative in ("", "bucketed", "disentangled"):
                assert "disentangled" in attention_rows(replace(site, relative=relative))
        for change in (
            {"dtype": torch.float32}, {"head_width": 8}, {"head_width": 20}, {"head_width": 136},
            {"kv_heads": 2}, {"patterns": (Sliding(3),)}, {"device": torch.device("cpu")},
        ):  # fmt: skip
            assert "disentangled" not in attention_rows(replace(HALF, **change))
        with disable("triton.attention.disentangled"):
            assert "disentangled" not in attention_rows(HALF)
    with hardware(capability=(7, 5)):
        assert "disentangled" not in attention_rows(HALF)
    with hardware(triton=False):
        assert "disentangled" not in attention_rows(HALF)


def test_chosen_for_relative_positions_of_any_length() -> None:
    with hardware():
        for lengths in ((3,), (2 * disentangled_attention.MAX_PLAIN_LENGTH,)):
            site = replace(HALF, relative="disentangled")
            assert chosen(site, lengths, relative=RELATIVE, dropout=0.1) == "disentangled"
            assert chosen(site, lengths, relative=RELATIVE, global_tokens=torch.zeros(3)) == "grouped"


def test_chosen_for_short_texts_without_relative_positions() -> None:
    longest = disentangled_attention.MAX_PLAIN_LENGTH
    training = replace(HALF, training=True)
    with hardware():
        assert chosen(HALF, (3, longest)) == "short"
        assert chosen(HALF, (3, longest), dropout=0.1) == "disentangled"
        assert chosen(training, (3, longest)) == "disentangled"
        assert chosen(training, (3, longest + 1)) == "varlen"
        with disable("triton.attention"):
            assert chosen(HALF, (3, longest)) == "varlen"
        with disable("torch.attention.varlen"):
            assert chosen(training, (3, longest + 1)) == "grouped"


def test_bucketed_positions_without_triton() -> None:
    site = replace(HALF, relative="bucketed")
    with hardware():
        assert chosen(site, (3,), relative=RELATIVE) == "disentangled"
        with disable("triton"):
            assert chosen(site, (3,), relative=RELATIVE) == "bucketed"
            assert chosen(site, (513,), relative=RELATIVE) == "grouped"
            assert chosen(site, (3,), relative=RELATIVE, dropout=0.1) == "grouped"
            assert chosen(replace(site, training=True), (3,), relative=RELATIVE) == "grouped"


def test_arguments_of_the_chosen_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that the layers of a forward pass share is passed on."""
    calls: list[Any] = []
    monkeypatch.setattr(
        disentangled_attention, "attend", lambda *call, **options: calls.append((call, options)) or call[0]
    )
    q, cu, cache = torch.zeros(3, 2, 16), torch.tensor([0, 3]).int(), {}
    with forced("triton.attention.disentangled"):
        attend(q, q, q, (3,), cu, scale=0.5, pattern=Full(), relative=RELATIVE, dropout=0.1, cache=cache)
    ((call, options),) = calls
    assert call == (q, q, q, (3,), cu)
    assert options == {"scale": 0.5, "relative": RELATIVE, "dropout": 0.1, "cache": cache}
    assert options["cache"] is cache


def test_sites_of_short_attention() -> None:
    with hardware():
        for change in (
            {}, {"head_width": 24, "dtype": torch.float16}, {"kv_heads": 2}, {"patterns": (Sliding(3),)},
        ):  # fmt: skip
            assert "short" in attention_rows(replace(HALF, **change))
        for change in (
            {"patterns": (BlockSparse(4, 1),)}, {"dtype": torch.float32}, {"head_width": 8}, {"head_width": 20},
            {"head_width": 136}, {"device": torch.device("cpu")}, {"training": True}, {"relative": "bucketed"},
        ):  # fmt: skip
            assert "short" not in attention_rows(replace(HALF, **change))
        with disable("triton.attention.short"):
            assert "short" not in attention_rows(HALF)
    with hardware(capability=(7, 5)):
        assert "short" not in attention_rows(HALF)
    with hardware(triton=False):
        assert "short" not in attention_rows(HALF)


def test_batches_of_short_attention() -> None:
    longest = short_attention.MAX_LENGTH
    sliding = replace(HALF, patterns=(Sliding(3),))
    with hardware():
        assert chosen(HALF, (7, 2)) == chosen(HALF, (longest,)) == "short"
        assert chosen(sliding, (2 * longest,)) == "short"
        assert chosen(HALF, (longest + 1, 2)) == "varlen"
        assert chosen(HALF, (7, 2), dropout=0.1) == "disentangled"
        assert chosen(HALF, (7, 2), global_tokens=torch.zeros(9)) == "grouped"
        row = select("attention", HALF)[0]
        q = torch.empty(9, 4, 64, device="meta")
        bounds = AttentionInputs(q, q, q, (7, 7, 7), q, 0.5, Full(), None, None, None, 0.0, None)
        assert row.accepts is not None
        assert not row.accepts(bounds)  # upper bounds, not lengths


def test_short_attention_is_for_inference() -> None:
    q, k = (torch.zeros(3, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    with hardware():
        for trained in (q, k):
            trained.requires_grad_()
            site = attention_backends(AttentionInputs(q, k, k, (3,), q, 0.5, Full()))
            assert "triton.attention.short" not in [row.backend for row in site.rows]
            trained.requires_grad_(False)


# --- rotary embeddings


def test_sites_of_rotary() -> None:
    def backends(dtype: torch.dtype = torch.bfloat16, width: int = 64, device: str = "cuda:0") -> list[str]:
        site = Site(torch.device(device), dtype, heads=4, kv_heads=2, head_width=width, rotary=True)
        return [row.backend for row in select("rotary", site) if "short" not in row.backend]

    with hardware():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert backends(dtype) == ["triton.rotary"]
        assert backends(torch.float64) == ["torch.eager"]
        assert backends(width=8) == backends(width=256) == ["torch.eager"]
        assert backends(device="cpu") == ["torch.eager"]
        with disable("triton.rotary"):
            assert backends() == ["torch.eager"]
    with hardware(triton=False):
        assert backends() == ["torch.eager"]


def test_rotary_inside_the_kernel() -> None:
    """Where half a head's width is a power of two of at least 16, and a query sees few keys."""

    def fuses(width: int = 64, length: int = 3, pattern: Any = Full()) -> bool:  # noqa: B008
        backends = AttentionBackends.resolve(replace(HALF, head_width=width, patterns=(pattern,), rotary=True))
        q = torch.empty(length, 4, width, device="meta")
        call = AttentionInputs(q, q, q, (length,), q, 0.5, pattern, None, (q, q), None, 0.0, None)
        return backends.rotates(backends.choose(call), call)

    longest = max(short_attention.ROTARY_TILES)
    with hardware():
        assert all(fuses(width) for width in (32, 64, 128))
        assert not any(fuses(width) for width in (16, 24, 48, 96))
        assert fuses(length=longest)
        assert not fuses(length=longest + 1)
        assert fuses(length=longest + 1, pattern=Sliding(64))
        with disable("triton.attention.short_rotary"):
            assert not fuses()
        with disable("triton.attention.short"):
            assert not fuses()


@pytest.mark.parametrize("fused", [True, False])
def test_rotation_is_applied_once(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(short_attention, "attend", lambda *call, **options: calls.append((call, options)) or call[0])
    q, k = torch.randn(3, 2, 64), torch.randn(3, 1, 64)
    rotation = rotary_tables(Rotary((100.0,)), torch.arange(3), 64)[100.0]
    with forced("triton.attention.short", *(["triton.attention.short_rotary"] if fused else [])):
        attend(q, k, k, (3,), torch.tensor([0, 3]).int(), scale=0.5, pattern=Sliding(2), rotation=rotation)
    (((q_, k_, _, lengths), options),) = calls
    assert lengths == (3,)
    assert options == {"scale": 0.5, "pattern": Sliding(2), "rotation": rotation if fused else None}
    expected = (q, k) if fused else apply_rotary(q, k, *rotation)
    assert torch.equal(q_, expected[0])
    assert torch.equal(k_, expected[1])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pattern", [Full(), Sliding(2)], ids=str)
def test_rotary_before_other_backends(pattern: Any, training: bool) -> None:
    """Bit for bit."""
    torch.manual_seed(0)
    lengths, cu = (5, 1, 9), torch.tensor([0, 5, 6, 15]).int()
    q, k, v = (torch.randn(15, heads, 32, requires_grad=training) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(n) for n in lengths])
    rotation = rotary_tables(Rotary((100.0,)), positions, 32)[100.0]
    with disable("native.training.rotary"):  # it rounds differently
        out = attend(q, k, v, lengths, cu, scale=0.3, pattern=pattern, rotation=rotation)
    rotated = apply_rotary(q, k, *rotation)
    assert torch.equal(out, attend(*rotated, v, lengths, cu, scale=0.3, pattern=pattern))
    assert out.requires_grad == training


# --- fused kernels


def test_sites_of_fused_kernels() -> None:
    """Half precision on GPUs with Triton, where autocast counts; LayerNorm of rows that fit into a kernel."""
    half = Site(torch.device("cuda", 0), torch.bfloat16, width=768)

    def fused_operations(site: Site) -> set[str]:
        names = ("norm", "activation", "embedding", "cross_entropy", "pooling", "fp8_quantization")
        return {name for name in names if select(name, site)[0].backend.startswith("triton.fused.")}

    everything = {"norm", "activation", "embedding", "cross_entropy", "pooling", "fp8_quantization"}
    with hardware():
        assert fused_operations(half) == fused_operations(replace(half, dtype=torch.float16)) == everything
        assert fused_operations(replace(half, dtype=torch.float32)) == {"pooling"}
        assert fused_operations(replace(half, dtype=torch.float64)) == set()
        assert fused_operations(replace(half, training=True)) == everything - {"embedding", "pooling"}
        assert fused_operations(replace(half, autocast=True)) == everything - {"embedding"}
        assert fused_operations(replace(half, norm="rms")) == everything - {"norm", "embedding"}
        assert fused_operations(replace(half, width=MAX_WIDTH + 1)) == everything - {"norm", "embedding"}
        assert fused_operations(replace(half, activation="tanh")) == everything - {"activation"}
        assert fused_operations(replace(half, device=torch.device("cpu"))) == set()
        with disable("triton.fused"):
            assert fused_operations(half) == set()
    with hardware(triton=False):
        assert fused_operations(half) == set()


def test_rows_of_tensors_follow_autocast_and_gradients() -> None:
    x = torch.zeros(3, 4)
    with forced("triton.fused.cross_entropy"):
        assert row_for("cross_entropy", x).backend == "triton.fused.cross_entropy"
    assert compute_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
    assert not needs_grad(x, None)
    x.requires_grad_()
    assert needs_grad(None, x)
    with torch.no_grad():
        assert not needs_grad(x)


def test_modes_of_the_pooling_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes of a pooling are computed by the kernel, or none."""
    nan = replace(select("pooling", Site(torch.device("cpu"), torch.float32))[0], backend="triton.fused.pooling")
    nan = replace(nan, run=lambda hidden, ends, mode: torch.full((len(ends) - 1, 4), torch.nan))
    monkeypatch.setattr("bertie.ops.dispatch.row_for", lambda operation, x: nan)
    batch = Batch.from_ids([[1, 2], [3]])
    assert Pooling(("max", "weightedmean"))(torch.zeros(3, 4), batch).isnan().all()
    for modes in ("cls", "lasttoken", ("cls", "max")):
        assert not Pooling(modes)(torch.zeros(3, 4), batch).any()
