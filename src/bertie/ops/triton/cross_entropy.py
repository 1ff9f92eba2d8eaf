"""Fused linear cross-entropy: logits stay in half precision and are overwritten by their gradient.

The kernel is in `cross_entropy_kernels.py`, the reference in `ops/torch/eager.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bertie.ops.contracts import compute_dtype
from bertie.ops.triton.launch import device_guard, next_power_of_2

ALIGNMENT = 64  # of the vocabulary: GEMMs of other sizes take up to twice as long
MAX_BLOCK = 4096  # logits of a row that are loaded at a time


def fused_linear_cross_entropy(
    x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor
) -> Tensor:
    """As `eager.linear_cross_entropy`."""
    loss: Tensor = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x.to(compute_dtype(x)), words, bias, targets, weights
    )
    return loss


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, words: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
        from bertie.ops.triton import cross_entropy_kernels as kernels

        vocab = len(words)
        padded_vocab = -(-vocab // ALIGNMENT) * ALIGNMENT
        table = F.pad(words.to(x.dtype), (0, 0, 0, padded_vocab - vocab))  # (V', D)
        logits = x @ table.T  # (N, V')
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
        with device_guard(x):
            kernels.cross_entropy_forward_backward[(len(x),)](
                *(logits, bias, targets, weights, losses),
                VOCAB=vocab,
                STRIDE=padded_vocab,
                STORE_GRADIENT=any(ctx.needs_input_grad),
                HAS_BIAS=bias is not None,
                BLOCK=min(MAX_BLOCK, next_power_of_2(padded_vocab)),
                num_warps=8,
            )
        ctx.save_for_backward(x, words, bias, table, logits)  # the logits hold their gradient now
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> Any:
        x, words, bias, table, dlogits = ctx.saved_tensors
        vocab = len(words)
        with torch.autocast(x.device.type, enabled=False):
            scaled = (x * dloss).to(x.dtype)  # cheaper than scaling dlogits
            dx = ((dlogits @ table) * dloss).to(x.dtype)
            dwords = (dlogits.T @ scaled)[:vocab].to(words.dtype)
            dbias = None if bias is None else (dlogits.sum(0, dtype=torch.float32)[:vocab] * dloss).to(bias.dtype)
        return dx, dwords, dbias, None, None
