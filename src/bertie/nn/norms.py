"""Normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertie.config import NormConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def build_norm(cfg: NormConfig, width: int) -> nn.Module:
    """The module for a `NormConfig`."""
    if cfg.kind == "rms":
        return RMSNorm(width, cfg.eps)
    return nn.LayerNorm(width, eps=cfg.eps, bias=cfg.bias)
