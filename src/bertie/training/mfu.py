"""Model FLOPs utilization (MFU): the operations per token from the model's shape, and the measured
peak of the device.

Only matrix multiplications count: two operations per weight and token. Norms, activations and
lookups count nothing, nor does recomputation (gradient checkpointing, scores in a fused backward
pass) or masked work (keys outside an attention pattern, spare room in a recorded batch). So a
faster kernel raises the MFU, and redundant work does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.config import BlockSparse, Causal, Disentangled, EncoderConfig, HeadConfig, Pattern, Sliding
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.ops.gemm_benchmark import GemmBenchmark


@cache
def peak_flops(device: torch.device | str, dtype: torch.dtype, seconds: float = 0.5) -> float:
    """Measure the operations per second of large square matrix multiplications: the best of
    `seconds` seconds.

    Measured once per process. It needs memory for three matrices of 8192 x 8192 on a GPU, so
    measure before training.

    >>> peak_flops("cpu", torch.float32, seconds=0.01) > 1e8
    True
    """
    if not seconds > 0:
        raise ConfigError(f"seconds={seconds} must be greater than 0")
    return GemmBenchmark(device, dtype).best(seconds)


def flops_per_token(
    model: Model, lengths: Sequence[int], rows_share: float, *, head: str = "mlm", backward: bool = True
) -> float:
    """Operations per token of the forward and backward pass, for a batch of texts of these lengths.

    `rows_share` is the share of tokens that go through the head: that of masked tokens, or 1. A
    teacher has a forward pass only (`backward=False`), a third of the work. All weights count as
    trained; global tokens, which pretraining does not use, are not counted. MFU is this times
    tokens per second, divided by `peak_flops`.

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
        raise InputError(f"lengths={lengths!r:.80} must be the number of tokens of each text, at least 1 each")
    if not 0 <= rows_share <= 1:
        raise InputError(f"rows_share={rows_share} must be between 0 and 1")
    cfg = model.config
    weights = encoder_weights(cfg) + rows_share * _head(model.head(head).cfg, cfg)
    inner = cfg.heads * cfg.head_width
    # Queries times keys, and probabilities times values: each of width `inner` per pair of tokens.
    pairs = sum(int(_pairs(pattern, sizes).sum()) for pattern in cfg.patterns) / int(sizes.sum())
    forward = 2 * weights + 4 * inner * pairs + _relative(cfg, int(sizes.sum()))
    return float(forward * (3 if backward else 1))  # backward: once for the inputs, once for the weights


def encoder_weights(cfg: EncoderConfig) -> int:
    """The matrix weights applied to each token; those of a shared block count in each layer."""
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
    """DeBERTa's content-to-position terms: each token times each row of the position table, in each
    layer.

    The rows themselves are projected once per batch, shared by its tokens.
    """
    scheme = next((position for position in cfg.positions if isinstance(position, Disentangled)), None)
    if scheme is None:
        return 0.0
    rows, inner, terms = 2 * scheme.span, cfg.heads * cfg.head_width, len(scheme.terms)
    return cfg.depth * 2 * rows * inner * terms * (1 + cfg.width / tokens)


def _pairs(pattern: Pattern, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B,) the number of query-key pairs of each text under an attention pattern."""
    if isinstance(pattern, Sliding):
        window = np.minimum(pattern.window, lengths - 1)
        pairs: NDArray[np.int64] = lengths * (2 * window + 1) - window * (window + 1)  # fewer at both ends of a text
        return pairs
    if isinstance(pattern, Causal):
        window = lengths - 1 if pattern.window is None else np.minimum(pattern.window, lengths - 1)
        return lengths * (window + 1) - window * (window + 1) // 2  # fewer at the beginning of a text
    every: NDArray[np.int64] = lengths**2
    if isinstance(pattern, BlockSparse):
        for n in np.unique(lengths[lengths > pattern.full_below]).tolist():
            every[lengths == n] = _blocks(pattern.block, n)
    return every


def _blocks(block: int, n: int) -> int:
    """The pairs of a long text: the first and last block attend to all and are attended to, others to neighbours."""
    count = -(-n // block)
    last = n - (count - 1) * block
    edge = block + last
    inner = n - edge  # tokens of the `count - 2` blocks between
    near = (3 * (count - 2) - 2) * block**2  # pairs of neighbouring blocks, each with itself too
    return edge * n + inner * edge + near
