"""One block: attention and feed-forward, each with its residual. Which of the four norm slots are filled is config."""

from __future__ import annotations

from torch import Tensor, nn

from bertie.config import EncoderConfig
from bertie.nn.attention import Places, SelfAttention
from bertie.nn.feedforward import FeedForward
from bertie.nn.norms import build_norm
from bertie.ops.triton.fused import add_norm, add_norms, norm
from bertie.text.batch import Batch


class Block(nn.Module):
    """x + attention, then x + feed-forward."""

    def __init__(self, cfg: EncoderConfig, number: int) -> None:
        super().__init__()
        self.dropout = cfg.dropout
        self.attention = SelfAttention(cfg)
        self.ff = FeedForward(cfg)

        def slot(filled: bool) -> nn.Module:
            return build_norm(cfg.norm, cfg.width) if filled else nn.Identity()

        self.pre_attention = slot(cfg.pre_norm and (cfg.first_norm or number > 0))
        self.post_attention = slot(not cfg.pre_norm)
        self.pre_ff = slot(cfg.pre_norm)
        self.post_ff = slot(not cfg.pre_norm)

    def forward(self, x: Tensor, batch: Batch, places: Places, layer: int, queries: Tensor | None = None) -> Tensor:
        """(T, D) -> (T, D). With `queries` (T, D), these look at `x` and are what is added to; else `x` is both."""
        asking = None if queries is None else norm(queries, self.pre_attention)
        seen = self.attention(norm(x, self.pre_attention), batch, places, layer, asking)
        dropout = self.dropout if self.training else 0.0
        x, normed = add_norms(seen, x if queries is None else queries, self.post_attention, self.pre_ff, dropout)
        return add_norm(self.ff(normed), x, self.post_ff, dropout)
