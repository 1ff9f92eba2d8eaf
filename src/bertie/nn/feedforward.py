"""The feed-forward part of a block."""

from __future__ import annotations

from torch import Tensor, nn

from bertie.config import EncoderConfig
from bertie.ops.triton.fused import expand


class FeedForward(nn.Module):
    """up, activation (gated or not), down."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.gated, self.activation = cfg.gated, cfg.activation
        self.up: nn.Module = nn.Linear(cfg.width, cfg.ff_width * (2 if cfg.gated else 1), bias=cfg.ff_bias)
        self.down: nn.Module = nn.Linear(cfg.ff_width, cfg.width, bias=cfg.ff_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        out: Tensor = self.down(expand(x, self.up, self.activation, self.gated))
        return out
