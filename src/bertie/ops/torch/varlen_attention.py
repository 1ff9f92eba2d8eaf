"""PyTorch's variable-length attention on GPUs: full, sliding-window or causal attention without relative positions.

The flash kernel in half precision, the memory-efficient kernel otherwise. Both need only the longest length on the
host, and read nothing back from the device. `attend_biased` is for bucketed relative positions at inference.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.config import Causal, Pattern, visible_range
from bertie.ops.contracts import AttentionInputs, Relative
from bertie.text.batch import send

WIDEST = 192  # head width; the flash kernel's backward pass supports wider heads on a few GPUs only
MAX_PADDING = 4  # padded size over tokens, where texts of different lengths must be padded


def accepts(call: AttentionInputs) -> bool:
    """Whether `attend` takes a batch: the guard of its row in ops/dispatch.py."""
    if call.global_tokens is not None:
        return False
    q, lengths = call.q, call.lengths
    return call.dropout == 0.0 or _flash(q) or len(lengths) * _longest(q, lengths) <= MAX_PADDING * len(q)


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
    """As `ops.attend`, for what `ops/dispatch.py` allows.

    PyTorch's public functions are `varlen_attn`, which has no dropout, and `scaled_dot_product_attention`, which has no
    ragged batches. These are the operators behind them.
    """
    longest = _longest(q, lengths)
    causal = isinstance(pattern, Causal)
    out: Tensor
    if _flash(q):
        before, after = visible_range(pattern)
        out, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, cu_seqlens, cu_seqlens, longest, longest),
            dropout_p=dropout,
            is_causal=causal,
            return_debug_mask=False,
            scale=scale,
            window_size_left=before,
            window_size_right=after,
        )
        return out
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    if dropout > 0.0:
        return _padded(q, k, v, longest, cu_seqlens, scale, dropout, causal)
    out, *_ = torch.ops.aten._efficient_attention_forward(
        *(q[None], k[None], v[None], None, cu_seqlens, cu_seqlens, longest, longest),
        dropout_p=0.0,
        custom_mask_type=int(causal),  # 1: causal, from the first query and key of each text
        compute_log_sumexp=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        scale=scale,
    )
    return out[0]  # (1, T, H, d) -> (T, H, d)


# --- bucketed relative positions, at inference ---

BUCKET = 32  # tokens: texts whose lengths round up to the same multiple are padded together
MAX_SCORES = 1 << 28  # of a padded batch
LONGEST_BIASED = 512  # tokens


def attend_biased(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], *, scale: float, relative: Relative
) -> Tensor:
    """As `ops.attend` with `relative.scores` only, in padded batches of similar lengths."""
    assert relative.scores is not None
    plan = _padded_batches(lengths, q.shape[1], q.device)
    out = torch.empty_like(q)
    for n, index, visible, real in plan:
        i = torch.arange(n, device=q.device)
        # Distances beyond the table occur only between padding tokens.
        far = (i[:, None] - i[None, :]).clamp(-(len(relative.rows) // 2), len(relative.rows) // 2)
        bias = relative.scores[relative.rows[far + len(relative.rows) // 2]].permute(2, 0, 1)[None].to(q.dtype)
        bias = bias.contiguous()  # as is the mask then: for others, PyTorch falls back to a slow float32 kernel
        mask = torch.where(visible[:, None, None, :], bias, torch.finfo(q.dtype).min)  # (b, H, n, n)
        qs, ks, vs = (x[index].view(-1, n, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (b, H, n, d)
        padded = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, scale=scale)
        out[index[real]] = padded.transpose(1, 2).reshape(-1, *q.shape[1:])[real]
    return out


@lru_cache(maxsize=4)  # the layers of a pass share it
def _padded_batches(
    lengths: tuple[int, ...], heads: int, device: torch.device
) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """For each padded batch: its length n, tokens (b · n,), visible positions (b, n), and indices of those."""
    sizes = np.array(lengths)
    starts = np.cumsum(sizes) - sizes
    padded = np.minimum(-(-sizes // BUCKET) * BUCKET, sizes.max())
    out = []
    for n in np.unique(padded).tolist():
        members = np.flatnonzero(padded == n)
        most = max(1, MAX_SCORES // (heads * n * n))
        for texts in np.array_split(members, -(-len(members) // most)):
            position = np.arange(n)
            visible = position < sizes[texts, None]  # (b, n)
            index = np.where(visible, starts[texts, None] + position, starts[texts, None]).ravel()
            real = np.flatnonzero(visible.ravel())
            out.append((n, *(send(torch.from_numpy(x), device) for x in (index, visible, real))))
    return out


def _padded(
    q: Tensor, k: Tensor, v: Tensor, longest: int, cu_seqlens: Tensor, scale: float, dropout: float, causal: bool
) -> Tensor:
    """Attention over a padded batch: on ragged ones the operator's backward pass drops other weights than its forward.

    (Up to torch 2.13 at least: the two are passed different maximum lengths, and seed by them.)
    """
    tokens = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    text = torch.searchsorted(cu_seqlens[1:], tokens, right=True)  # (T,)
    texts = len(cu_seqlens) - 1
    slots = text * longest + tokens - cu_seqlens[text]  # (T,) in the padded batch
    qs, ks, vs = (
        x.new_zeros(texts * longest, *x.shape[1:])
        .index_copy(0, slots, x)
        .view(texts, longest, *x.shape[1:])
        .transpose(1, 2)  # (T, H, d) -> (B, H, n, d)
        for x in (q, k, v)
    )
    visible = torch.arange(longest, device=q.device) < cu_seqlens.diff()[:, None]  # (B, n)
    mask = visible[:, None, None]  # (B, 1, 1, n)
    if causal:
        mask = mask & torch.ones(longest, longest, dtype=torch.bool, device=q.device).tril()
    out = F.scaled_dot_product_attention(qs, ks, vs, mask, dropout_p=dropout, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots)  # (B, H, n, d) -> (T, H, d)


def _longest(q: Tensor, lengths: tuple[int, ...]) -> int:
    return min(max(lengths), len(q))  # in a batch with spare room, lengths are upper bounds


def _flash(q: Tensor) -> bool:
    return has_flash(q.device, q.dtype, q.shape[-1])


def has_flash(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether PyTorch's flash kernel takes heads of this width."""
    return dtype in (torch.float16, torch.bfloat16) and head_width <= WIDEST and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether the flash kernel is built, and runs on this GPU."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
