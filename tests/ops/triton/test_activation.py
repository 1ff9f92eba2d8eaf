"""Fused bias + activation against the eager reference, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bertie.config import Activation
from bertie.ops.triton import activation as triton_activation
from tests.ops.triton.helpers import DEVICE, TOLERANCE, assert_matches_eager, random_tensor

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "fused_backends", "nan_memory"),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", triton_activation.ACTIVATIONS)
def test_linear_activation(activation: Activation, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, width, dtype in ((9, 20, torch.float32), (9, 20, torch.bfloat16)):
        x = random_tensor(rows, 6, dtype=dtype)
        linear = nn.Linear(6, width, bias=bias, device=DEVICE, dtype=dtype)
        inputs = [x, *linear.parameters()]
        assert_matches_eager(
            triton_activation,
            lambda ops, x=x, linear=linear: ops.linear_activation(x, linear, activation, gated),
            inputs,
            dtype,
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", triton_activation.ACTIVATIONS)
def test_inference(activation: Activation, gated: bool, bias: bool) -> None:
    """By the same kernel, or by a GEMM whose epilogue applies the activation before rounding."""
    for dtype in TOLERANCE:
        x, linear = random_tensor(9, 6, dtype=dtype), nn.Linear(6, 20, bias=bias, device=DEVICE, dtype=dtype)
        trained = triton_activation.linear_activation(x, linear, activation, gated).detach()
        with torch.no_grad():
            inferred = triton_activation.linear_activation(x, linear, activation, gated)
        assert inferred.dtype == dtype
        if bias and not gated and triton_activation._fits_gemm_epilogue(x, linear, activation):
            near = max(5e-4, TOLERANCE[dtype]["atol"])  # the epilogue's GELU may be the tanh approximation
            assert_close(inferred, trained, atol=near, rtol=near)
        else:
            assert torch.equal(inferred, trained)


def test_gelu_is_exact() -> None:
    """GELU and its derivative are within 1e-6 of those with erf in float64, for the largest values too."""
    x = torch.cat([torch.linspace(-12, 12, 24001), torch.tensor([0.0, -0.0, 1e-30, -1e-30])]).to(DEVICE)[:, None]
    linear = nn.Linear(1, 1, device=DEVICE)  # the identity
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.bias.zero_()
    x.requires_grad_()
    out = triton_activation.linear_activation(x, linear, "gelu", gated=False)
    (derivative,) = torch.autograd.grad(out.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    assert_close(out.double(), exact, atol=1e-6, rtol=1e-7)
    assert_close(derivative.double(), torch.autograd.grad(exact.sum(), wide)[0], atol=1e-6, rtol=1e-7)
    far = torch.tensor([[-3e38], [3e38], [-1e4], [1e4]], device=DEVICE, requires_grad=True)
    out = triton_activation.linear_activation(far, linear, "gelu", gated=False)
    assert torch.equal(out.detach(), far.detach().clamp(min=0.0))
    assert torch.autograd.grad(out.sum(), far)[0].tolist() == [[0.0], [1.0], [0.0], [1.0]]


def test_several_blocks_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_activation, "MAX_BLOCK", 16)
    x, linear = random_tensor(21, 6), nn.Linear(6, 2 * 40, device=DEVICE)
    assert_matches_eager(
        triton_activation,
        lambda ops: ops.linear_activation(x, linear, "gelu", True),
        [x, *linear.parameters()],
        torch.float32,
    )


def test_when_the_gemm_applies_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference, ungated, with a bias, and where the result is then more accurate."""
    monkeypatch.setattr(torch, "_addmm_activation", lambda bias, x, weight, use_gelu: ("gemm", use_gelu))
    monkeypatch.setattr(triton_activation._BiasActivation, "run", lambda *call: ("kernel", None))
    monkeypatch.setattr(triton_activation._BiasActivation, "apply", lambda *call: ("training", None))

    def implementation(
        kind: Any, dtype: torch.dtype = torch.bfloat16, bias: bool = True, gated: bool = False, weights: Any = None
    ) -> Any:
        linear = nn.Linear(4, 6, bias=bias, dtype=weights or dtype)
        return triton_activation.linear_activation(torch.zeros(3, 4, dtype=dtype), linear, kind, gated)

    assert implementation("gelu") == ("training", None)
    with torch.no_grad():
        assert implementation("gelu") == implementation("gelu_tanh") == ("gemm", True)
        assert implementation("relu") == ("gemm", False)
        assert implementation("gelu", torch.float16) == ("kernel", None)
        assert implementation("gelu_tanh", torch.float16) == ("gemm", True)
        assert implementation("silu") == ("kernel", None)
        for kind in ("gelu", "gelu_tanh", "relu"):
            assert implementation(kind, gated=True) == ("kernel", None)
            assert implementation(kind, bias=False) == ("kernel", None)
            with torch.autocast("cpu", torch.bfloat16):
                assert implementation(kind, torch.float32) == ("kernel", None)
                assert implementation(kind, weights=torch.float32) == ("kernel", None)
