"""Rotary embeddings applied to the queries and keys of a layer in one pass over memory (`rotary_kernels.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertie.ops.contracts import needs_grad
from bertie.ops.triton.disentangled_attention import _rows_apart
from bertie.ops.triton.fused import _launching, _power_of_2

NARROWEST, WIDEST = 16, 128  # of a head
ROWS, WARPS = 1, 4  # tokens of a program, all their heads: fastest on an H200 (python -m benchmarks.rotary --tune)


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `eager.rotate_pair`; both halves of cos and sin (T, d) are alike.

    Without gradients, q and k are overwritten where their memory layout allows it.
    """
    if needs_grad(q, k):
        rotated: tuple[Tensor, Tensor] = _Rotate.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
        return rotated
    q, k = _rows_apart(q), _rows_apart(k)
    return _turn(q, k, q, k, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _anew(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q: Tensor, k: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *_anew(q, k, cos, sin, back=True), None, None


def _anew(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """Turned, in memory of their own."""
    q, k = _rows_apart(q), _rows_apart(k)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return _turn(q, k, q_out, k_out, cos, sin, back)


def _turn(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, back: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k turned, or with `back` turned back, and written to q_out and k_out, which they may be themselves."""
    from bertie.ops.triton import rotary_kernels as programs

    tokens, heads, width = q.shape
    key_heads = k.shape[1]
    with _launching(q):
        programs.turn[(-(-tokens // ROWS),)](
            *(q, k, q_out, k_out, cos.contiguous(), sin.contiguous(), tokens),
            *(x.stride(0) for x in (q, k, q_out, k_out)),
            BACK=back,
            HEADS=heads,
            KEY_HEADS=key_heads,
            WIDTH=width,
            HEADS_ROOM=_power_of_2(heads),
            KEY_HEADS_ROOM=_power_of_2(key_heads),
            HALF_ROOM=_power_of_2(width // 2),
            ROWS=ROWS,
            num_warps=WARPS,
        )
    return q_out, k_out
