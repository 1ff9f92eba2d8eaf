"""Attention's backends behind one signature: for each the guard that depends on the batch, and the call."""

from __future__ import annotations

from torch import Tensor

from bertie.ops.contracts import AttentionInputs
from bertie.ops.torch import grouped_attention, varlen_attention
from bertie.ops.triton import disentangled_attention, short_attention


def short_accepts(call: AttentionInputs) -> bool:
    """Guard of the row."""
    return (
        call.global_tokens is None
        and call.dropout == 0.0
        and (short_attention.has_window(call.pattern) or max(call.lengths) <= short_attention.MAX_LENGTH)
        and sum(call.lengths) == len(call.q)  # else the lengths are only upper bounds
    )


def run_short(call: AttentionInputs) -> Tensor:
    """Run the backend."""
    return short_attention.attend(
        call.q, call.k, call.v, call.lengths, scale=call.scale, pattern=call.pattern, rotation=call.rotation
    )


def disentangled_accepts(call: AttentionInputs) -> bool:
    """Guard of the row."""
    return call.global_tokens is None and (
        call.relative is not None or max(call.lengths) <= disentangled_attention.MAX_PLAIN_LENGTH
    )


def run_disentangled(call: AttentionInputs) -> Tensor:
    """Run the backend."""
    return disentangled_attention.attend(
        *(call.q, call.k, call.v, call.lengths, call.cu_seqlens),
        scale=call.scale,
        relative=call.relative,
        dropout=call.dropout,
        cache=call.cache,
    )


def run_varlen(call: AttentionInputs) -> Tensor:
    """Run the backend."""
    return varlen_attention.attend(
        *(call.q, call.k, call.v, call.lengths, call.cu_seqlens),
        scale=call.scale,
        pattern=call.pattern,
        dropout=call.dropout,
    )


def bucketed_accepts(call: AttentionInputs) -> bool:
    """Guard of the row."""
    return call.global_tokens is None and call.dropout == 0.0 and max(call.lengths) <= varlen_attention.LONGEST_BIASED


def run_bucketed(call: AttentionInputs) -> Tensor:
    """Run the backend."""
    assert call.relative is not None
    return varlen_attention.attend_biased(
        call.q, call.k, call.v, call.lengths, scale=call.scale, relative=call.relative
    )


def run_grouped(call: AttentionInputs) -> Tensor:
    """Run the backend."""
    return grouped_attention.attend(
        *(call.q, call.k, call.v, call.lengths),
        scale=call.scale,
        pattern=call.pattern,
        relative=call.relative,
        global_tokens=call.global_tokens,
        dropout=call.dropout,
    )
