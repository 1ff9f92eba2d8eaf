"""Normalization and activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import Activation, Norm


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def build_norm(cfg: Norm, width: int) -> nn.Module:
    """The module for a `Norm`."""
    if cfg.kind == "rms":
        return RMSNorm(width, cfg.eps)
    return nn.LayerNorm(width, eps=cfg.eps, bias=cfg.bias)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _identity(x: Tensor) -> Tensor:
    return x


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": _identity,
}


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function for an activation's name."""
    return _FUNCTIONS[name]
