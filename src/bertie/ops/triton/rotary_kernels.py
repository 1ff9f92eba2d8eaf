# mypy: ignore-errors
"""Triton kernel of `rotary.py`: rotary embeddings of queries and keys.

Inputs are loaded in their own dtype; arithmetic is in float32. Outputs may alias the inputs: each thread stores only
where it has loaded.
"""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, tl


@jit(do_not_specialize=["tokens"])  # else compiled again for multiples of 16
def rotary(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, tokens, q_stride, k_stride, q_out_stride, k_out_stride,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KV_HEADS: tl.constexpr, BLOCK_HALF_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: all heads of ROWS tokens. BACKWARD: rotate by the negative angle."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    column = tl.arange(0, BLOCK_HALF_DIM)[None, None, :]
    mask = (token < tokens) & (column < HEAD_DIM // 2)
    cos = tl.load(cos_ptr + token * HEAD_DIM + column, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HEAD_DIM + column, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    q_ptr += token * q_stride + column
    k_ptr += token * k_stride + column
    q_out_ptr += token * q_out_stride + column
    k_out_ptr += token * k_out_stride + column
    _rotate_heads(q_ptr, q_out_ptr, mask, cos, sin, HEADS, HEAD_DIM, BLOCK_HEADS)
    _rotate_heads(k_ptr, k_out_ptr, mask, cos, sin, KV_HEADS, HEAD_DIM, BLOCK_KV_HEADS)


@jit
def _rotate_heads(
    x_ptr, out_ptr, mask, cos, sin, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr
):  # fmt: skip
    head = tl.arange(0, BLOCK_HEADS)[None, :, None]
    mask = mask & (head < HEADS)
    x1 = tl.load(x_ptr + head * HEAD_DIM, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + head * HEAD_DIM + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + head * HEAD_DIM, x1 * cos - x2 * sin, mask=mask)
    tl.store(out_ptr + head * HEAD_DIM + HEAD_DIM // 2, x2 * cos + x1 * sin, mask=mask)
