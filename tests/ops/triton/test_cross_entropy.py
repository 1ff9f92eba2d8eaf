"""Fused linear cross-entropy against the eager reference, alone and in a model of fused kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import HeadConfig, NormConfig
from bertie.nn.model import Model
from bertie.ops import disable
from bertie.ops.triton import cross_entropy
from bertie.text.batch import Batch
from tests.ops.triton.helpers import DEVICE, TOLERANCE, random_tensor
from tests.test_config import GOOD

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "fused_backends", "nan_memory"),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("vocab", "block"), [(100, 4096), (64, 32)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fused_linear_cross_entropy(
    vocab: int, block: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "MAX_BLOCK", block)
    x, words = random_tensor(7, 8, dtype=dtype), random_tensor(vocab, 8)
    added = random_tensor(vocab) if bias else None
    targets = torch.randint(vocab, (7,), device=DEVICE)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0, 1.0], device=DEVICE)
    slow = F.cross_entropy(F.linear(x.float(), words, added), targets, reduction="none") @ weights
    fast = cross_entropy.fused_linear_cross_entropy(x, words, added, targets, weights)
    expected = [x, words, *([] if added is None else [added])]
    assert_close(fast, slow, **TOLERANCE[dtype])
    ours, theirs = (torch.autograd.grad(loss * 3.0, expected) for loss in (fast, slow))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        scale = float(other.float().abs().max())
        assert_close(one.float(), other.float(), atol=TOLERANCE[dtype]["atol"] * max(1.0, scale), rtol=0)
    assert (ours[0][2] == 0).all()
    with torch.no_grad():
        assert_close(cross_entropy.fused_linear_cross_entropy(x, words, added, targets, weights), fast.detach())


@pytest.mark.parametrize("large", [300.0, float("nan"), float("inf")])
def test_rows_of_weight_zero_contribute_nothing(large: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor(2, 4)
    with torch.no_grad():
        x[1] = large
    words, targets = random_tensor(70, 4), torch.tensor([3, 0], device=DEVICE)

    def step(weights: list[float]) -> tuple[Tensor, Tensor]:
        loss = cross_entropy.fused_linear_cross_entropy(x, words, None, targets, torch.tensor(weights, device=DEVICE))
        return loss, torch.autograd.grad(loss, x)[0]

    loss, grad = step([1.0, 0.0])
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    # With a weight, they do.
    assert step([1.0, 1.0])[0].isfinite().item() == math.isfinite(large)


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_model_with_all_fused_kernels(gated: bool, pre_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = replace(GOOD, activation="gelu", gated=gated, pre_norm=pre_norm)
    model = Model(
        cfg,
        {"mlm": HeadConfig(kind="vocabulary", outputs=50, dense=8, activation="gelu", norm=NormConfig(), tied=True)},
    ).to(DEVICE)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(DEVICE)
    targets, weights = torch.randint(50, (8,), device=DEVICE), torch.rand(8, device=DEVICE)

    def step() -> tuple[Tensor, ...]:
        words = model.encoder.embeddings.words.weight
        loss = model.head("mlm").fused_linear_cross_entropy(model.hidden(batch), words, targets, weights)
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    fast = step()
    with disable("triton.fused"):
        slow = step()
    for one, other in zip(fast, slow, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)
    logits = model(batch, "mlm").float()
    assert_close(slow[0], F.cross_entropy(logits, targets, reduction="none") @ weights, atol=1e-5, rtol=1e-5)


def test_model_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are bfloat16; parameters and gradients stay float32 and match those without autocast."""
    cfg = replace(GOOD, dropout=0.1)
    model = Model(cfg, {"mlm": HeadConfig(kind="vocabulary", outputs=50, dense=8, norm=NormConfig(), tied=True)}).to(
        DEVICE
    )
    batch = Batch.from_ids([[1, 2, 3], [4]]).to(DEVICE)
    targets, weights = torch.randint(50, (4,), device=DEVICE), torch.ones(4, device=DEVICE)
    words = model.encoder.embeddings.words.weight
    for training in (True, False):
        model.train(training)
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
            hidden = model.hidden(batch)
            loss = model.head("mlm").fused_linear_cross_entropy(hidden, words, targets, weights)
            grads = torch.autograd.grad(loss, list(model.parameters()))
        assert hidden.dtype == torch.bfloat16
        assert loss.dtype == torch.float32
        assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
    with disable("triton.fused"):
        plain = model.head("mlm").fused_linear_cross_entropy(model.hidden(batch), words, targets, weights)
    assert_close(loss, plain, atol=0, rtol=2e-2)
    for one, other in zip(grads, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        assert_close(one, other, atol=0.05 * max(0.1, float(other.abs().max())), rtol=0)
