# mypy: ignore-errors
"""Triton kernel of `pooling.py`: one embedding per text from the hidden states of its tokens."""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, tl


@jit
def pool_forward(
    hidden_ptr, cu_seqlens_ptr, out_ptr, width, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program: BLOCK columns of one text. One thread accumulates a column in token order, so that the result does
    not depend on how the kernel was compiled."""
    text = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_seqlens_ptr + text).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + text + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    initial = float("-inf") if MODE == "max" else 0.0
    out = tl.full((BLOCK,), initial, tl.float32)
    row = start
    while row < end:
        for i in tl.static_range(ROWS):
            mask = in_row & (row + i < end)
            x = tl.load(hidden_ptr + (row + i) * width + column, mask=mask, other=initial).to(tl.float32)
            if MODE == "max":
                out = tl.maximum(out, x, propagate_nan=tl.PropagateNan.ALL)
            elif MODE == "weightedmean":
                out += x * (row + i - start + 1).to(tl.float32)
            else:
                out += x
        row += ROWS
    count = (end - start).to(tl.float32)
    if MODE == "max":
        out = tl.where(count > 0, out, 0.0)
    elif MODE == "weightedmean":
        out = tl.div_rn(out, tl.maximum(count * (count + 1.0) * 0.5, 1.0))
    elif MODE == "mean":
        out = tl.div_rn(out, tl.maximum(count, 1.0))
    else:
        tl.static_assert(MODE == "mean_sqrt_len_tokens")
        out = tl.div_rn(out, tl.sqrt_rn(tl.maximum(count, 1.0)))
    tl.store(out_ptr + text * width + column, out, mask=in_row)
