"""Pooling of token embeddings to one embedding per text, for inference (`pooling_kernels.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from bertie.ops.triton.launch import device_guard

MODES = ("max", "mean", "mean_sqrt_len_tokens", "weightedmean")  # that the kernel implements
ROWS, BLOCK, WARPS = 16, 128, 1  # tokens loaded at a time, columns and warps of a program


def pool(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """Pool (T, D) to (B, D) by one of `MODES`; the reference is in nn/pooling.py.

    Rows are accumulated in token order, in float32, independently of the other texts. An empty text gives zeros.
    """
    from bertie.ops.triton import pooling_kernels as kernels

    hidden = hidden.contiguous()
    texts, width = len(cu_seqlens) - 1, hidden.shape[1]
    out = torch.empty(texts, width, dtype=hidden.dtype, device=hidden.device)
    with device_guard(hidden):
        kernels.pool_forward[(texts, -(-width // BLOCK))](
            *(hidden, cu_seqlens, out, width), MODE=mode, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS
        )
    return out
