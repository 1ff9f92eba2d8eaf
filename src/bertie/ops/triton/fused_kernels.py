# mypy: ignore-errors
"""The Triton programs behind `fused.py`, which says what they compute. Only that file calls them.

Values are read in the precision they lie in and computed in float32. Eight rows share one draw of random numbers: its
four words have sixteen bits for each of two rows. (One draw a number would take longer than reading and writing it.)
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:  # then nothing here is called

    def jit(program):
        """The program as it stands."""
        return program


ROWS = 8  # that share a draw


@jit
def add_norm_forward(
    x_at, residual_at, weight_at, bias_at, out_at, sum_at, mean_at, rstd_at, seed_at, codes_at, scales_at,
    rows, width, eps, dropped, scale,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr, SUM: tl.constexpr, KEEP: tl.constexpr,
    CODES: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: `ROWS` rows, TALL at a time. With SUM, what is normalized is written too; with KEEP, what the way back
    needs to know of it; with CODES, the norm in eight bits."""
    group = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        # Of 7 rounds: the fewest that pass every test.
        a, b, c, d = tl.randint4x(tl.load(seed_at), group * BLOCK + column, 7)
    for part in tl.static_range(8 // TALL):
        i = part * TALL + tl.arange(0, TALL)[:, None]
        row = (group * 8 + i).to(tl.int64)
        there = inside & (row < rows)
        x = tl.load(x_at + row * width + column, mask=there, other=0.0).to(tl.float32)
        if DROP:
            x = tl.where(_bits(a, b, c, d, i) >= dropped, x * scale, 0.0)
        if RESIDUAL:
            x += tl.load(residual_at + row * width + column, mask=there, other=0.0).to(tl.float32)
        if SUM:
            x = x.to(sum_at.dtype.element_ty)
            tl.store(sum_at + row * width + column, x, mask=there)
            x = x.to(tl.float32)  # as it will be read
        mean = tl.sum(x, 1, keep_dims=True) / width
        x = tl.where(inside, x - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
        out = x * rstd * weight
        if BIAS:
            out += bias
        tl.store(out_at + row * width + column, out, mask=there)
        if CODES:
            _store_codes(codes_at, scales_at, tl.where(inside, out, 0.0), row, column, rows, width)
        if KEEP:
            tl.store(mean_at + row, mean, mask=row < rows)
            tl.store(rstd_at + row, rstd, mask=row < rows)


@jit
def add_norm_backward(
    up_at, x_at, residual_at, sum_at, sum_up_at, weight_at, mean_at, rstd_at, seed_at,
    dx_at, dresidual_at, dweight_at, dbias_at, rows, width, dropped, scale,
    DROP: tl.constexpr, SUM: tl.constexpr, SUM_UP: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: every so many-th `ROWS` rows, and the sums over them for weight and bias. With SUM, what was
    normalized was kept in place of what it was made of; with SUM_UP it has a gradient of its own."""
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    weight = tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((1, BLOCK), tl.float32)
    dbias = tl.zeros((1, BLOCK), tl.float32)
    group = tl.program_id(0)
    while group * 8 < rows:  # not a range: the interpreter fails on one that begins with a program's number
        if DROP:
            a, b, c, d = tl.randint4x(tl.load(seed_at), group * BLOCK + column, 7)
        for part in tl.static_range(8 // TALL):
            i = part * TALL + tl.arange(0, TALL)[:, None]
            row = (group * 8 + i).to(tl.int64)
            there = inside & (row < rows)
            up = tl.load(up_at + row * width + column, mask=there, other=0.0).to(tl.float32)
            if DROP:
                kept = _bits(a, b, c, d, i) >= dropped
            if SUM:
                x = tl.load(sum_at + row * width + column, mask=there, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_at + row * width + column, mask=there, other=0.0).to(tl.float32)
                if DROP:
                    x = tl.where(kept, x * scale, 0.0)
                x += tl.load(residual_at + row * width + column, mask=there, other=0.0).to(tl.float32)
            mean = tl.load(mean_at + row, mask=row < rows, other=0.0)
            rstd = tl.load(rstd_at + row, mask=row < rows, other=0.0)
            x = tl.where(inside, (x - mean) * rstd, 0.0)  # normalized
            dweight += tl.sum(up * x, 0, keep_dims=True)
            dbias += tl.sum(up, 0, keep_dims=True)
            up *= weight
            across = tl.sum(up, 1, keep_dims=True) / width + x * (tl.sum(up * x, 1, keep_dims=True) / width)
            down = (up - across) * rstd
            if SUM_UP:
                down += tl.load(sum_up_at + row * width + column, mask=there, other=0.0).to(tl.float32)
            tl.store(dresidual_at + row * width + column, down, mask=there)
            if DROP:
                tl.store(dx_at + row * width + column, tl.where(kept, down * scale, 0.0), mask=there)
        group += tl.num_programs(0)
    part_at = tl.program_id(0) * width + column
    tl.store(dweight_at + part_at, dweight, mask=inside)
    tl.store(dbias_at + part_at, dbias, mask=inside)


@jit
def _bits(a, b, c, d, i):
    """Sixteen random bits a column for row i of eight."""
    word = tl.where(i % 4 < 2, tl.where(i % 2 == 0, a, b), tl.where(i % 2 == 0, c, d))
    return ((word >> (16 * (i // 4))) & 0xFFFF).to(tl.int32)


@jit
def embed_norm(
    first_at, second_at, third_at, first_row_at, second_row_at, third_row_at, weight_at, bias_at, out_at,
    codes_at, scales_at, rows, width, eps,
    SECOND: tl.constexpr, THIRD: tl.constexpr, BIAS: tl.constexpr, CODES: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: TALL rows. With CODES, they are written in eight bits too."""
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < width
    there = row < rows
    x = _looked_up(first_at, first_row_at + row, there, column, width)
    if SECOND:
        x += _looked_up(second_at, second_row_at + row, there, column, width)
    if THIRD:
        x += _looked_up(third_at, third_row_at + row, there, column, width)
    mean = tl.sum(x, 1, keep_dims=True) / width
    x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / width + eps)
    out = x * rstd * tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias_at + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_at + row * width + column, out, mask=there & inside)
    if CODES:
        _store_codes(codes_at, scales_at, tl.where(inside, out, 0.0), row, column, rows, width)


@jit
def _store_codes(codes_at, scales_at, x, row, column, rows, width):
    """Whole rows, zero past their ends, as e4m3 with one scale each: as `fp8.rounded` has it."""
    top = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True), 1e-12)
    codes = (x * (448.0 / top)).to(codes_at.dtype.element_ty)
    tl.store(codes_at + row * width + column, codes, mask=(row < rows) & (column < width))
    tl.store(scales_at + row, top / 448.0, mask=row < rows)


@jit
def _looked_up(table_at, row_at, there, column, width):
    at = tl.load(row_at, mask=there, other=0).to(tl.int64) * width + column
    return tl.load(table_at + at, mask=there & (column < width), other=0.0).to(tl.float32)


@jit
def activate_forward(
    x_at, bias_at, out_at, rows, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: a tile of TALL × BLOCK outputs."""
    row = (tl.program_id(0) * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    out = _activated(x_at, bias_at, row, column, rows, width, KIND, GATED, BIAS)
    tl.store(out_at + row * width + column, out, mask=(row < rows) & (column < width))


@jit
def activate_codes(
    x_at, bias_at, codes_at, scales_at, rows, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: TALL whole rows, in eight bits alone."""
    row = (tl.program_id(0) * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    out = _activated(x_at, bias_at, row, column, rows, width, KIND, GATED, BIAS)
    _store_codes(codes_at, scales_at, out, row, column, rows, width)


@jit
def _activated(
    x_at, bias_at, row, column, rows, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Outputs in float32, zero where there are none."""
    there = (row < rows) & (column < width)
    stride = width * 2 if GATED else width
    x = tl.load(x_at + row * stride + column, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_at + column, mask=column < width, other=0.0).to(tl.float32)
    out = _value(x, KIND)
    if GATED:
        gate = tl.load(x_at + row * stride + width + column, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            gate += tl.load(bias_at + width + column, mask=column < width, other=0.0).to(tl.float32)
        out *= gate
    return out


@jit
def activate_backward(
    up_at, x_at, bias_at, dx_at, dbias_at, rows, width, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: every so many-th tile of its columns, and the sums over them for the bias."""
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    stride = width * 2 if GATED else width
    dbias = tl.zeros((BLOCK,), tl.float32)
    dgate_bias = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        bias = tl.load(bias_at + column, mask=column < width, other=0.0).to(tl.float32)
        if GATED:
            gate_bias = tl.load(bias_at + width + column, mask=column < width, other=0.0).to(tl.float32)
    tile = tl.program_id(0)
    while tile * TALL < rows:
        row = (tile * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
        there = (row < rows) & (column < width)
        up = tl.load(up_at + row * width + column, mask=there, other=0.0).to(tl.float32)
        x = tl.load(x_at + row * stride + column, mask=there, other=0.0).to(tl.float32)
        if BIAS:
            x += bias
        if GATED:
            gate = tl.load(x_at + row * stride + width + column, mask=there, other=0.0).to(tl.float32)
            if BIAS:
                gate += gate_bias
            dgate = up * _value(x, KIND)
            tl.store(dx_at + row * stride + width + column, dgate, mask=there)
            if BIAS:
                dgate_bias += tl.sum(dgate, 0)
            up *= gate
        dx = up * _slope(x, KIND)
        tl.store(dx_at + row * stride + column, dx, mask=there)
        if BIAS:
            dbias += tl.sum(dx, 0)
        tile += tl.num_programs(0)
    if BIAS:
        own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        part = tl.program_id(0) * stride + own
        tl.store(dbias_at + part, dbias, mask=own < width)
        if GATED:
            tl.store(dbias_at + part + width, dgate_bias, mask=own < width)


@jit
def _normal(x):
    """The normal distribution's share below x, within 1e-7 (Abramowitz and Stegun 7.1.26), and its density at x: by one
    exponential. The library's erf takes longer than reading and writing x."""
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / √2
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), bell * 0.3989422804014327


@jit
def _value(x, KIND: tl.constexpr):
    if KIND == "gelu":
        share, _ = _normal(x)
        out = x * share
    elif KIND == "gelu_tanh":
        out = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "silu":
        out = x * tl.sigmoid(x)
    elif KIND == "identity":
        out = x
    else:
        tl.static_assert(KIND == "relu")
        out = tl.where(x > 0.0, x, 0.0)
    return out


@jit
def _slope(x, KIND: tl.constexpr):
    if KIND == "gelu":
        share, density = _normal(x)
        out = share + x * density
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        out = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif KIND == "silu":
        s = tl.sigmoid(x)
        out = s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(KIND == "relu")
        out = tl.where(x > 0.0, 1.0, 0.0)
    return out


@jit
def fused_linear_cross_entropy(
    logits_at, bias_at, target_at, weight_at, loss_at, VOCAB: tl.constexpr, STRIDE: tl.constexpr,
    GRAD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program: a row. With GRAD its logits give way to their gradient, zero in the columns past the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * STRIDE
    columns = tl.arange(0, BLOCK)
    target = tl.load(target_at + row)
    weight = tl.load(weight_at + row)
    wanted = tl.load(logits_at + target).to(tl.float32)  # now: its place is written to below
    if BIAS:
        wanted += tl.load(bias_at + target).to(tl.float32)
    top = tl.full((BLOCK,), -1e30, tl.float32)  # a column of each block; and the sum of exp(x − top)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        at = start + columns
        x = tl.load(logits_at + at, mask=at < STRIDE, other=0.0).to(tl.float32)
        if BIAS:
            x += tl.load(bias_at + at, mask=at < VOCAB, other=0.0).to(tl.float32)
        x = tl.where(at < VOCAB, x, -1e30)
        higher = tl.maximum(top, x)
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    highest = tl.max(top, 0)
    level = highest + tl.log(tl.sum(total * tl.exp(top - highest), 0))
    tl.store(loss_at + row, tl.where(weight > 0.0, (level - wanted) * weight, 0.0))
    if GRAD:
        for start in range(0, STRIDE, BLOCK):
            at = start + columns
            x = tl.load(logits_at + at, mask=at < STRIDE, other=0.0).to(tl.float32)
            if BIAS:
                x += tl.load(bias_at + at, mask=at < VOCAB, other=0.0).to(tl.float32)
            x = tl.where(at < VOCAB, x, -1e30)
            down = (tl.exp(x - level) - tl.where(at == target, 1.0, 0.0)) * weight
            tl.store(logits_at + at, tl.where(weight > 0.0, down, 0.0), mask=at < STRIDE)


@jit
def pool(hidden_at, ends_at, out_at, width, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program: BLOCK columns of a text. Each is added up by one thread, row after row: in no other order, however
    the program was compiled."""
    text = tl.program_id(0).to(tl.int64)
    start, end = tl.load(ends_at + text).to(tl.int64), tl.load(ends_at + text + 1).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    nothing = float("-inf") if MODE == "max" else 0.0
    out = tl.full((BLOCK,), nothing, tl.float32)
    row = start
    while row < end:
        for i in tl.static_range(ROWS):
            there = inside & (row + i < end)
            x = tl.load(hidden_at + (row + i) * width + column, mask=there, other=nothing).to(tl.float32)
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
    tl.store(out_at + text * width + column, out, mask=inside)
