"""Models and gradient comparisons for tests of distillation losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.nn.model import Model
from bertie.text.batch import Batch

IDS = [[3, 9, 4, 11, 5], [7], [8, 8, 2, 6, 30, 12, 1, 3], [5, 6, 7]]


def make(seed: int = 0, depth: int = 2, dropout: float = 0.0, **changes: Any) -> Model:
    defaults: dict[str, Any] = {
        "vocab": 40,
        "width": 16,
        "layer_map": tuple(range(depth)),
        "heads": 2,
        "head_width": 8,
        "kv_heads": 2,
        "ff_width": 24,
        "activation": "gelu",
        "embeddings": EmbeddingConfig(width=16, segments=2),
        "positions": (Learned(32),),
        "patterns": (Full(),) * depth,
        "max_length": 32,
        "dropout": dropout,
        "attention_dropout": dropout,
        "init_std": 0.3,
    }
    cfg = EncoderConfig(**(defaults | changes))
    torch.manual_seed(seed)
    width = cfg.width
    mlm = HeadConfig(kind="vocabulary", outputs=cfg.vocab, dense=width, activation="gelu", norm=NormConfig(), tied=True)
    return Model(cfg, {"mlm": mlm, "classify": HeadConfig(kind="text", outputs=3)})


def wide(seed: int = 9, dropout: float = 0.0) -> Model:
    """A model of another width and another number of heads."""
    shape: dict[str, Any] = {
        "width": 24,
        "heads": 3,
        "kv_heads": 3,
        "embeddings": EmbeddingConfig(width=24, segments=2),
    }
    return make(seed, dropout=dropout, **shape)


def grads(of: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    of.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


def assert_same(of: nn.Module, found: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    """Compare losses, and gradients of all parameters."""
    assert_close(found.detach(), wanted.detach(), atol=atol, rtol=1e-5)
    a, b = grads(of, found), grads(of, wanted)
    zero = {name: torch.zeros_like(p) for name, p in of.named_parameters()}
    assert any(g.abs().max() > 1e-3 for g in b.values()), "there is no gradient to compare"
    for name in zero:
        assert_close(a.get(name, zero[name]), b.get(name, zero[name]), atol=atol, rtol=1e-4, msg=f"gradient of {name}")


def kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of probabilities, in the textbook form."""
    p, q = torch.softmax(teacher / temperature, -1), torch.softmax(student / temperature, -1)
    return (p * (p / q).log()).sum(-1)


def batches(seed: int, count: int) -> list[Batch]:
    rng = np.random.default_rng(seed)
    return [Batch.from_ids([rng.integers(1, 40, n) for n in rng.integers(1, 12, 8)]) for _ in range(count)]


def assert_teacher_is_fixed(loss: Any) -> None:
    """The teacher runs without dropout, whatever its mode, and gets no gradients. `loss`: teacher -> ()."""
    teacher = make(0, dropout=0.5).train()
    total = loss(teacher)
    total.backward()
    assert total.item() == loss(make(0)).item()
    assert all(p.grad is None for p in teacher.parameters())


def assert_float32_under_autocast(student: Model, loss: Any) -> None:
    """Forward passes run in bfloat16, the loss in float32."""
    expected = grads(student, loss())
    with torch.autocast("cpu", torch.bfloat16):
        total = loss()
    assert total.dtype == torch.float32
    for name, gradient in grads(student, total).items():
        error = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=0.1)
        assert error < 0.1, name


def assert_converges(student: Model, loss: Any) -> None:
    """Training on some batches lowers the loss on others. `loss`: batch -> ()."""

    def held_out() -> float:
        with torch.no_grad():
            return float(np.mean([loss(batch).item() for batch in batches(99, 3)]))

    before = held_out()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    for batch in batches(1, 40):
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    assert held_out() < 0.8 * before
