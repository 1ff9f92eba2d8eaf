"""A row's result does not depend on the other rows, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from bertie.nn.row_blocks import TOKEN_ROWS, in_row_blocks, linear_by_row


@pytest.mark.parametrize("rows", [1, TOKEN_ROWS])
@pytest.mark.parametrize(("width", "outputs"), [(384, 384), (384, 3), (48, 5), (768, 9)])
def test_rows_are_independent(width: int, outputs: int, rows: int) -> None:
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(width, outputs), torch.randn(53, width)
    function = torch.nn.Sequential(layer, torch.nn.Tanh())
    with torch.inference_mode():
        together = in_row_blocks(function, x, rows)
        assert_close(together, function(x), atol=1e-5, rtol=0)
        for count in (1, 2, 15, 16, 17):
            order = torch.randperm(53)[:count]
            assert torch.equal(in_row_blocks(function, x[order], rows), together[order])
        assert in_row_blocks(function, x[:0], rows).shape == (0, outputs)
    assert in_row_blocks(function, x, rows).requires_grad, "training is not split"


@pytest.mark.parametrize("bias", [True, False])
def test_linear_by_row(bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 64), torch.randn(9001, 64)
    added = torch.randn(9001) if bias else None
    together = linear_by_row(x, weight, added)
    assert_close(together, F.linear(x, weight, added), atol=1e-4, rtol=0)
    for i in range(7):
        assert torch.equal(linear_by_row(x[i : i + 1], weight, added)[0], together[i])
