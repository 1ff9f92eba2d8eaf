"""fp8 quantization by the fused kernels against plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.config import Activation, EmbeddingConfig
from bertie.nn.encoder import Encoder
from bertie.nn.linear import Fp8Linear, to_fp8
from bertie.ops import disable
from bertie.ops.torch import eager
from bertie.ops.triton import activation as triton_activation
from bertie.ops.triton import fp8
from bertie.ops.triton import norm as triton_norm
from bertie.ops.triton.launch import Fp8Rows
from bertie.text.batch import Batch
from tests.ops.triton.helpers import DEVICE, TOLERANCE, random_layer_norm, random_tensor
from tests.test_config import GOOD

pytestmark = [
    pytest.mark.interpreted(native_on_gpu=True),
    pytest.mark.usefixtures("interpreter", "fused_backends", "nan_memory"),
]


def assert_quantized(actual: Fp8Rows, x: Tensor) -> None:
    """The fp8 rows of x, up to one step where x was rounded to half precision before."""
    values, scales = actual
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (
        *(torch.float8_e4m3fn, x.shape, torch.float32, (len(x), 1)),
    )
    expected, by = fp8.quantize_rows(x)
    assert_close(scales, by, atol=0, rtol=1e-2)  # of values rounded to bfloat16
    assert_close(values.float(), expected.float(), atol=2**-8, rtol=0.13)
    assert (values.float() != expected.float()).float().mean() < (0.2 if x.dtype == torch.bfloat16 else 0.02)
    assert (values.float().abs().amax(1)[x.abs().amax(1) > 1e-12] == 448).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (13, 48), (36, 100)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fp8_output_of_norms(rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In addition to the same output, bit for bit; only where the module asks for it."""
    x, residual = random_tensor(rows, width, dtype=dtype), random_tensor(rows, width, dtype=dtype)
    norm, plain = random_layer_norm(width, True, dtype), random_layer_norm(width, True, dtype)
    plain.load_state_dict(norm.state_dict())
    norm.fp8 = True
    table = nn.Embedding(5, width, device=DEVICE, dtype=dtype)
    at = torch.randint(5, (rows,), device=DEVICE)
    calls = {
        "norm": lambda one: triton_norm.norm(x, one),
        "add_norm": lambda one: triton_norm.add_norm(x, residual, one, 0.0),
        "add_norms": lambda one: triton_norm.add_norms(x, residual, nn.Identity(), one, 0.0)[1],
        "embed_norm": lambda one: triton_norm.embed_norm([(table, at), (table, at)], one),
    }
    with torch.no_grad():
        for call in calls.values():
            one, other = call(norm), call(plain)
            assert torch.equal(one, other)
            assert not hasattr(other, "fp8")
            assert fp8.quantize(one) is one.fp8  # type: ignore[attr-defined]
            assert_quantized(one.fp8, one)  # type: ignore[attr-defined]
    assert not hasattr(triton_norm.add_norm(x, residual, norm, 0.0), "fp8")  # training


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", triton_activation.ACTIVATIONS)
def test_fp8_output_of_activations(
    activation: Activation, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, width, tile in ((1, 16, 4096), (9, 40, 4096), (21, 100, 512)):
        monkeypatch.setattr(fp8, "TILE", tile)
        y, added = (
            random_tensor(rows, width * (2 if gated else 1)).detach(),
            random_tensor(width * (2 if gated else 1)).detach(),
        )
        actual = fp8.activate_and_quantize(y, added if bias else None, activation, gated)
        assert_quantized(actual, eager.activate(y + added if bias else y, activation, gated))


def test_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor(7, 48).detach()
    x[1], x[2], x[3, 5], x[4] = 0.0, 1e-9 * x[2], 1e5, 1e30 * x[4]
    assert_quantized(fp8.quantize(x), x)
    assert_quantized(fp8.quantize(x.T.contiguous().T), x)
    assert (fp8.quantize(x)[0][1].float() == 0).all()


@pytest.mark.parametrize("change", [{}, {"pre_norm": True, "gated": True, "first_norm": False}], ids=["post", "pre"])
@torch.no_grad()
def test_fp8_encoder(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every GEMM but the output projection of attention finds its input quantized; with the kernels as without."""
    sizes: dict[str, Any] = {"width": 32, "head_width": 16, "ff_width": 48, "embeddings": EmbeddingConfig(width=32)}
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    encoder = Encoder(replace(GOOD, **sizes, **change)).to(DEVICE, dtype).eval()
    for parameter in encoder.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    batch = Batch.from_ids([[1, 2, 3], [4], [5, 6, 7, 8]]).to(DEVICE)
    exact = encoder(batch)
    to_fp8(encoder)
    launched: list[str] = []
    kernel = fp8._activate_and_quantize
    monkeypatch.setattr(fp8, "_activate_and_quantize", lambda *call: launched.append(call[2]) or kernel(*call))
    fast = encoder(batch)
    assert launched == ["identity", "gelu"] * 2
    with disable("triton.fused"):
        slow = encoder(batch)
    assert not hasattr(slow, "fp8")
    assert sum(isinstance(one, Fp8Linear) for one in encoder.modules()) == 8
    for one, other, most in ((fast, slow, 0.05), (slow, exact, 0.08)):
        assert 0 < float((one - other).norm() / other.norm()) < most
