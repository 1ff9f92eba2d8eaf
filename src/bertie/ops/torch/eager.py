"""Plain PyTorch expressions: they run on any device, and are the reference for the fused kernels.

add_norm, add_norms, norm   residual + dropout + LayerNorm
embed_norm                  LayerNorm of a sum of embeddings
linear_activation, activate linear layer + activation, gated or not
linear_cross_entropy        cross-entropy over a vocabulary
rotate, apply_rotary        rotary embeddings
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import Activation, Rotary, RotaryKey, RotaryScaling


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, dropout: float) -> Tensor:
    """norm(residual + dropout(x)): (T, D), (T, D) -> (T, D).

    >>> add_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), nn.LayerNorm(2), 0.0).round().tolist()
    [[1.0, -1.0]]
    """
    out: Tensor = norm(residual + F.dropout(x, dropout))
    return out


def add_norms(x: Tensor, residual: Tensor, post: nn.Module, pre: nn.Module, dropout: float) -> tuple[Tensor, Tensor]:
    """The new residual stream post(residual + dropout(x)), and pre(...) of it, the next layer's input: (T, D) both.

    Mostly one of the two norms is `nn.Identity`.

    >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])
    >>> total, normed = add_norms(x, residual, nn.Identity(), nn.LayerNorm(2), 0.0)
    >>> total.tolist(), normed.round().tolist()
    ([[4.0, 2.0]], [[1.0, -1.0]])
    """
    total = add_norm(x, residual, post, dropout)
    return total, pre(total)


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """module(x), where the module is a norm or `nn.Identity`: (T, D) -> (T, D).

    >>> norm(torch.tensor([[1.0, 3.0]]), nn.LayerNorm(2)).round().tolist()
    [[-1.0, 1.0]]
    """
    out: Tensor = module(x)
    return out


def embed_norm(tables: Sequence[tuple[nn.Embedding, Tensor]], module: nn.Module) -> Tensor:
    """module(sum of embeddings): each table with its row indices (T,) -> (T, D).

    >>> table = nn.Embedding.from_pretrained(torch.tensor([[1.0, 3.0]]))
    >>> embed_norm([(table, torch.tensor([0, 0]))], nn.LayerNorm(2)).round().tolist()
    [[-1.0, 1.0], [-1.0, 1.0]]
    """
    (first, rows), *others = tables
    x: Tensor = first(rows)
    for table, rows in others:
        x = x + table(rows)
    out: Tensor = module(x)
    return out


def linear_activation(x: Tensor, linear: nn.Module, activation: Activation, gated: bool) -> Tensor:
    """activation(linear(x)): (T, D) -> (T, F). Gated: the first F of 2F outputs are activated and multiply the rest.

    >>> linear = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.constant_(linear.weight, 3.0)
    >>> linear_activation(torch.ones(1, 1), linear, "relu", gated=True).tolist()
    [[9.0]]
    """
    return activate(linear(x), activation, gated)


def activate(y: Tensor, activation: Activation, gated: bool) -> Tensor:
    """(T, F) -> (T, F), or gated (T, 2F) -> (T, F)."""
    if gated:
        gate, value = y.chunk(2, dim=-1)  # (T, 2F) -> (T, F), (T, F)
        return activation_function(activation)(gate) * value
    return activation_function(activation)(y)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _identity(x: Tensor) -> Tensor:
    return x


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": _identity,
}


def activation_function(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function for an activation's name."""
    return _ACTIVATIONS[name]


def linear_cross_entropy(x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum () of cross-entropies of `targets` under the logits x·wordsᵀ + bias.

    x (N, D), words (V, D), bias (V,), targets (N,), weights (N,) in float32. A row of weight 0 contributes nothing
    to the loss or its gradient, whatever it contains.

    >>> x, words = torch.zeros(1, 3), torch.ones(10, 3)
    >>> linear_cross_entropy(x, words, None, torch.tensor([7]), torch.tensor([2.0])).exp().round()     # 10²
    tensor(100.)
    """
    logits = F.linear(x, words, bias)
    with torch.autocast(x.device.type, enabled=False):
        logits = logits.float()
        # On a GPU the question would synchronize; on a CPU the copy takes a tenth of a training step.
        if logits.device.type != "cpu" or not bool((weights > 0).all()):
            logits = torch.where(weights[:, None] > 0, logits, 0.0)
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def rotary_tables(rotary: Rotary, positions: Tensor, head_width: int) -> dict[RotaryKey, tuple[Tensor, Tensor]]:
    """cos and sin, each (T, d), for each base frequency and scaling in use."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float, device=positions.device) / head_width
    tables = {}
    for key in rotary.distinct_keys():
        base, scaling = key if isinstance(key, tuple) else (key, None)
        frequencies = _scaled(1.0 / base**exponents, scaling)  # (d / 2,)
        angles = positions[:, None].float() * frequencies  # (T, d / 2)
        angles = torch.cat((angles, angles), dim=-1)  # (T, d)
        tables[key] = (angles.cos(), angles.sin())
    return tables


def _scaled(frequencies: Tensor, scaling: RotaryScaling | None) -> Tensor:
    """(d / 2,) rotary frequencies, scaled for a model that was extended to longer texts."""
    if scaling is None:
        return frequencies
    scaled = frequencies / scaling.factor
    if scaling.waves is None:
        return scaled
    low, high = scaling.waves
    kept = ((scaling.original_length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * scaled + kept * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (T, H, d), in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (wide * cos[:, None] + rotated * sin[:, None]).to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to q (T, H, d) and k (T, G, d).

    >>> x = torch.ones(2, 1, 2)
    >>> q, k = apply_rotary(x, x, *rotary_tables(Rotary((10000.0,)), torch.tensor([0, 1]), 2)[10000.0])
    >>> [[round(value, 2) for value in token] for token in q[:, 0].tolist()]     # by the angles 0 and 1
    [[1.0, 1.0], [-0.3, 1.38]]
    """
    return rotate(q, cos, sin), rotate(k, cos, sin)
