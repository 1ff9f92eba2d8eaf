# mypy: ignore-errors
"""Triton kernels of `norm.py`: residual + dropout + LayerNorm, forward and backward, and embeddings + LayerNorm.

Inputs are loaded in their own dtype; arithmetic is in float32. For dropout, eight rows share one Philox draw per
column: each of its four 32-bit words has sixteen bits for two rows. One draw per element would take longer than the
memory traffic.
"""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, store_fp8, tl

ROWS_PER_PROGRAM = 8  # rows that share a Philox draw


@jit
def residual_norm_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, mean_ptr, rstd_ptr, seed_ptr, fp8_ptr, scales_ptr,
    rows, width, eps, drop_threshold, keep_scale,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, STORE_SUM: tl.constexpr,
    STORE_STATS: tl.constexpr, STORE_FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: eight rows, BLOCK_ROWS at a time.

    STORE_SUM: also store residual + dropout(x). STORE_STATS: store mean and rstd for the backward pass. STORE_FP8: also
    store the output in fp8.
    """
    group = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < width
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if DROPOUT:
        # Philox with 7 rounds: the fewest that pass BigCrush (Salmon et al., 2011).
        a, b, c, d = tl.randint4x(tl.load(seed_ptr), group * BLOCK + column, 7)
    for part in tl.static_range(8 // BLOCK_ROWS):
        i = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        row = (group * 8 + i).to(tl.int64)
        mask = in_row & (row < rows)
        x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if DROPOUT:
            x = tl.where(_random_bits(a, b, c, d, i) >= drop_threshold, x * keep_scale, 0.0)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        if STORE_SUM:
            x = x.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * width + column, x, mask=mask)
            x = x.to(tl.float32)  # normalize the rounded sum, as the backward pass will read it
        mean = tl.sum(x, 1, keep_dims=True) / width
        x = tl.where(in_row, x - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
        out = x * rstd * weight
        if HAS_BIAS:
            out += bias
        tl.store(out_ptr + row * width + column, out, mask=mask)
        if STORE_FP8:
            store_fp8(fp8_ptr, scales_ptr, tl.where(in_row, out, 0.0), row, column, rows, width)
        if STORE_STATS:
            tl.store(mean_ptr + row, mean, mask=row < rows)
            tl.store(rstd_ptr + row, rstd, mask=row < rows)


@jit
def residual_norm_backward(
    dout_ptr, x_ptr, residual_ptr, sum_ptr, dsum_ptr, weight_ptr, mean_ptr, rstd_ptr, seed_ptr,
    dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, rows, width, drop_threshold, keep_scale,
    DROPOUT: tl.constexpr, HAS_SUM: tl.constexpr, HAS_DSUM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: groups of eight rows in a grid-stride loop, and partial sums of dweight and dbias.

    HAS_SUM: the forward pass stored residual + dropout(x), which is loaded in place of the two. HAS_DSUM: the sum has
    an incoming gradient too.
    """
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < width
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros((1, BLOCK), tl.float32)
    dbias = tl.zeros((1, BLOCK), tl.float32)
    group = tl.program_id(0)
    while group * 8 < rows:  # not range(): the interpreter fails on a range that starts at a program id
        if DROPOUT:
            a, b, c, d = tl.randint4x(tl.load(seed_ptr), group * BLOCK + column, 7)
        for part in tl.static_range(8 // BLOCK_ROWS):
            i = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
            row = (group * 8 + i).to(tl.int64)
            mask = in_row & (row < rows)
            dout = tl.load(dout_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
            if DROPOUT:
                keep = _random_bits(a, b, c, d, i) >= drop_threshold
            if HAS_SUM:
                x = tl.load(sum_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
                if DROPOUT:
                    x = tl.where(keep, x * keep_scale, 0.0)
                x += tl.load(residual_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)
            rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
            x_hat = tl.where(in_row, (x - mean) * rstd, 0.0)
            dweight += tl.sum(dout * x_hat, 0, keep_dims=True)
            dbias += tl.sum(dout, 0, keep_dims=True)
            dx_hat = dout * weight
            mean_terms = tl.sum(dx_hat, 1, keep_dims=True) / width + x_hat * (
                tl.sum(dx_hat * x_hat, 1, keep_dims=True) / width
            )
            dx = (dx_hat - mean_terms) * rstd
            if HAS_DSUM:
                dx += tl.load(dsum_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
            tl.store(dresidual_ptr + row * width + column, dx, mask=mask)
            if DROPOUT:
                tl.store(dx_ptr + row * width + column, tl.where(keep, dx * keep_scale, 0.0), mask=mask)
        group += tl.num_programs(0)
    offset = tl.program_id(0) * width + column
    tl.store(dweight_ptr + offset, dweight, mask=in_row)
    tl.store(dbias_ptr + offset, dbias, mask=in_row)


@jit
def _random_bits(a, b, c, d, i):
    """Sixteen random bits per column for row i of eight."""
    word = tl.where(i % 4 < 2, tl.where(i % 2 == 0, a, b), tl.where(i % 2 == 0, c, d))
    return ((word >> (16 * (i // 4))) & 0xFFFF).to(tl.int32)


@jit
def embedding_norm_forward(
    table1_ptr, table2_ptr, table3_ptr, ids1_ptr, ids2_ptr, ids3_ptr, weight_ptr, bias_ptr, out_ptr,
    fp8_ptr, scales_ptr, rows, width, eps,
    HAS_TABLE2: tl.constexpr, HAS_TABLE3: tl.constexpr, HAS_BIAS: tl.constexpr, STORE_FP8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of LayerNorm(sum of up to three embeddings)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < width
    row_mask = row < rows
    x = _load_embedding(table1_ptr, ids1_ptr + row, row_mask, column, width)
    if HAS_TABLE2:
        x += _load_embedding(table2_ptr, ids2_ptr + row, row_mask, column, width)
    if HAS_TABLE3:
        x += _load_embedding(table3_ptr, ids3_ptr + row, row_mask, column, width)
    mean = tl.sum(x, 1, keep_dims=True) / width
    x = tl.where(in_row, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    out = x * rstd * tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, out, mask=row_mask & in_row)
    if STORE_FP8:
        store_fp8(fp8_ptr, scales_ptr, tl.where(in_row, out, 0.0), row, column, rows, width)


@jit
def _load_embedding(table_ptr, ids_ptr, row_mask, column, width):
    offset = tl.load(ids_ptr, mask=row_mask, other=0).to(tl.int64) * width + column
    return tl.load(table_ptr + offset, mask=row_mask & (column < width), other=0.0).to(tl.float32)
