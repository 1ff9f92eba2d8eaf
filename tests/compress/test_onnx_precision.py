"""int8 and fp16 graphs: Bertie's own codes, results that do not depend on the batch, small errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from safetensors.torch import load_file

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.compress import graph_formats, onnx_precision
from bertie.compress.padded_model import PaddedModel
from bertie.ops.quantization import quantize
from tests.compress.padded import padded_inputs, ragged
from tests.tasks import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PaddedModel:
    folder = tiny.save(tmp_path_factory.mktemp("bert"), "wordpiece", "ForMaskedLM")
    return PaddedModel(Checkpoint.load(folder).model, "mlm")


@pytest.fixture(scope="module")
def proto(model: PaddedModel) -> Any:
    return graph_formats.to_onnx(model)


def tensors(proto: Any) -> dict[str, NDArray[Any]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def test_int8_has_the_codes_of_bertie(proto: Any, model: PaddedModel) -> None:
    small = onnx_precision.to_int8(proto)
    onnx.checker.check_model(small, full_check=True)
    stored = tensors(small)
    codes, scales = quantize(model.words.weight)
    [table] = [x for name, x in stored.items() if x.dtype == np.uint8 and x.shape == tuple(codes.shape)]
    assert np.array_equal(table.astype(np.int16) - 128, codes.numpy())  # once: the output layer is tied to it
    assert any(np.array_equal(x, scales.numpy()) for x in stored.values())
    up = model.encoder.blocks[0].ff.up.weight
    codes, _ = quantize(up)  # type: ignore[arg-type]
    assert any(
        x.shape == up.T.shape and np.array_equal(x.astype(np.int16) - 128, codes.T.numpy()) for x in stored.values()
    )
    assert max(x.nbytes for x in stored.values() if x.dtype == np.float32) < 4 * model.words.weight.numel()
    assert small.ByteSize() < proto.ByteSize() / 2


def test_a_model_saved_in_int8_is_exported_with_the_codes_of_its_file(tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "bert", "wordpiece", "")
    Checkpoint.load(source).save(tmp_path / "int8", precision="int8")
    saved = load_file(tmp_path / "int8" / "model.int8.safetensors")
    stored = tensors(
        onnx_precision.to_int8(graph_formats.to_onnx(PaddedModel(Checkpoint.load(tmp_path / "int8").model)))
    )
    name = next(
        name for name in saved if name.endswith("intermediate.dense.weight") and saved[name].dtype == torch.int8
    )
    wanted = saved[name].numpy().T
    assert any(x.shape == wanted.shape and np.array_equal(x.astype(np.int16) - 128, wanted) for x in stored.values())


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 1e-3), ("int8", 0.05)])
def test_results(precision: Any, limit: float, proto: Any, model: PaddedModel, tmp_path: Path) -> None:
    plain, small = tmp_path / "model.onnx", tmp_path / "small.onnx"
    graph_formats.write_onnx(proto, plain, "fp32")
    graph_formats.write_onnx(proto, small, precision)
    assert small.stat().st_size < plain.stat().st_size * (0.65 if precision == "fp16" else 0.5)
    ids, segments = ragged("bert", "Model")
    inputs = padded_inputs(model, ids, segments)
    exact, run = (graph_formats.open_graph(path) for path in (plain, small))
    real = inputs["attention_mask"] > 0
    a, b = exact(inputs)["logits"][real], run(inputs)["logits"][real]
    error = np.linalg.norm(a - b) / np.linalg.norm(a)
    assert 1e-6 < error < limit
    # A text alone: activations have their scales token by token.
    alone = run(padded_inputs(model, ids[1:2], segments[1:2]))["logits"][0]
    together = run(inputs)["logits"][1][: len(ids[1])]
    assert np.abs(alone - together).max() < 1e-3 * np.abs(a).max()


def test_openvino(proto: Any, model: PaddedModel, tmp_path: Path) -> None:
    graph_formats.write_onnx(proto, tmp_path / "model.onnx", "fp32")
    ids, segments = ragged("bert", "Model")
    inputs = padded_inputs(model, ids, segments)
    real = inputs["attention_mask"] > 0
    outputs, sizes = {}, {}
    for precision in ("fp32", "fp16", "int8"):
        path = tmp_path / f"{precision}.xml"
        graph_formats.write_openvino(tmp_path / "model.onnx", path, precision)
        outputs[precision] = graph_formats.open_graph(path)(inputs)["logits"][real]
        sizes[precision] = path.with_suffix(".bin").stat().st_size
    assert sizes["int8"] < 0.5 * sizes["fp32"]
    assert sizes["fp16"] < 0.65 * sizes["fp32"]
    for precision, limit in (("fp16", 1e-2), ("int8", 0.05)):
        error = np.linalg.norm(outputs["fp32"] - outputs[precision]) / np.linalg.norm(outputs["fp32"])
        assert 1e-6 < error < limit, precision
