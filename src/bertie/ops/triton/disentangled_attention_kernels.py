# mypy: ignore-errors
"""Triton kernels of `disentangled_attention.py`: attention with relative position terms, forward and backward.

One program has a row tile of B tokens of one text and head, and loops over the text's tokens in column tiles of B.
Between row a and column b of two tiles whose origins are `offset` apart, the distance is offset + b − a: of the tile
pair's 2 B − 1 distances, row a needs the B consecutive ones from B − 1 − a on. So the products of the row tile with
two tiles of B table rows are merged into one (B, B) matrix by the mask `earlier`, and each row is then shifted by its
own amount (`tl.gather`, compiled to warp shuffles): the relative shift of Transformer-XL, within a tile. The second
table tile of one iteration is the first of the next. Products of the column tile with a table are the same, transposed.

C2P is the content-to-position term (queries times relative keys), P2C the position-to-content term (keys times relative
queries), and BIAS a learned bias per distance. Inputs are loaded in their own dtype; matrix multiplications accumulate
and the softmax is computed in float32.
"""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, load_head, store_head, tl

VARYING = ["total", "distances", "drop_threshold"]  # not specialized: else compiled again for multiples of 16


@jit(do_not_specialize=VARYING)
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, c2p_ptr, p2c_ptr, bias_ptr, tiles_ptr, seed_ptr,
    q_stride, k_stride, v_stride, total, distances, log2_scale, drop_threshold, keep_scale,
    C2P: tl.constexpr, P2C: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, FP16_TERMS: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: a tile of queries. `lse` is the base-2 log-sum-exp of each row's scores."""
    head, start, length, first, query, query_mask = _tile_coordinates(tiles_ptr, HEADS, B)
    q = load_head(q_ptr, start + query, q_stride, head, query_mask, HEAD_DIM, BLOCK_D)
    c2p_ptr += head * distances * HEAD_DIM
    p2c_ptr += head * distances * HEAD_DIM
    bias_ptr += head * B * _bias_columns(distances, B)
    if DROPOUT:
        query_words, _ = _random_words(seed_ptr, start + query, head, HEADS)
    row_max = tl.full((B,), -1e30, tl.float32)
    denominator = tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, BLOCK_D), tl.float32)
    carry = _initial_carry(q, c2p_ptr, -first, distances, C2P, FP16_TERMS, HEAD_DIM, BLOCK_D, B)
    for block in range(0, length, B):
        key = block + tl.arange(0, B)
        k = load_head(k_ptr, start + key, k_stride, head, key < length, HEAD_DIM, BLOCK_D)
        scores, carry = _scores(
            q, k, carry, c2p_ptr, p2c_ptr, bias_ptr, block - first, distances, log2_scale,
            C2P, P2C, BIAS, FP16_TERMS, HEAD_DIM, BLOCK_D, B,
        )  # fmt: skip
        scores = tl.where((key < length)[None, :], scores, -1e30)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        denominator = denominator * rescale + tl.sum(weights, 1)
        row_max = new_max
        if DROPOUT:
            _, key_words = _random_words(seed_ptr, start + key, head, HEADS)
            weights = tl.where(_keep_mask(query_words, key_words, drop_threshold), weights, 0.0)
        v = load_head(v_ptr, start + key, v_stride, head, key < length, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
    denominator = tl.where(query_mask, denominator, 1.0)
    out = acc * (keep_scale / denominator)[:, None]
    store_head(out_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, out, HEAD_DIM, BLOCK_D)
    tl.store(lse_ptr + head * total + start + query, row_max + tl.log2(denominator), mask=query_mask)


@jit(do_not_specialize=VARYING)
def attention_backward_q(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, c2p_ptr, p2c_ptr, bias_ptr, dc2p_ptr, dbias_ptr,
    tiles_ptr, seed_ptr, q_stride, k_stride, v_stride, total, distances, scale, log2_scale, drop_threshold, keep_scale,
    C2P: tl.constexpr, P2C: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, FP16_TERMS: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: a tile of queries. Computes dq, adds to the gradients of the c2p table and of the bias, and stores
    `delta`, the row sums of dout · out, for the kernel of the keys."""
    head, start, length, first, query, query_mask = _tile_coordinates(tiles_ptr, HEADS, B)
    q = load_head(q_ptr, start + query, q_stride, head, query_mask, HEAD_DIM, BLOCK_D)
    dout = load_head(dout_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, HEAD_DIM, BLOCK_D)
    out = load_head(out_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + head * total + start + query, delta, mask=query_mask)
    lse = tl.load(lse_ptr + head * total + start + query, mask=query_mask, other=0.0)
    c2p_ptr += head * distances * HEAD_DIM
    p2c_ptr += head * distances * HEAD_DIM
    bias_ptr += head * B * _bias_columns(distances, B)
    dc2p_ptr += head * distances * HEAD_DIM
    dbias_ptr += head * distances
    if DROPOUT:
        query_words, _ = _random_words(seed_ptr, start + query, head, HEADS)
    dq = tl.zeros((B, BLOCK_D), tl.float32)
    carry = _initial_carry(q, c2p_ptr, -first, distances, C2P, FP16_TERMS, HEAD_DIM, BLOCK_D, B)
    remainder = tl.zeros((B, B), q.dtype if C2P else tl.float32)
    for block in range(0, length, B):
        key = block + tl.arange(0, B)
        k = load_head(k_ptr, start + key, k_stride, head, key < length, HEAD_DIM, BLOCK_D)
        scores, carry = _scores(
            q, k, carry, c2p_ptr, p2c_ptr, bias_ptr, block - first, distances, log2_scale,
            C2P, P2C, BIAS, FP16_TERMS, HEAD_DIM, BLOCK_D, B,
        )  # fmt: skip
        visible = query_mask[:, None] & (key < length)[None, :]
        weights = tl.where(visible, tl.exp2(scores - lse[:, None]), 0.0)
        v = load_head(v_ptr, start + key, v_stride, head, key < length, HEAD_DIM, BLOCK_D)
        dweights = tl.dot(dout, tl.trans(v))
        if DROPOUT:
            _, key_words = _random_words(seed_ptr, start + key, head, HEADS)
            dweights = tl.where(_keep_mask(query_words, key_words, drop_threshold), dweights * keep_scale, 0.0)
        dscores = weights * (dweights - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq)
        if C2P or BIAS:
            by_distance, remainder = _unshift(dscores.to(remainder.dtype), remainder, block - first, B)
            dq = _table_backward(
                by_distance, q, dq, c2p_ptr, dc2p_ptr, dbias_ptr, block - first, distances, scale,
                C2P, BIAS, HEAD_DIM, BLOCK_D, B,
            )  # fmt: skip
    if C2P or BIAS:
        offset = (length + B - 1) // B * B - first
        dq = _table_backward(
            remainder, q, dq, c2p_ptr, dc2p_ptr, dbias_ptr, offset, distances, scale, C2P, BIAS, HEAD_DIM, BLOCK_D, B
        )
    store_head(dq_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, dq * scale, HEAD_DIM, BLOCK_D)


@jit(do_not_specialize=VARYING)
def attention_backward_kv(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, c2p_ptr, p2c_ptr, bias_ptr, dp2c_ptr,
    tiles_ptr, seed_ptr, q_stride, k_stride, v_stride, total, distances, scale, log2_scale, drop_threshold, keep_scale,
    C2P: tl.constexpr, P2C: tl.constexpr, BIAS: tl.constexpr, DROPOUT: tl.constexpr, FP16_TERMS: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """One program: a tile of keys. Computes dk and dv, and adds to the gradient of the p2c table.

    Everything is transposed: scores are (key, query), and the bias is ordered by query − key.
    """
    head, start, length, first, key, key_mask = _tile_coordinates(tiles_ptr, HEADS, B)
    k = load_head(k_ptr, start + key, k_stride, head, key_mask, HEAD_DIM, BLOCK_D)
    v = load_head(v_ptr, start + key, v_stride, head, key_mask, HEAD_DIM, BLOCK_D)
    c2p_ptr += head * distances * HEAD_DIM
    p2c_ptr += head * distances * HEAD_DIM
    bias_ptr += head * B * _bias_columns(distances, B)
    dp2c_ptr += head * distances * HEAD_DIM
    if DROPOUT:
        _, key_words = _random_words(seed_ptr, start + key, head, HEADS)
    dk = tl.zeros((B, BLOCK_D), tl.float32)
    dv = tl.zeros((B, BLOCK_D), tl.float32)
    carry = _initial_carry(k, p2c_ptr, -first, distances, P2C, FP16_TERMS, HEAD_DIM, BLOCK_D, B)
    remainder = tl.zeros((B, B), k.dtype)
    for block in range(0, length, B):
        query = block + tl.arange(0, B)
        query_mask = query < length
        q = load_head(q_ptr, start + query, q_stride, head, query_mask, HEAD_DIM, BLOCK_D)
        scores, carry = _scores(
            k, q, carry, p2c_ptr, c2p_ptr, bias_ptr, block - first, distances, log2_scale,
            P2C, C2P, BIAS, FP16_TERMS, HEAD_DIM, BLOCK_D, B,
        )  # fmt: skip
        dout = load_head(dout_ptr, start + query, HEADS * HEAD_DIM, head, query_mask, HEAD_DIM, BLOCK_D)
        lse = tl.load(lse_ptr + head * total + start + query, mask=query_mask, other=0.0)
        delta = tl.load(delta_ptr + head * total + start + query, mask=query_mask, other=0.0)
        visible = key_mask[:, None] & query_mask[None, :]
        weights = tl.where(visible, tl.exp2(scores - lse[None, :]), 0.0)
        dweights = tl.dot(v, tl.trans(dout))
        if DROPOUT:
            query_words, _ = _random_words(seed_ptr, start + query, head, HEADS)
            keep = _keep_mask(key_words, query_words, drop_threshold)
            dweights = tl.where(keep, dweights * keep_scale, 0.0)
            dv = tl.dot(tl.where(keep, weights, 0.0).to(dout.dtype), dout, dv)
        else:
            dv = tl.dot(weights.to(dout.dtype), dout, dv)
        dscores = (weights * (dweights - delta[None, :])).to(q.dtype)
        dk = tl.dot(dscores, q, dk)
        if P2C:
            by_distance, remainder = _unshift(dscores, remainder, block - first, B)
            dk = _table_backward(
                by_distance, k, dk, p2c_ptr, dp2c_ptr, bias_ptr, block - first, distances, scale,
                True, False, HEAD_DIM, BLOCK_D, B,
            )  # fmt: skip
    if P2C:
        offset = (length + B - 1) // B * B - first
        dk = _table_backward(
            remainder, k, dk, p2c_ptr, dp2c_ptr, bias_ptr, offset, distances, scale, True, False, HEAD_DIM, BLOCK_D, B
        )
    store_head(dk_ptr, start + key, HEADS * HEAD_DIM, head, key_mask, dk * scale, HEAD_DIM, BLOCK_D)
    store_head(dv_ptr, start + key, HEADS * HEAD_DIM, head, key_mask, dv * keep_scale, HEAD_DIM, BLOCK_D)


# --- scores ---


@jit
def _scores(
    rows, columns, carry, row_table_ptr, column_table_ptr, bias_ptr, offset, distances, log2_scale,
    ROW_TERM: tl.constexpr, COLUMN_TERM: tl.constexpr, BIAS: tl.constexpr, FP16_TERMS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """(B, B) scores in base 2 for tiles `offset` apart; and the row term's products that the next tile reuses."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    earlier = row + column >= B - 1
    shift = _mod(column - row - 1, offset, B)
    next_carry = carry
    terms = tl.zeros((B, B), tl.float32)
    if COLUMN_TERM:
        low_table = _load_table(column_table_ptr, 1 - B - offset, distances, HEAD_DIM, BLOCK_D, B)
        low = _to_fp16(tl.dot(columns, tl.trans(low_table)), FP16_TERMS)
        high_table = _load_table(column_table_ptr, 1 - offset, distances, HEAD_DIM, BLOCK_D, B)
        high = _to_fp16(tl.dot(columns, tl.trans(high_table)), FP16_TERMS)
        column_term = tl.where(earlier, low, high)
    if ROW_TERM:
        table = _load_table(row_table_ptr, offset + 1, distances, HEAD_DIM, BLOCK_D, B)
        next_carry = _to_fp16(tl.dot(rows, tl.trans(table)), FP16_TERMS)
        row_term = tl.where(earlier, carry, next_carry)
    if ROW_TERM and COLUMN_TERM and FP16_TERMS:
        # Both terms shift alike: one gather of packed pairs.
        both = tl.gather(_fp16_bits(row_term) | (_fp16_bits(column_term) << 16), shift, 1)
        terms = _bits_to_float(both & 0xFFFF) + tl.trans(_bits_to_float(both >> 16))
    else:
        if ROW_TERM:
            terms += tl.gather(row_term, shift, 1).to(tl.float32)
        if COLUMN_TERM:
            terms += tl.trans(tl.gather(column_term, shift, 1).to(tl.float32))
    # As the accumulator: if added afterwards, the compiler would use their layout for everything that follows.
    scores = tl.dot(rows, tl.trans(columns), terms) * log2_scale
    if BIAS:
        stride = _bias_columns(distances, B)
        bias = tl.load(bias_ptr + row * stride + (stride - B) // 2 + offset + column)
        scores += bias.to(tl.float32) * 1.4426950408889634
    return scores, next_carry


@jit
def _initial_carry(
    rows, table_ptr, offset, distances,
    ROW_TERM: tl.constexpr, FP16_TERMS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """`carry` of the first column tile."""
    if ROW_TERM:
        table = _load_table(table_ptr, offset + 1 - B, distances, HEAD_DIM, BLOCK_D, B)
        carry = _to_fp16(tl.dot(rows, tl.trans(table)), FP16_TERMS)
    else:
        carry = tl.zeros((B, B), tl.float32)
    return carry


@jit
def _mod(n, offset, B: tl.constexpr):
    """n modulo B. The offset, a multiple of B, does not change the result: it only prevents the compiler, which does
    not know that, from hoisting the indices out of the loop, where they would occupy registers."""
    return (n + offset * offset) & (B - 1)


@jit
def _to_fp16(x, FP16_TERMS: tl.constexpr):
    """Relative position terms as they are carried and shifted: in float16 for half-precision models, bfloat16 ones
    too, because float16 is more accurate at this magnitude."""
    return tl.clamp(x, -65504.0, 65504.0).to(tl.float16) if FP16_TERMS else x


@jit
def _fp16_bits(x):
    return x.to(tl.uint16, bitcast=True).to(tl.uint32)


@jit
def _bits_to_float(x):
    return x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# --- backward of the relative position terms ---


@jit
def _unshift(dscores, remainder, offset, B: tl.constexpr):
    """The gradient with respect to the products with the first of two table tiles, completed by the `remainder` of the
    last iteration; and the remainder of this one, which belongs to the second table tile."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    shifted = tl.gather(dscores, _mod(column + row + 1, offset, B), 1)
    zeros = tl.zeros((B, B), dscores.dtype)
    earlier = row + column >= B - 1
    return tl.where(earlier, shifted, remainder), tl.where(earlier, zeros, shifted)


@jit
def _table_backward(
    by_distance, rows, drows, table_ptr, dtable_ptr, dbias_ptr, offset, distances, scale,
    HAS_TABLE: tl.constexpr, BIAS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Add the gradient through the table's rows from distance offset + 1 − B on to `drows`, to the table's gradient and
    to the bias's."""
    index = offset + 1 - B + distances // 2 + tl.arange(0, B)
    index_mask = (index >= 0) & (index < distances)
    if HAS_TABLE:
        drows = tl.dot(by_distance, _load_table(table_ptr, offset + 1 - B, distances, HEAD_DIM, BLOCK_D, B), drows)
        dtable = tl.dot(tl.trans(by_distance), rows) * scale
        column = tl.arange(0, BLOCK_D)
        mask = index_mask[:, None] & (column < HEAD_DIM)[None, :]
        tl.atomic_add(dtable_ptr + index[:, None] * HEAD_DIM + column[None, :], dtable, mask=mask, sem="relaxed")
    if BIAS:
        tl.atomic_add(dbias_ptr + index, tl.sum(by_distance.to(tl.float32), 0), mask=index_mask, sem="relaxed")
    return drows


# --- memory ---


@jit
def _tile_coordinates(tiles_ptr, HEADS: tl.constexpr, B: tl.constexpr):
    """Head; the text's first token and length; the tile's first position, its positions, and which of them exist."""
    program = tl.program_id(0)
    tile = program // HEADS * 3
    start, length, first = tl.load(tiles_ptr + tile), tl.load(tiles_ptr + tile + 1), tl.load(tiles_ptr + tile + 2)
    first = tl.multiple_of(first, B)
    position = first + tl.arange(0, B)
    return program % HEADS, start, length, first, position, position < length


@jit
def _bias_columns(distances, B: tl.constexpr):
    """Columns of a head's bias table, see `disentangled_attention._skew_bias`."""
    return distances // 2 // B * B * 2 + B


@jit
def _load_table(table_ptr, first, distances, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, B: tl.constexpr):
    """(B, BLOCK_D) a head's table from distance `first` on."""
    row = first + distances // 2 + tl.arange(0, B)
    column = tl.arange(0, BLOCK_D)
    mask = ((row >= 0) & (row < distances))[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(table_ptr + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)


# --- dropout ---


@jit
def _random_words(seed_ptr, tokens, head, HEADS: tl.constexpr):
    """Two random 32-bit words per token and head: one for its query, one for its key."""
    seed = tl.load(seed_ptr)
    index = (tokens * HEADS + head).to(tl.uint32)
    return _murmur3_finalizer(index ^ seed.to(tl.uint32)), _murmur3_finalizer(index ^ (seed >> 32).to(tl.uint32))


@jit
def _keep_mask(row_words, column_words, drop_threshold):
    """(B, B) from the upper bits of a multiplicative hash of two words that are already mixed. One Philox draw per
    attention weight would take longer than everything else."""
    return (row_words[:, None] ^ column_words[None, :]) * 0x9E3779B1 >= drop_threshold.to(tl.uint32) << 16


@jit
def _murmur3_finalizer(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
