"""Self-attention: project, place, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import Disentangled, EncoderConfig, Rotary
from bertie.ops import Relative
from bertie.ops.attention import attend
from bertie.text.batch import Batch


@dataclass(frozen=True, slots=True)
class Places:
    """What attention needs to know of positions, computed once for all layers of a pass."""

    rotations: dict[float, tuple[Tensor, Tensor]]  # by base frequency: cos, sin (T, d)
    rows: Tensor | None = None  # of the relative table, by distance
    table: Tensor | None = None  # the relative table
    kept: dict[Any, Tensor] = field(default_factory=dict)  # see `attend`


class QKV(nn.Module):
    """Query, key and value in one product. The bias covers those of the three that have one."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.sizes = (cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width, cfg.kv_heads * cfg.head_width)
        self.with_bias = cfg.qkv_bias
        self.head_width = cfg.head_width
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), cfg.width))
        sized = dict(zip("qkv", self.sizes, strict=True))
        self.bias = nn.Parameter(torch.empty(sum(sized[part] for part in self.with_bias))) if self.with_bias else None

    def full_bias(self) -> Tensor | None:
        """The bias over all three, zero where there is none."""
        if self.bias is None or self.with_bias == "qkv":
            return self.bias
        query, value = self.bias[: self.sizes[0]], self.bias[self.sizes[0] :]
        return torch.cat((query, query.new_zeros(self.sizes[1]), value))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, D) -> (T, H, d), (T, G, d), (T, G, d)."""
        return by_heads(F.linear(x, self.weight, self.full_bias()), self.sizes, self.head_width)


def by_heads(y: Tensor, sizes: tuple[int, int, int], head_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(T, (H + 2G) · d) -> (T, H, d), (T, G, d), (T, G, d)."""
    y = y.view(len(y), -1, head_width)  # (T, H + 2G, d)
    # Not slices: each of those would fill a whole gradient on the way back.
    q, k, v = torch.split(y, [size // head_width for size in sizes], dim=1)
    return q, k, v


class SelfAttention(nn.Module):
    """Attention of a text's tokens to each other, with whatever position scheme and pattern the config names."""

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
        self.scale = (cfg.head_width * (1 + terms)) ** -0.5  # each term adds its variance

    def forward(self, x: Tensor, batch: Batch, places: Places, layer: int, queries: Tensor | None = None) -> Tensor:
        """(T, D) -> (T, D). With `queries` (T, D), these look at `x`; else `x` looks at itself."""
        cfg = self.cfg
        q, k, v = self.qkv(x)
        if queries is not None:
            q, _, _ = self.qkv(queries)
        dropout = cfg.attention_dropout if self.training else 0.0
        y = attend(
            q,
            k,
            v,
            batch.lengths,
            batch.cu_seqlens,
            scale=self.scale,
            pattern=cfg.patterns[layer],
            relative=self._relative(places),
            rotation=places.rotations[self.rotary.bases[layer]] if self.rotary else None,
            global_tokens=batch.global_tokens,
            dropout=dropout,
            kept=places.kept,
        )
        if self.global_qkv is not None and batch.global_tokens is not None:
            y = self._answer_globals(x, y, batch, dropout)
        out: Tensor = self.out(y.flatten(1))  # (T, H, d) -> (T, D)
        return out

    def _relative(self, places: Places) -> Relative | None:
        if places.rows is None or places.table is None:
            return None
        scheme = self.disentangled
        if scheme is None:
            return Relative(places.rows, scores=places.table)
        table = F.dropout(places.table, self.cfg.dropout, self.training)
        if scheme.shared:
            queries, keys, _ = self.qkv(table)  # (R, D) -> (R, H, d)
        else:
            keys, queries = (
                None if layer is None else layer(table).view(len(table), self.cfg.heads, -1)
                for layer in (self.position_key, self.position_query)
            )
        return Relative(
            places.rows,
            keys=keys if "c2p" in scheme.terms else None,
            queries=queries if "p2c" in scheme.terms else None,
        )

    def _answer_globals(self, x: Tensor, y: Tensor, batch: Batch, dropout: float) -> Tensor:
        """Global tokens see the whole text, through projections of their own."""
        assert self.global_qkv is not None
        assert batch.global_tokens is not None
        q, k, v = self.global_qkv(x)
        chosen = batch.global_tokens.nonzero()[:, 0]
        answers, start = [], 0
        for n in batch.lengths:
            mine = chosen[(chosen >= start) & (chosen < start + n)]
            heads = (q[mine], k[start : start + n], v[start : start + n])
            qs, ks, vs = (part.transpose(0, 1) for part in heads)  # (n, H, d) -> (H, n, d)
            answers.append(
                F.scaled_dot_product_attention(qs, ks, vs, dropout_p=dropout, scale=self.scale).transpose(0, 1)
            )
            start += n
        return y.index_copy(0, chosen, torch.cat(answers))
