"""Tiles of a flat batch for the attention kernels: consecutive tokens of one text, never of two."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from bertie.text.batch import send


@lru_cache(maxsize=8)  # all layers of a forward pass use the same tiles
def tiles_from_lengths(lengths: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """(N, 3) for each tile: the text's first token, its length, and the tile's first position in it.

    Long texts come first, for balance at the end of the grid.
    """
    sizes = np.array(lengths, dtype=np.int32)
    starts = np.cumsum(sizes, dtype=np.int32) - sizes
    order = np.argsort(-sizes, kind="stable")
    counts = -(-sizes[order] // tile)
    text = np.repeat(order, counts)
    index = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([starts[text], sizes[text], index.astype(np.int32) * tile], axis=1)
    with torch.inference_mode(False):  # a later forward pass may need gradients
        return send(torch.from_numpy(tiles), device)


def tiles_from_cu_seqlens(cu_seqlens: Tensor, tokens: int, tile: int, max_length: int) -> Tensor:
    """As `tiles_from_lengths`, computed on the device: as many tiles as there can be, the unused ones of length 0."""
    sizes = cu_seqlens.diff()
    counts = (sizes + tile - 1) // tile
    ends = counts.cumsum(0)
    capacity = min(tokens // tile + len(sizes), len(sizes) * -(-max_length // tile))
    index = torch.arange(capacity, device=cu_seqlens.device)
    text = torch.searchsorted(ends, index, right=True).clamp(max=len(sizes) - 1)
    first = (index - (ends - counts)[text]) * tile
    length = torch.where(index < ends[-1], sizes[text], 0)
    return torch.stack([cu_seqlens[text], length, first], dim=1).int()


@cache
def can_pipeline(device: torch.device) -> bool:
    """Whether shared memory holds several stages of a software-pipelined loop: data-center GPUs since Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
