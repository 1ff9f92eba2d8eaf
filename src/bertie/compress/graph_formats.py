"""Write a padded model as an ONNX or OpenVINO graph, and run such files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.compress import onnx_precision
from bertie.compress.padded_model import PaddedModel
from bertie.errors import ConfigError, MissingPackageError

Arrays = dict[str, NDArray[Any]]
GraphRunner = Callable[[Arrays], Arrays]
GraphFormat = Literal["onnx", "openvino"]
GraphPrecision = Literal["fp32", "fp16", "int8"]

OPSET = 18
MAX_BYTES = 2_000_000_000  # of the weights in fp32: a protobuf file holds at most 2 GiB
# Where each loader looks for the files: sentence-transformers (and optimum) and transformers.js, which knows
# model_quantized and model_fp16.
FILES: dict[tuple[GraphFormat, GraphPrecision], str] = {
    ("onnx", "fp32"): "onnx/model.onnx",
    ("onnx", "fp16"): "onnx/model_fp16.onnx",
    ("onnx", "int8"): "onnx/model_quantized.onnx",
    ("openvino", "fp32"): "openvino/openvino_model.xml",
    ("openvino", "fp16"): "openvino/openvino_model_fp16.xml",
    ("openvino", "int8"): "openvino/openvino_model_int8.xml",
}


def require(*packages: str) -> None:
    """Raise an error with the install command if a package is missing."""
    for package in packages:
        try:
            import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"export needs the package {package} ({error}): pip install 'bertie[export]'"
            ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop the exporter's notes about packages and names that do not concern a user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def to_onnx(model: PaddedModel) -> Any:
    """The ONNX graph (onnx.ModelProto) of a model in fp32, with dynamic batch and sequence axes."""
    require("onnx", "onnxscript")
    if (size := 4 * sum(weight.numel() for weight in model.parameters())) > MAX_BYTES:
        raise ConfigError(
            f"the weights take {size / 1e9:.1f} GB in fp32; ONNX files hold at most {MAX_BYTES / 1e9:.0f} GB; larger "
            "models cannot be exported"
        )
    # Two texts of seven tokens: sizes of 1 would be taken for constants.
    example = tuple(torch.ones(2, 7, dtype=torch.long) for _ in model.input_names)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence")
    with _quiet():
        program = torch.onnx.export(
            model,
            example,
            dynamo=True,
            input_names=model.input_names,
            output_names=model.output_names,
            opset_version=OPSET,
            dynamic_shapes=tuple({0: batch, 1: sequence} for _ in example),
            verbose=False,
        )
    assert program is not None
    proto: Any = program.model_proto
    for node in proto.graph.node:  # stack traces of the exporting program
        del node.metadata_props[:]
    return proto


def write_onnx(proto: Any, path: Path, precision: GraphPrecision) -> None:
    """Write a graph in fp32 as it is, or with smaller weights (see onnx_precision.py)."""
    import onnx

    if precision == "int8":
        proto = onnx_precision.to_int8(proto)
    elif precision == "fp16":
        proto = onnx_precision.to_fp16(proto)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, path)


def write_openvino(onnx_file: Path, path: Path, precision: GraphPrecision) -> None:
    """Convert an ONNX file in fp32. int8 and fp16 concern the stored weights only."""
    require("openvino")
    import openvino

    model = openvino.convert_model(onnx_file)
    if precision == "int8":
        _compress_weights(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, path, compress_to_fp16=precision == "fp16")


def _compress_weights(model: Any) -> None:
    """Store the constants of matrix multiplications and lookups in int8, with one scale per output or row."""
    import openvino.opset13 as ops

    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in ("MatMul", "Gather"):
            continue
        port = node.input(1 if kind == "MatMul" else 0)
        constant = port.get_source_output().get_node()
        if constant.get_type_name() != "Constant" or constant.get_element_type().get_type_name() != "f32":
            continue
        values = constant.get_data()
        if values.ndim != 2 or values.size < onnx_precision.MIN_VALUES:
            continue
        # Of a matrix (K, N), or (N, K) if it is transposed: one scale per output.
        columns = kind == "MatMul" and not node.get_attributes()["transpose_b"]
        codes, scales = onnx_precision.quantize_rows(values.T if columns else values)
        stored = ops.constant(np.ascontiguousarray(codes.T if columns else codes), dtype=np.int8)
        factor = ops.constant(scales[None, :] if columns else scales[:, None])
        port.replace_source_output(ops.multiply(ops.convert(stored, "f32"), factor).output(0))
    model.validate_nodes_and_infer_types()


def parts(path: Path) -> list[Path]:
    """A graph's file and, for OpenVINO, the file beside it that has the weights."""
    return [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]


def open_graph(path: Path) -> GraphRunner:
    """A function that runs a file on the CPU: inputs by name -> outputs by name."""
    return _open_openvino(path) if path.suffix == ".xml" else _open_onnx(path)


def _open_onnx(path: Path) -> GraphRunner:
    require("onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _open_openvino(path: Path) -> GraphRunner:
    require("openvino")
    import openvino

    # fp32: on CPUs with AMX the default is bf16, which some of them advertise and cannot run.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    names = [output.get_any_name() for output in compiled.outputs]

    def run(inputs: Arrays) -> Arrays:
        results = compiled(inputs)
        return {name: np.array(results[output]) for name, output in zip(names, compiled.outputs, strict=True)}

    return run
