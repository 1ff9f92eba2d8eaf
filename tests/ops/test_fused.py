"""The fused programs, in a process of their own; and what is there without them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bertie.nn.pooling import Pooling
from bertie.ops import disable
from bertie.ops.contracts import compute_dtype, needs_grad
from bertie.ops.dispatch import Site, row_for, select
from bertie.ops.torch import eager
from bertie.ops.triton import fused
from bertie.text.batch import Batch
from tests.ops.compiled import compiled
from tests.ops.forced import forced, hardware

CODES = {"codes_at": "*fp8e4nv", "scales_at": "*fp32"}


def test_the_programs() -> None:
    """On a GPU as they are, elsewhere interpreted. Without Triton there are none, and that is said."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    environment = dict(os.environ) if torch.cuda.is_available() else os.environ | {"TRITON_INTERPRET": "1"}
    cases = Path(__file__).with_name("fused_programs.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    ("residual", "drop", "keep", "width"),
    [
        *product(["bf16", "fp32"], [True, False], [True, False], [768]),
        ("bf16", True, True, 384),
        ("", False, False, 768),
    ],
)
def test_norms_compiled(
    residual: str, drop: bool, keep: bool, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sum, which is kept or not; and of one part alone."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    half = dict.fromkeys(("x_at", "out_at", "up_at", "dx_at", "weight_at"), "*bf16")
    single = dict.fromkeys(("mean_at", "rstd_at", "dweight_at", "dbias_at"), "*fp32") | {"eps": "fp32", "scale": "fp32"}
    wide = dict.fromkeys(("residual_at", "sum_at", "sum_up_at", "dresidual_at"), f"*{residual or 'bf16'}")
    types = half | single | wide | {"seed_at": "*i64"} | CODES
    absent = ["bias_at", *([] if drop else ["seed_at"]), *([] if residual else ["residual_at"])]
    for learn in (True, False):
        gone = [*absent, *([] if keep else ["sum_at"]), *(CODES if learn else ["mean_at", "rstd_at"])]
        there = {"RESIDUAL": bool(residual), "BIAS": False, "DROP": drop, "SUM": keep, "KEEP": learn}
        there["CODES"] = not learn
        _compiled(programs.add_norm_forward, types, dict.fromkeys(gone) | there, fused._norm_sizes(width, 0))
    known = keep or not residual  # what was normalized
    gone = [*([] if drop else ["seed_at", "dx_at"]), *(["x_at", "residual_at"] if known else ["sum_at"])]
    back = dict.fromkeys(gone if keep else [*gone, "sum_up_at"]) | {"DROP": drop, "SUM": known, "SUM_UP": keep}
    _compiled(programs.add_norm_backward, types, back, fused._norm_sizes(width, 1))


@pytest.mark.parametrize(("gated", "width", "bias"), [(False, 3072, True), (True, 1152, False)])
@pytest.mark.parametrize("kind", fused.KINDS)
def test_activations_compiled(
    kind: str, gated: bool, width: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("x_at", "out_at", "up_at", "dx_at", "bias_at"), "*bf16") | {"dbias_at": "*fp32"}
    common: dict[str, Any] = {"KIND": kind, "GATED": gated, "BIAS": bias}
    absent = common if bias else dict.fromkeys(["bias_at"]) | common
    _compiled(programs.activate_forward, types, absent, fused._tile_sizes(width, 0))
    absent = common if bias else dict.fromkeys(["bias_at", "dbias_at"]) | common
    _compiled(programs.activate_backward, types, absent, fused._tile_sizes(width, 1))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("mode", fused.POOLS)
def test_pooling_compiled(mode: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"hidden_at": f"*{kind}", "out_at": f"*{kind}", "ends_at": "*i32"}
    constants = {"MODE": mode, "ROWS": fused.POOL_ROWS, "BLOCK": fused.POOL_BLOCK}
    compiled(programs.pool, types, constants, fused.POOL_WARPS)


@pytest.mark.parametrize(("gated", "width", "bias"), [(False, 4096, True), (True, 1152, False), (False, 768, False)])
def test_codes_compiled(gated: bool, width: int, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded by the chip's own instruction, to the nearest."""
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import fp8
    from bertie.ops.triton import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = dict.fromkeys(("x_at", "bias_at"), "*bf16") | CODES
    constants: dict[str, Any] = {"KIND": "gelu" if bias or gated else "identity", "GATED": gated, "BIAS": bias}
    sizes = fp8._sizes(width)
    constants |= {} if bias else {"bias_at": None}
    constants |= {name: sizes[name] for name in ("TALL", "BLOCK")}
    made = compiled(programs.activate_codes, types, constants, sizes["num_warps"])
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.asm["ptx"]


def test_embeddings_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the programs are Triton's")
    from bertie.ops.triton import fused_kernels as programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = programs.embed_norm.arg_names
    types: dict[str, str] = {name: "*i64" if "_row_" in name else "*bf16" for name in names if name.endswith("_at")}
    types |= CODES | {"eps": "fp32"}
    for codes in (True, False):
        constants = {"SECOND": True, "THIRD": True, "BIAS": True, "CODES": codes}
        gone = {} if codes else dict.fromkeys(CODES)
        _compiled(programs.embed_norm, types, constants | gone, fused._norm_sizes(768, 0))


def _compiled(program: Any, types: dict[str, str], constants: dict[str, Any], sizes: dict[str, int]) -> None:
    constants = constants | {name: size for name, size in sizes.items() if name != "num_warps"}
    compiled(program, types, constants, sizes["num_warps"])


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("width", [1, 8, 100, 384, 512, 768, 1024, 1025, 2048, 4096, 8192])
def test_sizes_fit_what_they_are_for(width: int, back: int) -> None:
    """Tiles of rows divide the eight that share a draw; a tile's columns hold a row, or fill it in turns."""
    sizes = fused._norm_sizes(width, back)
    assert width <= sizes["BLOCK"] < 2 * max(1, width)
    assert 8 % sizes["TALL"] == 0
    sizes = fused._tile_sizes(width, back)
    for size in sizes.values():
        assert size == fused._power_of_2(size)
    assert sizes["BLOCK"] <= fused._Activate.BLOCK


def test_supported_sites() -> None:
    """Half precision on GPUs with Triton, where autocast counts; LayerNorm of rows that fit into a kernel."""
    half = Site(torch.device("cuda", 0), torch.bfloat16, width=768)

    def fused_operations(site: Site) -> set[str]:
        names = ("norm", "activation", "embedding", "cross_entropy", "pooling", "fp8_quantization")
        return {name for name in names if select(name, site)[0].backend.startswith("triton.fused.")}

    everything = {"norm", "activation", "embedding", "cross_entropy", "pooling", "fp8_quantization"}
    with hardware():
        assert fused_operations(half) == fused_operations(replace(half, dtype=torch.float16)) == everything
        assert fused_operations(replace(half, dtype=torch.float32)) == {"pooling"}
        assert fused_operations(replace(half, dtype=torch.float64)) == set()
        assert fused_operations(replace(half, training=True)) == everything - {"embedding", "pooling"}
        assert fused_operations(replace(half, autocast=True)) == everything - {"embedding"}
        assert fused_operations(replace(half, norm="rms")) == everything - {"norm", "embedding"}
        assert fused_operations(replace(half, width=fused.WIDEST + 1)) == everything - {"norm", "embedding"}
        assert fused_operations(replace(half, activation="tanh")) == everything - {"activation"}
        assert fused_operations(replace(half, device=torch.device("cpu"))) == set()
        with disable("triton.fused"):
            assert fused_operations(half) == set()
    with hardware(triton=False):
        assert fused_operations(half) == set()


def test_rows_of_tensors_follow_autocast_and_gradients() -> None:
    x = torch.zeros(3, 4)
    with forced("triton.fused.cross_entropy"):
        assert row_for("cross_entropy", x).backend == "triton.fused.cross_entropy"
    assert compute_dtype(x) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
    assert not needs_grad(x, None)
    x.requires_grad_()
    assert needs_grad(None, x)
    with torch.no_grad():
        assert not needs_grad(x)


def test_who_ends_the_product_with_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework, where nothing is learnt, nothing is gated, there is a bias, and the result lies nearer then."""
    monkeypatch.setattr(torch, "_addmm_activation", lambda bias, x, weight, use_gelu: ("product", use_gelu))
    monkeypatch.setattr(fused._Activate, "run", lambda *call: ("ours", None))
    monkeypatch.setattr(fused._Activate, "apply", lambda *call: ("learns", None))

    def way(
        kind: Any, dtype: torch.dtype = torch.bfloat16, bias: bool = True, gated: bool = False, weights: Any = None
    ) -> Any:
        linear = nn.Linear(4, 6, bias=bias, dtype=weights or dtype)
        return fused.expand(torch.zeros(3, 4, dtype=dtype), linear, kind, gated)

    assert way("gelu") == ("learns", None)
    with torch.no_grad():
        assert way("gelu") == way("gelu_tanh") == ("product", True)
        assert way("relu") == ("product", False)
        assert way("gelu", torch.float16) == ("ours", None)
        assert way("gelu_tanh", torch.float16) == ("product", True)
        assert way("silu") == ("ours", None)
        for kind in ("gelu", "gelu_tanh", "relu"):
            assert way(kind, gated=True) == ("ours", None)
            assert way(kind, bias=False) == ("ours", None)
            with torch.autocast("cpu", torch.bfloat16):
                assert way(kind, torch.float32) == ("ours", None)
                assert way(kind, weights=torch.float32) == ("ours", None)


def test_eager_expressions() -> None:
    torch.manual_seed(0)
    x, residual, norm, linear = torch.randn(5, 8), torch.randn(5, 8), nn.LayerNorm(8), nn.Linear(8, 12)
    torch.manual_seed(1)
    got = eager.add_norm(x, residual, norm, 0.5)
    torch.manual_seed(1)
    assert torch.equal(got, norm(residual + F.dropout(x, 0.5)))
    for post, pre in ((norm, nn.Identity()), (nn.Identity(), norm)):
        total, normed = eager.add_norms(x, residual, post, pre, 0.0)
        assert torch.equal(total, post(residual + x))
        assert torch.equal(normed, norm(residual + x))
    assert torch.equal(eager.norm(x, norm), norm(x))
    assert eager.norm(x, nn.Identity()) is x
    assert torch.equal(eager.expand(x, linear, "gelu", gated=False), F.gelu(linear(x)))
    act, factor = linear(x).chunk(2, dim=-1)
    assert torch.equal(eager.expand(x, linear, "silu", gated=True), F.silu(act) * factor)
    targets, weights = torch.randint(12, (5,)), torch.rand(5)
    each = F.cross_entropy(linear(x), targets, reduction="none")
    assert torch.equal(
        eager.linear_cross_entropy(x, linear.weight, linear.bias, targets, weights), (each * weights).sum()
    )


def test_modes_of_the_pooling_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modes of a pooling are computed by the kernel, or none."""
    nan = replace(select("pooling", Site(torch.device("cpu"), torch.float32))[0], backend="triton.fused.pooling")
    nan = replace(nan, run=lambda hidden, ends, mode: torch.full((len(ends) - 1, 4), torch.nan))
    monkeypatch.setattr("bertie.ops.dispatch.row_for", lambda operation, x: nan)
    batch = Batch.from_ids([[1, 2], [3]])
    assert Pooling(("max", "weightedmean"))(torch.zeros(3, 4), batch).isnan().all()
    for modes in ("cls", "lasttoken", ("cls", "max")):
        assert not Pooling(modes)(torch.zeros(3, 4), batch).any()
