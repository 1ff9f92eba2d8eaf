# mypy: ignore-errors
"""The Triton program behind `rotary.py`, which says what it computes. Only that file calls it.

Values are read in the precision they lie in and computed in float32. Outputs may lie where the inputs do: each thread
writes only where it has read.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    program = triton.jit(do_not_specialize=["tokens"])  # else compiled anew for some of them
except ImportError:  # then nothing here is called

    def jit(function):
        """The function as it stands."""
        return function

    program = jit


@program
def turn(
    q_at, k_at, q_out_at, k_out_at, cos_at, sin_at, tokens, q_stride, k_stride, q_out_stride, k_out_stride,
    BACK: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HEADS_ROOM: tl.constexpr, KEY_HEADS_ROOM: tl.constexpr, HALF_ROOM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program: all heads of ROWS tokens."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    column = tl.arange(0, HALF_ROOM)[None, None, :]
    there = (token < tokens) & (column < WIDTH // 2)
    cos = tl.load(cos_at + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    sin = tl.load(sin_at + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    q_at += token * q_stride + column
    k_at += token * k_stride + column
    q_out_at += token * q_out_stride + column
    k_out_at += token * k_out_stride + column
    _turn_heads(q_at, q_out_at, there, cos, sin, HEADS, WIDTH, HEADS_ROOM)
    _turn_heads(k_at, k_out_at, there, cos, sin, KEY_HEADS, WIDTH, KEY_HEADS_ROOM)


@jit
def _turn_heads(x_at, out_at, there, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    head = tl.arange(0, ROOM)[None, :, None]
    mask = there & (head < HEADS)
    first = tl.load(x_at + head * WIDTH, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_at + head * WIDTH + WIDTH // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at + head * WIDTH, first * cos - second * sin, mask=mask)
    tl.store(out_at + head * WIDTH + WIDTH // 2, second * cos + first * sin, mask=mask)
