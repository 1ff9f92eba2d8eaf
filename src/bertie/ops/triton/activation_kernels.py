# mypy: ignore-errors
"""Triton kernels of `activation.py` and `fp8.py`: activation(x + bias), gated or not, forward and backward.

Inputs are loaded in their own dtype; arithmetic is in float32.
"""

from __future__ import annotations

from bertie.ops.triton.kernel_utils import jit, store_fp8, tl


@jit
def activation_forward(
    x_ptr, bias_ptr, out_ptr, rows, width, ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a tile of BLOCK_ROWS by BLOCK outputs."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    out = _activate(x_ptr, bias_ptr, row, column, rows, width, ACTIVATION, GATED, HAS_BIAS)
    tl.store(out_ptr + row * width + column, out, mask=(row < rows) & (column < width))


@jit
def activation_fp8(
    x_ptr, bias_ptr, fp8_ptr, scales_ptr, rows, width,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS whole rows, stored in fp8 only."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    out = _activate(x_ptr, bias_ptr, row, column, rows, width, ACTIVATION, GATED, HAS_BIAS)
    store_fp8(fp8_ptr, scales_ptr, out, row, column, rows, width)


@jit
def _activate(
    x_ptr, bias_ptr, row, column, rows, width,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile in float32, zero outside the matrix."""
    mask = (row < rows) & (column < width)
    stride = width * 2 if GATED else width
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    out = _function(x, ACTIVATION)
    if GATED:
        gate = tl.load(x_ptr + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            gate += tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
        out *= gate
    return out


@jit
def activation_backward(
    dout_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, width,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: tiles of BLOCK columns in a grid-stride loop over the rows, and partial sums of dbias."""
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    stride = width * 2 if GATED else width
    dbias = tl.zeros((BLOCK,), tl.float32)
    dgate_bias = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        if GATED:
            gate_bias = tl.load(bias_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    tile = tl.program_id(0)
    while tile * BLOCK_ROWS < rows:
        row = (tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
        mask = (row < rows) & (column < width)
        dout = tl.load(dout_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += bias
        if GATED:
            gate = tl.load(x_ptr + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                gate += gate_bias
            dgate = dout * _function(x, ACTIVATION)
            tl.store(dx_ptr + row * stride + width + column, dgate, mask=mask)
            if HAS_BIAS:
                dgate_bias += tl.sum(dgate, 0)
            dout *= gate
        dx = dout * _derivative(x, ACTIVATION)
        tl.store(dx_ptr + row * stride + column, dx, mask=mask)
        if HAS_BIAS:
            dbias += tl.sum(dx, 0)
        tile += tl.num_programs(0)
    if HAS_BIAS:
        bias_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        offset = tl.program_id(0) * stride + bias_column
        tl.store(dbias_ptr + offset, dbias, mask=bias_column < width)
        if GATED:
            tl.store(dbias_ptr + offset + width, dgate_bias, mask=bias_column < width)


@jit
def _normal_cdf_and_pdf(x):
    """The standard normal CDF, within 1e-7 (Abramowitz and Stegun 7.1.26), and the density, with one exponential.

    CUDA's erf takes longer than loading and storing x.
    """
    bell = tl.exp(-0.5 * x * x)
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / √2
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * bell
    return tl.where(x < 0.0, tail, 1.0 - tail), bell * 0.3989422804014327


@jit
def _function(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        cdf, _ = _normal_cdf_and_pdf(x)
        out = x * cdf
    elif ACTIVATION == "gelu_tanh":
        out = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        out = x * tl.sigmoid(x)
    elif ACTIVATION == "identity":
        out = x
    else:
        tl.static_assert(ACTIVATION == "relu")
        out = tl.where(x > 0.0, x, 0.0)
    return out


@jit
def _derivative(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        cdf, pdf = _normal_cdf_and_pdf(x)
        out = cdf + x * pdf
    elif ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        out = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        out = s * (1.0 + x * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "relu")
        out = tl.where(x > 0.0, 1.0, 0.0)
    return out
