"""How near a run is to what its chip can do: the work of a token by the model's shape, and the chip's pace, measured.

The work is that of matrix products alone, two operations for each weight that a token meets. Norms, activations and
lookups have none here, nor has what is computed twice to save memory (gradient checkpointing, scores in a fused
backward pass) or only to be hidden (keys outside a pattern, room left over in a recorded batch): a faster kernel
raises the share of the ceiling, more work of a slower one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.config import BlockSparse, Disentangled, EncoderConfig, HeadConfig, Pattern, Sliding
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.ops.gemm_benchmark import GemmBenchmark


@cache
def ceiling(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Operations a second in products of large square matrices: the best stretch of so many seconds.

    Measured once a process. It takes memory for three matrices of 8192 a side on a GPU, so ask before training.

    >>> ceiling("cpu", torch.float32, seconds=0.01) > 1e8
    True
    """
    return GemmBenchmark(device, dtype).best(seconds)


def flops_per_token(
    model: Model, lengths: Sequence[int], rows_share: float, *, head: str = "mlm", backward: bool = True
) -> float:
    """Operations for a token of a batch of texts of these lengths, there and back.

    `rows_share` is the share of tokens that go through the head: that of hidden ones, or 1. A teacher only goes there
    (`backward=False`), which is a third of the work. All weights count as trained; of global tokens, which no
    pretraining has, nothing is counted. Times tokens a second, over `ceiling`, this is the share of the chip in use.

    >>> from bertie.config import EmbeddingConfig, Full, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=50, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> model = Model(cfg, {"mlm": HeadConfig(kind="vocabulary", outputs=50, tied=True)})
    >>> flops_per_token(model, [10, 10], rows_share=0.0)       # 6 · (4 · 8 · 8 + 2 · 8 · 16) + 12 · 8 · 10
    4032.0
    >>> flops_per_token(model, [10, 10], rows_share=0.25)      # and 6 · 8 · 50 for every fourth token
    4632.0
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.ndim != 1 or not len(sizes) or sizes.min() < 1:
        raise InputError(f"lengths={lengths!r:.80} must be the tokens of each text: one number of at least 1, or more")
    if not 0 <= rows_share <= 1:
        raise InputError(f"rows_share={rows_share} must lie between 0 and 1")
    cfg = model.config
    weights = encoder_weights(cfg) + rows_share * _head(model.head(head).cfg, cfg)
    inner = cfg.heads * cfg.head_width
    # A product of queries and keys, and one of their weights and values: each of width `inner` for a pair.
    pairs = sum(int(_pairs(pattern, sizes).sum()) for pattern in cfg.patterns) / int(sizes.sum())
    there = 2 * weights + 4 * inner * pairs + _relative(cfg, int(sizes.sum()))
    return float(there * (3 if backward else 1))  # back: as much for the inputs as for the weights


def encoder_weights(cfg: EncoderConfig) -> int:
    """The weights that a token meets in matrices: a shared block's in each layer that runs it."""
    inner, inner_kv = cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width
    attention = cfg.width * (inner + 2 * inner_kv) + inner * cfg.width
    feed_forward = cfg.width * cfg.ff_width * (3 if cfg.gated else 2)
    project = cfg.embeddings.width * cfg.width if cfg.embeddings.project else 0
    conv = cfg.width * (cfg.width // cfg.conv.groups) * cfg.conv.kernel if cfg.conv else 0
    return cfg.depth * (attention + feed_forward) + project + conv


def _head(head: HeadConfig, cfg: EncoderConfig) -> int:
    width = head.dense or cfg.width
    outputs = cfg.vocab if head.tied else head.outputs or 0
    return cfg.width * (head.dense or 0) + 2 * cfg.width * (head.residual or 0) + width * outputs


def _relative(cfg: EncoderConfig, tokens: int) -> float:
    """Of terms between content and distance, the products: each token with each row of the table, in each layer.

    The rows themselves are projected once a batch, so a token has its part of that.
    """
    scheme = next((one for one in cfg.positions if isinstance(one, Disentangled)), None)
    if scheme is None:
        return 0.0
    rows, inner, terms = 2 * scheme.span, cfg.heads * cfg.head_width, len(scheme.terms)
    return cfg.depth * 2 * rows * inner * terms * (1 + cfg.width / tokens)


def _pairs(pattern: Pattern, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B,) how many pairs of query and key each text has, as the pattern lets them meet."""
    if isinstance(pattern, Sliding):
        window = np.minimum(pattern.window, lengths - 1)
        near: NDArray[np.int64] = lengths * (2 * window + 1) - window * (window + 1)  # less at both ends of a text
        return near
    every: NDArray[np.int64] = lengths**2
    if isinstance(pattern, BlockSparse):
        for n in np.unique(lengths[lengths > pattern.full_below]).tolist():
            every[lengths == n] = _blocks(pattern.block, n)
    return every


def _blocks(block: int, n: int) -> int:
    """The pairs of a long text: its first and last block see and are seen by all, others their neighbours."""
    count = -(-n // block)
    last = n - (count - 1) * block
    edge = block + last
    inner = n - edge  # tokens of the blocks between, `count - 2` whole ones
    beside = (3 * (count - 2) - 2) * block**2  # pairs of neighbours among these, each block with itself too
    return edge * n + inner * edge + beside
