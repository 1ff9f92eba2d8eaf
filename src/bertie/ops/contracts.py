"""The contract of attention: its inputs, and what the attention patterns mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bertie.config import BlockSparse, Causal, Full, Pattern, Sliding


@dataclass(frozen=True, slots=True)
class Relative:
    """Terms of the attention score that depend on the distance between query and key."""

    rows: Tensor  # (2 · max_len − 1,) the table row of each distance i − j, from −(max_len − 1) up
    keys: Tensor | None = None  # (R, H, d) multiplied by the queries: content-to-position
    queries: Tensor | None = None  # (R, H, d) multiplied by the keys: position-to-content
    scores: Tensor | None = None  # (R, H) added to the scores


@dataclass(slots=True)
class AttentionInputs:
    """The arguments of attention over a flat batch of T tokens in B texts; G key heads serve H query heads."""

    q: Tensor  # (T, H, d)
    k: Tensor  # (T, G, d)
    v: Tensor  # (T, G, d)
    # Tokens per text. If they sum to more than T, they are upper bounds (a batch with spare room), and only
    # `cu_seqlens` is exact.
    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (B + 1,) where the texts start and end
    scale: float
    pattern: Pattern
    relative: Relative | None = None
    rotation: tuple[Tensor, Tensor] | None = None  # cos and sin (T, d) of rotary embeddings
    # (T,) bool: keys that every query of their text sees. Their own queries are computed in nn/attention.py.
    global_tokens: Tensor | None = None
    dropout: float = 0.0
    cache: dict[Any, Tensor] | None = None  # derived from the batch, shared by the layers of one forward pass


def additive_mask(
    pattern: Pattern, rows: range, keys: range, length: int, global_keys: Tensor | None, like: Tensor
) -> Tensor | None:
    """The bias to add to the scores of `rows` × `keys` of a text: −inf for masked keys, log n for keys counted n times.

    (rows, keys), or (B, 1, rows, keys) with `global_keys` (B, keys). None: there is nothing to add.
    """
    i = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=like.device)[None, :]
    if isinstance(pattern, Sliding):
        visible = (i - j).abs() <= pattern.window
        if global_keys is not None:
            visible = visible | global_keys[:, None, None, :]
        elif max(rows.stop - keys.start, keys.stop - rows.start) - 1 <= pattern.window:
            return None
        return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, -torch.inf)
    if isinstance(pattern, Causal):
        visible = i >= j
        if pattern.window is not None:
            visible &= i - j <= pattern.window
        return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, -torch.inf)
    if isinstance(pattern, BlockSparse) and length > pattern.full_below:
        last = (length - 1) // pattern.block
        row_block, key_block = i // pattern.block, j // pattern.block
        full_rows = (row_block == 0) | (row_block == last)
        visible = full_rows | (key_block == 0) | (key_block == last) | ((row_block - key_block).abs() <= 1)
        # See BlockSparse: the first block also stands in for the random ones.
        repeated = ~full_rows & (key_block == 0)
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill(repeated, math.log1p(pattern.random)).masked_fill(~visible, -torch.inf)
    assert isinstance(pattern, Full | BlockSparse)
    return None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether gradients are recorded for any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix multiplication of x is computed: autocast's where it is on."""
    return torch.get_autocast_dtype(x.device.type) if has_autocast(x) else x.dtype


def has_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
