"""Fused bias + activation of a feed-forward's first linear layer, gated or not (`activation_kernels.py`).

The reference is `ops/torch/eager.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertie.config import Activation
from bertie.ops.contracts import compute_dtype, needs_grad
from bertie.ops.torch import eager
from bertie.ops.triton.launch import device_guard, max_programs, next_power_of_2

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # that the kernels implement
MAX_BLOCK = 1024  # columns of a tile
# Fastest on an H200 (python -m benchmarks.fused), forward and backward: elements and warps of a tile, and programs per
# multiprocessor of the backward kernel.
TILE, WARPS, PROGRAMS = (2048, 1024), (2, 4), 16


def linear_activation(x: Tensor, linear: nn.Module, activation: Activation, gated: bool) -> Tensor:
    """As `eager.linear_activation`."""
    if not isinstance(linear, nn.Linear):  # a quantized layer
        return eager.linear_activation(x, linear, activation, gated)
    training = needs_grad(x, linear.weight, linear.bias)
    if not training and not gated and linear.bias is not None and _fits_gemm_epilogue(x, linear, activation):
        return torch._addmm_activation(linear.bias, x, linear.weight.T, use_gelu=activation != "relu")
    y = F.linear(x, linear.weight)
    if training:
        out: Tensor = _BiasActivation.apply(y, linear.bias, activation, gated)  # type: ignore[no-untyped-call]
        return out
    return _BiasActivation.run(y, linear.bias, activation, gated)


def _fits_gemm_epilogue(x: Tensor, linear: nn.Linear, activation: Activation) -> bool:
    """Whether cuBLAS may apply the activation in the GEMM's epilogue, before anything is rounded.

    Its GELU is the tanh approximation, up to 5e-4 from the exact one. That is less than bfloat16 loses when the GEMM's
    output is stored and loaded again, so that the result is closer to the exact one. In float16 it is not.
    """
    if x.dtype != compute_dtype(x) or linear.weight.dtype != x.dtype:
        return False  # autocast would cast them
    return activation in ("gelu_tanh", "relu") or (activation == "gelu" and x.dtype == torch.bfloat16)


class _BiasActivation(torch.autograd.Function):
    """activation(x + bias): (T, F) -> (T, F), or gated (T, 2F) -> (T, F)."""

    @staticmethod
    def run(x: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
        from bertie.ops.triton import activation_kernels as kernels

        x = x.contiguous()
        rows, width = len(x), x.shape[1] // (2 if gated else 1)
        out = x.new_empty(rows, width)
        blocks = _block_sizes(width, 0)
        with device_guard(x):
            kernels.activation_forward[(-(-rows // blocks["BLOCK_ROWS"]), -(-width // blocks["BLOCK"]))](
                *(x, bias, out, rows, width), ACTIVATION=activation, GATED=gated, HAS_BIAS=bias is not None, **blocks
            )
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, gated: bool) -> Tensor:
        ctx.activation, ctx.gated = activation, gated
        ctx.save_for_backward(x, bias)
        return _BiasActivation.run(x, bias, activation, gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        from bertie.ops.triton import activation_kernels as kernels

        x, bias = ctx.saved_tensors
        x, dout = x.contiguous(), dout.contiguous()
        rows, width = dout.shape
        dx = torch.empty_like(x)
        blocks = _block_sizes(width, 1)
        programs = min(-(-rows // blocks["BLOCK_ROWS"]), max_programs(x.device, PROGRAMS))
        partial_sums = None if bias is None else torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
        with device_guard(x):
            kernels.activation_backward[(programs, -(-width // blocks["BLOCK"]))](
                *(dout, x, bias, dx, partial_sums, rows, width),
                ACTIVATION=ctx.activation,
                GATED=ctx.gated,
                HAS_BIAS=bias is not None,
                **blocks,
            )
        return dx, None if partial_sums is None else partial_sums.sum(0).to(bias.dtype), None, None


def _block_sizes(width: int, backward: int) -> dict[str, int]:
    """Tiles whose columns divide the width, as far as powers of two do."""
    block = min(MAX_BLOCK, max(64, width & -width), next_power_of_2(width))
    return {"BLOCK_ROWS": max(1, TILE[backward] // block), "BLOCK": block, "num_warps": WARPS[backward]}
