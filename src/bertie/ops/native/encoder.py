"""An encoder's layers on a CPU in C++ (cpp/): packed weights, no passes over memory between products, no padding.

Built with the package where there is a compiler. Where there is none, for architectures it does not know and whenever
gradients are recorded, the plain path is taken. A text's numbers do not depend on its neighbours, to the bit.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from operator import attrgetter, is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import BlockSparse, Bucketed, Disentangled, Sliding
from bertie.nn.attention import QKV
from bertie.nn.norms import RMSNorm
from bertie.nn.positions import RelativeTable, relative_rows, rotations
from bertie.ops.attention import Relative
from bertie.text.batch import Batch

if TYPE_CHECKING:
    from bertie.nn.blocks import Block
    from bertie.nn.encoder import Encoder

enabled = True  # whether the library is used where it can be
level: int | None = (
    None  # of its instructions: 0 plain, 1 AVX2, 2 AVX-512, 3 with VNNI; None: the chip's highest above 0
)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in its order
ABI_VERSION = 5  # increment here and in encoder.cpp when the C interface changes
KINDS = (torch.float32, torch.bfloat16, torch.int8)  # of matrices, in its order
BYTES_FROM = 1  # the level from which it multiplies bytes
SECONDS_TO_TRY, WIN = 20, 1.1  # for products of bf16, and how many times as fast they must be
ROOM = 64  # numbers that it may read beyond the last distance, more than any panel has columns


@cache
def library() -> ctypes.CDLL | None:
    """The compiled part, if it was built, and from these sources."""
    files = (Path(__file__).with_name(f"_encoder{ending}") for ending in EXTENSION_SUFFIXES)
    found = next((file for file in files if file.exists()), None)
    if found is None:
        return None
    lib = ctypes.CDLL(str(found))
    if not hasattr(lib, f"bertie_encoder_abi_{ABI_VERSION}"):  # left over from an older installation
        return None
    pointer, number, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.bertie_encoder_create.restype = pointer
    lib.bertie_encoder_create.argtypes = [number, pointer, ctypes.c_double]
    lib.bertie_encoder_add_layer.argtypes = [pointer, number, wide, number]
    lib.bertie_encoder_set_linear.argtypes = [pointer, number, number, wide, wide, *[pointer] * 5]
    lib.bertie_encoder_set_norm.argtypes = [pointer, number, number, pointer, pointer, number, ctypes.c_double]
    lib.bertie_encoder_set_embeddings.argtypes = [pointer, pointer, pointer, pointer, pointer, ctypes.c_double]
    lib.bertie_encoder_set_relative_tables.argtypes = [pointer, number, wide, pointer, pointer]
    lib.bertie_encoder_forward.argtypes = [pointer, wide, *[pointer] * 9, wide, wide, number]
    lib.bertie_encoder_sample_weight.argtypes = [pointer, pointer, wide]
    lib.bertie_encoder_is_current.argtypes = lib.bertie_encoder_destroy.argtypes = [pointer]
    lib.bertie_encoder_set_openmp.argtypes = [pointer, pointer, pointer]
    try:
        mine = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        lib.bertie_encoder_set_openmp(*(ctypes.cast(mine[name], pointer) for name in names))
    except (StopIteration, OSError, AttributeError):  # a torch without OpenMP: one thread
        pass
    return lib


def run(encoder: Encoder, batch: Batch) -> Tensor | None:
    """(T, D) the last hidden state; None if this path cannot take the pass."""
    lib = library()
    words = encoder.embeddings.words.weight
    if (
        lib is None
        or not enabled
        or _learns(encoder)
        or words.device.type != "cpu"
        or words.dtype not in (torch.float32, torch.bfloat16)
        or batch.global_tokens is not None
        or not (batch.ids.dtype == batch.segments.dtype == torch.int64)
        or not (batch.ids.is_contiguous() and batch.segments.is_contiguous())
        or batch.cu_seqlens.dtype != torch.int32
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or (packed := _packed(encoder, lib)) is None
        or batch.max_len > packed.longest
    ):
        return None
    embeddings = encoder.embeddings
    embeddings.check(batch)
    if packed.embeds:
        x = torch.empty(len(batch.ids), encoder.cfg.width)
        rows = None if embeddings.learned is None else embeddings.rows(batch)
        given = [None if one is None else one.data_ptr() for one in (batch.ids, batch.segments, rows)]
    else:
        x, given = embeddings(batch).float().contiguous(), [None, None, None]
    turned: list[tuple[Tensor, Tensor]] = []
    if encoder.rotary is not None:
        found = rotations(encoder.rotary, batch.positions, encoder.cfg.head_width)
        turned = [found[base] for base in packed.bases]
    cos, sin = ((ctypes.c_void_p * len(turned))(*(pair[i].data_ptr() for pair in turned)) for i in range(2))
    bias, met = (None, None) if encoder.relative is None else _by_distance(encoder.relative, batch.max_len)
    far = [None if one is None else one.data_ptr() for one in (bias, met)]
    lib.bertie_encoder_forward(
        *(packed.handle, len(batch), batch.cu_seqlens.data_ptr(), *given, x.data_ptr(), cos, sin),
        *(*far, 2 * batch.max_len - 1 + ROOM, batch.max_len - 1, torch.get_num_threads()),
    )
    return x.to(words.dtype)


def _by_distance(relative: RelativeTable, longest: int) -> tuple[Tensor | None, Tensor | None]:
    """For keys from `longest` - 1 places before the query to as many after it, and then room for a register that begins
    with the last of them: (H, D) what each head adds to a score; or (D,) the rows of the table that both meet."""
    rows = relative_rows(relative.scheme, longest, torch.device("cpu")).flip(0)  # they count from key to query
    if isinstance(relative.scheme, Bucketed):
        return F.pad(relative().float()[rows].T, (0, ROOM)).contiguous(), None
    return None, F.pad(rows, (0, ROOM)).int()


@cache
def bf16_is_faster() -> bool:
    """Whether products of bf16 work on this chip and are faster than those of float32: tried in another process, as a
    machine may say that it has such instructions and then end whoever uses them."""
    lib = library()
    if lib is None or not lib.bertie_encoder_has_bf16() or not sys.executable:
        return False
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, lib._name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_TRY, check=True)
        return float(done.stdout) > WIN
    except (OSError, ValueError, subprocess.SubprocessError):
        return False


_TRIAL = """
import ctypes, sys
trial = ctypes.CDLL(sys.argv[1]).bertie_encoder_bf16_speedup
trial.restype = ctypes.c_double
print(trial())
"""


def _learns(encoder: Encoder) -> bool:
    """Whether a gradient is wanted, or chance. Neither is where an encoder is held fixed and a head over it trained."""
    if not encoder.training and not torch.is_grad_enabled():
        return False
    if encoder.training and (encoder.cfg.dropout or encoder.cfg.attention_dropout):
        return True
    # In training also where no gradient is recorded: such a pass is compared with one that is (cached gradients).
    return any(one.requires_grad for one in encoder.parameters())


# --- weights as the library wants them ---

_kept: WeakKeyDictionary[Encoder, _Packed] = WeakKeyDictionary()
_lock = threading.Lock()


def _packed(encoder: Encoder, lib: ctypes.CDLL) -> _Packed | None:
    """An encoder's packed weights; None if the library does not know its kind, or if its layers do more than they say:
    somebody listens to what passes through them, or their weights are computed anew each time (LoRA).
    """
    instructions = int(lib.bertie_encoder_isa_level()) if level is None else level
    if level is None and instructions == 0:  # torch is faster there
        return None
    packed = _kept.get(encoder)
    if packed is not None and packed.instructions == instructions and packed.current():
        return packed
    if not _knows(encoder, instructions):
        return None
    with _lock:
        packed = _kept[encoder] = _Packed(encoder, lib, instructions)
    return packed


def _knows(encoder: Encoder, instructions: int) -> bool:
    cfg, parts = encoder.cfg, list(encoder.modules())
    return (
        cfg.activation in ACTIVATIONS
        and cfg.conv is None
        and not cfg.global_tokens
        and not any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        and not any("parametrizations" in part._modules for part in parts)
        and all(one.is_contiguous() for one in encoder.parameters())
        and (instructions >= BYTES_FROM or all(one.dtype != torch.int8 for one in encoder.parameters()))
        and _one_kind(encoder, instructions)
    )


def _one_kind(encoder: Encoder, instructions: int) -> bool:
    """Whether all is float32 with bytes here and there, or all bf16, and that of use."""
    kinds = {one.dtype for one in encoder.parameters()}
    return kinds <= {torch.float32, torch.int8} or (
        kinds == {torch.bfloat16} and instructions == 3 and bf16_is_faster()
    )


_version = attrgetter("_version")


class _Packed:
    """The weights, for as long as they are what they were."""

    def __init__(self, encoder: Encoder, lib: ctypes.CDLL, instructions: int) -> None:
        cfg, rotary = encoder.cfg, encoder.rotary
        self.instructions = instructions
        self.bases = tuple(dict.fromkeys(rotary.bases)) if rotary is not None else ()
        self.longest = min([one.full_below for one in cfg.patterns if isinstance(one, BlockSparse)], default=1 << 62)
        self.embeds = encoder.embeddings.project is None and encoder.embeddings.words.weight.dtype == torch.float32
        parts = [*encoder.blocks.modules(), *encoder.embeddings.modules()]
        parts += [] if encoder.norm is None else [encoder.norm]
        parts += [] if encoder.relative is None else encoder.relative.modules()
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        held, children = [part._parameters for part in parts], [part._modules for part in parts]
        every: list[dict[str, Any]] = [*held, *children]
        named = [(one, name, thing) for one in every for name, thing in one.items()]
        self._owners, self._names, self._things = (list(some) for some in zip(*named, strict=True))
        # Whatever replaces a parameter changes where it lies, and whatever writes to it counts its version up: all but
        # torch's fused optimizers, for which the library looks at a few numbers.
        self._weights = [weight for one in held for weight in one.values() if weight is not None]
        self._places = list(map(Tensor.data_ptr, self._weights))
        self._counted = [weight for weight in self._weights if not weight.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._free, self._same = lib.bertie_encoder_destroy, lib.bertie_encoder_is_current
        shape = (
            *(cfg.width, cfg.heads, cfg.kv_heads, cfg.head_width, cfg.ff_width, ACTIVATIONS.index(cfg.activation)),
            *(int(cfg.gated), cfg.blocks),
        )
        blocks = [cast("Block", block) for block in encoder.blocks]
        disentangled = any(isinstance(one, Disentangled) for one in cfg.positions)
        relative = encoder.places(Batch.from_ids([[0]])) if disentangled else None
        scale = blocks[0].attention.scale
        self.handle = lib.bertie_encoder_create(instructions, (ctypes.c_int64 * len(shape))(*shape), scale)
        for layer, number in enumerate(cfg.layer_map):
            pattern = cfg.patterns[layer]
            rotation = self.bases.index(rotary.bases[layer]) if rotary is not None else -1
            lib.bertie_encoder_add_layer(
                self.handle, number, pattern.window if isinstance(pattern, Sliding) else -1, rotation
            )
        for number, block in enumerate(blocks):
            attention, ff, cut = block.attention, block.ff, cfg.ff_width
            self._matrix(lib, number, 0, attention.qkv, slice(None))
            self._matrix(lib, number, 1, attention.out, slice(None))
            self._matrix(lib, number, 2, ff.up, slice(cut))
            if cfg.gated:
                self._matrix(lib, number, 3, ff.up, slice(cut, None))
            self._matrix(lib, number, 4, ff.down, slice(None))
            if relative is not None:
                self._relative(lib, number, attention._relative(relative))
            for slot, norm in enumerate((block.pre_attention, block.post_attention, block.pre_ff, block.post_ff)):
                self._norm(lib, number, slot, norm)
        self._norm(lib, -1, 1, encoder.norm)
        embeddings = encoder.embeddings
        if self.embeds:
            self._norm(lib, -1, 0, embeddings.norm)
        tables = (embeddings.words, embeddings.segments, embeddings.positions, embeddings.tasks)
        at = (None if one is None else one.weight.data_ptr() for one in tables)
        lib.bertie_encoder_set_embeddings(self.handle, *at, cfg.embeddings.scale)
        for weight, place in zip(self._weights, self._places, strict=True):
            floats = weight.numel() * weight.element_size() // 4  # two of bf16 count as one
            if weight.is_floating_point() and weight.is_contiguous() and floats:
                lib.bertie_encoder_sample_weight(self.handle, place, floats)

    def current(self) -> bool:
        """Whether nothing has changed, and nobody listens. Asked in every pass: no loop here is Python's own."""
        return (
            all(map(is_, map(dict.get, self._owners, self._names), self._things))
            and list(map(Tensor.data_ptr, self._weights)) == self._places
            and list(map(_version, self._counted)) == self._versions
            and not any(self._hooks)
            and bool(self._same(self.handle))
        )

    def _matrix(self, lib: ctypes.CDLL, block: int, which: int, layer: nn.Module, rows: slice) -> None:
        bias = layer.full_bias() if isinstance(layer, QKV) else layer.bias
        scale = getattr(layer, "scale", None)  # of a layer in bytes
        weight = cast(Tensor, layer.weight)[rows].detach().contiguous()
        held = [None if one is None else cast(Tensor, one)[rows].detach().float().contiguous() for one in (scale, bias)]
        places = [weight.data_ptr() if weight.dtype == kind else None for kind in KINDS]
        added = [None if one is None else one.data_ptr() for one in held]
        lib.bertie_encoder_set_linear(self.handle, block, which, *weight.shape, *places, *added)

    def _relative(self, lib: ctypes.CDLL, block: int, relative: Relative | None) -> None:
        """What a block makes of the table of relative positions, which no text changes."""
        assert relative is not None
        met = (relative.keys, relative.queries)
        held = [None if one is None else one.detach().float().contiguous() for one in met]
        rows = next(len(one) for one in held if one is not None)
        lib.bertie_encoder_set_relative_tables(
            self.handle, block, rows, *(None if one is None else one.data_ptr() for one in held)
        )

    def _norm(self, lib: ctypes.CDLL, block: int, slot: int, norm: nn.Module | None) -> None:
        if isinstance(norm, nn.LayerNorm | RMSNorm):
            rms = isinstance(norm, RMSNorm)
            weight, bias = norm.weight.detach().float(), None
            if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
                bias = norm.bias.detach().float()
            at = None if bias is None else bias.data_ptr()
            lib.bertie_encoder_set_norm(self.handle, block, slot, weight.data_ptr(), at, int(rms), norm.eps)

    def __del__(self) -> None:
        self._free(self.handle)
