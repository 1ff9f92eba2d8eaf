"""The transformer block: attention and feed-forward, each with a residual. The config says which norms it has."""

from __future__ import annotations

from torch import Tensor, nn

from bertie.config import EncoderConfig
from bertie.nn.attention import PassContext, SelfAttention
from bertie.nn.feedforward import FeedForward
from bertie.nn.norms import build_norm
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
        self.attention_output = build_norm(cfg.norm, cfg.width) if cfg.output_norms else None
        self.ff_output = build_norm(cfg.norm, cfg.width) if cfg.output_norms else None

    def forward(
        self, x: Tensor, batch: Batch, context: PassContext, layer: int, queries: Tensor | None = None
    ) -> Tensor:
        """(T, D) -> (T, D). `queries` (T, D) attend to `x` and carry the residual; when None, `x` does both."""
        ops = context.ops
        normed_queries = None if queries is None else ops.norm(queries, self.pre_attention)
        attended = self.attention(ops.norm(x, self.pre_attention), batch, context, layer, normed_queries)
        if self.attention_output is not None:
            attended = ops.norm(attended, self.attention_output)
        dropout = self.dropout if self.training else 0.0
        residual = x if queries is None else queries
        x, normed = ops.add_norms(attended, residual, self.post_attention, self.pre_ff, dropout)
        y = self.ff(normed, ops)
        if self.ff_output is not None:
            y = ops.norm(y, self.ff_output)
        return ops.add_norm(y, x, self.post_ff, dropout)
