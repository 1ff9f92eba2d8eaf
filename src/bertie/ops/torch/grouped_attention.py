"""Attention for any device, pattern and position scheme: texts of equal length are stacked, without padding.

The queries of long texts are processed in chunks, each with only the keys that the pattern allows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import Pattern, visible_range
from bertie.ops.contracts import Relative, additive_mask
from bertie.text.batch import send

CHUNK = 512  # queries per chunk
MAX_SCORES = 1 << 25  # scores in memory at a time, over all texts and heads of a group


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
    """As `ops.attend`."""
    plan = _plan(lengths, q.shape[1], q.device)
    sizes = [n * count for n, count in plan.groups]
    # One gather for all groups: the backward pass of one per group would fill a whole tensor of zeros each.
    parts = [torch.split(x if plan.order is None else x[plan.order], sizes) for x in (q, k, v)]
    ordered = global_tokens if global_tokens is None or plan.order is None else global_tokens[plan.order]
    keys = [None] * len(sizes) if ordered is None else torch.split(ordered, sizes)
    pieces = []
    for (n, count), q_, k_, v_, key in zip(plan.groups, *parts, keys, strict=True):
        # (b · n, H, d) -> (b, H, n, d)
        qs, ks, vs = (x.view(count, n, *x.shape[1:]).transpose(1, 2) for x in (q_, k_, v_))
        global_keys = None if key is None else key.view(count, n)  # (b, n)
        out = _attend_stack(qs, ks, vs, scale, pattern, relative, global_keys, dropout)
        pieces.append(out.transpose(1, 2).flatten(0, 1))  # (b, H, n, d) -> (b · n, H, d)
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return joined if plan.back is None else joined[plan.back]


def attend_to_beginnings(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
    *,
    scale: float,
    pattern: Pattern,
    relative: Relative | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """As `attend`, but only the first `key_lengths` tokens of each text are attended to; text by text."""
    pieces = []
    texts = zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), key_lengths, strict=True)
    for q_, k_, v_, keys in texts:
        qs, ks, vs = (x.transpose(0, 1)[None] for x in (q_, k_[:keys], v_[:keys]))  # (n, H, d) -> (1, H, n, d)
        pieces.append(_attend_stack(qs, ks, vs, scale, pattern, relative, None, dropout)[0].transpose(0, 1))
    return torch.cat(pieces)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Texts grouped by length, and the token order by group and back; None if the tokens are in this order."""

    groups: tuple[tuple[int, int], ...]  # length, number of texts
    order: Tensor | None
    back: Tensor | None


@lru_cache(maxsize=8)  # the layers of a pass share it
def _plan(lengths: tuple[int, ...], heads: int, device: torch.device) -> _Plan:
    groups = _groups(lengths, heads)
    sizes = tuple((n, len(starts)) for n, starts in groups)
    firsts = [start for _, starts in groups for start in starts]
    if firsts == sorted(firsts):
        return _Plan(sizes, None, None)
    order = np.concatenate([(np.array(starts)[:, None] + np.arange(n)).ravel() for n, starts in groups])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    with torch.inference_mode(False):  # a later pass may record gradients
        return _Plan(sizes, send(torch.from_numpy(order), device), send(torch.from_numpy(back), device))


def _groups(lengths: tuple[int, ...], heads: int) -> list[tuple[int, list[int]]]:
    """The starts of the texts of each length, split where a group's scores would take too much memory."""
    by_length: dict[int, list[int]] = defaultdict(list)
    start = 0
    for n in lengths:
        by_length[n].append(start)
        start += n
    out = []
    for n, starts in by_length.items():
        most = max(1, MAX_SCORES // (heads * min(n, CHUNK) * n))
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
    """(b, H, n, d), (b, G, m, d), (b, G, m, d) -> (b, H, n, d); m = n, or the first m tokens are attended to."""
    n, m = q.shape[2], k.shape[2]
    if k.shape[1] != q.shape[1]:
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    out = []
    for start in range(0, n, CHUNK):
        rows = range(start, min(n, start + CHUNK))
        keys = range(m)
        if global_keys is None:
            before, after = visible_range(pattern)
            first = 0 if before < 0 else max(0, rows.start - before)
            keys = range(first, m if after < 0 else min(m, rows.stop + after))
        qs = q[:, :, rows.start : rows.stop]
        ks, vs = (x[:, :, keys.start : keys.stop] for x in (k, v))
        bias = additive_mask(pattern, rows, keys, n, global_keys, q)
        if relative is not None:
            terms = _relative(qs, ks, relative, rows, keys, scale)
            bias = terms if bias is None else terms + bias
        if bias is not None and bias.requires_grad:
            # Scaled before the multiplication, which might overflow in half precision.
            weights = torch.softmax((qs * scale) @ ks.transpose(-1, -2) + bias, dim=-1)
            out.append(F.dropout(weights, dropout) @ vs)
        else:
            out.append(F.scaled_dot_product_attention(qs, ks, vs, attn_mask=bias, dropout_p=dropout, scale=scale))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _relative(q: Tensor, k: Tensor, relative: Relative, rows: range, keys: range, scale: float) -> Tensor:
    """(b or 1, H, rows, keys) the score terms that depend on distance."""
    i = torch.arange(rows.start, rows.stop, device=q.device)
    j = torch.arange(keys.start, keys.stop, device=q.device)
    row = relative.rows[i[:, None] - j[None, :] + len(relative.rows) // 2]  # (rows, keys)
    out: Tensor | None = None
    if relative.keys is not None:
        by_row = (q * scale) @ relative.keys.permute(1, 2, 0)  # (b, H, rows, R)
        out = by_row.gather(-1, row.expand(*by_row.shape[:2], *row.shape))
    if relative.queries is not None:
        by_row = (k * scale) @ relative.queries.permute(1, 2, 0)  # (b, H, keys, R)
        term = by_row.gather(-1, row.T.expand(*by_row.shape[:2], *row.T.shape)).transpose(-1, -2)
        out = term if out is None else out + term
    if relative.scores is not None:
        scores = relative.scores[row].permute(2, 0, 1)[None]  # (1, H, rows, keys)
        out = scores if out is None else out + scores
    assert out is not None
    return out
