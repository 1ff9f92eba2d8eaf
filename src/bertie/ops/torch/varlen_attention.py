"""The framework's attention on CUDA devices, for full and sliding patterns without relative terms.

In half precision that is its flash kernel, and elsewhere its memory-efficient one. Both read nothing of the lengths but
the longest, and nothing back from the device. What neither can do takes the plain path.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import Pattern, Sliding
from bertie.ops.contracts import AttentionInputs, Relative
from bertie.text.batch import send

WIDEST = 192  # of a head; the flash kernel goes further, but its way back does on a few chips only
WASTE = 4  # times as many places as tokens, where texts of different lengths must lie in one rectangle


def accepts(call: AttentionInputs) -> bool:
    """Whether `attend` takes a batch: the guard of its row in ops/dispatch.py."""
    if call.global_tokens is not None:
        return False
    q, lengths = call.q, call.lengths
    return call.dropout == 0.0 or _flash(q) or len(lengths) * _longest(q, lengths) <= WASTE * len(q)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    cu_seqlens: Tensor,
    *,
    scale: float,
    pattern: Pattern,
    dropout: float = 0.0,
) -> Tensor:
    """As `attend.attend`, for what `can` allows.

    The framework's public functions are `varlen_attn`, which knows no dropout, and `scaled_dot_product_attention`,
    which knows no ragged batches. The two operators here are those behind them.
    """
    longest = _longest(q, lengths)
    out: Tensor
    if _flash(q):
        window = pattern.window if isinstance(pattern, Sliding) else -1
        out, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu_seqlens, cu_seqlens, longest, longest),
            dropout_p=dropout,
            is_causal=False,
            return_debug_mask=False,
            scale=scale,
            window_size_left=window,
            window_size_right=window,
        )
        return out
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    if dropout > 0.0:
        return _rectangle(q, k, v, longest, cu_seqlens, scale, dropout)
    out, *_ = torch.ops.aten._efficient_attention_forward(
        *(q[None], k[None], v[None], None, cu_seqlens, cu_seqlens, longest, longest),
        dropout_p=0.0,
        custom_mask_type=0,  # none
        compute_log_sumexp=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        scale=scale,
    )
    return out[0]  # (1, T, H, d) -> (T, H, d)


# --- scores that depend on distance, where nothing is to be learnt ---

BUCKET = 32  # tokens: texts whose lengths round up to the same multiple lie in one rectangle
CELLS = 1 << 28  # scores of a rectangle at most
LONGEST_BIASED = 512  # tokens


def attend_biased(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, scale: float, relative: Relative
) -> Tensor:
    """As `attend.attend` for `scores` alone, in rectangles of near-equal lengths: few launches, a little padding."""
    assert relative.scores is not None
    plan = _rectangles(lengths, q.shape[1], q.device)
    out = torch.empty_like(q)
    for n, index, seen, real in plan:
        i = torch.arange(n, device=q.device)
        # A text that is shorter than its rectangle asks for no distance that is not there: what is beyond is not seen.
        far = (i[:, None] - i[None, :]).clamp(-(len(relative.rows) // 2), len(relative.rows) // 2)
        bias = relative.scores[relative.rows[far + len(relative.rows) // 2]].permute(2, 0, 1)[None].to(q.dtype)
        bias = bias.contiguous()  # and so is the mask: of any other, the framework takes its slow way, in float32
        mask = torch.where(seen[:, None, None, :], bias, torch.finfo(q.dtype).min)  # (b, H, n, n)
        qs, ks, vs = (x[index].view(-1, n, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (b, H, n, d)
        found = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale)
        out[index[real]] = found.transpose(1, 2).reshape(-1, *q.shape[1:])[real]
    return out


@lru_cache(maxsize=4)  # the layers of a pass ask for the same
def _rectangles(lengths: tuple[int, ...], heads: int, device: torch.device) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """For each rectangle its width n, the token (b · n,) at each place, which places (b, n) are seen, and which are."""
    sizes = np.array(lengths)
    starts = np.cumsum(sizes) - sizes
    wide = np.minimum(-(-sizes // BUCKET) * BUCKET, sizes.max())
    out = []
    for n in np.unique(wide).tolist():
        members = np.flatnonzero(wide == n)
        most = max(1, CELLS // (heads * n * n))
        for some in np.array_split(members, -(-len(members) // most)):
            at = np.arange(n)
            seen = at < sizes[some, None]  # (b, n)
            index = np.where(seen, starts[some, None] + at, starts[some, None]).ravel()
            real = np.flatnonzero(seen.ravel())
            out.append((n, *(send(torch.from_numpy(x), device) for x in (index, seen, real))))
    return out


def _rectangle(
    q: Tensor, k: Tensor, v: Tensor, longest: int, cu_seqlens: Tensor, scale: float, dropout: float
) -> Tensor:
    """A text a row. On ragged batches the operator's way back drops other weights than its way there did.

    (Up to torch 2.13 at least: the one is told the longest text and the other 0, and both seed by it.)
    """
    tokens = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    text = torch.searchsorted(cu_seqlens[1:], tokens, right=True)  # (T,)
    texts = len(cu_seqlens) - 1
    places = text * longest + tokens - cu_seqlens[text]  # (T,) in the rectangle
    qs, ks, vs = (
        x.new_zeros(texts * longest, *x.shape[1:])
        .index_copy(0, places, x)
        .view(texts, longest, *x.shape[1:])
        .transpose(1, 2)  # (T, H, d) -> (B, H, n, d)
        for x in (q, k, v)
    )
    seen = torch.arange(longest, device=q.device) < cu_seqlens.diff()[:, None]  # (B, n)
    out = F.scaled_dot_product_attention(qs, ks, vs, seen[:, None, None], dropout_p=dropout, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places)  # (B, H, n, d) -> (T, H, d)


def _longest(q: Tensor, lengths: tuple[int, ...]) -> int:
    return min(max(lengths), len(q))  # a batch with spare room may claim more than it has


def _flash(q: Tensor) -> bool:
    return has_flash(q.device, q.dtype, q.shape[-1])


def has_flash(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether PyTorch's flash kernel takes heads of this width."""
    return dtype in (torch.float16, torch.bfloat16) and head_width <= WIDEST and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether the flash kernel is there, and runs on this chip."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
