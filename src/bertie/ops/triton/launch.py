"""What the callers of Triton kernels share: device guards, block sizes, memory layouts and output buffers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

Fp8Rows = tuple[Tensor, Tensor]  # e4m3 values (T, K), and the float32 scale (T, 1) that multiplies each row

MAX_WIDTH = 8192  # of rows that a program holds as a whole
HALF = (torch.bfloat16, torch.float16)


def device_guard(x: Tensor) -> Any:
    """Make the device of x the current one: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@cache
def max_programs(device: torch.device, per_processor: int) -> int:
    """The size of a grid whose programs loop over the rows: several programs per multiprocessor."""
    if device.type != "cuda":
        return 4
    return per_processor * torch.cuda.get_device_properties(device).multi_processor_count


def dropout_threshold(dropout: float) -> tuple[int, float]:
    """The 16-bit random values below which an element is dropped, and the scale of those that are kept."""
    threshold = round(dropout * 65536)
    return threshold, 65536 / (65536 - threshold)


def dropout_seed(dropout: float, device: torch.device) -> Tensor | None:
    """A random seed, drawn on the device so that each replay of a CUDA graph draws another one."""
    return torch.randint(1 << 62, (1,), device=device) if dropout else None


def contiguous_heads(x: Tensor) -> Tensor:
    """(T, H, d) with the heads of a token contiguous; the stride between tokens may be larger than H d."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def empty_fp8(rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Uninitialized fp8 rows."""
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(rows, 1, dtype=torch.float32, device=device)
