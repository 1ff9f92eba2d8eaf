"""Row-wise functions whose result for a row does not depend on the other rows, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

TOKEN_ROWS = 16  # for one row per token; one row per text is computed by itself, which has the lowest latency
CACHED_OUTPUTS = 4096  # rows of a weight matrix that stay in the cache


def in_row_blocks(function: Callable[[Tensor], Tensor], x: Tensor, rows: int = 1) -> Tensor:
    """Apply a row-wise function to (N, D) in blocks of exactly `rows` rows, where this is inference on a CPU.

    BLAS libraries choose a kernel, and with it the order of summation, by the number of rows. With a fixed number, each
    row takes the same path whatever else is in the batch. The last block is padded with zeros.

    >>> in_row_blocks(torch.relu, torch.tensor([[-1.0, 2.0]])).tolist()
    [[0.0, 2.0]]
    """
    if x.device.type != "cpu" or torch.is_grad_enabled() or not len(x):
        return function(x)
    if len(x) == rows:
        return function(x)
    blocks = list(torch.split(x, rows))
    missing = rows - len(blocks[-1])
    if missing:
        blocks[-1] = F.pad(blocks[-1], (0, 0, 0, missing))
    results = [function(block) for block in blocks]
    results[-1] = results[-1][: rows - missing]
    return torch.cat(results) if len(results) > 1 else results[0]


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer with many outputs, row by row: (N, D) -> (N, outputs).

    For few rows and a vocabulary of outputs. The weights are read once, in blocks that stay in the cache for all rows.

    >>> linear_by_row(torch.ones(2, 3), torch.ones(5, 3), None).unique().tolist()
    [3.0]
    """
    rows = torch.split(x, 1)
    weights = torch.split(weight, CACHED_OUTPUTS)
    biases = [None] * len(weights) if bias is None else torch.split(bias, CACHED_OUTPUTS)
    blocks = zip(weights, biases, strict=True)
    return torch.cat([torch.cat([F.linear(row, block, own) for row in rows]) for block, own in blocks], dim=1)
