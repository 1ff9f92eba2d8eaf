"""fp8 GEMMs on GPUs: e4m3 values (4 exponent bits, 3 mantissa bits) with one scale per row.

    quantize               the fp8 rows of a tensor: those that a fused kernel stored with it (`norm.py`), or new ones
    activate_and_quantize  the fp8 rows of activation(x + bias), gated or not
    linear                 fp8 rows times an fp8 weight

A row's scale maps its largest magnitude to 448, the largest of e4m3. Values down to 1/28,000 of that have a relative
error of at most 1/16. Nothing here synchronizes with the device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bertie.config import Activation
from bertie.ops import dispatch
from bertie.ops.torch import eager
from bertie.ops.triton.activation import ACTIVATIONS
from bertie.ops.triton.launch import MAX_WIDTH, Fp8Rows, device_guard, empty_fp8, next_power_of_2

E4M3_MAX = 448.0
MIN_AMAX = 1e-12  # lower bound of a row's largest magnitude, so that rows of zeros have a scale
ALIGNMENT = 16  # of both sides of a weight, for the device's GEMM
MIN_CAPABILITY = (8, 9)  # of GPUs with fp8 GEMMs: Ada, Hopper and later
TILE = 4096  # elements of a tile of whole rows


@cache
def is_supported(device: torch.device) -> bool:
    """Whether a device has fp8 GEMMs.

    >>> is_supported(torch.device("cpu"))
    False
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize_rows(x: Tensor) -> Fp8Rows:
    """Quantize (T, K) with plain PyTorch: values (T, K) and scales (T, 1).

    >>> values, scales = quantize_rows(torch.tensor([[896.0, -10.0, 0.3]]))
    >>> values.float().tolist(), scales.tolist()
    ([[448.0, -5.0, 0.15625]], [[2.0]])
    """
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=MIN_AMAX) / E4M3_MAX
    return (wide / scales).to(torch.float8_e4m3fn), scales


def quantize(x: Tensor | Fp8Rows) -> Fp8Rows:
    """The fp8 rows of a tensor, unless it has them already."""
    if isinstance(x, tuple):
        return x
    stored: Fp8Rows | None = getattr(x, "fp8", None)
    if stored is not None:
        return stored
    if _uses_kernel(x) and x.shape[1] <= MAX_WIDTH:
        return _activate_and_quantize(x, None, "identity", False)
    return quantize_rows(x)


def activate_and_quantize(x: Tensor, bias: Tensor | None, activation: Activation, gated: bool) -> Fp8Rows:
    """The fp8 rows (T, F) of activation(x + bias); x (T, F), or gated (T, 2F).

    >>> values, scales = activate_and_quantize(torch.tensor([[-1.0, 3.0]]), torch.tensor([0.0, 4.0]), "relu", False)
    >>> (values.float() * scales).tolist()
    [[0.0, 7.0]]
    """
    if _uses_kernel(x) and activation in ACTIVATIONS and x.shape[1] <= (2 if gated else 1) * MAX_WIDTH:
        return _activate_and_quantize(x, bias, activation, gated)
    return quantize_rows(eager.activate(x if bias is None else x + bias, activation, gated))


def linear(x: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x (T, K) times weight (N, K) with a scale (N,) -> (T, N); emulated in float32 where there is no fp8 GEMM.

    >>> weight, scale = quantize_rows(torch.tensor([[1.0, 0.5]]))
    >>> linear(quantize_rows(torch.tensor([[2.0, 4.0]])), weight, scale[:, 0], None, torch.float32).tolist()
    [[4.0]]
    """
    values, scales = x
    if is_supported(values.device):
        # Always to bfloat16: torch supports other outputs with row-wise scales only in some builds.
        bias = None if bias is None else bias.bfloat16()
        return torch._scaled_mm(
            values, weight.T, scales, scale[None], bias, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    y = (values.float() * scales) @ (weight.float() * scale[:, None]).T
    return (y if bias is None else y + bias).to(dtype)


def _uses_kernel(x: Tensor) -> bool:
    return dispatch.row_for("fp8_quantization", x).backend == "triton.fused.fp8"


def _activate_and_quantize(x: Tensor, bias: Tensor | None, activation: Activation, gated: bool) -> Fp8Rows:
    from bertie.ops.triton import activation_kernels as kernels

    x = x.contiguous()
    rows, width = len(x), x.shape[1] // (2 if gated else 1)
    values, scales = empty_fp8(rows, width, x.device)
    blocks = _block_sizes(width)
    with device_guard(x):
        kernels.activation_fp8[(-(-rows // blocks["BLOCK_ROWS"]),)](
            *(x, bias, values, scales, rows, width),
            ACTIVATION=activation,
            GATED=gated,
            HAS_BIAS=bias is not None,
            **blocks,
        )
    return values, scales


def _block_sizes(width: int) -> dict[str, int]:
    block = next_power_of_2(width)
    rows = max(1, TILE // max(block, 512))
    return {"BLOCK_ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 512))}
