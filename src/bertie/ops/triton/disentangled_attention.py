"""Attention with relative position terms on GPUs in half precision, forward and backward: the formula of `ops.attend`.

Disentangled attention (DeBERTa) and relative position bias (MPNet) are computed tile by tile from the table rows that
the distances of a tile select (`disentangled_attention_kernels.py`). Neither the scores of all pairs of tokens nor the
terms of all tokens and distances are stored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertie.ops.contracts import Relative
from bertie.ops.triton.launch import (
    HALF,
    contiguous_heads,
    device_guard,
    dropout_seed,
    dropout_threshold,
    next_power_of_2,
)
from bertie.ops.triton.tiles import can_pipeline, tiles_from_cu_seqlens, tiles_from_lengths

MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 16, 128
MAX_PLAIN_LENGTH = 512  # of texts without relative position terms; for longer ones FlashAttention is as fast


class KernelOptions(NamedTuple):
    """Compiler options of a kernel."""

    warps: int
    stages: int  # of the software pipeline
    max_registers: int | None = None  # per thread; None: no limit


# Tuned on an H200 (python -m benchmarks.disentangled --tune). The largest tile of the forward and of the backward pass;
# and for each tile the options of the three kernels: forward, backward of the queries, backward of keys and values.
MAX_TILES = (64, 32)
OPTIONS: dict[int, tuple[KernelOptions, ...]] = {
    16: (KernelOptions(1, 1, 128), KernelOptions(1, 1, 168), KernelOptions(1, 1)),
    32: (KernelOptions(2, 2), KernelOptions(2, 2), KernelOptions(2, 2)),
    64: (KernelOptions(4, 2), KernelOptions(4, 1), KernelOptions(4, 1)),
}
# The same without relative position terms (python -m benchmarks.disentangled --tune --plain).
PLAIN_MAX_TILES = (64, 64)
PLAIN_OPTIONS = OPTIONS | {64: (KernelOptions(4, 3), KernelOptions(4, 3), KernelOptions(4, 2))}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    cu_seqlens: Tensor,
    *,
    scale: float,
    relative: Relative | None,
    dropout: float = 0.0,
    cache: dict[Any, Tensor] | None = None,
) -> Tensor:
    """As `ops.attend`, for what `ops/dispatch.py` allows.

    Where `lengths` are only upper bounds (a batch of a CUDA graph), `cu_seqlens` has the true lengths.
    """
    max_tiles = PLAIN_MAX_TILES if relative is None else MAX_TILES
    relative = relative or Relative(torch.zeros(1, dtype=torch.long, device=q.device))
    tile, backward_tile = (min(limit, max(16, next_power_of_2(max(lengths)))) for limit in max_tiles)

    def tiles_of(size: int) -> Tensor:
        if sum(lengths) == len(q):
            return tiles_from_lengths(lengths, size, q.device)
        shared = {} if cache is None else cache
        if ("tiles", size) not in shared:
            shared["tiles", size] = tiles_from_cu_seqlens(cu_seqlens, len(q), size, max(lengths))
        return shared["tiles", size]

    tiles = [tiles_of(tile), tiles_of(backward_tile if torch.is_grad_enabled() else tile)]
    out: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        *(q, k, v, relative.keys, relative.queries, relative.scores, relative.rows),
        *(*tiles, tile, backward_tile, scale, dropout),
    )
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keys: Tensor | None,
        queries: Tensor | None,
        bias: Tensor | None,
        rows: Tensor,
        tiles: Tensor,
        backward_tiles: Tensor,
        tile: int,
        backward_tile: int,
        scale: float,
        dropout: float,
    ) -> Tensor:
        from bertie.ops.triton import disentangled_attention_kernels as kernels

        q, k, v = (contiguous_heads(x) for x in (q, k, v))
        tokens, heads, head_width = q.shape
        out = torch.empty(tokens, heads, head_width, dtype=q.dtype, device=q.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        # Tables by distance, so that a tile needs consecutive rows. c2p and bias are ordered by key − query.
        flipped = rows.flip(0)
        c2p = None if keys is None else keys.to(q.dtype).transpose(0, 1).index_select(1, flipped)  # (H, 2n − 1, d)
        p2c = None if queries is None else queries.to(q.dtype).transpose(0, 1).index_select(1, rows)
        bias_by_distance = None if bias is None else bias.T.index_select(1, flipped)  # (H, 2n − 1)
        skewed = None if bias_by_distance is None else _skew_bias(bias_by_distance, tile)
        seed = dropout_seed(dropout, q.device)
        ctx.dropout, ctx.tile, ctx.scale = dropout, backward_tile, scale
        ctx.options = {
            "C2P": keys is not None,
            "P2C": queries is not None,
            "BIAS": bias is not None,
            "DROPOUT": seed is not None,
            "FP16_TERMS": q.dtype in HALF,
            "HEADS": heads,
            "HEAD_DIM": head_width,
            "BLOCK_D": next_power_of_2(head_width),
        }
        with device_guard(q):
            kernels.attention_forward[(len(tiles) * heads,)](
                *(q, k, v, out, lse, *(q if x is None else x for x in (c2p, p2c, skewed)), tiles, seed),
                *(q.stride(0), k.stride(0), v.stride(0), tokens, len(rows), scale * math.log2(math.e)),
                *dropout_threshold(dropout),
                **ctx.options,
                **_launch_options(tile, 0, q, ctx.options),
            )
        ctx.save_for_backward(q, k, v, out, lse, c2p, p2c, bias_by_distance, rows, backward_tiles, seed)
        ctx.table_shapes = [None if x is None else (len(x), x.dtype) for x in (keys, queries, bias)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        from bertie.ops.triton import disentangled_attention_kernels as kernels

        q, k, v, out, lse, c2p, p2c, bias, rows, tiles, seed = ctx.saved_tensors
        dout = dout.contiguous()
        tokens, heads, _ = q.shape
        dq, dk, dv = (torch.empty_like(out) for _ in range(3))
        delta = torch.empty_like(lse)
        gradients = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (c2p, p2c, bias)]
        # The kernel of the keys sees the bias transposed: ordered by query − key.
        skewed, transposed = (None, None) if bias is None else (_skew_bias(x, ctx.tile) for x in (bias, bias.flip(1)))
        # Triton takes no null pointers: q and lse stand in for what is absent.
        tables = [q if x is None else x for x in (c2p, p2c)]
        skewed, transposed = (q if x is None else x for x in (skewed, transposed))
        dc2p, dp2c, dbias = (lse if x is None else x for x in gradients)
        sizes = (q.stride(0), k.stride(0), v.stride(0), tokens, len(rows))
        common = (tiles, seed, *sizes, ctx.scale, ctx.scale * math.log2(math.e), *dropout_threshold(ctx.dropout))
        grid = (len(tiles) * heads,)
        with device_guard(q):
            kernels.attention_backward_q[grid](
                *(q, k, v, out, dout, lse, delta, dq, *tables, skewed, dc2p, dbias, *common),
                **ctx.options,
                **_launch_options(ctx.tile, 1, q, ctx.options),
            )
            kernels.attention_backward_kv[grid](
                *(q, k, v, dout, lse, delta, dk, dv, *tables, transposed, dp2c, *common),
                **ctx.options,
                **_launch_options(ctx.tile, 2, q, ctx.options),
            )
        flipped = rows.flip(0)
        dtables = [
            None if x is None else _sum_by_row(x, order, *shape)
            for x, order, shape in zip(gradients, (flipped, rows, flipped), ctx.table_shapes, strict=True)
        ]
        return dq, dk, dv, *dtables, *[None] * 7


def _launch_options(tile: int, kernel: int, q: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    has_terms = options["C2P"] or options["P2C"] or options["BIAS"]
    warps, stages, max_registers = (OPTIONS if has_terms else PLAIN_OPTIONS)[tile][kernel]
    if q.shape[2] > 64 or not can_pipeline(q.device):
        stages = 1
    return {"B": tile, "num_warps": warps, "num_stages": stages, "maxnreg": max_registers}


def _sum_by_row(by_distance: Tensor, rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(H, 2n − 1, …) -> (R, H, …): sum the gradients of the distances that share a table row."""
    out = by_distance.new_zeros(len(by_distance), count, *by_distance.shape[2:])
    return out.index_add_(1, rows, by_distance).transpose(0, 1).to(dtype)


def _skew_bias(bias: Tensor, tile: int) -> Tensor:
    """(H, 2n − 1) by distance -> (H, tile, columns), each row shifted by one against the row above.

    The bias of a (tile, tile) block of scores, which is constant along diagonals, is then a rectangle of it.
    """
    max_distance = bias.shape[1] // 2
    padded = max_distance // tile * tile
    column, row = (torch.arange(n, device=bias.device) for n in (2 * padded + tile, tile))
    index = (column - padded - row[:, None] + max_distance).clamp(0, 2 * max_distance)  # beyond: never read
    return bias[:, index]
