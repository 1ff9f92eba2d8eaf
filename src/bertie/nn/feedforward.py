"""The feed-forward layer of a block."""

from __future__ import annotations

from torch import Tensor, nn

from bertie.config import EncoderConfig
from bertie.ops.dispatch import DispatchTable


class FeedForward(nn.Module):
    """Up-projection, activation (gated or not), down-projection."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.gated, self.activation = cfg.gated, cfg.activation
        self.up: nn.Module = nn.Linear(cfg.width, cfg.ff_width * (2 if cfg.gated else 1), bias=cfg.ff_bias)
        self.down: nn.Module = nn.Linear(cfg.ff_width, cfg.width, bias=cfg.ff_bias)

    def forward(self, x: Tensor, ops: DispatchTable) -> Tensor:
        """(T, D) -> (T, D)."""
        out: Tensor = self.down(ops.linear_activation(x, self.up, self.activation, self.gated))
        return out
