"""Reference implementation of attention: text by text, by the formula of `ops/attention.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from bertie.config import BlockSparse, Causal, Pattern, Sliding
from bertie.ops.contracts import Relative


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    *,
    scale: float,
    pattern: Pattern,
    relative: Relative | None = None,
    global_tokens: Tensor | None = None,
) -> Tensor:
    """As `ops.attend`, without dropout."""
    out, start = [], 0
    share = q.shape[1] // k.shape[1]
    for n in lengths:
        qs, ks, vs = (x[start : start + n] for x in (q, k, v))
        ks, vs = ks.repeat_interleave(share, dim=1), vs.repeat_interleave(share, dim=1)  # (n, G, d) -> (n, H, d)
        scores = torch.einsum("ihd,jhd->hij", qs, ks)
        if relative is not None:
            middle = len(relative.rows) // 2
            row = relative.rows[torch.arange(n)[:, None] - torch.arange(n)[None, :] + middle]  # (n, n)
            if relative.keys is not None:
                scores = scores + torch.einsum("ihd,ijhd->hij", qs, relative.keys[row])
            if relative.queries is not None:
                scores = scores + torch.einsum("jhd,ijhd->hij", ks, relative.queries[row])
        scores = scores * scale
        if relative is not None and relative.scores is not None:
            scores = scores + relative.scores[row].permute(2, 0, 1)
        counts = torch.tensor([[_count(pattern, i, j, n) for j in range(n)] for i in range(n)], dtype=scores.dtype)
        if global_tokens is not None:
            counts = counts.maximum(global_tokens[start : start + n][None, :].to(counts))
        weights = counts * torch.exp(scores - scores.amax(dim=-1, keepdim=True))  # (H, n, n)
        out.append(torch.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdim=True), vs))
        start += n
    return torch.cat(out)


def _count(pattern: Pattern, i: int, j: int, n: int) -> int:
    """How many times key j counts for query i in a text of n tokens."""
    if isinstance(pattern, Sliding):
        return int(abs(i - j) <= pattern.window)
    if isinstance(pattern, Causal):
        return int(i - j >= 0 and (pattern.window is None or i - j <= pattern.window))
    if isinstance(pattern, BlockSparse) and n > pattern.full_below:
        row, column, last = i // pattern.block, j // pattern.block, (n - 1) // pattern.block
        if row in (0, last):
            return 1
        if column == 0:
            return 1 + pattern.random
        return int(column == last or abs(row - column) <= 1)
    return 1
