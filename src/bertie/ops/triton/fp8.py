"""Products in eight bits on GPUs: e4m3 codes (a sign, four bits of exponent, three of fraction) with one scale a row.

    coded     a tensor's codes: those that the program which made it wrote beside it (`fused.py`), or fresh ones
    activate  the codes of activation(x + bias), gated or not, and nothing else
    product   rows of codes times rows of codes

A row's scale takes its number of greatest size to 448, the greatest of e4m3. Numbers down to a 28,000th of that size
are within a sixteenth of themselves. Nothing here waits for the device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bertie.config import Activation
from bertie.ops import dispatch
from bertie.ops.torch import eager
from bertie.ops.triton.fused import KINDS, WIDEST, Coded, _launching, _power_of_2, room

GREATEST = 448.0  # of e4m3
LEAST = 1e-12  # that a row's greatest counts as, so that rows of zeros have a scale
MULTIPLE = 16  # of both sides of a weight, for the device's products
CAPABILITY = (8, 9)  # of the first GPUs that multiply such codes: Ada, then Hopper and later
TILE = 4096  # values of a program's tile of whole rows


@cache
def can(device: torch.device) -> bool:
    """Whether a device multiplies such codes.

    >>> can(torch.device("cpu"))
    False
    """
    return (
        device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= CAPABILITY
    )


def rounded(x: Tensor) -> Coded:
    """Codes and scales by the plain expression: (T, K) -> (T, K), (T, 1).

    >>> codes, scales = rounded(torch.tensor([[896.0, -10.0, 0.3]]))
    >>> codes.float().tolist(), scales.tolist()
    ([[448.0, -5.0, 0.15625]], [[2.0]])
    """
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST) / GREATEST
    return (wide / scales).to(torch.float8_e4m3fn), scales


def coded(x: Tensor | Coded) -> Coded:
    """Codes (T, K) and scales (T, 1) of a tensor, unless they are there already."""
    if isinstance(x, tuple):
        return x
    there: Coded | None = getattr(x, "fp8", None)
    if there is not None:
        return there
    return _programmed(x, None, "identity", False) if _uses_kernel(x) and x.shape[1] <= WIDEST else rounded(x)


def activate(x: Tensor, bias: Tensor | None, kind: Activation, gated: bool) -> Coded:
    """Codes (T, F) and scales (T, 1) of activation(x + bias); x (T, F), or gated (T, 2F).

    >>> codes, scales = activate(torch.tensor([[-1.0, 3.0]]), torch.tensor([0.0, 4.0]), "relu", False)
    >>> (codes.float() * scales).tolist()
    [[0.0, 7.0]]
    """
    if _uses_kernel(x) and kind in KINDS and x.shape[1] <= (2 if gated else 1) * WIDEST:
        return _programmed(x, bias, kind, gated)
    return rounded(eager.activate(x if bias is None else x + bias, kind, gated))


def _uses_kernel(x: Tensor) -> bool:
    return dispatch.row_for("fp8_quantization", x).backend == "triton.fused.fp8"


def _programmed(x: Tensor, bias: Tensor | None, kind: Activation, gated: bool) -> Coded:
    from bertie.ops.triton import fused_kernels as programs

    x = x.contiguous()
    rows, width = len(x), x.shape[1] // (2 if gated else 1)
    codes, scales = room(rows, width, x.device)
    sizes = _sizes(width)
    with _launching(x):
        programs.activate_codes[(-(-rows // sizes["TALL"]),)](
            *(x, bias, codes, scales, rows, width), KIND=kind, GATED=gated, BIAS=bias is not None, **sizes
        )
    return codes, scales


def _sizes(width: int) -> dict[str, int]:
    block = _power_of_2(width)
    tall = max(1, TILE // max(block, 512))
    return {"TALL": tall, "BLOCK": block, "num_warps": min(16, max(1, tall * block // 512))}


def product(x: Coded, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(T, K) times (N, K) with a scale (N,) -> (T, N); where no device does it, the same numbers in float32.

    >>> weight, scale = rounded(torch.tensor([[1.0, 0.5]]))
    >>> product(rounded(torch.tensor([[2.0, 4.0]])), weight, scale[:, 0], None, torch.float32).tolist()
    [[4.0]]
    """
    codes, scales = x
    if can(codes.device):
        # To bfloat16 for all: of codes with a scale a row, torch writes other numbers with some libraries only.
        added = None if bias is None else bias.bfloat16()
        return torch._scaled_mm(
            codes, weight.T, scales, scale[None], added, out_dtype=torch.bfloat16, use_fast_accum=True
        ).to(dtype)
    y = (codes.float() * scales) @ (weight.float() * scale[:, None]).T
    return (y if bias is None else y + bias).to(dtype)
