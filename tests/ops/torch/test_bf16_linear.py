"""Linear layers in bf16 on a CPU, against those in float32, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.ops.native import encoder
from bertie.ops.torch import bf16_linear
from bertie.ops.torch.bf16_linear import MIN_ROWS, Bf16Linear, is_supported


@pytest.fixture
def supported() -> None:
    """The rest of the test runs only where torch's bf16 kernels do not kill the process."""
    if not is_supported():
        pytest.skip("no bf16 on this CPU")


def gradients(x: Tensor, linear: nn.Linear, upstream: Tensor) -> list[Tensor]:
    out = linear(x)
    return [out, *torch.autograd.grad(out, [x, *linear.parameters()], upstream)]


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_near_float32(bias: bool) -> None:
    torch.manual_seed(0)
    x, linear, upstream = torch.randn(50, 24, requires_grad=True), nn.Linear(24, 40, bias=bias), torch.randn(50, 40)
    exact = gradients(x, linear, upstream)
    with Bf16Linear():
        rounded = gradients(x, linear, upstream)
    for fast, slow in zip(rounded, exact, strict=True):
        assert fast.dtype == torch.float32
        assert_close(fast, slow, atol=0.02 * float(slow.detach().abs().max()), rtol=0)
    assert not torch.equal(rounded[0], exact[0])
    assert torch.equal(gradients(x, linear, upstream)[0], exact[0])  # afterwards as before


def test_few_rows_other_dtypes_and_other_functions_are_left_alone() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(MIN_ROWS - 1, 24), torch.randn(40, 24)
    with Bf16Linear():
        assert torch.equal(F.linear(x, weight), x @ weight.T)
        assert F.linear(x.double(), weight.double()).dtype == torch.float64
        wide = torch.randn(64, 24)
        assert torch.equal(wide @ weight.T, torch.mm(wide, weight.T))


@pytest.mark.parametrize("trial", ["import os; os.abort()", "assert 1 == 2", "import time; time.sleep(60)"])
def test_a_cpu_whose_kernels_fail_is_not_supported(trial: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "bf16_is_faster", lambda: True)
    monkeypatch.setattr(bf16_linear, "_TRIAL", trial)
    monkeypatch.setattr(bf16_linear, "TRIAL_SECONDS", 0.5)
    is_supported.cache_clear()
    try:
        assert not is_supported()
    finally:
        is_supported.cache_clear()
