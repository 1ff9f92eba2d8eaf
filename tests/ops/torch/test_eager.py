"""The eager expressions, which are the reference for the fused kernels, against PyTorch's own modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bertie.config import Rotary
from bertie.ops.torch import eager
from bertie.ops.torch.eager import apply_rotary, rotary_tables, rotate


def test_expressions() -> None:
    torch.manual_seed(0)
    x, residual, norm, linear = torch.randn(5, 8), torch.randn(5, 8), nn.LayerNorm(8), nn.Linear(8, 12)
    torch.manual_seed(1)
    got = eager.add_norm(x, residual, norm, 0.5)
    torch.manual_seed(1)
    assert torch.equal(got, norm(residual + F.dropout(x, 0.5)))
    for post, pre in ((norm, nn.Identity()), (nn.Identity(), norm)):
        total, normed = eager.add_norms(x, residual, post, pre, 0.0)
        assert torch.equal(total, post(residual + x))
        assert torch.equal(normed, norm(residual + x))
    assert torch.equal(eager.norm(x, norm), norm(x))
    assert eager.norm(x, nn.Identity()) is x
    assert torch.equal(eager.linear_activation(x, linear, "gelu", gated=False), F.gelu(linear(x)))
    act, factor = linear(x).chunk(2, dim=-1)
    assert torch.equal(eager.linear_activation(x, linear, "silu", gated=True), F.silu(act) * factor)
    targets, weights = torch.randint(12, (5,)), torch.rand(5)
    each = F.cross_entropy(linear(x), targets, reduction="none")
    assert torch.equal(
        eager.linear_cross_entropy(x, linear.weight, linear.bias, targets, weights), (each * weights).sum()
    )


def test_apply_rotary() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    cos, sin = rotary_tables(Rotary((100.0,)), torch.arange(5), 16)[100.0]
    out = apply_rotary(q, k, cos, sin)
    assert torch.equal(out[0], rotate(q, cos, sin))
    assert torch.equal(out[1], rotate(k, cos, sin))
