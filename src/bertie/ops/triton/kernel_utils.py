# mypy: ignore-errors
"""What the Triton kernels share. They can be imported, though not launched, without Triton."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    tl = None

    def jit(function=None, **options):
        """Return the function unchanged."""
        return function if function is not None else lambda decorated: decorated


@jit
def load_head(x_ptr, tokens, stride, head, mask, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) one head of some tokens of x (T, H, HEAD_DIM)."""
    column = tl.arange(0, BLOCK_D)
    pointers = x_ptr + tokens.to(tl.int64)[:, None] * stride + head * HEAD_DIM + column[None, :]
    return tl.load(pointers, mask=mask[:, None] & (column < HEAD_DIM)[None, :], other=0.0)


@jit
def store_head(x_ptr, tokens, stride, head, mask, x, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store one head of some tokens of x (T, H, HEAD_DIM)."""
    column = tl.arange(0, BLOCK_D)
    pointers = x_ptr + tokens.to(tl.int64)[:, None] * stride + head * HEAD_DIM + column[None, :]
    tl.store(pointers, x.to(x_ptr.dtype.element_ty), mask=mask[:, None] & (column < HEAD_DIM)[None, :])


@jit
def store_fp8(fp8_ptr, scales_ptr, x, row, column, rows, width):
    """Quantize whole rows, zero beyond the width, to e4m3 with one scale per row, as `fp8.quantize_rows` does."""
    amax = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), 1e-12)
    quantized = (x * (448.0 / amax)).to(fp8_ptr.dtype.element_ty)
    tl.store(fp8_ptr + row * width + column, quantized, mask=(row < rows) & (column < width))
    tl.store(scales_ptr + row, amax / 448.0, mask=row < rows)
