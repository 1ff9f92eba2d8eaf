# mypy: ignore-errors
"""The Triton program behind `ragged.py`, which says what it computes. Only that file calls it.

Values are read in the precision they lie in. Products are summed, and the softmax is taken, in float32.
"""

from __future__ import annotations

from bertie.kernels.disentangled_kernels import _load, _store, jit

try:
    import triton
    import triton.language as tl

    program = triton.jit(do_not_specialize=["reach"])  # else compiled anew for some of them
except ImportError:  # then nothing here is called
    program = jit


@program
def forward(
    q_at, k_at, v_at, out_at, tiles_at, q_stride, k_stride, v_stride, factor, reach,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program: M queries of one text and head, that meet its keys N at a time."""
    number = tl.program_id(0)
    tile, head = number // HEADS * 3, number % HEADS
    start, length, first = tl.load(tiles_at + tile), tl.load(tiles_at + tile + 1), tl.load(tiles_at + tile + 2)
    own = first + tl.arange(0, M)
    there = own < length
    q = _load(q_at, start + own, q_stride, head, there, WIDTH, D)
    low, high = 0, length
    if WINDOW:
        low = tl.maximum(first - reach, 0) // N * N
        high = tl.minimum(first + M + reach, length)
    top = tl.full((M,), -1e9, tl.float32)
    sums = tl.zeros((M,), tl.float32)
    out = tl.zeros((M, D), tl.float32)
    for at in range(low, high, N):
        other = at + tl.arange(0, N)
        k = _load(k_at, start + other, k_stride, head // SHARE, other < length, WIDTH, D)
        score = tl.dot(q, tl.trans(k))
        seen = (other < length)[None, :]
        if WINDOW:
            seen = seen & (tl.abs(own[:, None] - other[None, :]) <= reach)
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
