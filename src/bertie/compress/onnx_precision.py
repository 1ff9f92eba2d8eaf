"""ONNX graphs with smaller weights: int8 (dynamic quantization) and fp16.

int8: each weight matrix has Bertie's own codes, symmetric with one scale per output (ops/quantization.py), so that a
model saved in int8 is exported with the very codes of its file. Matrix multiplications run in int8, by standard
operators (MatMulInteger). Activations have one scale per token, computed in the graph, so that a text's result does
not depend on its neighbours; ONNX's own DynamicQuantizeLinear has one per batch, and is less exact. Embedding tables
are stored in int8 with one scale per row, and looked up before they are scaled.

fp16: weights are stored in half precision and converted when they are loaded; all operators compute in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.ops.quantization import quantize

MIN_VALUES = 1024  # smaller tensors stay as they are


@dataclass
class _Rewriter:
    """A graph that is written anew, node by node."""

    graph: Any  # onnx.GraphProto
    weights: dict[str, NDArray[Any]]
    nodes: list[Any] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)  # weights that are still used
    added: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"{output}/{kind}", **attributes))
        return output

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Add an initializer; return its name."""
        from onnx import numpy_helper

        if name not in self.added:
            self.added[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def keep(self, node: Any) -> None:
        """Take a node over unchanged."""
        self.nodes.append(node)
        self.kept.update(node.input)


def _rewrite(model: Any, rewrite: Callable[[_Rewriter, Any], bool]) -> Any:
    """A copy of a model in which `rewrite` has replaced some nodes: it returns False for those to keep."""
    import onnx
    from onnx import numpy_helper

    out = onnx.ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    large = [
        tensor
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= MIN_VALUES
    ]
    state = _Rewriter(graph, {tensor.name: numpy_helper.to_array(tensor) for tensor in large})
    for node in graph.node:
        if not rewrite(state, node):
            state.keep(node)
    state.kept.update(output.name for output in graph.output)
    small = [tensor for tensor in graph.initializer if tensor.name not in state.weights or tensor.name in state.kept]
    tensors = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in small]
    del graph.node[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(state.nodes)
    graph.initializer.extend([*tensors, *state.added.values()])
    return out


def to_int8(model: Any) -> Any:
    """An ONNX model with int8 weights: matrix multiplications in int8, embedding tables in int8."""
    quantized_inputs: dict[str, tuple[str, str]] = {}
    transposed = _transposed_weights(model)  # of an output layer tied to the word embeddings

    def rewrite(state: _Rewriter, node: Any) -> bool:
        if node.domain not in ("", "ai.onnx"):
            return False
        if node.op_type == "Transpose" and node.output[0] in transposed and node.input[0] in state.weights:
            return True  # its readers read the weight
        if node.op_type == "Gather" and node.input[0] in state.weights and _axis(node) == 0:
            _gather_int8(state, node, node.input[0])
            return True
        if node.op_type == "MatMul":
            name = transposed.get(node.input[1], node.input[1])
            if name in state.weights and state.weights[name].ndim == 2:
                _multiply_int8(state, node, name, name != node.input[1], quantized_inputs)
                return True
        return False

    return _rewrite(model, rewrite)


def _transposed_weights(model: Any) -> dict[str, str]:
    """Transposed matrices that are only multiplied by: the names of the matrices, by those of the transposed ones."""
    weights = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    found = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "Transpose" and node.input[0] in weights
    }
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in found and (node.op_type, place) != ("MatMul", 1):
                del found[name]
    return found


def to_fp16(model: Any) -> Any:
    """An ONNX model with weights in half precision, which is converted to fp32 before it is used."""
    import onnx

    cast: dict[str, str] = {}

    def rewrite(state: _Rewriter, node: Any) -> bool:
        names = [name for name in node.input if name in state.weights]
        if not names:
            return False
        if node.op_type == "Gather" and node.input[0] == names[0]:  # convert the rows, not the table
            table = state.constant(f"{names[0]}_fp16", _half(state.weights[names[0]]))
            rows = state.add("Gather", [table, node.input[1]], f"{node.output[0]}_fp16", axis=_axis(node))
            state.add("Cast", [rows], node.output[0], to=onnx.TensorProto.FLOAT)
            return True
        for name in names:
            if name not in cast:
                half = state.constant(f"{name}_fp16", _half(state.weights[name]))
                cast[name] = state.add("Cast", [half], f"{name}_fp32", to=onnx.TensorProto.FLOAT)
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.input[:]
        copy.input.extend(cast.get(name, name) for name in node.input)
        state.keep(copy)
        return True

    return _rewrite(model, rewrite)


def _half(values: NDArray[Any]) -> NDArray[np.float16]:
    limit = float(np.finfo(np.float16).max)
    return values.clip(-limit, limit).astype(np.float16)


def _axis(node: Any) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def quantize_rows(values: NDArray[Any]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """(R, n) -> int8 codes (R, n) and scales (R,), as in Bertie's int8 files."""
    codes, scales = quantize(torch.from_numpy(np.array(values, order="C")))  # a copy: protobuf's arrays are read-only
    return codes.numpy(), scales.numpy()


def _codes(state: _Rewriter, name: str, *, columns: bool) -> tuple[str, str, str]:
    """The names of a weight's codes (in its own shape), their zero point and its scales, one per row or column."""
    if f"{name}_uint8" not in state.added:
        values = state.weights[name]
        codes, scales = quantize_rows(values.T if columns else values)
        # Unsigned, with zero point 128: the same products, but CPUs without VNNI instructions would add pairs of
        # unsigned × signed products with saturation.
        state.constant(f"{name}_uint8", ((codes.T if columns else codes).astype(np.int16) + 128).astype(np.uint8))
        state.constant(f"{name}_scale", scales)
    return f"{name}_uint8", state.constant("int8_zero_point", np.array(128, np.uint8)), f"{name}_scale"


def _gather_int8(state: _Rewriter, node: Any, name: str) -> None:
    """Look up int8 rows and their scales."""
    import onnx

    output, indices = node.output[0], node.input[1]
    table, _, scales = _codes(state, name, columns=False)
    middle = state.constant("int8_middle", np.array(128, np.float32))
    last = state.constant("int8_axis", np.array([-1], np.int64))
    rows = state.add("Gather", [table, indices], f"{output}_uint8", axis=0)
    scale = state.add("Gather", [scales, indices], f"{output}_scales", axis=0)
    wide = state.add("Cast", [rows], f"{output}_float", to=onnx.TensorProto.FLOAT)
    column = state.add("Unsqueeze", [scale, last], f"{output}_scale")
    state.add("Mul", [state.add("Sub", [wide, middle], f"{output}_codes"), column], output)


def _multiply_int8(
    state: _Rewriter, node: Any, name: str, transposed: bool, quantized: dict[str, tuple[str, str]]
) -> None:
    """x @ W with W (K, N), or (N, K) if it is `transposed`, in int8, and x quantized token by token."""
    import onnx

    source, output = node.input[0], node.output[0]
    weight, middle, scale = _codes(state, name, columns=not transposed)
    if transposed:
        weight = state.add("Transpose", [weight], f"{output}_weight", perm=[1, 0])
    if source not in quantized:
        quantized[source] = _quantize_tokens(state, source, middle)
    activations, of_tokens = quantized[source]
    product = state.add("MatMulInteger", [activations, weight, middle, middle], f"{output}_int32")
    wide = state.add("Cast", [product], f"{output}_codes", to=onnx.TensorProto.FLOAT)
    state.add("Mul", [state.add("Mul", [wide, scale], f"{output}_scaled"), of_tokens], output)


def _quantize_tokens(state: _Rewriter, source: str, middle: str) -> tuple[str, str]:
    """Codes (…, K) around 128 of the activations, and their scales (…, 1): the largest absolute value is 127."""
    last = state.constant("int8_axis", np.array([-1], np.int64))
    step = state.constant("int8_step", np.array(1 / 127, np.float32))
    least = state.constant("int8_least_scale", np.array(1e-30, np.float32))
    one = state.constant("int8_one", np.array(1, np.float32))
    largest = state.add("ReduceMax", [state.add("Abs", [source], f"{source}_abs"), last], f"{source}_max", keepdims=1)
    scale = state.add("Max", [state.add("Mul", [largest, step], f"{source}_step"), least], f"{source}_scale")
    # With scale 1 this only rounds, adds 128 and converts.
    codes = state.add(
        "QuantizeLinear", [state.add("Div", [source, scale], f"{source}_ratio"), one, middle], f"{source}_uint8"
    )
    return codes, scale
