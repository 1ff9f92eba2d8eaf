"""Attention on a GPU against the reference in every precision, and each family's encoder against the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bertie.checkpoints.model_spec import model_spec
from bertie.config import (
    BlockSparse,
    Causal,
    Disentangled,
    EmbeddingConfig,
    EncoderConfig,
    Full,
    Learned,
    Pattern,
    Rotary,
    Sliding,
)
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.nn.pooling import MODES, Pooling
from bertie.nn.positions import relative_rows
from bertie.ops import Relative, reference
from bertie.ops.contracts import AttentionInputs
from bertie.ops.dispatch import attention_backends
from bertie.ops.torch import grouped_attention, varlen_attention
from bertie.text.batch import Batch
from tests.ops.forced import attend
from tests.parity.tiny import TINY
from tests.test_config import GOOD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [1, 2, 15, 16, 17, 127, 128, 129, 300, 1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Sliding(64), BlockSparse(16, 1)], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_attention(dtype: torch.dtype, pattern: Pattern, relative: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), 2, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    leaves, wide = [q, k, v], [x.detach().float().cpu().requires_grad_() for x in (q, k, v)]
    terms = [None, None]
    if relative:
        scheme = Disentangled(("c2p", "p2c"), 64, buckets=16)
        table = torch.randn(2 * scheme.span, 2, 64, dtype=dtype, device="cuda", requires_grad=True)
        leaves.append(table)
        wide.append(table.detach().float().cpu().requires_grad_())
        terms = [
            Relative(relative_rows(scheme, max(LENGTHS), torch.device(device)), keys=one, queries=one)
            for device, one in (("cuda", table), ("cpu", wide[-1]))
        ]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    fast = attend(q, k, v, tuple(LENGTHS), cu, scale=0.1, pattern=pattern, relative=terms[0])
    slow = reference.attend(*wide[:3], tuple(LENGTHS), scale=0.1, pattern=pattern, relative=terms[1])
    # With relative terms, three GEMMs in half precision instead of one.
    assert_close(fast.float().cpu(), slow, atol=TOLERANCE[dtype] * (2 if relative else 1), rtol=0)
    upstream = torch.randn_like(slow)
    got = torch.autograd.grad(fast, leaves, upstream.to(dtype).cuda())
    for one, other in zip(got, torch.autograd.grad(slow, wide, upstream), strict=True):
        scale = float(other.abs().max())
        assert_close(one.float().cpu(), other, atol=2 * TOLERANCE[dtype] * max(scale, 1), rtol=0)


# --- torch's variable-length kernels, with dropout and without ---


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_qkv(lengths: list[int], dtype: torch.dtype, kv_heads: int = 2, seed: int = 0) -> tuple[Heads, torch.Tensor]:
    torch.manual_seed(seed)
    sizes = (2, kv_heads, kv_heads)
    q, k, v = (torch.randn(sum(lengths), h, 64, dtype=dtype, device="cuda", requires_grad=True) for h in sizes)
    return (q, k, v), torch.tensor([0, *lengths]).cumsum(0).int().cuda()


@pytest.mark.parametrize("lengths", [LENGTHS, [1, 1, 1], [0, 5, 0, 0, 200, 64, 0]], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Causal(), Causal(5)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_varlen_attention(dtype: torch.dtype, pattern: Pattern, kv_heads: int, lengths: list[int]) -> None:
    heads, cu = random_qkv(lengths, dtype, kv_heads)
    rows = attention_backends(AttentionInputs(*heads, tuple(lengths), cu, 0.1, pattern)).rows
    if "torch.attention.varlen" not in [row.backend for row in rows]:
        assert dtype == torch.float32
        assert pattern in (Sliding(5), Causal(5))
        return
    # `lengths` may be upper bounds: only the largest is used.
    fast = varlen_attention.attend(*heads, (max(lengths),) * len(lengths), cu, scale=0.1, pattern=pattern)
    wide = [x.detach().float().requires_grad_() for x in heads]
    slow = grouped_attention.attend(*wide, tuple(n for n in lengths if n), scale=0.1, pattern=pattern)
    assert_close(fast.float(), slow, atol=1e-5 if dtype == torch.float32 else TOLERANCE[dtype], rtol=0)
    upstream = torch.randn_like(slow)
    got = torch.autograd.grad(fast, heads, upstream.to(dtype))
    for one, other in zip(got, torch.autograd.grad(slow, wide, upstream), strict=True):
        atol = 1e-4 if dtype == torch.float32 else 2 * TOLERANCE[dtype] * max(1.0, float(other.abs().max()))
        assert_close(one.float(), other, atol=atol, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # with either implementation, dropping nothing
def test_without_flash_attention(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, cu = random_qkv(LENGTHS, torch.float16)
    flash = varlen_attention.attend(*heads, tuple(LENGTHS), cu, scale=0.1, pattern=Full())
    monkeypatch.setattr(varlen_attention, "_has_flash", lambda device: False)
    other = varlen_attention.attend(*heads, tuple(LENGTHS), cu, scale=0.1, pattern=Full(), dropout=dropout)
    assert_close(other, flash, atol=4e-3, rtol=0)


@pytest.mark.parametrize("window", [-1, 5])
def test_equals_the_public_function(window: int) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    heads, cu = random_qkv(LENGTHS, torch.bfloat16)
    longest = max(LENGTHS)
    theirs = varlen.varlen_attn(*heads, cu, cu, longest, longest, scale=0.1, window_size=(window, window))
    pattern = Full() if window < 0 else Sliding(window)
    assert torch.equal(varlen_attention.attend(*heads, tuple(LENGTHS), cu, scale=0.1, pattern=pattern), theirs)


DROPOUT = 0.3
KERNELS = [(torch.bfloat16, Full()), (torch.float16, Sliding(9)), (torch.float32, Full())]
SHORT = [5, 0, 64, 33, 1, 0, 0, 17]  # at most 64, the width of a head


def dropped(heads: Heads, cu: torch.Tensor, pattern: Pattern, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return varlen_attention.attend(*heads, (64,) * (len(cu) - 1), cu, scale=0.1, pattern=pattern, dropout=DROPOUT)


@pytest.mark.parametrize(("dtype", "pattern"), KERNELS, ids=str)
def test_dropout_repeats_with_its_seed_and_is_unbiased(dtype: torch.dtype, pattern: Pattern) -> None:
    heads, cu = random_qkv(SHORT, dtype)
    assert torch.equal(dropped(heads, cu, pattern, 1), dropped(heads, cu, pattern, 1))
    assert not torch.equal(dropped(heads, cu, pattern, 1), dropped(heads, cu, pattern, 2))
    with torch.no_grad():
        plain = varlen_attention.attend(*heads, (64,) * len(SHORT), cu, scale=0.1, pattern=pattern).float()
        many = torch.stack([dropped(heads, cu, pattern, seed).float() for seed in range(1000)])
    error = many.std(0) / len(many) ** 0.5
    assert ((many.mean(0) - plain).abs() <= 6 * error + TOLERANCE[dtype]).all()
    assert many.std(0).median() > 0.05


@pytest.mark.parametrize(("dtype", "pattern"), KERNELS, ids=str)
def test_gradients_with_dropout(dtype: torch.dtype, pattern: Pattern) -> None:
    """Values that are unit vectors reveal the dropout mask, which the same seed reproduces."""
    heads, cu = random_qkv(SHORT, dtype)
    units = torch.cat([torch.eye(n, 64) for n in SHORT])[:, None].expand(-1, 2, -1).to(heads[0])
    seen = dropped((heads[0], heads[1], units), cu, pattern, 1) > 0  # (T, H, 64): query, head, key
    fast = dropped(heads, cu, pattern, 1)
    wide = [x.detach().double().requires_grad_() for x in heads]
    rows, kept = [], []
    for start, n in zip(cu.tolist(), SHORT, strict=False):
        q, k, v = (x[start : start + n] for x in wide)
        mask = seen[start : start + n, :, :n]
        window = pattern.window if isinstance(pattern, Sliding) else n
        near = ((torch.arange(n)[:, None] - torch.arange(n)).abs() <= window)[:, None].expand_as(mask).cuda()
        kept.append(mask[near])
        scores = torch.einsum("ihd,jhd->ihj", q, k).masked_fill(~near, -torch.inf) * 0.1
        weights = scores.softmax(-1) * mask / (1 - DROPOUT)
        rows.append(torch.einsum("ihj,jhd->ihd", weights, v))
    slow = torch.cat(rows)
    assert abs(float(torch.cat(kept).float().mean()) - (1 - DROPOUT)) < 0.05
    atol = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    assert_close(fast.double(), slow, atol=atol, rtol=0)
    upstream = torch.randn_like(slow)
    got = torch.autograd.grad(fast, heads, upstream.to(dtype))
    for one, other in zip(got, torch.autograd.grad(slow, wide, upstream), strict=True):
        assert_close(one.double(), other, atol=2 * atol * max(1.0, float(other.abs().max())), rtol=0)


# --- encoders: no synchronization, and CUDA graphs ---

ENCODERS = {
    "learned": {"positions": (Learned(64),)},
    "offset past padding": {"positions": (Learned(66, skip_id=1),)},
    "rotary, sliding": {"positions": (Rotary((10.0, 100.0)),), "patterns": (Full(), Sliding(4)), "pre_norm": True},
}


def small(name: str, **more: Any) -> EncoderConfig:
    sizes = {"width": 32, "head_width": 16, "ff_width": 64, "embeddings": EmbeddingConfig(width=32, segments=2)}
    return replace(GOOD, max_length=64, **sizes, **ENCODERS[name], **more)


def of(lengths: list[int], seed: int = 0) -> Batch:
    torch.manual_seed(seed)
    return Batch.from_ids([torch.randint(2, 50, (n,)).tolist() for n in lengths])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_training_step_does_not_synchronize(name: str, dropout: float, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and "sliding" in name:
        pytest.skip("grouped attention uploads its indices")
    encoder = Encoder(small(name, dropout=dropout, attention_dropout=dropout)).cuda().to(dtype)
    pool = Pooling(MODES, include_prompt=False)
    pool(encoder(of([3, 9]).to("cuda")), of([3, 9]).to("cuda"), [1, 2]).sum().backward()  # one-time setup
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = of([3, 17, 1, 40, 9]).to("cuda")
        pool(encoder(batch), batch, [1, 2, 0, 3, 4]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_cuda_graph(name: str, dtype: torch.dtype) -> None:
    """One capture serves batches of other lengths: `lengths` are upper bounds, and unused texts are empty.

    Bit for bit where the longest text selects the same tiles as the upper bound.
    """
    if dtype == torch.float32 and "sliding" in name:
        pytest.skip("grouped attention depends on the lengths of the batch")
    torch.manual_seed(0)
    encoder = Encoder(small(name)).cuda().to(dtype)
    pool = Pooling(("cls", "max", "mean"))
    rounds = [of([33, 10, 17]), of([1, 1, 40, 2, 6, 10], seed=1), of([15, 36, 9], seed=2)]

    def spare(batch: Batch) -> torch.Tensor:
        return torch.nn.functional.pad(batch.cu_seqlens, (0, 8 - len(batch)), value=60).cuda()

    first = rounds[0].to("cuda")
    static = replace(first, cu_seqlens=spare(rounds[0]), lengths=(64,) * 8)

    def step() -> tuple[torch.Tensor, ...]:
        pooled = pool(encoder(static), static)
        real = static.cu_seqlens.diff()[:, None] > 0
        return pooled, *torch.autograd.grad((pooled.square() * real).sum(), list(encoder.parameters()))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for batch in rounds:
        moved = batch.to("cuda")
        static.ids.copy_(moved.ids)
        static.positions.copy_(moved.positions)
        static.cu_seqlens.copy_(spare(batch))
        graph.replay()
        pooled = pool(encoder(moved), moved)
        grads = torch.autograd.grad(pooled.square().sum(), list(encoder.parameters()))
        assert torch.equal(captured[0][: len(batch)], pooled)
        assert not captured[0][len(batch) :, 32:].any()  # except [CLS], which an empty text lacks
        for (label, _), one, other in zip(encoder.named_parameters(), captured[1:], grads, strict=True):
            assert torch.isfinite(one).all(), label
            assert_close(one, other, atol=2e-2 * max(1.0, float(other.abs().max())), rtol=0, msg=label)


@pytest.mark.parametrize(("dtype", "pattern"), KERNELS, ids=str)
def test_dropout_in_a_cuda_graph(dtype: torch.dtype, pattern: Pattern) -> None:
    heads, cu = random_qkv(SHORT, dtype)

    def step() -> tuple[torch.Tensor, ...]:
        out = varlen_attention.attend(*heads, (64,) * len(SHORT), cu, scale=0.1, pattern=pattern, dropout=DROPOUT)
        return out, *torch.autograd.grad(out.float().square().sum(), heads)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

    def replayed(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        graph.replay()
        return [x.clone() for x in captured]

    torch.manual_seed(1)
    eager = step()
    for one, other, label in zip(replayed(1), eager, ("out", "q", "k", "v"), strict=True):
        assert_close(one, other, atol=TOLERANCE[dtype] * max(1.0, float(other.detach().abs().max())), rtol=0, msg=label)
    assert torch.equal(replayed(1)[0], eager[0])
    assert not torch.equal(replayed(2)[0], eager[0])
    graph.replay()
    again = captured[0].clone()
    graph.replay()
    assert not torch.equal(captured[0], again)  # each replay draws a new mask


# --- whole encoders against the CPU ---


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_encoders(name: str) -> None:
    from transformers import AutoConfig

    tiny = TINY[name]
    try:
        raw = json.loads(AutoConfig.for_model(tiny.model_type, **tiny.config).to_json_string())
    except ValueError as error:
        pytest.skip(f"not in this version of transformers: {error}")
    plan = model_spec(raw, None)
    torch.manual_seed(0)
    model = Model(plan.encoder, {}).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = [torch.randint(3, 60, (n,)).tolist() for n in (1, tiny.longest, 7, 7, tiny.longest, 2)]
    batch = Batch.from_ids(ids)
    on_cpu = model.hidden(batch)
    on_gpu = model.cuda()
    assert_close(on_gpu.hidden(batch.to("cuda")).cpu(), on_cpu, atol=5e-5, rtol=0)
    for dtype in (torch.bfloat16, torch.float16):
        half = on_gpu.to(dtype).hidden(batch.to("cuda")).float().cpu()
        assert torch.isfinite(half).all()
        cosine = torch.cosine_similarity(half, on_cpu, dim=-1)
        assert cosine.mean() > 0.98, f"{dtype}: mean cosine {cosine.mean():.4f}"
