"""The fused maximum of logits against the maximum of all logits, forward and backward."""

from __future__ import annotations

import pytest
import torch

from bertie.nn import term_pooling
from bertie.nn.pooling import splade_pool
from bertie.text.batch import Batch


@pytest.mark.parametrize("has_bias", [True, False])
def test_as_with_all_logits(has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(term_pooling, "BLOCK", 3)  # texts of several blocks
    generator = torch.Generator().manual_seed(0)
    lengths = (4, 1, 7, 3)
    parts = [torch.randn(*shape, generator=generator) for shape in ((15, 6), (11, 6), (11,))]
    batch = Batch.from_ids([[1] * n for n in lengths])
    results = []
    for fused in (True, False):
        x, weight, bias = (part.clone().requires_grad_() for part in parts)
        used = bias if has_bias else None
        if fused:
            pooled = term_pooling.largest_logits(x, weight, used, lengths).relu().log1p()
        else:
            pooled = splade_pool(torch.nn.functional.linear(x, weight, used), batch)
        (pooled**2).sum().backward()
        results.append([pooled, x.grad, weight.grad, bias.grad])
    for ours, expected in zip(*results, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
