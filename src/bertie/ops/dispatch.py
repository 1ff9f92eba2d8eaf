"""The table of operations and their backends: the one place that decides which implementation runs.

`ROWS` lists, for each operation, its backends in order of preference. A row's predicate reads only facts that are
fixed for a model on a device in one precision and mode (`Site`), so that an encoder resolves the table once per such
combination and keeps the result. What depends on the batch (lengths, global tokens, dropout) is a guard of the row,
`accepts`: the first resolved row whose guard holds runs. The last row of an operation takes everything.

`bertie.ops.disable("triton.attention")` or BERTIE_DISABLE=triton.attention,cuda_graphs turns rows off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from bertie import switches
from bertie.config import Causal, EncoderConfig, Full, Pattern, Precision, Sliding
from bertie.ops import attention_adapters as adapters
from bertie.ops.contracts import AttentionInputs, compute_dtype, needs_grad
from bertie.ops.native import autograd
from bertie.ops.native import encoder as native
from bertie.ops.native import training as native_training
from bertie.ops.site import Site
from bertie.ops.torch import eager, varlen_attention
from bertie.ops.triton import activation, cross_entropy, disentangled_attention, norm, pooling, rotary, short_attention
from bertie.ops.triton.launch import HALF, MAX_WIDTH


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of an operation."""

    operation: str
    backend: str
    supports: Callable[[Site], bool]
    run: Callable[..., Any] | None = None  # None: the caller knows what to do
    accepts: Callable[[AttentionInputs], bool] | None = None  # guard that depends on the batch
    condition: str = ""  # the guard in words


# --- predicates ---


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, (0, 0) for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _on_gpu_with_triton(site: Site) -> bool:
    return site.device.type == "cuda" and has_triton()


def _half_on_gpu(site: Site) -> bool:
    return _on_gpu_with_triton(site) and site.dtype in HALF


def _any(site: Site) -> bool:
    return True


def _triton_attention(site: Site) -> bool:
    return (
        _half_on_gpu(site)
        and capability(site.device) >= (8, 0)
        and short_attention.MIN_HEAD_WIDTH <= site.head_width <= short_attention.MAX_HEAD_WIDTH
        and site.head_width % 8 == 0
    )


def _short(site: Site) -> bool:
    return _triton_attention(site) and not site.training and not site.relative and _contiguous(site)


def _contiguous(site: Site) -> bool:
    """Whether a query's keys are one range around it, in every layer: full, sliding-window or causal attention."""
    return all(isinstance(pattern, Full | Sliding | Causal) for pattern in site.patterns)


def _short_rotary(site: Site) -> bool:
    # A tile takes half a head's width in one matrix multiplication, of at least 16 columns.
    width = site.head_width
    return site.rotary and _short(site) and width >= 32 and width & (width - 1) == 0


def _disentangled(site: Site) -> bool:
    return _triton_attention(site) and site.heads == site.kv_heads and _only_full(site)


def _only_full(site: Site) -> bool:
    return all(isinstance(pattern, Full) for pattern in site.patterns)


def _varlen(site: Site) -> bool:
    if site.device.type != "cuda" or site.relative or site.head_width % 8:
        return False
    if varlen_attention.has_flash(site.device, site.dtype, site.head_width):
        return _contiguous(site)
    unbounded = all(pattern in (Full(), Causal()) for pattern in site.patterns)
    return unbounded and site.dtype in (torch.float32, torch.float16)


def _bucketed(site: Site) -> bool:
    return site.device.type == "cuda" and site.relative == "bucketed" and not site.training and _only_full(site)


def _triton_rotary(site: Site) -> bool:
    return (
        site.rotary
        and _on_gpu_with_triton(site)
        and site.dtype in (*HALF, torch.float32)
        and rotary.MIN_HEAD_WIDTH <= site.head_width <= rotary.MAX_HEAD_WIDTH
        and site.head_width % 2 == 0
    )


def _fused_norm(site: Site) -> bool:
    return _half_on_gpu(site) and site.norm == "layer" and site.width <= MAX_WIDTH


def _fused_embedding(site: Site) -> bool:
    return _fused_norm(site) and not site.training and not site.autocast


def _fused_activation(site: Site) -> bool:
    return _half_on_gpu(site) and site.activation in activation.ACTIVATIONS


def _fused_pooling(site: Site) -> bool:
    return _on_gpu_with_triton(site) and site.dtype in (*HALF, torch.float32) and not site.training


def _native(site: Site) -> bool:
    return (
        site.device.type == "cpu"
        and not site.training
        and not site.autocast
        and not site.global_tokens
        and not site.convolution
        and site.activation in native.ACTIVATIONS
        and native.supports(site.weights)
    )


def _native_training(site: Site) -> bool:
    if site.device.type != "cpu" or not site.training or site.autocast or site.dtype != torch.float32:
        return False
    return native_training.instruction_level() is not None


def _native_norm(site: Site) -> bool:
    return site.norm == "layer" and _native_training(site)


def _native_activation(site: Site) -> bool:
    return site.activation in native.ACTIVATIONS and _native_training(site)


def _native_attention(site: Site) -> bool:
    return not site.relative and _native_training(site)


def _native_rotary(site: Site) -> bool:
    return site.rotary and site.head_width % 2 == 0 and _native_training(site)


def _cuda_graphs(site: Site) -> bool:
    """Whether a pass launches the same sequence of kernels for every batch of a size."""
    if site.device.type != "cuda" or site.global_tokens or site.convolution or site.checkpointing:
        return False
    if site.relative == "bucketed" or (site.training and (site.dtype != torch.bfloat16 or site.relative)):
        return False
    if site.autocast and not site.training:
        return False
    # Attention must read the lengths from the device, for every pattern.
    needed = "triton.attention.disentangled" if site.relative else "torch.attention.varlen"
    return all(
        any(row.backend == needed for row in select("attention", replace(site, patterns=(pattern,))))
        for pattern in site.patterns
    )


# --- the table ---

ROWS = (
    Row("replay", "cuda_graphs", _cuda_graphs, condition="batches of a size seen before"),
    Row("replay", "none", _any),
    Row("encoder", "native.encoder", _native, condition="no hooks, no global tokens"),
    Row("encoder", "torch.layers", _any),
    Row(
        *("attention", "triton.attention.short", _short, adapters.run_short, adapters.short_accepts),
        condition=f"no dropout; windows, or texts of at most {short_attention.MAX_LENGTH:,} tokens",
    ),
    Row(
        *(
            "attention",
            "triton.attention.disentangled",
            _disentangled,
            adapters.run_disentangled,
            adapters.disentangled_accepts,
        ),
        condition=f"relative positions, or texts of at most {disentangled_attention.MAX_PLAIN_LENGTH} tokens",
    ),
    Row(
        *("attention", "torch.attention.varlen", _varlen, adapters.run_varlen, varlen_attention.accepts),
        condition="no global tokens; dropout in float32 only where lengths are similar",
    ),
    Row(
        *("attention", "torch.attention.bucketed", _bucketed, adapters.run_bucketed, adapters.bucketed_accepts),
        condition=f"no dropout, texts of at most {varlen_attention.LONGEST_BIASED} tokens",
    ),
    Row(
        *("attention", "native.training.attention", _native_attention, autograd.attend, autograd.attention_accepts),
        condition="full, sliding-window or causal attention, no global tokens",
    ),
    Row("attention", "torch.attention.grouped", _any, adapters.run_grouped),
    Row(
        *("rotary", "triton.attention.short_rotary", _short_rotary),
        condition=f"inside triton.attention.short, up to {max(short_attention.ROTARY_TILES)} keys per query",
    ),
    Row("rotary", "triton.rotary", _triton_rotary, rotary.apply_rotary),
    Row("rotary", "native.training.rotary", _native_rotary, autograd.apply_rotary),
    Row("rotary", "torch.eager", _any, eager.apply_rotary),
    Row("norm", "triton.fused.norm", _fused_norm),
    Row("norm", "native.training.norm", _native_norm),
    Row("norm", "torch.eager", _any),
    Row("activation", "triton.fused.activation", _fused_activation, activation.linear_activation),
    Row("activation", "native.training.activation", _native_activation, autograd.linear_activation),
    Row("activation", "torch.eager", _any, eager.linear_activation),
    Row("embedding", "triton.fused.embedding", _fused_embedding, norm.embed_norm),
    Row("embedding", "torch.eager", _any, eager.embed_norm),
    Row("cross_entropy", "triton.fused.cross_entropy", _half_on_gpu, cross_entropy.fused_linear_cross_entropy),
    Row("cross_entropy", "torch.eager", _any, eager.linear_cross_entropy),
    Row("optimizer", "native.training.optimizer", _native_training),
    Row("optimizer", "torch.eager", _any),
    Row("pooling", "triton.fused.pooling", _fused_pooling, pooling.pool, condition="modes max, mean, weightedmean"),
    Row("pooling", "torch.eager", _any),
    Row("fp8_quantization", "triton.fused.fp8", _half_on_gpu),
    Row("fp8_quantization", "torch.eager", _any),
)


def select(operation: str, site: Site) -> tuple[Row, ...]:
    """The rows of an operation that can run at a site, in order of preference, up to the first without a guard."""
    return _select(operation, site, switches.disabled())


@lru_cache(maxsize=4096)
def _select(operation: str, site: Site, disabled: frozenset[str]) -> tuple[Row, ...]:
    rows = []
    for row in ROWS:
        if row.operation == operation and not switches.is_disabled(row.backend) and row.supports(site):
            rows.append(row)
            if not row.condition:
                break
    return tuple(rows)


def clear_cache() -> None:
    """Forget what was resolved, for tests that change predicates."""
    for cached in (_select, _tensor_row, _attention_backends):
        cached.cache_clear()


# --- what is resolved ---


@dataclass(frozen=True, slots=True)
class AttentionBackends:
    """The resolved backends of attention for one pattern."""

    rows: tuple[Row, ...]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    fuses_rotary: bool

    def choose(self, call: AttentionInputs) -> Row:
        """The first row that takes the call."""
        return next(row for row in self.rows if row.accepts is None or row.accepts(call))

    def rotates(self, row: Row, call: AttentionInputs) -> bool:
        """Whether the row's kernel applies the rotary embeddings itself."""
        return (
            self.fuses_rotary
            and row.run is adapters.run_short
            and short_attention.visible_keys(call.lengths, call.pattern) <= max(short_attention.ROTARY_TILES)
        )

    @classmethod
    def resolve(cls, site: Site) -> AttentionBackends:
        """Resolve for a site of one pattern."""
        *_, rotate = rotations = select("rotary", site)
        assert rotate.run is not None
        fuses = any(row.backend == "triton.attention.short_rotary" for row in rotations)
        return cls(select("attention", site), rotate.run, fuses)


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """The resolved table of an encoder on a device, in one precision and mode."""

    site: Site
    attention: dict[Pattern, AttentionBackends]
    add_norm: Callable[..., Tensor]
    add_norms: Callable[..., tuple[Tensor, Tensor]]
    norm: Callable[..., Tensor]
    linear_activation: Callable[..., Tensor]
    embed_norm: Callable[..., Tensor]
    native: bool  # the compiled encoder is tried first
    replays: bool  # forward passes may be replayed from CUDA graphs

    @classmethod
    def resolve(cls, site: Site) -> DispatchTable:
        """Resolve every operation of an encoder."""
        fused: dict[str, Any] = {"triton.fused.norm": norm, "native.training.norm": autograd}
        norms = fused.get(select("norm", site)[0].backend, eager)
        linear_activation, embed_norm = (select(name, site)[0].run for name in ("activation", "embedding"))
        assert linear_activation is not None
        assert embed_norm is not None
        return cls(
            site,
            {pattern: AttentionBackends.resolve(replace(site, patterns=(pattern,))) for pattern in site.patterns},
            norms.add_norm,
            norms.add_norms,
            norms.norm,
            linear_activation,
            embed_norm,
            native=select("encoder", site)[0].backend == "native.encoder",
            replays=select("replay", site)[0].backend == "cuda_graphs",
        )

    def report(self) -> list[dict[str, str]]:
        """The rows in use, as plain data: operation, backend, and the condition on the batch, if there is one.

        Backends of an operation are in order of preference: the first whose condition holds runs.
        """
        rows: list[Row] = []
        operations = dict.fromkeys(row.operation for row in ROWS)
        skipped = {"fp8_quantization"} if torch.float8_e4m3fn not in self.site.weights else set()
        skipped |= set() if self.site.rotary else {"rotary"}
        skipped |= set() if self.site.training else {"cross_entropy", "optimizer"}
        for operation in operations:
            if operation not in skipped:
                sites = [replace(self.site, patterns=(p,)) for p in self.site.patterns if operation == "attention"]
                rows += dict.fromkeys(row for site in sites or [self.site] for row in select(operation, site))
        return [{"operation": row.operation, "backend": row.backend, "condition": row.condition} for row in rows]


_WEIGHTS: dict[Precision, tuple[torch.dtype, ...]] = {  # dtypes of the weights; the first is that of activations
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "int8": (torch.float32, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
}


def report(cfg: EncoderConfig, device: torch.device | str, precision: Precision) -> list[dict[str, str]]:
    """As `DispatchTable.report`, for inference with an encoder that need not be loaded."""
    weights = _WEIGHTS[precision]
    site = Site.of(cfg, torch.device(device), weights[0], weights=frozenset(weights))
    return DispatchTable.resolve(site).report()


def summarize(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One line per operation of a report, for people: its backends, in order, with their conditions."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        condition = f" ({row['condition']})" if row["condition"] else ""
        lines.setdefault(row["operation"], []).append(row["backend"] + condition)
    return {operation: ", else ".join(backends) for operation, backends in lines.items()}


# --- sites of tensors, for operations outside an encoder ---


@lru_cache(maxsize=1024)
def _tensor_row(operation: str, device: torch.device, dtype: torch.dtype, training: bool, disabled: object) -> Row:
    return select(operation, Site(device, dtype, training))[0]


def row_for(operation: str, x: Tensor) -> Row:
    """The first row of an operation for a tensor."""
    return _tensor_row(operation, x.device, compute_dtype(x), needs_grad(x), switches.disabled())


def attention_backends(call: AttentionInputs) -> AttentionBackends:
    """The backends for queries, keys and values that come from no encoder."""
    kind: Literal["", "bucketed", "disentangled"] = ""
    tensors: list[Tensor | None] = [call.q, call.k, call.v]
    if (relative := call.relative) is not None:
        tensors += [relative.keys, relative.queries, relative.scores]
        kind = "bucketed" if relative.keys is None and relative.queries is None else "disentangled"
    site = Site(
        call.q.device,
        call.q.dtype,
        needs_grad(*tensors),
        heads=call.q.shape[1],
        kv_heads=call.k.shape[1],
        head_width=call.q.shape[2],
        patterns=(call.pattern,),
        relative=kind,
        rotary=True,
    )
    return _attention_backends(site, switches.disabled())


@lru_cache(maxsize=256)
def _attention_backends(site: Site, disabled: frozenset[str]) -> AttentionBackends:
    return AttentionBackends.resolve(site)
