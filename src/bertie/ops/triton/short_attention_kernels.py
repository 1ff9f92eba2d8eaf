# mypy: ignore-errors
"""The Triton program behind `ragged.py`, which says what it computes. Only that file calls it.

Values are read in the precision they lie in. Products are summed, and the softmax is taken, in float32. What is turned
is turned in float32, and rounded as if it had been written.
"""

from __future__ import annotations

from bertie.ops.triton.disentangled_attention_kernels import _load, _store, jit

try:
    import triton
    import triton.language as tl

    program = triton.jit(do_not_specialize=["window"])  # else compiled anew for some of them
except ImportError:  # then nothing here is called
    program = jit


@program
def forward(
    q_at, k_at, v_at, out_at, cos_at, sin_at, tiles_at, q_stride, k_stride, v_stride, factor, window,
    WINDOW: tl.constexpr, TURN: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program: M queries of one text and head, that meet its keys N at a time. With TURN, both are turned first."""
    number = tl.program_id(0)
    tile, head = number // HEADS * 3, number % HEADS
    start, length, first = tl.load(tiles_at + tile), tl.load(tiles_at + tile + 1), tl.load(tiles_at + tile + 2)
    own = first + tl.arange(0, M)
    there = own < length
    if TURN:
        q, q_second = _turned(q_at, cos_at, sin_at, start + own, q_stride, head, there, WIDTH)
    else:
        q = _load(q_at, start + own, q_stride, head, there, WIDTH, D)
    low, high = 0, length
    if WINDOW:
        low = tl.maximum(first - window, 0) // N * N
        high = tl.minimum(first + M + window, length)
    top = tl.full((M,), -1e9, tl.float32)
    sums = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for at in range(low, high, N):
        other = at + tl.arange(0, N)
        if TURN:
            k, k_second = _turned(k_at, cos_at, sin_at, start + other, k_stride, head // SHARE, other < length, WIDTH)
            score = tl.dot(q_second, tl.trans(k_second), tl.dot(q, tl.trans(k)))
        else:
            k = _load(k_at, start + other, k_stride, head // SHARE, other < length, WIDTH, D)
            score = tl.dot(q, tl.trans(k))
        seen = (other < length)[None, :]
        if WINDOW:
            seen = seen & (tl.abs(own[:, None] - other[None, :]) <= window)
        score = tl.where(seen, score, -1e9)
        higher = tl.maximum(top, tl.max(score, 1))
        # Of a row that has seen nothing yet these are about one, and nothing once it has.
        weights = tl.exp2(score * factor - (higher * factor)[:, None])
        shrink = tl.exp2((top - higher) * factor)
        sums = sums * shrink + tl.sum(weights, 1)
        top = higher
        v = _load(v_at, start + other, v_stride, head // SHARE, other < length, WIDTH, D)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    _store(out_at, start + own, HEADS * WIDTH, head, there, out / sums[:, None], WIDTH, D)


@jit
def _turned(x_at, cos_at, sin_at, tokens, stride, head, there, WIDTH: tl.constexpr):
    """The two halves of a head, turned by its tokens' positions; of cos and sin, both halves are alike."""
    column = tl.arange(0, WIDTH // 2)[None, :]
    row, mask = tokens.to(tl.int64)[:, None], there[:, None]
    x_at += row * stride + head * WIDTH + column
    first, second = tl.load(x_at, mask=mask, other=0.0), tl.load(x_at + WIDTH // 2, mask=mask, other=0.0)
    cos = tl.load(cos_at + row * WIDTH + column, mask=mask, other=0.0)
    sin = tl.load(sin_at + row * WIDTH + column, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
