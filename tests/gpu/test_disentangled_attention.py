"""Attention with relative position terms, and without them in training, by the Triton kernels in half precision against
grouped attention in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.config import Bucketed, Disentangled, EmbeddingConfig, Full, Learned
from bertie.nn.encoder import Encoder
from bertie.nn.positions import relative_rows
from bertie.ops import Relative
from bertie.ops.torch import grouped_attention, varlen_attention
from bertie.ops.triton import disentangled_attention
from bertie.text.batch import Batch
from tests.ops.forced import attend, turn_off
from tests.test_config import GOOD

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEADS = 2
SCALE = 0.07
BOTH = Disentangled(("c2p", "p2c"), 512, buckets=64)


def random_inputs(
    lengths: list[int], dtype: torch.dtype, scheme: Any = BOTH, width: int = 64
) -> tuple[list[Tensor], Relative | None]:
    torch.manual_seed(0)
    fused = torch.randn(sum(lengths), 3 * HEADS, width, device="cuda").to(dtype)
    leaves = [x.detach().requires_grad_() for x in fused.split(HEADS, dim=1)]
    if scheme is None:
        return leaves, None
    if isinstance(scheme, Bucketed):
        tables = {"scores": torch.randn(scheme.buckets, HEADS, device="cuda")}  # a float32 parameter, as under autocast
    else:
        names = {"c2p": "keys", "p2c": "queries"}
        size = (2 * scheme.span, HEADS, width)
        tables = {names[term]: torch.randn(size, device="cuda").to(dtype) for term in scheme.terms}
    leaves += [x.requires_grad_() for x in tables.values()]
    rows = relative_rows(scheme, max(lengths), torch.device("cuda"))
    return leaves, Relative(rows, **dict(zip(tables, leaves[3:], strict=True)))


def compare(lengths: list[int], dtype: torch.dtype, scheme: Any = BOTH, width: int = 64) -> None:
    leaves, relative = random_inputs(lengths, dtype, scheme, width)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    fast = disentangled_attention.attend(*leaves[:3], tuple(lengths), cu, scale=SCALE, relative=relative)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    same = None
    if relative is not None:
        names = [name for name in ("keys", "queries", "scores") if getattr(relative, name) is not None]
        same = Relative(relative.rows, **dict(zip(names, wide[3:], strict=True)))
    slow = grouped_attention.attend(*wide[:3], tuple(lengths), scale=SCALE, pattern=Full(), relative=same)
    assert_close(fast.float(), slow, atol=TOLERANCE[dtype], rtol=0)
    dout = torch.randn_like(slow)
    ours = torch.autograd.grad(fast, leaves, dout.to(dtype))
    for leaf, one, other in zip(leaves, ours, torch.autograd.grad(slow, wide, dout), strict=True):
        assert one.dtype == leaf.dtype
        assert one.shape == leaf.shape
        assert_close(one.float(), other, atol=TOLERANCE[dtype] * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "lengths",
    [[1], [16] * 9, [1, 2, 15, 16, 17, 31, 32, 33], [127, 128, 129, 1, 2], [512, 513, 3], [1] * 50 + [4096] + [7] * 50],
    ids=lambda lengths: f"{len(lengths)} dout to {max(lengths)}",
)
@pytest.mark.parametrize("scheme", [BOTH, None], ids=str)
def test_lengths(scheme: Any, dtype: torch.dtype, lengths: list[int]) -> None:
    compare(lengths, dtype, scheme)


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(
    "scheme", [Bucketed(32), Disentangled(("c2p",), 64), Disentangled(("p2c",), 64, buckets=16), BOTH, None], ids=str
)
def test_terms_and_tiles(scheme: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disentangled_attention, "MAX_TILES", (rows, rows))
    monkeypatch.setattr(disentangled_attention, "PLAIN_MAX_TILES", (rows, rows))
    compare([1, 130, 64, 40], torch.bfloat16, scheme)


@pytest.mark.parametrize("scheme", [BOTH, None], ids=str)
@pytest.mark.parametrize("width", [16, 24, 32, 80, 128])
def test_widths(width: int, scheme: Any) -> None:
    compare([1, 17, 70], torch.float16, scheme, width=width)


def test_selected_for_relative_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, relative = random_inputs([40, 3], torch.bfloat16)
    cu = torch.tensor([0, 40, 43]).int().cuda()
    call = {"scale": SCALE, "pattern": Full(), "relative": relative}
    ours = attend(*leaves[:3], (40, 3), cu, **call)
    assert torch.equal(ours, disentangled_attention.attend(*leaves[:3], (40, 3), cu, scale=SCALE, relative=relative))
    turn_off(monkeypatch, "triton.attention.disentangled")
    assert_close(attend(*leaves[:3], (40, 3), cu, **call), ours, atol=3e-2, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("more", [0, 1])
def test_selected_in_training_for_short_texts(more: int, dropout: float) -> None:
    """And FlashAttention for longer ones."""
    lengths = [disentangled_attention.MAX_PLAIN_LENGTH + more, 3]
    leaves, _ = random_inputs(lengths, torch.bfloat16, None)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    def call(path: Any, **options: Any) -> Any:
        torch.cuda.manual_seed(1)
        return path(*leaves, tuple(lengths), cu, scale=SCALE, dropout=dropout, **options)

    ours, theirs = call(disentangled_attention.attend, relative=None), call(varlen_attention.attend, pattern=Full())
    actual = call(attend, pattern=Full())
    assert actual.requires_grad
    assert torch.equal(actual, theirs if more else ours)
    if not dropout:
        assert_close(ours, theirs, atol=3e-2, rtol=0)


# --- relative position bias ---


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", [12, 16])
def test_relative_position_bias(dtype: torch.dtype, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPNet's attention at real sizes: by the Triton kernels, and without them by padded groups."""
    torch.manual_seed(0)
    lengths = [1, 2, 15, 16, 17, 127, 128, 129, 511, 512, *torch.randint(3, 400, (100,)).tolist()]
    fused = torch.randn(sum(lengths), 3 * heads, 64, device="cuda").to(dtype)
    rows = relative_rows(Bucketed(32), max(lengths), torch.device("cuda"))
    relative = Relative(rows, scores=torch.randn(32, heads, device="cuda").to(dtype))
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    heads_ = fused.split(heads, dim=1)
    actual = {}
    with torch.no_grad():
        for on in (True, False):
            if not on:
                turn_off(monkeypatch, "triton.attention.disentangled")
            actual[on] = attend(*heads_, tuple(lengths), cu, scale=0.125, pattern=Full(), relative=relative)
        ours = disentangled_attention.attend(*heads_, tuple(lengths), cu, scale=0.125, relative=relative)
        wide = Relative(rows, scores=relative.scores.float())
        slow = grouped_attention.attend(
            *(x.float() for x in heads_), tuple(lengths), scale=0.125, pattern=Full(), relative=wide
        )
    assert torch.equal(actual[True], ours)
    for one in actual.values():
        assert_close(one.float(), slow, atol=TOLERANCE[dtype], rtol=0)


def test_encoder_with_relative_position_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference and training, with the kernels and without them."""
    cfg = replace(
        GOOD, width=256, heads=4, kv_heads=4, head_width=64, ff_width=512, embeddings=EmbeddingConfig(width=256),
        positions=(Learned(512), Bucketed(32)), max_length=512,
    )  # fmt: skip
    encoder = Encoder(cfg).cuda().bfloat16()
    batch = Batch.from_ids([torch.randint(0, 50, (n,)).tolist() for n in (1, 2, 15, 129, 500)]).to("cuda")
    with torch.no_grad():
        inferred = encoder(batch)
        with monkeypatch.context() as patched:
            turn_off(patched, "triton.attention.disentangled")
            padded = encoder(batch)
    trained = encoder(batch)
    for other in (padded, trained.detach()):  # their feed-forwards may round differently
        assert_close(inferred, other, atol=6e-2 * float(other.float().abs().max()), rtol=0)
    table = encoder.relative
    assert table is not None
    (grad,) = torch.autograd.grad(trained.float().sin().sum(), table.rows.weight)
    turn_off(monkeypatch, "triton.attention.disentangled")
    (plain,) = torch.autograd.grad(encoder(batch).float().sin().sum(), table.rows.weight)
    assert_close(grad.float(), plain.float(), atol=6e-2 * float(plain.float().abs().max()), rtol=0)


@pytest.mark.parametrize("scheme", [BOTH, None], ids=str)
def test_a_text_does_not_depend_on_its_neighbours(scheme: Any) -> None:
    """Bit for bit where the tiles are of the same size."""
    lengths = [70, 5, 200, 64]
    leaves, relative = random_inputs(lengths, torch.bfloat16, scheme)
    cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    with torch.no_grad():
        all_ = disentangled_attention.attend(*leaves[:3], tuple(lengths), cu, scale=SCALE, relative=relative)
        one = [x[75:275] for x in leaves[:3]]
        alone = disentangled_attention.attend(
            *one, (200,), torch.tensor([0, 200]).int().cuda(), scale=SCALE, relative=relative
        )
    assert torch.equal(all_[75:275], alone)


def test_terms_that_overflow_float16() -> None:
    leaves, relative = random_inputs([100, 30], torch.float16)
    cu = torch.tensor([0, 100, 130]).int().cuda()
    with torch.no_grad():
        leaves[0] *= 1000.0
        leaves[1] *= 10.0
    out = disentangled_attention.attend(*leaves[:3], (100, 30), cu, scale=1e-5, relative=relative)
    wide = [x.detach().float() for x in leaves]
    same = Relative(relative.rows, keys=wide[3], queries=wide[4])
    slow = grouped_attention.attend(*wide[:3], (100, 30), scale=1e-5, pattern=Full(), relative=same)
    assert_close(out.float(), slow, atol=4e-3, rtol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


def test_memory_grows_with_length_not_its_square() -> None:
    leaves, relative = random_inputs([8192], torch.bfloat16)
    cu = torch.tensor([0, 8192]).int().cuda()
    dout = torch.randn(8192, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = disentangled_attention.attend(*leaves[:3], (8192,), cu, scale=SCALE, relative=relative, dropout=0.1)
    torch.autograd.grad(out, leaves, dout)
    assert torch.cuda.max_memory_allocated() - before < HEADS * 8192 * 8192  # half of one matrix of scores


# --- dropout ---

DROPOUT = 0.3
SHORT = [5, 64, 33, 1, 17]  # at most 64, the width of a head


def dropped(leaves: list[Tensor], values: Tensor, relative: Relative | None, seed: int) -> Tensor:
    torch.manual_seed(seed)
    cu = torch.tensor([0, *SHORT]).cumsum(0).int().cuda()
    return disentangled_attention.attend(
        *leaves[:2], values, tuple(SHORT), cu, scale=SCALE, relative=relative, dropout=DROPOUT
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [(64, 64), (32, 64), (64, 16)])
@pytest.mark.parametrize("scheme", [BOTH, None], ids=str)
def test_gradients_with_dropout(
    scheme: Any, rows: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are unit vectors reveal the dropout mask, which the same seed reproduces."""
    monkeypatch.setattr(disentangled_attention, "MAX_TILES", rows)
    monkeypatch.setattr(disentangled_attention, "PLAIN_MAX_TILES", rows)
    leaves, relative = random_inputs(SHORT, dtype, scheme)
    units = torch.cat([torch.eye(n, 64) for n in SHORT])[:, None].expand(-1, HEADS, -1).to(leaves[0])
    kept = dropped(leaves, units, relative, 1) > 0  # (T, H, 64): query, head, key
    assert torch.equal(kept, dropped(leaves, units, relative, 1) > 0)
    assert not torch.equal(kept, dropped(leaves, units, relative, 2) > 0)
    share = float(kept[5:69].float().mean())
    assert abs(share - (1 - DROPOUT)) < 5 * (0.21 / kept[5:69].numel()) ** 0.5
    out = dropped(leaves, leaves[2], relative, 1)
    wide = [x.detach().float().requires_grad_() for x in leaves]
    pieces, start = [], 0
    for n in SHORT:
        own = slice(start, start + n)
        q, k, v = (x[own] for x in wide[:3])
        scores = torch.einsum("ihd,jhd->hij", q, k)
        if relative is not None:
            at = torch.arange(n, device="cuda")
            row = relative.rows[at[:, None] - at + len(relative.rows) // 2]
            scores = scores + torch.einsum("ihd,ijhd->hij", q, wide[3][row])
            scores = scores + torch.einsum("jhd,ijhd->hij", k, wide[4][row])
        weights = torch.softmax(scores * SCALE, -1) * kept[own, :, :n].transpose(0, 1) / (1 - DROPOUT)
        pieces.append(torch.einsum("hij,jhd->ihd", weights, v))
        start += n
    slow = torch.cat(pieces)
    assert_close(out.float(), slow, atol=2 * TOLERANCE[dtype], rtol=0)
    dout = torch.randn_like(slow)
    for one, other in zip(
        torch.autograd.grad(out, leaves, dout.to(dtype)), torch.autograd.grad(slow, wide, dout), strict=True
    ):
        assert_close(one.float(), other, atol=2 * TOLERANCE[dtype] * max(1.0, float(other.abs().max())), rtol=0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_masks_are_independent(rate: float) -> None:
    """Masks of two rows, columns or heads agree as often as independent ones, throughout a large batch."""
    n, width, texts = 128, 128, 40
    torch.manual_seed(0)
    q, k = torch.randn(2, n * texts, HEADS, width, device="cuda").bfloat16()
    units = torch.eye(n, device="cuda", dtype=torch.bfloat16)[:, None].expand(-1, HEADS, -1).repeat(texts, 1, 1)
    cu = torch.arange(0, n * texts + 1, n, device="cuda", dtype=torch.int32)
    with torch.no_grad():
        out = disentangled_attention.attend(q, k, units, (n,) * texts, cu, scale=0.01, relative=None, dropout=rate)
    kept = (out > 0).view(texts, n, HEADS, n).transpose(1, 2).flatten(0, 1)  # text and head, query, key
    error = (rate * (1 - rate)) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - rate)) < 5 * error / kept.numel() ** 0.5
    alike = rate**2 + (1 - rate) ** 2
    others = ~torch.eye(n, dtype=torch.bool, device="cuda")
    for ways in (kept, kept.mT):
        assert abs(float(ways.float().mean(2).std()) / (error / n**0.5) - 1) < 0.1
        same = torch.stack([(one[:, None] == one[None]).float().mean(-1)[others] for one in ways])
        assert abs(float(same.mean()) - alike) < 5e-3
        assert abs(float(same.std()) / ((alike * (1 - alike) / n) ** 0.5) - 1) < 0.15
    flat = kept.flatten(1)
    same = (flat[:, None] == flat[None]).float().mean(-1)[~torch.eye(len(flat), dtype=torch.bool, device="cuda")]
    assert float((same - alike).abs().max()) < 6 * (alike * (1 - alike)) ** 0.5 / n


@pytest.mark.parametrize("scheme", [BOTH, None], ids=str)
def test_cuda_graph_with_new_dropout_and_lengths(scheme: Any) -> None:
    leaves, relative = random_inputs([64, 56], torch.bfloat16, scheme)
    cu = torch.tensor([0, 64, 120, 120]).int().cuda()

    def call(dropout: float) -> Tensor:
        with torch.no_grad():
            return disentangled_attention.attend(
                *leaves[:3], (64,) * 3, cu, scale=SCALE, relative=relative, dropout=dropout
            )

    graphs = {}
    for dropout in (0.0, 0.5):
        call(dropout)  # compiles before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(dropout)
        graphs[dropout] = (graph, out)
    graph, out = graphs[0.5]
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)
    cu.copy_(torch.tensor([0, 10, 74, 120]))
    graph, out = graphs[0.0]
    graph.replay()
    expected = grouped_attention.attend(*leaves[:3], (10, 64, 46), scale=SCALE, pattern=Full(), relative=relative)
    assert_close(out, expected, atol=3e-2, rtol=0)
