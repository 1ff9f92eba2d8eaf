"""fp8 GEMMs on a GPU against the same values in float64, and encoders that use them.

(Small sizes of the kernels: tests/ops/triton/test_fp8.py. Emulation on a CPU: tests/nn/test_linear.py.)
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from bertie import Embedder
from bertie.bench import measure, random_model
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.cli import main
from bertie.compress.quantization_report import differences
from bertie.config import Activation
from bertie.errors import ConfigError
from bertie.nn.linear import Fp8Linear, is_fp8, to_fp8
from bertie.nn.model import Model
from bertie.ops.torch import eager
from bertie.ops.triton import fp8
from bertie.ops.triton import norm as triton_norm
from bertie.ops.triton.activation import ACTIVATIONS
from bertie.ops.triton.launch import HALF, Fp8Rows
from bertie.text.batch import Batch
from tests.checkpoints.test_roundtrip import with_tokenizer
from tests.gpu.test_cuda_graphs import HEADS, KINDS, ROUNDS, batch_of, build_model
from tests.nn.test_linear import FAMILIES
from tests.nn.test_linear import made as of_family
from tests.ops.forced import turn_off

CUDA = torch.device("cuda")
pytest.importorskip("triton", reason="needs Triton")
pytestmark = pytest.mark.skipif(not fp8.is_supported(CUDA), reason="needs a GPU of compute capability 8.9 or above")
MAX_ERROR = 0.08  # relative, of the hidden states after a few layers
MAX_ERROR_BY_FAMILY = {"eurobert": 0.12}  # 0.083 and 0.093 were seen on an H200


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def relative_error(one: Tensor, other: Tensor) -> float:
    assert one.isfinite().all()
    return float((one.float() - other.float()).norm() / other.float().norm())


def to_fp8_copy(model: Model) -> Model:
    other = deepcopy(model)
    to_fp8(other.encoder)
    assert is_fp8(other.encoder)
    return other


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 513, 8193])
@torch.no_grad()
def test_linear(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """Any number of rows, among them one of zeros and one with an outlier."""
    for width, outputs in ((384, 1152), (1024, 4096), (4096, 1024), (48, 16)):
        linear = nn.Linear(width, outputs, bias=bias, device=CUDA, dtype=dtype)
        x = torch.randn(rows, width, device=CUDA).to(dtype)
        x[rows // 2] = 0.0
        x[-1, 5] = 300.0
        layer = Fp8Linear(linear.weight, linear.bias)
        values, scales = fp8.quantize_rows(x)
        actual = layer((values, scales))
        expected = (values.double() * scales) @ (layer.weight.double() * layer.scale[:, None]).T
        expected = expected + linear.bias.double() if bias else expected
        assert (actual.dtype, actual.shape) == (dtype, (rows, outputs))
        rough = float(expected.abs().max())
        assert_close(actual.double(), expected, atol=1e-2 * rough, rtol=1e-2)
        assert relative_error(actual, expected) < 5e-3
        if rows > 16:
            assert relative_error(layer(x), linear(x)) < 0.06


def test_linear_does_not_synchronize() -> None:
    x, layer = torch.randn(33, 64, device=CUDA).bfloat16(), Fp8Linear(torch.randn(32, 64, device=CUDA).bfloat16(), None)
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_quantized(actual: Fp8Rows, x: Tensor) -> None:
    """The fp8 rows of x (float64), up to roundings of intermediate results."""
    values, scales = actual
    expected, by = fp8.quantize_rows(x)
    assert_close(scales, by, atol=0, rtol=1e-2)
    assert_close(values.float(), expected.float(), atol=2**-7, rtol=0.13)
    assert (values.float() != expected.float()).float().mean() < 0.1
    assert relative_error(values.float() * scales, x) < 0.04


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(65536, 768), (8193, 1024), (513, 384), (1, 768), (9, 5000)])
@torch.no_grad()
def test_fp8_output_of_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    """The other output is the same as without fp8, up to the last bit: it is compiled separately."""
    x, residual = (torch.randn(rows, width, device=CUDA).to(dtype) for _ in range(2))
    plain = nn.LayerNorm(width, device=CUDA, dtype=dtype)
    plain.weight.add_(torch.randn_like(plain.weight) * 0.3)
    norm = deepcopy(plain)
    norm.fp8 = True
    table, at = nn.Embedding(100, width, device=CUDA, dtype=dtype), torch.randint(100, (rows,), device=CUDA)
    kept = (x + residual).double()  # a stored sum is rounded before it is normalized
    wide = [x.double(), (x.double() + residual.double()), table.weight[at].double()]
    for call, inputs in (
        (lambda one: triton_norm.norm(x, one), wide[0]),
        (lambda one: triton_norm.add_norm(x, residual, one, 0.0), wide[1]),
        (lambda one: triton_norm.add_norms(x, residual, nn.Identity(), one, 0.0)[1], kept),
        (lambda one: triton_norm.embed_norm([(table, at)], one), wide[2]),
    ):
        actual = call(norm)
        last = torch.finfo(dtype).eps
        assert_close(actual, call(plain), rtol=last, atol=last)
        exact = F.layer_norm(inputs, (width,), plain.weight.double(), plain.bias.double(), plain.eps)
        assert_quantized(actual.fp8, exact)  # type: ignore[attr-defined]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
@torch.no_grad()
def test_fp8_output_of_activations(kind: Activation, gated: bool) -> None:
    for rows, width in ((4097, 3072), (513, 1152), (7, 4096), (3, 8192)):
        y = torch.randn(rows, width * (2 if gated else 1), device=CUDA).bfloat16()
        bias = torch.randn(y.shape[1], device=CUDA).bfloat16()
        assert_quantized(
            fp8.activate_and_quantize(y, bias, kind, gated), eager.activate(y.double() + bias.double(), kind, gated)
        )
        assert_quantized(fp8.activate_and_quantize(y, None, kind, gated), eager.activate(y.double(), kind, gated))
    wide = torch.randn(3, 10000, device=CUDA).bfloat16()  # wider than a tile
    assert_quantized(fp8.activate_and_quantize(wide, None, kind, False), eager.activate(wide, kind, False))
    assert_quantized(fp8.quantize(wide), wide)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_families(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to half precision, with the kernels and without them; a text alone as in a batch."""
    model = of_family(family).to(CUDA, dtype)
    other, most = to_fp8_copy(model), MAX_ERROR_BY_FAMILY.get(family, MAX_ERROR)
    ids = [torch.randint(2, 60, (n,)).tolist() for n in (3, 17, 1, 40, 33)]
    batch = Batch.from_ids(ids).to("cuda")
    actual = other.hidden(batch)
    assert actual.dtype == dtype
    assert 1e-3 < relative_error(actual, model.hidden(batch)) < most
    assert relative_error(other.hidden(Batch.from_ids(ids[1:2]).to("cuda")), actual[3:20]) < most
    turn_off(monkeypatch, "triton.fused")
    assert relative_error(other.hidden(batch), actual) < most


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_cuda_graphs(name: str) -> None:
    plain = build_model(name)
    eight = to_fp8_copy(plain)
    model = deepcopy(eight)
    assert model.encoder.dispatch().replays
    plain.replay = eight.replay = False
    for seed, lengths in enumerate(ROUNDS):
        batch = batch_of(lengths, seed)
        assert relative_error(model.hidden(batch), eight.hidden(batch)) < MAX_ERROR
        assert relative_error(model.hidden(batch), plain.hidden(batch)) < 2 * MAX_ERROR
        for head in HEADS:
            assert relative_error(model(batch, head), eight(batch, head)) < 0.2
    assert len(model.graphs) > 4


def test_float32_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"torch\.float32 cannot go to fp8 on a GPU; allowed: bfloat16, float16"):
        to_fp8(build_model("learned", torch.float32).encoder)


def test_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_tokenizer(tmp_path / "m")
    exact = Checkpoint.load(folder, device="cuda", precision="bf16")
    embedder = Embedder.load(folder, device="cuda", precision="fp8")
    assert (embedder.model.dtype, is_fp8(embedder.model.encoder)) == (torch.bfloat16, True)
    actual = differences(exact, embedder.checkpoint, ["the cat sat on the mat", "a dog"])
    assert 0.95 < actual["hidden"]["min_cosine"] <= 1
    assert main(["bench", "-m", str(folder), "--precision", "fp8", "--device", "cuda", "--seconds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "fp8 on " in shown
    assert "compared with bf16, on texts: built-in" in shown
    speed = measure(random_model("2x64", "cuda", "fp8"), seconds=0.5)
    assert speed.precision == "fp8"
