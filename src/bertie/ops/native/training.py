"""The compiled training kernels (cpp/training.cpp) on a CPU, in float32: calls into the library, on raw tensors.

autograd.py makes differentiable operations of them. Linear layers stay in PyTorch, whose GEMM is as fast.
No result depends on the number of threads. Without the library PyTorch's operations run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertie.compiled import load_library
from bertie.ops.native import encoder

ABI_VERSION = 3  # increment here and in training.cpp when the C interface changes
ACTIVATIONS = encoder.ACTIVATIONS  # in the library's order
_POINTER, _INT, _WIDE, _DOUBLE, _SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_uint64
_SIGNATURES: dict[str, list[Any]] = {
    "attention": [_POINTER, _POINTER, _DOUBLE, _DOUBLE, _SEED, _POINTER, _INT],
    "add_norm": [_WIDE, _WIDE, _DOUBLE, _INT, _DOUBLE, _SEED, _POINTER],
    "add_norm_backward": [_WIDE, _WIDE, _INT, _DOUBLE, _SEED, _POINTER],
    "activation": [_WIDE, _WIDE, _INT, _INT, *[_POINTER] * 4],
    "rotary": [*[_WIDE] * 4, *[_POINTER] * 4, _INT],
    "sum_of_squares": [_WIDE, _POINTER, _POINTER],
    "adamw": [_WIDE, *[_POINTER] * 4],
    "adamw_rows": [_WIDE, _WIDE, *[_POINTER] * 5],
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if it was not built, or was built from different sources."""
    lib = load_library(__file__, "_training", f"bertie_training_abi_{ABI_VERSION}")
    if lib is None:
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, f"bertie_training_{name}")
        function.argtypes = [_INT, _INT, *arguments]  # instruction level, threads
        function.restype = _DOUBLE if name == "sum_of_squares" else None
    lib.bertie_training_set_openmp.argtypes = [_POINTER] * 3
    if (openmp := encoder.openmp_functions()) is not None:
        lib.bertie_training_set_openmp(*openmp)
    return lib


def instruction_level() -> int | None:
    """The instructions to use, as `encoder.instruction_level`; None without the library, or where PyTorch is faster."""
    return None if library() is None else encoder.instruction_level()


def _call(name: str, *arguments: object) -> float | None:
    function = getattr(library(), f"bertie_training_{name}")
    result: float | None = function(instruction_level() or 0, torch.get_num_threads(), *arguments)
    return result


def _pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


def _longs(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _doubles(values: Sequence[float]) -> ctypes.Array[ctypes.c_double]:
    return (ctypes.c_double * len(values))(*values)


def attention(
    heads: Sequence[Tensor],
    cu_seqlens: Tensor,
    scale: float,
    visible: tuple[int, int],
    dropout: tuple[float, int],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor] = (),
) -> None:
    """Attention within each text: q (T, H, d), k and v (T, G, d), whose rows may be apart.

    Writes `outputs`: (T, H, d), and (T, H) the log of each softmax's denominator. With `gradients` (of the output, of
    q, k and v), reads the outputs and writes those of q, k and v, which lie in one tensor's rows. `dropout` is the rate
    and the seed; `visible` is how many tokens before and after itself a query attends to, −1 for all.
    """
    q, k, v = heads
    strides = [x.stride(0) for x in (q, k, v, *gradients[1:2])]
    shape = (len(cu_seqlens) - 1, q.shape[1], k.shape[1], q.shape[2], *visible, *strides, 0)
    tensors = _pointers((*heads, *outputs, *gradients))
    _call("attention", _longs(shape), cu_seqlens.data_ptr(), scale, *dropout, tensors, int(bool(gradients)))


def add_norm(eps: float, rms: bool, dropout: tuple[float, int], tensors: Sequence[Tensor | None]) -> None:
    """norm(residual + dropout(x)). Tensors: x, residual, weight, bias, total, out, statistics (T, 2)."""
    x = tensors[0]
    assert x is not None
    _call("add_norm", *x.shape, eps, int(rms), *dropout, _pointers(tensors))


def add_norm_backward(rms: bool, dropout: tuple[float, int], tensors: Sequence[Tensor | None]) -> None:
    """Gradients of `add_norm`. Tensors: weight, bias, total, statistics, and the gradients of out, total, residual, x,
    weight and bias, of which the first two are read.
    """
    total = tensors[2]
    assert total is not None
    _call("add_norm_backward", *total.shape, int(rms), *dropout, _pointers(tensors))


def activation(kind: str, gated: bool, y: Tensor, out: Tensor | None, gradients: Sequence[Tensor] = ()) -> None:
    """act(y), or gated act(y[:, :F]) · y[:, F:]; with `gradients`, reads that of the output and writes that of y."""
    width = y.shape[1] // 2 if gated else y.shape[1]
    tensors = [None if x is None else x.data_ptr() for x in (y, out, *(gradients or (None, None)))]
    _call("activation", len(y), width, ACTIVATIONS.index(kind), int(gated), *tensors)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, inverse: bool) -> None:
    """Rotary embeddings of x (T, H, d), whose rows may be apart; or their inverse, which is the gradient."""
    tensors = [tensor.data_ptr() for tensor in (x, cos, sin, out)]
    _call("rotary", *x.shape, x.stride(0), *tensors, int(inverse))


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all numbers in contiguous tensors."""
    total = _call("sum_of_squares", len(tensors), _pointers(tensors), _longs([x.numel() for x in tensors]))
    assert total is not None
    return total


def adamw(tensors: Sequence[Tensor], factors: Sequence[float], options: Sequence[float]) -> None:
    """One AdamW step. Per parameter 4 contiguous tensors: itself, its gradient, and the two averages.

    And per parameter 3 factors: 1 − lr · weight decay, lr / (1 − beta1ⁿ), 1 / √(1 − beta2ⁿ). `options`: beta1, beta2,
    eps and a factor for all gradients.
    """
    sizes = _longs([x.numel() for x in tensors[::4]])
    _call("adamw", len(tensors) // 4, _pointers(tensors), sizes, _doubles(factors), _doubles(options))


def adamw_rows(
    tensors: Sequence[Tensor],
    gradient_row: Tensor,
    active: Tensor,
    factors: Sequence[float],
    options: Sequence[float],
) -> None:
    """As `adamw` for one table whose gradient has few rows: `gradient_row` (R,) int32 says which, −1: zero.

    `active` (R,) uint8: rows that had a gradient in this step or an earlier one. Weight decay alone changes the others.
    """
    pointers = (gradient_row.data_ptr(), active.data_ptr(), _doubles(factors), _doubles(options))
    _call("adamw_rows", *tensors[0].shape, _pointers(tensors), *pointers)
