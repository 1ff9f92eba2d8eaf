"""Rotary positions: the queries and keys of a layer, turned in one pass over memory.

On GPUs, with Triton, by a program of our own (`rotary_kernels.py`); everywhere else by `nn.positions.rotate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertie.ops.triton.disentangled_attention import _rows_apart
from bertie.ops.triton.fused import HALF, _has_triton, _launching, _power_of_2

enabled = True  # whether our own program is used where it can be

NARROWEST, WIDEST = 16, 128  # of a head
ROWS, WARPS = 1, 4  # tokens of a program, all their heads: fastest on an H200 (python -m benchmarks.rotary --tune)


def takes(q: Tensor) -> bool:
    """Whether our own program is to turn q, and the keys that go with it."""
    return (
        enabled
        and q.is_cuda
        and q.dtype in (*HALF, torch.float32)
        and NARROWEST <= q.shape[-1] <= WIDEST
        and q.shape[-1] % 2 == 0
        and _has_triton()
    )


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (T, H, d) and k (T, G, d) turned by their positions, in float32; of cos and sin (T, d), both halves are alike.

    Where no gradient is recorded, what is returned may lie in the place of what was given.

    >>> from bertie.config import Rotary
    >>> from bertie.nn.positions import rotations
    >>> x = torch.ones(2, 1, 2)
    >>> q, k = rotated(x, x, *rotations(Rotary((10000.0,)), torch.tensor([0, 1]), 2)[10000.0])
    >>> [[round(value, 2) for value in token] for token in q[:, 0].tolist()]     # by no angle, and by 1
    [[1.0, 1.0], [-0.3, 1.38]]
    """
    if takes(q):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            turned: tuple[Tensor, Tensor] = _Rotate.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
            return turned
        q, k = _rows_apart(q), _rows_apart(k)
        return _turn(q, k, q, k, cos, sin)
    from bertie.nn.positions import rotate

    return rotate(q, cos, sin), rotate(k, cos, sin)


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
