"""An encoder's weights in the layout of the compiled library (ops/native), packed once and reused while unchanged."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.config import BlockSparse, Bucketed, Disentangled, visible_range
from bertie.nn.attention import QKV
from bertie.nn.norms import RMSNorm
from bertie.nn.positions import RelativeTable, relative_rows
from bertie.nn.snapshot import ModuleSnapshot
from bertie.ops.native import encoder as native
from bertie.ops.torch.eager import rotary_tables
from bertie.text.batch import Batch

if TYPE_CHECKING:
    from bertie.nn.blocks import Block
    from bertie.nn.encoder import Encoder

FROZEN_BYTES = 1 << 30  # of memory for the outputs of frozen layers


def run(encoder: Encoder, batch: Batch, depth: int | None = None) -> Tensor | None:
    """(T, D) the last hidden state; None if the compiled encoder does not take this batch or this encoder.

    For encoders whose resolved dispatch table has the row "native.encoder". With `depth`, that of the first layers.
    """
    if (
        batch.global_tokens is not None
        or batch.key_lengths is not None
        or not (batch.ids.dtype == batch.segments.dtype == torch.int64)
        or not (batch.ids.is_contiguous() and batch.segments.is_contiguous())
        or batch.cu_seqlens.dtype != torch.int32
        or torch.compiler.is_compiling()
        or (packed := _packed(encoder, depth or encoder.cfg.depth)) is None
        or batch.max_len > packed.longest
    ):
        return None
    embeddings = encoder.embeddings
    embeddings.check(batch)
    inputs: tuple[Tensor | None, ...] = (None, None, None)
    if packed.embeds:
        x = torch.empty(len(batch.ids), encoder.cfg.width)
        inputs = (batch.ids, batch.segments, None if embeddings.learned is None else embeddings.rows(batch))
    else:
        x = embeddings(batch, encoder.dispatch()).float().contiguous()
    rotations: list[tuple[Tensor, Tensor]] = []
    if encoder.rotary is not None:
        tables = rotary_tables(encoder.rotary, batch.positions, encoder.cfg.head_width)
        rotations = [tables[key] for key in packed.rotary_keys]
    by_distance = (None, None) if encoder.relative is None else _by_distance(encoder.relative, batch.max_len)
    packed.native.run(x, batch.cu_seqlens, inputs, rotations, by_distance, batch.max_len)
    return x.to(embeddings.words.weight.dtype)


def run_frozen(encoder: Encoder, batch: Batch, layers: int) -> Tensor | None:
    """As `run` for frozen layers, whose outputs are cached: a text that was seen before is not computed again.

    That is exact, as a text's result does not depend on the other texts of its batch.
    """
    ids, segments, ends = batch.ids.numpy(), batch.segments.numpy(), batch.cu_seqlens.tolist()
    spans = list(pairwise(ends))
    keys = [ids[a:b].tobytes() + segments[a:b].tobytes() for a, b in spans]
    if (packed := _packed(encoder, layers)) is None:
        return None
    known = packed.outputs
    missing = {key: b for b, key in enumerate(keys) if key not in known}
    fresh: dict[bytes, Tensor] = {}
    if missing:
        spanned = [spans[b] for b in missing.values()]
        part = Batch.from_ids([ids[a:b] for a, b in spanned], [segments[a:b] for a, b in spanned])
        with torch.no_grad():
            hidden = run(encoder, part, layers)
        if hidden is None:
            return None
        fresh = dict(zip(missing, torch.split(hidden, list(part.lengths)), strict=True))
        packed.keep(fresh)
    return torch.cat([fresh[key] if key in fresh else known[key] for key in keys])


def forget_frozen(encoder: Encoder) -> None:
    """Free the cached outputs of an encoder's frozen layers."""
    for depth in [depth for depth, packed in _cache.get(encoder, {}).items() if packed.outputs]:
        del _cache[encoder][depth]


def _by_distance(relative: RelativeTable, longest: int) -> tuple[Tensor | None, Tensor | None]:
    """What to add for keys from `longest` − 1 tokens before the query to as many after it.

    (H, distances) the score of each head, or (distances,) the rows of the table of relative positions; padded so
    that a vector register may start at the last distance.
    """
    rows = relative_rows(relative.scheme, longest, torch.device("cpu")).flip(0)  # here they run from key to query
    if isinstance(relative.scheme, Bucketed):
        return F.pad(relative().float()[rows].T, (0, native.PADDING)).contiguous(), None
    return None, F.pad(rows, (0, native.PADDING)).int()


_cache: WeakKeyDictionary[Encoder, dict[int, _Packed]] = WeakKeyDictionary()  # by the number of layers
_lock = threading.Lock()


def _packed(encoder: Encoder, depth: int) -> _Packed | None:
    """The encoder's packed weights; None if its layers compute more than the library does (hooks, LoRA)."""
    level = native.instruction_level()
    packed = _cache.get(encoder, {}).get(depth)
    if packed is not None and packed.level == level and packed.is_current():
        return packed
    parts = list(encoder.modules())
    if (
        level is None
        or any(part._forward_hooks or part._forward_pre_hooks for part in parts)
        or any("parametrizations" in part._modules for part in parts)
        or not all(weight.is_contiguous() for weight in encoder.parameters())
        or not native.supports(weight.dtype for weight in encoder.parameters())
    ):
        return None
    with _lock:
        packed = _cache.setdefault(encoder, {})[depth] = _Packed(encoder, level, depth)
    return packed


class _Packed:
    """The first layers of an encoder in the library, and what its weights were when it was packed."""

    def __init__(self, encoder: Encoder, level: int, depth: int) -> None:
        self.outputs: dict[bytes, Tensor] = {}  # of texts that `run_frozen` has seen
        self._free = FROZEN_BYTES
        cfg, rotary = encoder.cfg, encoder.rotary
        self.level = level
        self.rotary_keys = rotary.distinct_keys() if rotary is not None else ()
        self.longest = min([p.full_below for p in cfg.patterns if isinstance(p, BlockSparse)], default=1 << 62)
        self.embeds = encoder.embeddings.project is None and encoder.embeddings.words.weight.dtype == torch.float32
        blocks = {number: cast("Block", encoder.blocks[number]) for number in cfg.layer_map[:depth]}
        final_norm = encoder.norm if depth == cfg.depth else None
        parts = [part for block in blocks.values() for part in block.modules()]
        parts += [*encoder.embeddings.modules(), *([] if final_norm is None else [final_norm])]
        parts += [] if encoder.relative is None else encoder.relative.modules()
        # Replacing a parameter changes its address, and writing to it increments its version: in all but torch's
        # fused optimizers, for which the library samples a few numbers.
        self._snapshot = ModuleSnapshot(parts)
        shape = (
            *(cfg.width, cfg.heads, cfg.kv_heads, cfg.head_width, cfg.ff_width),
            *(native.ACTIVATIONS.index(cfg.activation), int(cfg.gated), cfg.blocks),
        )
        self.native = native.NativeEncoder(level, shape, blocks[cfg.layer_map[0]].attention.scale)
        for layer, number in enumerate(cfg.layer_map[:depth]):
            pattern = cfg.patterns[layer]
            rotation = self.rotary_keys.index(rotary.key(layer)) if rotary is not None else -1
            self.native.add_layer(number, visible_range(pattern), rotation)
        for number, block in blocks.items():
            self._set_block(encoder, number, block)
        self._set_norm(-1, 1, final_norm)
        embeddings = encoder.embeddings
        if self.embeds:
            self._set_norm(-1, 0, embeddings.norm)
        tables = (embeddings.words, embeddings.segments, embeddings.positions, embeddings.tasks)
        self.native.set_embeddings([None if t is None else t.weight for t in tables], cfg.embeddings.scale)
        for weight in self._snapshot.weights:
            self.native.watch(weight)

    def keep(self, outputs: Mapping[bytes, Tensor]) -> None:
        """Cache the outputs of texts, until the limit is reached."""
        for key, hidden in outputs.items():
            self._free -= len(key) + hidden.numel() * hidden.element_size()
            if self._free < 0:
                return
            self.outputs[key] = hidden.clone()  # not a view, which would keep its whole batch

    def is_current(self) -> bool:
        """Whether no weight has changed and there are no hooks."""
        return self._snapshot.is_unchanged() and self.native.is_current()

    def _set_block(self, encoder: Encoder, number: int, block: Block) -> None:
        attention, ff, cut = block.attention, block.ff, encoder.cfg.ff_width
        self._set_matrix(number, 0, attention.qkv)
        self._set_matrix(number, 1, attention.out)
        self._set_matrix(number, 2, ff.up, slice(cut))
        if encoder.cfg.gated:
            self._set_matrix(number, 3, ff.up, slice(cut, None))
        self._set_matrix(number, 4, ff.down)
        if any(isinstance(position, Disentangled) for position in encoder.cfg.positions):
            # The projections of the table depend on no text.
            relative = attention.relative_terms(encoder.pass_context(Batch.from_ids([[0]])))
            assert relative is not None
            self.native.set_relative(number, relative.keys, relative.queries)
        norms = (
            *(block.pre_attention, block.post_attention, block.pre_ff, block.post_ff),
            *(block.attention_output, block.ff_output, attention.q_norm, attention.k_norm),
        )
        for slot, norm in enumerate(norms):
            self._set_norm(number, slot, norm)

    def _set_matrix(self, block: int, which: int, layer: nn.Module, rows: slice = slice(None)) -> None:
        bias = layer.full_bias() if isinstance(layer, QKV) else cast("Tensor | None", layer.bias)
        scale: Tensor | None = getattr(layer, "scale", None)  # of an int8 layer
        self.native.set_matrix(block, which, cast(Tensor, layer.weight), scale, bias, rows)

    def _set_norm(self, block: int, slot: int, norm: nn.Module | None) -> None:
        if isinstance(norm, nn.LayerNorm):
            self.native.set_norm(block, slot, norm.weight, norm.bias, False, norm.eps)
        elif isinstance(norm, RMSNorm):
            self.native.set_norm(block, slot, norm.factor(), None, True, norm.eps)
