"""The feed-forward part of a block."""

from __future__ import annotations

from torch import Tensor, nn

from bertie.config import EncoderConfig
from bertie.nn.norm import activation


class FeedForward(nn.Module):
    """up, activation (gated or not), down."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.gated = cfg.gated
        self.activation = activation(cfg.activation)
        self.up = nn.Linear(cfg.width, cfg.ff_width * (2 if cfg.gated else 1), bias=cfg.ff_bias)
        self.down = nn.Linear(cfg.ff_width, cfg.width, bias=cfg.ff_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        x = self.up(x)
        if self.gated:
            act, linear = x.chunk(2, dim=-1)  # (T, 2F) -> (T, F), (T, F)
            x = self.activation(act) * linear
        else:
            x = self.activation(x)
        out: Tensor = self.down(x)
        return out
