"""The fused programs, in a process of their own; and what is there without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bertie.kernels import fused
from tests.kernels.compiled import compiled


def test_the_programs() -> None:
    """On a GPU as they are, elsewhere interpreted. Without Triton there are none, and that is said."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    cases = Path(__file__).with_name("fused_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("residual", ["bf16", "fp32"])
def test_norms_compiled(residual: str, drop: bool, keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.kernels import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    half = dict.fromkeys(("x_at", "out_at", "up_at", "dx_at", "weight_at"), "*bf16")
    single = dict.fromkeys(("mean_at", "rstd_at", "dweight_at", "dbias_at"), "*fp32") | {"eps": "fp32", "scale": "fp32"}
    wide = dict.fromkeys(("residual_at", "sum_at", "sum_up_at", "dresidual_at"), f"*{residual}")
    types = half | single | wide | {"seed_at": "*i64"}
    absent = [] if drop else ["seed_at"]
    common = {"DROP": drop, "SUM": keep, "BLOCK": 1024}
    there = dict.fromkeys(["bias_at", *absent, *([] if keep else ["sum_at"])]) | common | {"BIAS": False}
    compiled(programs.add_norm_forward, types, there, warps=8)
    gone = ["x_at", "residual_at"] if keep else ["sum_at", "sum_up_at"]
    back = dict.fromkeys([*absent, *gone, *([] if drop else ["dx_at"])]) | common
    compiled(programs.add_norm_backward, types, back, warps=4)


def test_the_programs_are_for_half_precision_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_has_triton", lambda: True)
    for on in (False, True):
        monkeypatch.setattr(fused, "enabled", on)
        assert not fused.takes(torch.zeros(1, dtype=torch.bfloat16))

    class OnGpu:
        is_cuda, device, dtype = True, torch.device("cpu"), torch.bfloat16  # a GPU's autocast needs a GPU

    one = OnGpu()
    assert fused.takes(one)  # type: ignore[arg-type]
    one.dtype = torch.float32
    assert not fused.takes(one)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.takes(one)  # type: ignore[arg-type]
    monkeypatch.setattr(fused, "_has_triton", lambda: False)
    one.dtype = torch.bfloat16
    assert not fused.takes(one)  # type: ignore[arg-type]


def test_the_plain_expressions_change_no_bit() -> None:
    torch.manual_seed(0)
    x, residual, norm, linear = torch.randn(5, 8), torch.randn(5, 8), nn.LayerNorm(8), nn.Linear(8, 12)
    torch.manual_seed(1)
    got = fused.add_norm(x, residual, norm, 0.5)
    torch.manual_seed(1)
    assert torch.equal(got, norm(residual + F.dropout(x, 0.5)))
    for post, pre in ((norm, nn.Identity()), (nn.Identity(), norm)):
        total, normed = fused.add_norms(x, residual, post, pre, 0.0)
        assert torch.equal(total, post(residual + x))
        assert torch.equal(normed, norm(residual + x))
    assert torch.equal(fused.expand(x, linear, "gelu", gated=False), F.gelu(linear(x)))
    act, factor = linear(x).chunk(2, dim=-1)
    assert torch.equal(fused.expand(x, linear, "silu", gated=True), F.silu(act) * factor)
    targets, weights = torch.randint(12, (5,)), torch.rand(5)
    each = F.cross_entropy(linear(x), targets, reduction="none")
    assert torch.equal(fused.surprise(x, linear.weight, linear.bias, targets, weights), (each * weights).sum())
