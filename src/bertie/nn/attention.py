"""Self-attention: query, key and value projections, attention, output projection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import Disentangled, EncoderConfig, Rotary, RotaryKey
from bertie.errors import ConfigError
from bertie.nn.norms import build_norm
from bertie.ops.attention import attend
from bertie.ops.contracts import AttentionInputs, Relative
from bertie.ops.dispatch import DispatchTable
from bertie.ops.torch.grouped_attention import attend_to_beginnings
from bertie.text.batch import Batch


@dataclass(frozen=True, slots=True)
class PassContext:
    """Values that all layers of one forward pass share: the resolved backends and tensors derived from positions."""

    ops: DispatchTable
    rotations: dict[RotaryKey, tuple[Tensor, Tensor]]  # by base frequency and scaling: cos, sin (T, d)
    relative_rows: Tensor | None = None  # rows of the relative table, by distance
    relative_table: Tensor | None = None
    cache: dict[Any, Tensor] = field(default_factory=dict)  # see `attend`


class QKV(nn.Module):
    """Query, key and value projections in one matrix multiplication. The bias covers those that have one."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.sizes = (cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width, cfg.kv_heads * cfg.head_width)
        self.with_bias = cfg.qkv_bias
        self.head_width = cfg.head_width
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), cfg.width))
        width_of = dict(zip("qkv", self.sizes, strict=True))
        biases = sum(width_of[part] for part in self.with_bias)
        self.bias = nn.Parameter(torch.empty(biases)) if biases else None

    def full_bias(self) -> Tensor | None:
        """The bias of all three projections, zero where there is none."""
        if self.bias is None or self.with_bias == "qkv":
            return self.bias
        query, value = self.bias[: self.sizes[0]], self.bias[self.sizes[0] :]
        return torch.cat((query, query.new_zeros(self.sizes[1]), value))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        return split_heads(F.linear(x, self.weight, self.full_bias()), self.sizes, self.head_width)


def split_heads(y: Tensor, sizes: tuple[int, int, int], head_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, (H + 2G) · d) -> (T, H, d), (T, G, d), (T, G, d)."""
    y = y.view(len(y), -1, head_width)  # (T, H + 2G, d)
    # Not slices: the backward pass of each would fill a gradient of the whole tensor.
    q, k, v = torch.split(y, [size // head_width for size in sizes], dim=1)
    return q, k, v


class SelfAttention(nn.Module):
    """Self-attention with the position scheme and the patterns of the config."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        inner = cfg.heads * cfg.head_width
        self.qkv: nn.Module = QKV(cfg)
        self.out: nn.Module = nn.Linear(inner, cfg.width, bias=cfg.out_bias)
        self.global_qkv = QKV(cfg) if cfg.global_tokens else None
        self.rotary = next((p for p in cfg.positions if isinstance(p, Rotary)), None)
        self.disentangled = next((p for p in cfg.positions if isinstance(p, Disentangled)), None)
        own = self.disentangled if self.disentangled is not None and not self.disentangled.shared else None
        self.position_key = nn.Linear(cfg.width, inner, bias=own.key_bias) if own and "c2p" in own.terms else None
        self.position_query = nn.Linear(cfg.width, inner) if own and "p2c" in own.terms else None
        terms = len(self.disentangled.terms) if self.disentangled else 0
        self.scale = cfg.attention_scale or (cfg.head_width * (1 + terms)) ** -0.5  # each term adds its variance
        self.q_norm = build_norm(cfg.norm, cfg.head_width) if cfg.qk_norm else None
        self.k_norm = build_norm(cfg.norm, cfg.head_width) if cfg.qk_norm else None

    def forward(
        self, x: Tensor, batch: Batch, context: PassContext, layer: int, queries: Tensor | None = None
    ) -> Tensor:
        """(T, D) -> (T, D). `queries` (T, D) attend to `x`; when None, `x` attends to itself."""
        cfg = self.cfg
        q, k, v = self.project(x)
        if queries is not None:
            q, _, _ = self.project(queries)
        dropout = cfg.attention_dropout if self.training else 0.0
        pattern = cfg.patterns[layer]
        inputs = AttentionInputs(
            q,
            k,
            v,
            batch.lengths,
            batch.cu_seqlens,
            self.scale,
            pattern,
            self.relative_terms(context),
            context.rotations[self.rotary.key(layer)] if self.rotary else None,
            batch.global_tokens,
            dropout,
            context.cache,
        )
        y = self._attend(inputs, batch, context)
        if self.global_qkv is not None and batch.global_tokens is not None:
            y = self._attend_globally(x, y, batch, dropout)
        out: Tensor = self.out(y.flatten(1))  # (T, H, d) -> (T, D)
        return out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values before rotary embeddings: (T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def _attend(self, inputs: AttentionInputs, batch: Batch, context: PassContext) -> Tensor:
        """(T, H, d), by the resolved backend unless some tokens are not attended to."""
        backends = context.ops.attention[inputs.pattern]
        if batch.key_lengths is None:
            return attend(inputs, backends)
        if self.disentangled is not None or self.global_qkv is not None:
            raise ConfigError("tokens that are not attended to are not supported by this encoder's attention")
        if inputs.rotation is not None:
            inputs.q, inputs.k = backends.rotate(inputs.q, inputs.k, *inputs.rotation)
        return attend_to_beginnings(
            *(inputs.q, inputs.k, inputs.v, inputs.lengths, batch.key_lengths),
            scale=inputs.scale,
            pattern=inputs.pattern,
            relative=inputs.relative,
            dropout=inputs.dropout,
        )

    def relative_terms(self, context: PassContext) -> Relative | None:
        """This layer's score terms that depend on distance."""
        if context.relative_rows is None or context.relative_table is None:
            return None
        scheme = self.disentangled
        if scheme is None:
            return Relative(context.relative_rows, scores=context.relative_table)
        table = F.dropout(context.relative_table, self.cfg.dropout, self.training)
        if scheme.shared:
            queries, keys, _ = self.qkv(table)  # (R, D) -> (R, H, d)
        else:
            keys, queries = (
                None if layer is None else layer(table).view(len(table), self.cfg.heads, -1)
                for layer in (self.position_key, self.position_query)
            )
        return Relative(
            context.relative_rows,
            keys=keys if "c2p" in scheme.terms else None,
            queries=queries if "p2c" in scheme.terms else None,
        )

    def _attend_globally(self, x: Tensor, y: Tensor, batch: Batch, dropout: float) -> Tensor:
        """Replace the outputs of global tokens, which see the whole text through projections of their own."""
        assert self.global_qkv is not None
        assert batch.global_tokens is not None
        q, k, v = self.global_qkv(x)
        indices = batch.global_tokens.nonzero()[:, 0]
        outputs, start = [], 0
        for n in batch.lengths:
            own = indices[(indices >= start) & (indices < start + n)]
            heads = (q[own], k[start : start + n], v[start : start + n])
            qs, ks, vs = (part.transpose(0, 1) for part in heads)  # (n, H, d) -> (H, n, d)
            outputs.append(
                F.scaled_dot_product_attention(qs, ks, vs, dropout_p=dropout, scale=self.scale).transpose(0, 1)
            )
            start += n
        return y.index_copy(0, indices, torch.cat(outputs))
