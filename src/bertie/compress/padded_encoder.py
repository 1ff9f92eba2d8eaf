"""The encoder over padded batches, for export: (B, S) ids and an attention mask in, (B, S, D) hidden states out.

Bertie itself never pads. Other runtimes (ONNX Runtime, OpenVINO) take padded batches, so the graph that is
exported for them is this one. It computes from the same weights, in plain tensor operations, whatever the config
describes. Padding may be on either side of a text; the outputs at padding are meaningless.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import BlockSparse, Bucketed, Causal, Disentangled, Learned, Pattern, RotaryKey, Sliding
from bertie.errors import ConfigError
from bertie.nn.attention import QKV, SelfAttention
from bertie.nn.blocks import Block
from bertie.nn.encoder import Encoder
from bertie.nn.feedforward import FeedForward
from bertie.nn.linear import precision_of
from bertie.nn.positions import relative_rows
from bertie.ops.torch.eager import activate, rotary_tables

# Added to the scores of masked keys. Not -inf: padding may have no visible key at all, and its NaN would spread
# through the values. Small enough for a weight of exactly 0, and finite in half precision.
MASKED = -30000.0


class PaddedProjections(nn.Module):
    """Query, key and value projections: (B, S, D) -> (B, H, S, d) each; grouped keys and values are repeated."""

    def __init__(self, qkv: QKV) -> None:
        super().__init__()
        self.sizes, self.head_width = qkv.sizes, qkv.head_width
        self.weight = qkv.weight
        bias = qkv.full_bias()
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, S, D) -> (B, H, S, d) queries, keys and values."""
        parts = torch.split(F.linear(x, self.weight, self.bias), list(self.sizes), dim=-1)
        split = (-1, self.head_width)
        heads = [part.unflatten(-1, split).transpose(1, 2) for part in parts]  # type: ignore[no-untyped-call]
        query, key, value = heads
        share = self.sizes[0] // self.sizes[1]
        if share > 1:
            key, value = (x.unsqueeze(2).expand(-1, -1, share, -1, -1).flatten(1, 2) for x in (key, value))
        return query, key, value


class PaddedAttention(nn.Module):
    """Self-attention of one layer."""

    def __init__(self, attention: SelfAttention, table: Tensor | None, rotary: RotaryKey | None) -> None:
        super().__init__()
        self.qkv = PaddedProjections(cast(QKV, attention.qkv))
        self.global_qkv = None if attention.global_qkv is None else PaddedProjections(attention.global_qkv)
        self.out = attention.out
        self.scale, self.rotary = attention.scale, rotary
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        keys, queries = (None, None) if table is None else _position_projections(attention, table)
        self.position_keys = None if keys is None else nn.Parameter(keys, requires_grad=False)  # (H, d, R)
        self.position_queries = None if queries is None else nn.Parameter(queries, requires_grad=False)

    def forward(
        self,
        x: Tensor,
        bias: Tensor,
        rotations: dict[RotaryKey, tuple[Tensor, Tensor]],
        rows: Tensor | None,
        unmasked: Tensor,
        global_tokens: Tensor | None,
    ) -> Tensor:
        """(B, S, D) -> (B, S, D). `bias` is added to the scores, `rows` (S, S) are those of the relative table."""
        query, key, value = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotary is not None:
            cos, sin = rotations[self.rotary]
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        scaled = query * self.scale
        scores = scaled @ key.transpose(-1, -2) + bias  # (B, H, S, S)
        if self.position_keys is not None and rows is not None:
            by_row = scaled @ self.position_keys  # (B, H, S, R)
            scores = scores + by_row.gather(-1, rows.expand(*by_row.shape[:2], -1, -1))
        if self.position_queries is not None and rows is not None:
            by_row = (key * self.scale) @ self.position_queries
            scores = scores + by_row.gather(-1, rows.T.expand(*by_row.shape[:2], -1, -1)).transpose(-1, -2)
        attended = torch.softmax(scores, dim=-1) @ value
        if self.global_qkv is not None and global_tokens is not None:
            # Global tokens see the whole text through projections of their own.
            query, key, value = self.global_qkv(x)
            weights = torch.softmax((query * self.scale) @ key.transpose(-1, -2) + unmasked, dim=-1)
            attended = torch.where(global_tokens[:, None, :, None], weights @ value, attended)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class PaddedEncoder(nn.Module):
    """An encoder's computation over padded batches, with the encoder's own weights.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0, 1), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(), Full()), max_length=32)
    >>> PaddedEncoder(Encoder(cfg))(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]]), None, None).shape
    torch.Size([1, 3, 8])
    """

    rows: Tensor | None

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if (precision := precision_of(encoder)) != "fp32":
            raise ConfigError(f"a model in {precision} cannot be exported; load it with precision='fp32'")
        self.cfg = cfg = encoder.cfg
        self.embeddings, self.norm, self.conv = encoder.embeddings, encoder.norm, encoder.conv
        self.blocks = nn.ModuleList(encoder.blocks)
        table = encoder.relative().detach() if encoder.relative is not None else None
        bucketed = encoder.relative is not None and isinstance(encoder.relative.scheme, Bucketed)
        self.scores = nn.Parameter(table, requires_grad=False) if bucketed and table is not None else None  # (R, H)
        self.rotary = encoder.rotary
        # By layer, as blocks that several layers share may differ in the rotary base. The weights are shared anyway.
        self.attention = nn.ModuleList(
            PaddedAttention(
                cast(Block, encoder.blocks[number]).attention,
                None if bucketed else table,
                None if encoder.rotary is None else encoder.rotary.key(layer),
            )
            for layer, number in enumerate(cfg.layer_map)
        )
        rows = None
        if encoder.relative is not None:
            # Rows do not change beyond the scheme's maximum distance.
            size = 2 * encoder.relative.scheme.max_distance
            rows = relative_rows(encoder.relative.scheme, size, torch.device("cpu")).clone()
        self.register_buffer("rows", rows)  # (2 · size − 1,)

    def forward(self, ids: Tensor, mask: Tensor, segments: Tensor | None, global_tokens: Tensor | None) -> Tensor:
        """(B, S) ids, mask (1: token, 0: padding), segments and global tokens -> (B, S, D)."""
        cfg = self.cfg
        real = mask > 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # (B, S)
        x = embedded = self._embed(ids, positions, segments, real)
        index = torch.arange(ids.shape[1], device=ids.device)
        distance = index[:, None] - index[None, :]  # (S, S) i − j
        unmasked = torch.where(real, 0.0, MASKED)[:, None, None, :]  # (B, 1, 1, S)
        rows = None
        if self.rows is not None:
            middle = len(self.rows) // 2
            rows = self.rows[distance.clamp(-middle, middle) + middle]
        shared = unmasked if self.scores is None or rows is None else unmasked + self.scores[rows].permute(2, 0, 1)
        biases = {
            pattern: _pattern_bias(pattern, shared, distance, positions, mask, global_tokens)
            for pattern in dict.fromkeys(cfg.patterns)
        }
        # Only differences of positions matter: padding on the left changes nothing.
        rotations = {} if self.rotary is None else rotary_tables(self.rotary, index, cfg.head_width)
        for layer, number in enumerate(cfg.layer_map):
            block = cast(Block, self.blocks[number])
            bias = biases[cfg.patterns[layer]]
            attention = self.attention[layer]
            attended = attention(block.pre_attention(x), bias, rotations, rows, unmasked, global_tokens)
            if block.attention_output is not None:
                attended = block.attention_output(attended)
            x = block.post_attention(x + attended)
            added = _feed_forward(block.ff, block.pre_ff(x))
            x = block.post_ff(x + (added if block.ff_output is None else block.ff_output(added)))
            if layer == 0 and self.conv is not None:
                inside = torch.where(real[..., None], embedded, 0.0).transpose(1, 2)  # (B, D, S)
                conv = self.conv
                y = F.conv1d(inside, conv.weight, conv.bias, padding=conv.cfg.kernel // 2, groups=conv.cfg.groups)
                x = conv.norm(x + conv.activation(y.transpose(1, 2)))
        return x if self.norm is None else self.norm(x)

    def _embed(self, ids: Tensor, positions: Tensor, segments: Tensor | None, real: Tensor) -> Tensor:
        part, cfg = self.embeddings, self.cfg.embeddings
        x: Tensor = part.words(ids)
        if cfg.scale != 1.0:
            x = x * cfg.scale
        if part.segments is not None:
            # A table of one row is the same for all tokens.
            x = x + (part.segments.weight[0] if segments is None else part.segments(segments))
        if part.positions is not None:
            assert isinstance(part.learned, Learned)
            skip = part.learned.skip_id
            if skip is not None:
                counted = ((ids != skip) & real).long()
                positions = counted.cumsum(1) * counted + skip
            x = x + part.positions(positions)
        if part.tasks is not None:
            x = x + part.tasks.weight[0]
        if part.project is not None and cfg.project == "before_norm":
            x = part.project(x)
        if part.norm is not None:
            x = part.norm(x)
        if part.project is not None and cfg.project == "after_norm":
            x = part.project(x)
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (B, H, S, d); cos and sin are (S, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _feed_forward(ff: FeedForward, x: Tensor) -> Tensor:
    out: Tensor = ff.down(activate(ff.up(x), ff.activation, ff.gated))
    return out


@torch.no_grad()
def _position_projections(attention: SelfAttention, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(H, d, R) the relative table as keys (content-to-position) and as queries (position-to-content)."""
    scheme = attention.disentangled
    assert isinstance(scheme, Disentangled)
    keys: Tensor | None
    queries: Tensor | None
    if scheme.shared:
        queries, keys, _ = attention.qkv(table)  # (R, D) -> (R, H, d)
    else:
        keys, queries = (
            None if layer is None else layer(table).view(len(table), attention.cfg.heads, -1)
            for layer in (attention.position_key, attention.position_query)
        )
    keys, queries = (None if x is None else x.permute(1, 2, 0).contiguous() for x in (keys, queries))
    return keys if "c2p" in scheme.terms else None, queries if "p2c" in scheme.terms else None


def _pattern_bias(
    pattern: Pattern, shared: Tensor, distance: Tensor, positions: Tensor, mask: Tensor, global_tokens: Tensor | None
) -> Tensor:
    """What a layer's pattern adds to the scores, over `shared`: (B or 1, H or 1, S, S)."""
    if isinstance(pattern, Sliding):
        near = distance.abs() <= pattern.window
        if global_tokens is not None:
            near = near | global_tokens[:, None, None, :]
        return shared + torch.where(near, 0.0, MASKED)
    if isinstance(pattern, Causal):
        visible = distance >= 0 if pattern.window is None else (distance >= 0) & (distance <= pattern.window)
        return shared + torch.where(visible, 0.0, MASKED)
    if isinstance(pattern, BlockSparse):
        length = mask.sum(1)[:, None, None]  # (B, 1, 1)
        last = (length - 1) // pattern.block
        row, key = positions[:, :, None] // pattern.block, positions[:, None, :] // pattern.block
        full = (row == 0) | (row == last) | (length <= pattern.full_below)
        visible = full | (key == 0) | (key == last) | ((row - key).abs() <= 1)
        # The first block also stands in for the random ones of training.
        repeated = torch.where(full | (key != 0), 0.0, math.log1p(pattern.random))
        return shared + torch.where(visible, repeated, MASKED)[:, None]
    return shared
