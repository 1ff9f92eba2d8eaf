from __future__ import annotations

import torch

from bertie.config import Bucketed
from bertie.nn.positions import relative_rows


def test_rows_cached_at_inference_serve_training() -> None:
    scheme = Bucketed(8, max_distance=77)  # asked for nowhere else: the first one makes them
    with torch.inference_mode():
        relative_rows(scheme, 9, torch.device("cpu"))
    rows = relative_rows(scheme, 9, torch.device("cpu"))
    table = torch.zeros(8, 2, requires_grad=True)
    table[rows].sum().backward()
    assert table.grad is not None
    assert table.grad.sum() == 2 * (2 * 9 - 1)
