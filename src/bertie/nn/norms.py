"""Normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertie.config import NormConfig


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32; with `unit_offset` x / rms(x) · (1 + weight), as in Gemma."""

    def __init__(self, width: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))
        self.eps, self.unit_offset = eps, unit_offset

    def factor(self) -> Tensor:
        """(D,) what the normalized rows are multiplied by; in float32 where it is not the weight itself."""
        return 1.0 + self.weight.float() if self.unit_offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, D)."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (self.factor() * wide).to(x.dtype)  # Gemma rounds after the multiplication, Llama before it
        return self.weight * wide.to(x.dtype)


def build_norm(cfg: NormConfig, width: int) -> nn.Module:
    """The module for a `NormConfig`."""
    if cfg.kind == "rms":
        return RMSNorm(width, cfg.eps, cfg.unit_offset)
    return nn.LayerNorm(width, eps=cfg.eps, bias=cfg.bias)
