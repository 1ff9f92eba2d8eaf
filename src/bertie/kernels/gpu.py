"""The framework's ragged attention on CUDA devices, in half precision; everything else takes the plain path."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertie.config import Full, Pattern, Sliding
from bertie.kernels.attend import Relative


@cache
def _varlen() -> tuple[Any, bool] | None:
    """The framework's function, and whether it takes a window; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, "window_size" in inspect.signature(varlen_attn).parameters


def can(q: Tensor, pattern: Pattern, relative: Relative | None, global_tokens: Tensor | None, dropout: float) -> bool:
    """Whether this path can take the call."""
    found = _varlen()
    plain = relative is None and global_tokens is None and dropout == 0.0
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if found is None or not plain or not fits:
        return False
    return isinstance(pattern, Full) or (isinstance(pattern, Sliding) and found[1])


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], cu_seqlens: Tensor, *, scale: float, pattern: Pattern
) -> Tensor:
    """As `attend.attend`, for what `can` allows."""
    found = _varlen()
    assert found is not None
    share = q.shape[1] // k.shape[1]
    if share > 1:
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    longest = max(lengths)
    options: dict[str, Any] = {"scale": scale}
    if isinstance(pattern, Sliding):
        options["window_size"] = (pattern.reach, pattern.reach)
    out: Tensor = found[0](q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out
