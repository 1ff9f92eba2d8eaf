"""The compiled training kernels as differentiable operations, with the signatures of ops/torch: their reference.

Dropout draws one seed per call from torch's generator. Which elements are dropped follows from the seed and their
place, so that nothing is stored for the backward pass.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertie.config import Activation, Causal, Full, Sliding, visible_range
from bertie.ops.contracts import AttentionInputs
from bertie.ops.native import training
from bertie.ops.torch import eager


def _dropout(rate: float) -> tuple[float, int]:
    """The rate and a fresh seed."""
    return rate, int(torch.randint(1 << 62, ())) if rate else 0


def _is_float(*tensors: Tensor | None) -> bool:
    return all(x is None or x.dtype == torch.float32 for x in tensors)


# --- attention ---


def attention_accepts(call: AttentionInputs) -> bool:
    """Guard of the row."""
    return (
        call.relative is None
        and call.global_tokens is None
        and isinstance(call.pattern, Full | Sliding | Causal)
        and sum(call.lengths) == len(call.q)
        and call.cu_seqlens.dtype == torch.int32
        and _is_float(call.q, call.k, call.v)
    )


def attend(call: AttentionInputs) -> Tensor:
    """As `ops.attend`, for calls that `attention_accepts`."""
    visible = visible_range(call.pattern)
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, call.cu_seqlens, call.scale, visible, _dropout(call.dropout)
    )
    return out


def _rows(x: Tensor) -> Tensor:
    """(T, H, d) with contiguous rows; the rows themselves may be apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        visible: tuple[int, int],
        dropout: tuple[float, int],
    ) -> Tensor:
        heads = [_rows(x) for x in (q, k, v)]
        out, log_sums = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        training.attention(heads, cu_seqlens, scale, visible, dropout, (out, log_sums))
        ctx.save_for_backward(*heads, cu_seqlens, out, log_sums)
        ctx.options = (scale, visible, dropout)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens, out, log_sums = ctx.saved_tensors
        sizes = [q.shape[1], k.shape[1], v.shape[1]]
        grads = torch.split(q.new_empty(len(q), sum(sizes), q.shape[2]), sizes, dim=1)
        gradients = (grad.contiguous(), *grads)
        scale, visible, dropout = ctx.options
        training.attention((q, k, v), cu_seqlens, scale, visible, dropout, (out, log_sums), gradients)
        return *grads, None, None, None, None


# --- rotary embeddings ---


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `eager.apply_rotary`."""
    if not _is_float(q, k, cos, sin):
        return eager.apply_rotary(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        training.rotary(_rows(x), cos, sin, out, inverse=False)
        ctx.save_for_backward(cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(grad.shape)
        cos, sin = ctx.saved_tensors
        training.rotary(_rows(grad), cos, sin, out, inverse=True)
        return out, None, None


# --- norms ---


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module, dropout: float) -> Tensor:
    """As `eager.add_norm`."""
    if _is_layer_norm(norm) and _is_float(x, residual, norm.weight):
        return _add_norm(x, residual, norm, dropout)[0]
    return eager.add_norm(x, residual, norm, dropout)


def add_norms(x: Tensor, residual: Tensor, post: nn.Module, pre: nn.Module, dropout: float) -> tuple[Tensor, Tensor]:
    """As `eager.add_norms`."""
    if isinstance(post, nn.Identity) and _is_layer_norm(pre) and _is_float(x, residual, pre.weight):
        normed, total = _add_norm(x, residual, pre, dropout)
        assert total is not None
        return total, normed
    total = add_norm(x, residual, post, dropout)
    return total, norm(total, pre)


def norm(x: Tensor, module: nn.Module) -> Tensor:
    """As `eager.norm`."""
    if _is_layer_norm(module) and _is_float(x, module.weight):
        return _add_norm(x, None, module, 0.0)[0]
    return eager.norm(x, module)


def _is_layer_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    # A hook, which the kernel would skip, wants the module itself.
    return type(module) is nn.LayerNorm and not module._forward_hooks and not module._forward_pre_hooks


def _add_norm(x: Tensor, residual: Tensor | None, module: nn.LayerNorm, dropout: float) -> tuple[Tensor, Tensor | None]:
    """The norm of residual + dropout(x), and the sum where there is a residual."""
    outputs: tuple[Tensor, Tensor | None] = _AddNorm.apply(  # type: ignore[no-untyped-call]
        x, residual, module.weight, module.bias, module.eps, _dropout(dropout)
    )
    return outputs


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        dropout: tuple[float, int],
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        total = x if residual is None else torch.empty_like(x)
        out, statistics = torch.empty_like(x), x.new_empty(len(x), 2)
        residual = None if residual is None else residual.contiguous()
        own = None if residual is None else total
        training.add_norm(eps, False, dropout, (x, residual, weight, bias, own, out, statistics))
        ctx.save_for_backward(weight, bias, total, statistics)
        ctx.dropout, ctx.has_residual = dropout, residual is not None
        return out, None if residual is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, bias, total, statistics = ctx.saved_tensors
        grad = torch.zeros_like(total) if grad is None else grad.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_residual = torch.empty_like(total)
        grad_x = torch.empty_like(total) if ctx.dropout[0] else None
        grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
        gradients = (grad, grad_total, grad_residual, grad_x, grad_weight, grad_bias)
        training.add_norm_backward(False, ctx.dropout, (weight, bias, total, statistics, *gradients))
        to_x = grad_residual if grad_x is None else grad_x
        return to_x, grad_residual if ctx.has_residual else None, grad_weight, grad_bias, None, None


# --- activations ---


def linear_activation(x: Tensor, linear: nn.Module, activation: Activation, gated: bool) -> Tensor:
    """As `eager.linear_activation`."""
    y: Tensor = linear(x)
    if activation not in training.ACTIVATIONS or not _is_float(y):
        return eager.activate(y, activation, gated)
    out: Tensor = _Activation.apply(y, activation, gated)  # type: ignore[no-untyped-call]
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, kind: Activation, gated: bool) -> Tensor:
        y = y.contiguous()
        out = y.new_empty(len(y), y.shape[1] // 2 if gated else y.shape[1])
        training.activation(kind, gated, y, out)
        ctx.save_for_backward(y)
        ctx.kind, ctx.gated = kind, gated
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        grad_y = torch.empty_like(y)
        training.activation(ctx.kind, ctx.gated, y, None, (grad.contiguous(), grad_y))
        return grad_y, None, None
