"""The largest logit of each term over the tokens of a text, without the logits of all tokens in memory.

SPLADE's pooling is a maximum over tokens, so that a term's gradient reaches one token of each text. The backward pass
is over (B, V) instead of (T, V): for passages of a hundred tokens, a hundredth of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # tokens whose logits are in memory at once


class _LargestLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
        out = x.new_empty(len(lengths), len(weight))
        where = torch.empty(len(lengths), len(weight), dtype=torch.int64, device=x.device)
        start = 0
        for b, length in enumerate(lengths):
            for first in range(start, start + length, BLOCK):
                logits = F.linear(x[first : min(first + BLOCK, start + length)], weight, bias)
                values, index = logits.max(0)
                if first > start:
                    larger = values > out[b]
                    values, index = torch.where(larger, values, out[b]), torch.where(larger, index + first, where[b])
                    out[b], where[b] = values, index
                else:
                    out[b], where[b] = values, index + first
            start += length
        ctx.save_for_backward(x, weight, where)
        ctx.has_bias = bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (grad,) = grads
        x, weight, where = ctx.saved_tensors
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for row, tokens in zip(grad, where, strict=True):
            terms = row.nonzero()[:, 0]  # terms with a negative logit have none
            values, rows = row[terms, None].to(x.dtype), tokens[terms]
            grad_x.index_add_(0, rows, values * weight[terms])
            grad_weight.index_add_(0, terms, values * x[rows])
        return grad_x, grad_weight, grad.sum(0).to(weight.dtype) if ctx.has_bias else None, None


def largest_logits(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """(T, E), (V, E), (V,) -> (B, V): the maximum of x @ weight.T + bias over the tokens of each text.

    >>> largest_logits(torch.tensor([[1.0], [3.0], [2.0]]), torch.tensor([[1.0], [-1.0]]), None, [2, 1]).tolist()
    [[3.0, -1.0], [2.0, -2.0]]
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _LargestLogits.apply(x, weight, bias, tuple(lengths))  # type: ignore[no-untyped-call]
        return out
