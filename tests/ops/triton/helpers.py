"""Random inputs, and comparison of fused kernels with the eager reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.ops.torch import eager

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}}


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype).requires_grad_()


def random_layer_norm(width: int, bias: bool, dtype: torch.dtype = torch.float32) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-6, bias=bias, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def assert_matches_eager(fused: Any, call: Callable[[Any], Tensor], inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Compare outputs and gradients of call(fused) and call(eager)."""
    out = call(fused)
    dout = torch.randn_like(out, dtype=torch.float32).to(out.dtype)
    gradients = torch.autograd.grad(out, inputs, dout)
    expected_out = call(eager)
    expected_gradients = torch.autograd.grad(expected_out, inputs, dout.to(expected_out.dtype))
    assert out.isfinite().all()
    tolerance = TOLERANCE[dtype]
    for actual, expected in zip((out, *gradients), (expected_out, *expected_gradients), strict=True):
        assert actual.dtype == expected.dtype
        scale = max(1.0, float(expected.detach().float().abs().max()))  # sums over rows are larger than their terms
        assert_close(actual.float(), expected.float(), atol=tolerance["atol"] * scale, rtol=tolerance["rtol"])
