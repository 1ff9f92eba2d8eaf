"""Accuracy of fused activations. (Small sizes: tests/ops/triton/test_activation.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.config import Activation
from bertie.ops.torch.eager import activation_function
from bertie.ops.triton import activation as triton_activation
from bertie.ops.triton.launch import HALF

pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_gelu_in_the_gemm_epilogue_is_more_accurate() -> None:
    """Than the exact GELU of an output that was rounded to bfloat16: on average."""
    x, linear = torch.randn(4096, 768, device="cuda").bfloat16(), nn.Linear(768, 3072, device="cuda").bfloat16()
    with torch.no_grad():
        linear.weight *= 3.0  # outputs of magnitude 1
        exact = F.gelu(F.linear(x.double(), linear.weight.double(), linear.bias.double()))
        assert triton_activation._fits_gemm_epilogue(x, linear, "gelu")
        one = triton_activation.linear_activation(x, linear, "gelu", gated=False)
        two = triton_activation._BiasActivation.run(F.linear(x, linear.weight), linear.bias, "gelu", False)
        three = F.gelu(linear(x))
    errors = [float((way.double() - exact).abs().mean()) for way in (one, two, three)]
    assert errors[0] < min(errors[1:]), errors
    assert_close(one.double(), exact, atol=3e-2, rtol=1e-2)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_inference(dtype: torch.dtype, activation: Activation) -> None:
    """Within one or two roundings of the exact result, with every implementation."""
    x, linear = torch.randn(513, 384, device="cuda").to(dtype), nn.Linear(384, 1536, device="cuda").to(dtype)
    with torch.no_grad():
        wide = F.linear(*(one.double() for one in (x, *linear.parameters())))
        actual = triton_activation.linear_activation(x, linear, activation, gated=False)
        expected = activation_function(activation)(wide)
    near = 2e-2 if dtype == torch.bfloat16 else 3e-3
    assert actual.dtype == dtype
    assert_close(actual.double(), expected, atol=near, rtol=near)
