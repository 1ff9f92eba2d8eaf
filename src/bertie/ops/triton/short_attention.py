"""Softmax attention of short texts, where nothing is to be learnt: on GPUs in half precision, full or by a window.

The framework's kernel cuts texts into tiles of 128 rows. Ours (`ragged_kernels.py`, Triton) takes as many as the
longest text of the batch has, 64 at most. Where positions are rotary it can turn queries and keys as it reads them,
which spares a pass over memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bertie.config import Pattern, Sliding
from bertie.ops.triton.disentangled_attention import _roomy, _rows_apart, _tiles
from bertie.ops.triton.fused import _launching, _power_of_2

NARROWEST, WIDEST = 16, 128  # of a head
LONGEST = 2048  # tokens of a text, where all are seen; of longer ones the framework's kernel is as fast
# Tuned on an H200 (python -m benchmarks.ragged): for a longest text of up to so many tokens, queries and keys of a
# tile, warps, turns of the loop in flight, and registers of a thread (None: as many as it likes).
SIZES: dict[int, tuple[int, int, int, int, int | None]] = {
    16: (16, 16, 1, 1, None),
    32: (32, 32, 1, 1, 168),
    64: (64, 64, 4, 2, 96),
    128: (64, 32, 4, 3, None),
    LONGEST: (64, 64, 4, 3, None),
}
# The same where it turns queries and keys, which takes registers, and room for cos and sin in each turn of the loop
# (python -m benchmarks.ragged --rotary). What is longer than all of these is turned before.
TURNED_SIZES: dict[int, tuple[int, int, int, int, int | None]] = {
    16: (16, 16, 1, 1, None),
    32: (32, 32, 1, 1, None),
    64: (64, 64, 4, 1, None),
    128: (64, 64, 4, 1, None),
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
    from bertie.ops.triton import short_attention_kernels as programs

    q, k, v = (_rows_apart(x) for x in (q, k, v))
    tokens, heads, width = q.shape
    sizes = SIZES if rotation is None else TURNED_SIZES
    rows, columns, warps, stages, registers = sizes[next(n for n in sizes if n >= visible(lengths, pattern))]
    if width > 64 or not _roomy(q.device):
        stages, registers = 1, None
    tiles = _tiles(lengths, rows, q.device)
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    cos, sin = (None, None) if rotation is None else (one.contiguous() for one in rotation)
    with _launching(q):
        programs.forward[(len(tiles) * heads,)](
            *(q, k, v, out, cos, sin, tiles, q.stride(0), k.stride(0), v.stride(0), scale * math.log2(math.e)),
            pattern.window if isinstance(pattern, Sliding) else 0,
            WINDOW=isinstance(pattern, Sliding),
            TURN=rotation is not None,
            HEADS=heads,
            SHARE=heads // k.shape[1],
            WIDTH=width,
            D=_power_of_2(width),
            M=rows,
            N=columns,
            num_warps=warps,
            num_stages=stages,
            maxnreg=registers,
        )
    return out


def visible(lengths: tuple[int, ...], pattern: Pattern) -> int:
    """How many keys a query sees at most, as far as it matters for the sizes of tiles."""
    return min(max(lengths), 128 if isinstance(pattern, Sliding) else LONGEST)
