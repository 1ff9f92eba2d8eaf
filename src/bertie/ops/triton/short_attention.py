"""Variable-length softmax attention for inference on GPUs in half precision: full, causal or with a sliding window.

FlashAttention's tiles have 128 rows, most of them empty for short texts. This kernel (`short_attention_kernels.py`)
uses tiles as long as the longest text of the batch, at most 64. It can apply rotary embeddings as it loads queries and
keys, which saves a pass over memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from bertie.config import Causal, Pattern, visible_range
from bertie.ops.triton.launch import contiguous_heads, device_guard, next_power_of_2
from bertie.ops.triton.tiles import can_pipeline, tiles_from_lengths

MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 16, 128
MAX_LENGTH = 2048  # of texts with full attention; for longer ones FlashAttention is as fast


class TileConfig(NamedTuple):
    """Queries and keys of a tile, and compiler options."""

    block_m: int
    block_n: int
    warps: int
    stages: int  # of the software pipeline
    max_registers: int | None = None  # per thread; None: no limit


# By the largest number of keys per query; tuned on an H200 (python -m benchmarks.short_attention).
TILES = {
    16: TileConfig(16, 16, 1, 1),
    32: TileConfig(32, 32, 1, 1, 168),
    64: TileConfig(64, 64, 4, 2, 96),
    128: TileConfig(64, 32, 4, 3),
    MAX_LENGTH: TileConfig(64, 64, 4, 3),
}
# The same with rotary embeddings, which take registers, and shared memory for cos and sin in each pipeline stage
# (python -m benchmarks.short_attention --rotary). Beyond these lengths they are applied by a kernel of their own.
ROTARY_TILES = {
    16: TileConfig(16, 16, 1, 1),
    32: TileConfig(32, 32, 1, 1),
    64: TileConfig(64, 64, 4, 1),
    128: TileConfig(64, 64, 4, 1),
}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float,
    pattern: Pattern,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `ops.attend`, for what `ops/dispatch.py` allows."""
    from bertie.ops.triton import short_attention_kernels as kernels

    q, k, v = (contiguous_heads(x) for x in (q, k, v))
    tokens, heads, head_width = q.shape
    configs = TILES if rotation is None else ROTARY_TILES
    config = configs[next(n for n in configs if n >= visible_keys(lengths, pattern))]
    if head_width > 64 or not can_pipeline(q.device):
        config = config._replace(stages=1, max_registers=None)
    tiles = tiles_from_lengths(lengths, config.block_m, q.device)
    out = torch.empty(tokens, heads, head_width, dtype=q.dtype, device=q.device)
    cos, sin = (None, None) if rotation is None else (table.contiguous() for table in rotation)
    window, _ = visible_range(pattern)
    with device_guard(q):
        kernels.attention_forward[(len(tiles) * heads,)](
            *(q, k, v, out, cos, sin, tiles, q.stride(0), k.stride(0), v.stride(0), scale * math.log2(math.e)),
            max(0, window),
            HAS_WINDOW=window >= 0,
            CAUSAL=isinstance(pattern, Causal),
            ROTARY=rotation is not None,
            HEADS=heads,
            GROUP_SIZE=heads // k.shape[1],
            HEAD_DIM=head_width,
            BLOCK_D=next_power_of_2(head_width),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.max_registers,
        )
    return out


def visible_keys(lengths: tuple[int, ...], pattern: Pattern) -> int:
    """The largest number of keys per query, capped where more makes no difference to the tile sizes."""
    return min(max(lengths), 128 if has_window(pattern) else MAX_LENGTH)


def has_window(pattern: Pattern) -> bool:
    """Whether the number of keys per query is bounded, so that texts may have any length."""
    return visible_range(pattern)[0] >= 0
