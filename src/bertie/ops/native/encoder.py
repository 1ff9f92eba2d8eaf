"""The compiled encoder (cpp/): all layers on a CPU in C++, with packed weights and no padding.

Between two matrix multiplications nothing is written to main memory that need not be. The library is built with the
package where there is a compiler; without it, or for architectures that it does not implement, PyTorch's layers run.
A text's result does not depend on the other texts of the batch, to the bit. nn/packed.py hands it an encoder's weights.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bertie.compiled import load_library

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the library's order
ABI_VERSION = 6  # increment here and in encoder.cpp when the C interface changes
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.int8)  # in the library's order
LEVELS = (  # names of the instruction levels, from 1 on
    ("NEON", "NEON with dot product")
    if platform.machine().lower() in ("aarch64", "arm64")
    else ("AVX2", "AVX-512", "AVX-512 with VNNI")
)
INT8_LEVEL = 1  # the lowest instruction level with int8 matrix multiplication
BF16_LEVEL = 3
TRIAL_SECONDS, MIN_SPEEDUP = 20, 1.1  # of the trial of bf16
PADDING = 64  # numbers that may be read past the last distance; more than a panel has columns


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if it was not built, or was built from different sources."""
    lib = load_library(__file__, "_encoder", f"bertie_encoder_abi_{ABI_VERSION}")
    if lib is None:
        return None
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.bertie_encoder_create.restype = pointer
    lib.bertie_encoder_create.argtypes = [number, pointer, ctypes.c_double]
    lib.bertie_encoder_add_layer.argtypes = [pointer, number, wide, wide, number]
    lib.bertie_encoder_set_linear.argtypes = [pointer, number, number, wide, wide, *[pointer] * 5]
    lib.bertie_encoder_set_norm.argtypes = [pointer, number, number, pointer, pointer, number, ctypes.c_double]
    lib.bertie_encoder_set_embeddings.argtypes = [pointer, pointer, pointer, pointer, pointer, ctypes.c_double]
    lib.bertie_encoder_set_relative_tables.argtypes = [pointer, number, wide, pointer, pointer]
    lib.bertie_encoder_forward.argtypes = [pointer, wide, *[pointer] * 9, wide, wide, number]
    lib.bertie_encoder_sample_weight.argtypes = [pointer, pointer, wide]
    lib.bertie_encoder_is_current.argtypes = lib.bertie_encoder_destroy.argtypes = [pointer]
    lib.bertie_encoder_set_openmp.argtypes = [pointer, pointer, pointer]
    if (openmp := openmp_functions()) is not None:
        lib.bertie_encoder_set_openmp(*openmp)
    return lib


def openmp_functions() -> tuple[ctypes.c_void_p, ...] | None:
    """Functions of torch's OpenMP runtime, for its thread pool; None if it has none of GNU's interface (Windows)."""
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    try:
        torch_cpu = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        return tuple(ctypes.cast(torch_cpu[name], ctypes.c_void_p) for name in names)
    except (StopIteration, OSError, AttributeError):
        return None


@cache
def instruction_level() -> int | None:
    """The instructions to use, named in LEVELS; None without the library or such instructions: PyTorch is faster.

    (Level 0, plain C++, is for tests.)
    """
    lib = library()
    return (int(lib.bertie_encoder_isa_level()) or None) if lib is not None else None


def supports(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the library computes with weights of these dtypes: float32, int8 among float32, or bf16 where it pays."""
    level, kinds = instruction_level(), set(dtypes)
    if level is None:
        return False
    if kinds == {torch.bfloat16}:
        return level == BF16_LEVEL and bf16_is_faster()
    return kinds <= {torch.float32, torch.int8} and (level >= INT8_LEVEL or torch.int8 not in kinds)


@cache
def bf16_is_faster() -> bool:
    """Whether bf16 matrix multiplication works on this CPU and is faster than float32.

    Tried in another process: a virtual machine may report the instructions and then kill the process that uses them.
    """
    lib = library()
    if lib is None or not lib.bertie_encoder_has_bf16() or not sys.executable:
        return False
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, lib._name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=True)
        return float(done.stdout) > MIN_SPEEDUP
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


_TRIAL = """
import ctypes, sys
trial = ctypes.CDLL(sys.argv[1]).bertie_encoder_bf16_speedup
trial.restype = ctypes.c_double
print(trial())
"""


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class NativeEncoder:
    """An encoder inside the library. Matrices and norms are copied; embedding tables are read where they are.

    `shape` is width, heads, key heads, head width, feed-forward width, activation, gated, blocks.
    """

    def __init__(self, level: int, shape: Sequence[int], scale: float) -> None:
        lib = library()
        assert lib is not None
        self._lib, self._free, self._same = lib, lib.bertie_encoder_destroy, lib.bertie_encoder_is_current
        self._handle = lib.bertie_encoder_create(level, (ctypes.c_int64 * len(shape))(*shape), scale)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._free(self._handle)

    def add_layer(self, block: int, visible: tuple[int, int], rotation: int) -> None:
        """Append a layer that runs a block.

        `visible` is how many tokens before and after itself a token attends to, −1 for all; `rotation` is an index of
        `run`'s tables, −1 for none.
        """
        self._lib.bertie_encoder_add_layer(self._handle, block, *visible, rotation)

    def set_matrix(
        self, block: int, which: int, weight: Tensor, scale: Tensor | None, bias: Tensor | None, rows: slice
    ) -> None:
        """Pack rows of a weight (N, K): 0 qkv, 1 attention output, 2 up, 3 the gate's other half, 4 down."""
        weight = weight[rows].detach().contiguous()
        vectors = [None if x is None else x[rows].detach().float().contiguous() for x in (scale, bias)]
        pointers = [weight.data_ptr() if weight.dtype == dtype else None for dtype in WEIGHT_DTYPES]
        self._lib.bertie_encoder_set_linear(
            self._handle, block, which, *weight.shape, *pointers, *map(_pointer, vectors)
        )

    def set_norm(self, block: int, slot: int, weight: Tensor, bias: Tensor | None, rms: bool, eps: float) -> None:
        """Set a norm of a block, or with block −1 that of the embeddings (0) or the last one (1).

        Slots of a block: 0 before attention, 1 after it, 2 before the feed-forward layer, 3 after it, 4 and 5 of their
        outputs, 6 of queries, 7 of keys.
        """
        held = [None if x is None else x.detach().float().contiguous() for x in (weight, bias)]
        self._lib.bertie_encoder_set_norm(self._handle, block, slot, *map(_pointer, held), int(rms), eps)

    def set_embeddings(self, tables: Sequence[Tensor | None], scale: float) -> None:
        """Set the tables of words, segments, positions and tasks."""
        self._lib.bertie_encoder_set_embeddings(self._handle, *map(_pointer, tables), scale)

    def set_relative(self, block: int, keys: Tensor | None, queries: Tensor | None) -> None:
        """Set a block's projections (R, H, d) of the table of relative positions."""
        held = [None if x is None else x.detach().float().contiguous() for x in (keys, queries)]
        rows = next(len(x) for x in held if x is not None)
        self._lib.bertie_encoder_set_relative_tables(self._handle, block, rows, *map(_pointer, held))

    def watch(self, weight: Tensor) -> None:
        """Sample a weight, so that `is_current` notices writes that leave its version counter unchanged."""
        floats = weight.numel() * weight.element_size() // 4  # two bf16 numbers count as one
        if weight.is_floating_point() and weight.is_contiguous() and floats:
            self._lib.bertie_encoder_sample_weight(self._handle, weight.data_ptr(), floats)

    def is_current(self) -> bool:
        """Whether the watched weights have not changed."""
        return bool(self._same(self._handle))

    def run(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        inputs: Sequence[Tensor | None],
        rotations: Sequence[tuple[Tensor, Tensor]],
        by_distance: tuple[Tensor | None, Tensor | None],
        max_len: int,
    ) -> None:
        """Run all layers, writing the last hidden state (T, D) to x.

        `inputs` are ids, segments and rows of the position table (T,); all None if x holds the embeddings.
        `by_distance` are a bias (H, 2 · max_len − 1) or table rows, with PADDING numbers of room behind them.
        """
        cos, sin = ((ctypes.c_void_p * len(rotations))(*(pair[i].data_ptr() for pair in rotations)) for i in range(2))
        self._lib.bertie_encoder_forward(
            *(self._handle, len(cu_seqlens) - 1, cu_seqlens.data_ptr(), *map(_pointer, inputs), x.data_ptr(), cos, sin),
            *(*map(_pointer, by_distance), 2 * max_len - 1 + PADDING, max_len - 1, torch.get_num_threads()),
        )
