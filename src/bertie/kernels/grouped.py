"""The plain path, for any device: texts of equal length are stacked, so that nothing needs padding.

Long texts are taken a stretch of queries at a time, against only the keys that stretch can see.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import Pattern, Sliding
from bertie.kernels.attend import Relative, additive_mask

STRETCH = 512  # queries at a time
SCORES = 1 << 25  # scores held at a time, over all texts and heads of a group


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
    dropout: float = 0.0,
) -> Tensor:
    """As `attend.attend`."""
    heads = q.shape[1]
    pieces, order = [], []
    for n, starts in _groups(lengths, heads):
        tokens = torch.tensor([s + t for s in starts for t in range(n)], device=q.device)
        # (T, H, d) -> (b, H, n, d)
        qs, ks, vs = (x[tokens].view(len(starts), n, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        global_keys = None if global_tokens is None else global_tokens[tokens].view(len(starts), n)  # (b, n)
        out = _attend_stack(qs, ks, vs, scale, pattern, relative, global_keys, dropout)
        pieces.append(out.transpose(1, 2).flatten(0, 1))  # (b, H, n, d) -> (b · n, H, d)
        order.append(tokens)
    if len(pieces) == 1 and len(lengths) == 1:
        return pieces[0]
    back = torch.empty(q.shape[0], dtype=torch.long, device=q.device)
    back[torch.cat(order)] = torch.arange(q.shape[0], device=q.device)
    return torch.cat(pieces)[back]


def _groups(lengths: tuple[int, ...], heads: int) -> list[tuple[int, list[int]]]:
    """Starts of texts by length, split where a group's scores would take too much memory."""
    by_length: dict[int, list[int]] = defaultdict(list)
    start = 0
    for n in lengths:
        by_length[n].append(start)
        start += n
    out = []
    for n, starts in by_length.items():
        most = max(1, SCORES // (heads * min(n, STRETCH) * n))
        out += [(n, starts[i : i + most]) for i in range(0, len(starts), most)]
    return out


def _attend_stack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    pattern: Pattern,
    relative: Relative | None,
    global_keys: Tensor | None,
    dropout: float,
) -> Tensor:
    """(b, H, n, d), (b, G, n, d), (b, G, n, d) -> (b, H, n, d)."""
    n = q.shape[2]
    if k.shape[1] != q.shape[1]:
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    out = []
    for start in range(0, n, STRETCH):
        rows = range(start, min(n, start + STRETCH))
        keys = range(n)
        if isinstance(pattern, Sliding) and global_keys is None:
            keys = range(max(0, rows.start - pattern.reach), min(n, rows.stop + pattern.reach))
        qs = q[:, :, rows.start : rows.stop]
        ks, vs = (x[:, :, keys.start : keys.stop] for x in (k, v))
        bias = additive_mask(pattern, rows, keys, n, global_keys, q)
        if relative is not None:
            terms = _relative(qs, ks, relative, rows, keys, scale)
            bias = terms if bias is None else terms + bias
        if bias is not None and bias.requires_grad:
            # Scaled before the product: in half precision, the product alone may be past the largest number.
            weights = torch.softmax((qs * scale) @ ks.transpose(-1, -2) + bias, dim=-1)
            out.append(F.dropout(weights, dropout) @ vs)
        else:
            out.append(F.scaled_dot_product_attention(qs, ks, vs, attn_mask=bias, dropout_p=dropout, scale=scale))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _relative(q: Tensor, k: Tensor, relative: Relative, rows: range, keys: range, scale: float) -> Tensor:
    """(b or 1, H, rows, keys) the terms that depend on distance."""
    i = torch.arange(rows.start, rows.stop, device=q.device)
    j = torch.arange(keys.start, keys.stop, device=q.device)
    row = relative.rows[i[:, None] - j[None, :] + len(relative.rows) // 2]  # (rows, keys)
    out: Tensor | None = None
    if relative.keys is not None:
        met = (q * scale) @ relative.keys.permute(1, 2, 0)  # (b, H, rows, R)
        out = met.gather(-1, row.expand(*met.shape[:2], *row.shape))
    if relative.queries is not None:
        met = (k * scale) @ relative.queries.permute(1, 2, 0)  # (b, H, keys, R)
        turned = met.gather(-1, row.T.expand(*met.shape[:2], *row.T.shape)).transpose(-1, -2)
        out = turned if out is None else out + turned
    if relative.scores is not None:
        scores = relative.scores[row].permute(2, 0, 1)[None]  # (1, H, rows, keys)
        out = scores if out is None else out + scores
    assert out is not None
    return out
