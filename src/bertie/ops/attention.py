"""`attend()`: softmax attention inside each text of a flat batch.

The score of query i and key j of one text is

    scale · (qᵢ·kⱼ + qᵢ·keys[r] + kⱼ·queries[r]) + scores[r],      r = rows[i − j]

where the three terms in r exist only in models with relative positions, and only over the keys that the pattern lets
query i see. With rotary positions, q and k are turned by them first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertie.config import Full, Pattern


@dataclass(frozen=True, slots=True)
class Relative:
    """Terms of the score that depend on the distance of query and key."""

    rows: Tensor  # (2 · max_len − 1,) the row for each distance i − j, from −(max_len − 1) up
    keys: Tensor | None = None  # (R, H, d) met by the content's queries
    queries: Tensor | None = None  # (R, H, d) met by the content's keys
    scores: Tensor | None = None  # (R, H)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    cu_seqlens: Tensor,
    *,
    scale: float,
    pattern: Pattern,
    relative: Relative | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    global_tokens: Tensor | None = None,
    dropout: float = 0.0,
    kept: dict[Any, Tensor] | None = None,
) -> Tensor:
    """(T, H, d), (T, G, d), (T, G, d) -> (T, H, d); G key heads serve H query heads, G divides H.

    `rotation`, cos and sin (T, d), turns queries and keys; without gradients it may be where they lie (rotary.py).
    `global_tokens` (T,) bool are keys that every query of their text sees whatever the pattern. Their own
    queries are answered elsewhere (nn/attention.py). `kept` is what a path found out from the batch, for the layers of
    a pass to share; new in each pass.
    """
    from bertie.ops.torch import grouped_attention as grouped
    from bertie.ops.torch import varlen_attention as gpu
    from bertie.ops.triton import disentangled_attention as disentangled
    from bertie.ops.triton import rotary
    from bertie.ops.triton import short_attention as ragged

    fits = relative is None and ragged.can(q, k, v, lengths, pattern, global_tokens, dropout)
    if rotation is not None and not (fits and ragged.can_turn(q, lengths, pattern)):
        q, k = rotary.rotated(q, k, *rotation)
        rotation = None
    if fits:
        return ragged.attend(q, k, v, lengths, scale=scale, pattern=pattern, rotation=rotation)
    if disentangled.can(q, k, pattern, global_tokens) and (
        relative is not None or max(lengths) <= disentangled.LONGEST
    ):
        return disentangled.attend(
            q, k, v, lengths, cu_seqlens, scale=scale, relative=relative, dropout=dropout, kept=kept
        )
    if q.is_cuda and gpu.can(q, lengths, pattern, relative, global_tokens, dropout):
        return gpu.attend(q, k, v, lengths, cu_seqlens, scale=scale, pattern=pattern, dropout=dropout)
    if relative is not None and q.is_cuda and gpu.can_biased(q, lengths, pattern, relative, global_tokens, dropout):
        return gpu.attend_biased(q, k, v, lengths, scale=scale, relative=relative)
    return grouped.attend(
        q, k, v, lengths, scale=scale, pattern=pattern, relative=relative, global_tokens=global_tokens, dropout=dropout
    )


def additive_mask(
    pattern: Pattern, rows: range, keys: range, length: int, global_keys: Tensor | None, like: Tensor
) -> Tensor | None:
    """What to add to the scores of `rows` × `keys` of a text: −inf for unseen keys, log n for a key counted n times.

    (rows, keys), or (B, 1, rows, keys) with `global_keys` (B, keys). None: nothing to add.
    """
    from bertie.config import BlockSparse, Sliding

    i = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    if isinstance(pattern, Sliding):
        seen = (i - j).abs() <= pattern.window
        if global_keys is not None:
            seen = seen | global_keys[:, None, None, :]
        elif max(rows.stop - keys.start, keys.stop - rows.start) - 1 <= pattern.window:
            return None
        return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf)
    if isinstance(pattern, BlockSparse) and length > pattern.full_below:
        last = (length - 1) // pattern.block
        bi, bj = i // pattern.block, j // pattern.block
        sees_all = (bi == 0) | (bi == last)
        seen = sees_all | (bj == 0) | (bj == last) | ((bi - bj).abs() <= 1)
        # See BlockSparse: the first block stands in for the random ones too.
        repeated = ~sees_all & (bj == 0)
        mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill(repeated, math.log1p(pattern.random)).masked_fill(~seen, -torch.inf)
    assert isinstance(pattern, Full | BlockSparse)
    return None
