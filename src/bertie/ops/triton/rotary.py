"""Rotary embeddings of a layer's queries and keys in one pass over memory (`rotary_kernels.py`).

The reference is `ops/torch/eager.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertie.ops.contracts import needs_grad
from bertie.ops.triton.launch import contiguous_heads, device_guard, next_power_of_2

MIN_HEAD_WIDTH, MAX_HEAD_WIDTH = 16, 128
ROWS, WARPS = 1, 4  # tokens and warps of a program: fastest on an H200 (python -m benchmarks.rotary --tune)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `eager.apply_rotary`; the two halves of cos and sin (T, d) must be equal.

    Without gradients, q and k are overwritten where their memory layout allows it.
    """
    if needs_grad(q, k):
        rotated: tuple[Tensor, Tensor] = _ApplyRotary.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
        return rotated
    q, k = contiguous_heads(q), contiguous_heads(k)
    return _rotate_into(q, k, q, k, cos, sin)


class _ApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *_rotate(dq, dk, cos, sin, backward=True), None, None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """Out of place."""
    q, k = contiguous_heads(q), contiguous_heads(k)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return _rotate_into(q, k, q_out, k_out, cos, sin, backward)


def _rotate_into(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k, with `backward` by the negative angle, into q_out and k_out, which may be q and k."""
    from bertie.ops.triton import rotary_kernels as kernels

    tokens, heads, head_width = q.shape
    kv_heads = k.shape[1]
    with device_guard(q):
        kernels.rotary[(-(-tokens // ROWS),)](
            *(q, k, q_out, k_out, cos.contiguous(), sin.contiguous(), tokens),
            *(x.stride(0) for x in (q, k, q_out, k_out)),
            BACKWARD=backward,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_width,
            BLOCK_HEADS=next_power_of_2(heads),
            BLOCK_KV_HEADS=next_power_of_2(kv_heads),
            BLOCK_HALF_DIM=next_power_of_2(head_width // 2),
            ROWS=ROWS,
            num_warps=WARPS,
        )
    return q_out, k_out
