# mypy: ignore-errors
"""Triton kernel of `short_attention.py`: variable-length softmax attention, forward only.

Inputs are loaded in their own dtype; matrix multiplications accumulate and the softmax is computed in float32. Rotary
embeddings are applied in float32 and rounded as if they had been stored.
"""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, load_head, store_head, tl


@jit(do_not_specialize=["window"])  # else compiled again for multiples of 16
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, tiles_ptr, q_stride, k_stride, v_stride, log2_scale, window,
    HAS_WINDOW: tl.constexpr, CAUSAL: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one text and head; the text's keys in blocks of BLOCK_N, with online softmax.

    `log2_scale` is the score scale times log2(e). GROUP_SIZE query heads share one key and value head. With CAUSAL, a
    query sees no key after its own.
    """
    program = tl.program_id(0)
    tile, head = program // HEADS * 3, program % HEADS
    start, length, first = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + tile + 1), tl.load(tiles_ptr + tile + 2)
    query = first + tl.arange(0, BLOCK_M)
    query_mask = query < length
    if ROTARY:
        q, q2 = _load_rotated(q_ptr, cos_ptr, sin_ptr, start + query, q_stride, head, query_mask, HEAD_DIM)
    else:
        q = load_head(q_ptr, start + query, q_stride, head, query_mask, HEAD_DIM, BLOCK_D)
    low, high = 0, length
    if HAS_WINDOW:
        low = tl.maximum(first - window, 0) // BLOCK_N * BLOCK_N
        high = tl.minimum(first + BLOCK_M + window, length)
    if CAUSAL:
        high = tl.minimum(first + BLOCK_M, length)
    row_max = tl.full((BLOCK_M,), -1e9, tl.float32)
    denominator = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    kv_head = head // GROUP_SIZE
    for block in range(low, high, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        if ROTARY:
            k, k2 = _load_rotated(k_ptr, cos_ptr, sin_ptr, start + key, k_stride, kv_head, key < length, HEAD_DIM)
            scores = tl.dot(q2, tl.trans(k2), tl.dot(q, tl.trans(k)))
        else:
            k = load_head(k_ptr, start + key, k_stride, kv_head, key < length, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q, tl.trans(k))
        visible = (key < length)[None, :]
        if HAS_WINDOW:
            visible = visible & (tl.abs(query[:, None] - key[None, :]) <= window)
        if CAUSAL:
            visible = visible & (key[None, :] <= query[:, None])
        scores = tl.where(visible, scores, -1e9)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # While a row has seen only masked keys its weights are 1; the first visible key rescales them to 0.
        weights = tl.exp2(scores * log2_scale - (new_max * log2_scale)[:, None])
        rescale = tl.exp2((row_max - new_max) * log2_scale)
        denominator = denominator * rescale + tl.sum(weights, 1)
        row_max = new_max
        v = load_head(v_ptr, start + key, v_stride, kv_head, key < length, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
    out = acc / denominator[:, None]
    store_head(out_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, out, HEAD_DIM, BLOCK_D)


@jit
def _load_rotated(x_ptr, cos_ptr, sin_ptr, tokens, stride, head, token_mask, HEAD_DIM: tl.constexpr):
    """The two halves of a head with rotary embeddings applied; the halves of cos and sin are equal."""
    column = tl.arange(0, HEAD_DIM // 2)[None, :]
    row, mask = tokens.to(tl.int64)[:, None], token_mask[:, None]
    x_ptr += row * stride + head * HEAD_DIM + column
    first, second = tl.load(x_ptr, mask=mask, other=0.0), tl.load(x_ptr + HEAD_DIM // 2, mask=mask, other=0.0)
    cos = tl.load(cos_ptr + row * HEAD_DIM + column, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + row * HEAD_DIM + column, mask=mask, other=0.0)
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    return (x1 * cos - x2 * sin).to(first.dtype), (x2 * cos + x1 * sin).to(first.dtype)
