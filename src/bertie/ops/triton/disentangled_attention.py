"""Attention with terms that depend on distance, on GPUs in half precision: the formula in `attend.py`, there and back.

Scores are computed a tile at a time from the rows that the tile's distances look up, and never lie in memory: neither
for each pair of tokens, nor for each token and distance. Programs of our own (`disentangled_kernels.py`, Triton).
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertie.ops.contracts import Relative
from bertie.ops.triton.fused import HALF, _dropped, _launching, _power_of_2
from bertie.text.batch import send

NARROWEST, WIDEST = 16, 128  # of a head
LONGEST = 512  # tokens of a text, where there are no such terms; of longer ones the framework's kernel is as fast
# Tuned on an H200 (python -m benchmarks.disentangled --tune). Rows of a program where texts have as many, there and
# back; and for each number of rows the warps, the turns of a loop in flight and the registers of a thread (None: as
# many as it likes) of the three programs: there, back by queries, back by keys.
ROWS = (64, 32)
SIZES: dict[int, tuple[tuple[int, int, int | None], ...]] = {
    16: ((1, 1, 128), (1, 1, 168), (1, 1, None)),
    32: ((2, 2, None), (2, 2, None), (2, 2, None)),
    64: ((4, 2, None), (4, 1, None), (4, 1, None)),
}
# The same where there are no such terms (python -m benchmarks.disentangled --tune --plain).
PLAIN_ROWS = (64, 64)
PLAIN_SIZES = SIZES | {64: ((4, 3, None), (4, 3, None), (4, 2, None))}


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

    Of lengths that are no more than bounds (a batch with spare room), `cu_seqlens` has the truth.
    """
    rows = PLAIN_ROWS if relative is None else ROWS
    relative = relative or Relative(torch.zeros(1, dtype=torch.long, device=q.device))
    there, back = (min(most, max(16, _power_of_2(max(lengths)))) for most in rows)

    def cut(rows: int) -> Tensor:
        if sum(lengths) == len(q):
            return _tiles(lengths, rows, q.device)
        shared = {} if cache is None else cache
        if ("tiles", rows) not in shared:
            shared["tiles", rows] = _tiles_of(cu_seqlens, len(q), rows, max(lengths))
        return shared["tiles", rows]

    tiles = [cut(there), cut(back if torch.is_grad_enabled() else there)]
    out: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        *(q, k, v, relative.keys, relative.queries, relative.scores, relative.rows),
        *(*tiles, there, back, scale, dropout),
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
        scores: Tensor | None,
        rows: Tensor,
        tiles: Tensor,
        tiles_back: Tensor,
        there: int,
        back: int,
        scale: float,
        dropout: float,
    ) -> Tensor:
        from bertie.ops.triton import disentangled_attention_kernels as programs

        q, k, v = (_rows_apart(x) for x in (q, k, v))
        tokens, heads, width = q.shape
        out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
        level = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
        # By distance, so that a tile needs a run of rows. Keys and scores are in the order of key − query.
        turned = rows.flip(0)
        keys_ = None if keys is None else keys.to(q.dtype).transpose(0, 1).index_select(1, turned)  # (H, 2n − 1, d)
        queries_ = None if queries is None else queries.to(q.dtype).transpose(0, 1).index_select(1, rows)
        scores_ = None if scores is None else scores.T.index_select(1, turned)  # (H, 2n − 1)
        slanted = None if scores_ is None else _slanted(scores_, there)
        # Drawn on the device, so that a recorded graph draws anew each time it is played.
        seed = torch.randint(1 << 62, (1,), device=q.device) if dropout else None
        ctx.dropped, ctx.kept_scale = _dropped(dropout)
        ctx.back, ctx.scale = back, scale
        plain = keys is None and queries is None and scores is None
        ctx.options = {
            "KEYS": keys is not None,
            "QUERIES": queries is not None,
            "SCORES": scores is not None,
            "DROP": seed is not None,
            "PACK": q.dtype in HALF,
            "HEADS": heads,
            "WIDTH": width,
            "D": _power_of_2(width),
        }
        with _launching(q):
            programs.forward[(len(tiles) * heads,)](
                *(q, k, v, out, level, *(q if x is None else x for x in (keys_, queries_, slanted)), tiles, seed),
                *(q.stride(0), k.stride(0), v.stride(0), tokens, len(rows), scale * math.log2(math.e)),
                *(ctx.dropped, ctx.kept_scale),
                **ctx.options,
                **_sizes(there, 0, q, plain),
            )
        ctx.save_for_backward(q, k, v, out, level, keys_, queries_, scores_, rows, tiles_back, seed)
        ctx.given = [None if x is None else (len(x), x.dtype) for x in (keys, queries, scores)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> Any:
        from bertie.ops.triton import disentangled_attention_kernels as programs

        q, k, v, out, level, keys, queries, scores, rows, tiles, seed = ctx.saved_tensors
        up = up.contiguous()
        tokens, heads, _ = q.shape
        dq, dk, dv = (torch.empty_like(out) for _ in range(3))
        delta = torch.empty_like(level)
        sums = [None if x is None else torch.zeros_like(x, dtype=torch.float32) for x in (keys, queries, scores)]
        slanted, mirrored = (
            (None, None) if scores is None else (_slanted(x, ctx.back) for x in (scores, scores.flip(1)))
        )
        tables = [q if x is None else x for x in (keys, queries, slanted)]
        dkeys, dqueries, dscores = (level if x is None else x for x in sums)
        sizes = (q.stride(0), k.stride(0), v.stride(0), tokens, len(rows))
        common = (tiles, seed, *sizes, ctx.scale, ctx.scale * math.log2(math.e), ctx.dropped, ctx.kept_scale)
        grid = (len(tiles) * heads,)
        plain = keys is None and queries is None and scores is None
        with _launching(q):
            programs.backward_queries[grid](
                *(q, k, v, out, up, level, delta, dq, *tables, dkeys, dscores, *common),
                **ctx.options,
                **_sizes(ctx.back, 1, q, plain),
            )
            programs.backward_keys[grid](
                *(
                    q,
                    k,
                    v,
                    up,
                    level,
                    delta,
                    dk,
                    dv,
                    *tables[:2],
                    q if mirrored is None else mirrored,
                    dqueries,
                    *common,
                ),
                **ctx.options,
                **_sizes(ctx.back, 2, q, plain),
            )
        turned = rows.flip(0)
        down = [
            None if x is None else _by_row(x, order, *given)
            for x, order, given in zip(sums, (turned, rows, turned), ctx.given, strict=True)
        ]
        return dq, dk, dv, *down, *[None] * 7


def _sizes(rows: int, program: int, q: Tensor, plain: bool) -> dict[str, Any]:
    warps, stages, registers = (PLAIN_SIZES if plain else SIZES)[rows][program]
    if q.shape[2] > 64 or not _roomy(q.device):
        stages = 1
    return {"B": rows, "num_warps": warps, "num_stages": stages, "maxnreg": registers}


@cache
def _roomy(device: torch.device) -> bool:
    """Whether a program's shared memory can hold several turns of a loop: that of large chips since Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def _by_row(by_distance: Tensor, rows: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """(H, 2n − 1, …) -> (R, H, …): distances that share a row add up."""
    out = by_distance.new_zeros(len(by_distance), count, *by_distance.shape[2:])
    return out.index_add_(1, rows, by_distance).transpose(0, 1).to(dtype)


def _slanted(scores: Tensor, rows: int) -> Tensor:
    """(H, 2n − 1) by distance -> (H, rows, columns) each row one further to the right than the one above it.

    So the scores of a tile of `rows` × `rows`, whose distances are alike along its slants, are a rectangle of it.
    """
    max_length = scores.shape[1] // 2
    room = max_length // rows * rows
    column, row = (torch.arange(n, device=scores.device) for n in (2 * room + rows, rows))
    at = (column - room - row[:, None] + max_length).clamp(0, 2 * max_length)  # what lies beyond, no text asks for
    return scores[:, at]


def _rows_apart(x: Tensor) -> Tensor:
    """(T, H, d) with the heads of a token side by side; tokens may lie further apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@lru_cache(maxsize=8)  # the layers of a pass ask for the same
def _tiles(lengths: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """(N, 3) for each tile the text's first token, its length and the tile's first place in it; long texts first."""
    sizes = np.array(lengths, dtype=np.int32)
    starts = np.cumsum(sizes, dtype=np.int32) - sizes
    order = np.argsort(-sizes, kind="stable")
    counts = -(-sizes[order] // tile)
    text = np.repeat(order, counts)
    number = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([starts[text], sizes[text], number.astype(np.int32) * tile], axis=1)
    with torch.inference_mode(False):  # a later pass may need its gradient
        return send(torch.from_numpy(tiles), device)


def _tiles_of(cu_seqlens: Tensor, tokens: int, tile: int, longest: int) -> Tensor:
    """The same from what only the device knows; as many as there can be, those that are not are of no length."""
    sizes = cu_seqlens.diff()
    counts = (sizes + tile - 1) // tile
    ends = counts.cumsum(0)
    most = min(tokens // tile + len(sizes), len(sizes) * -(-longest // tile))
    number = torch.arange(most, device=cu_seqlens.device)
    text = torch.searchsorted(ends, number, right=True).clamp(max=len(sizes) - 1)
    first = (number - (ends - counts)[text]) * tile
    length = torch.where(number < ends[-1], sizes[text], 0)
    return torch.stack([cu_seqlens[text], length, first], dim=1).int()
