"""Tiny models and masked batches for tests of pretraining losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.pretrain.masking import Masking, masking_rng

VOCAB, MASK = 60, 4
SPECIAL = (0, 1, 2, 3, 4)


def config(width: int = 16, depth: int = 2, embedding: int = 12) -> EncoderConfig:
    return EncoderConfig(
        vocab=VOCAB,
        width=width,
        layer_map=tuple(range(depth)),
        heads=2,
        head_width=width // 2,
        kv_heads=2,
        ff_width=24,
        activation="gelu",
        embeddings=EmbeddingConfig(width=embedding, segments=2, project="after_norm"),
        positions=(Learned(64),),
        patterns=(Full(),) * depth,
        max_length=64,
        init_std=0.3,
    )


MLM = HeadConfig(kind="vocabulary", outputs=VOCAB, dense=12, activation="gelu", norm=NormConfig(), tied=True)
RTD = HeadConfig(kind="token", outputs=1, dense=16, activation="gelu")
OF_TEXT = HeadConfig(kind="text", outputs=2, dense=16, activation="tanh")


def built(heads: dict[str, HeadConfig], seed: int = 0, **shape: int) -> Model:
    torch.manual_seed(seed)
    return Model(config(**shape), heads).eval()


def step(seed: int = 0, lengths: tuple[int, ...] = (9, 30, 2, 17), below: int = VOCAB) -> Any:
    """A masked batch, its rows and targets, and which tokens are special."""
    rng = np.random.default_rng(seed)
    ids = [np.concatenate([[2], rng.integers(5, below, n - 2), [3]]) for n in lengths]
    flat = np.concatenate(ids)
    special = np.isin(flat, SPECIAL)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    masking, draw = Masking(rate=0.3), masking_rng(seed, 0, 0)
    places = masking.choose(special, ~special, cu, draw)
    masked, targets = masking.apply(flat, places, draw, below, MASK, SPECIAL)
    batch = Batch.from_ids(np.split(masked, cu[1:-1]))
    return batch, torch.from_numpy(places), torch.from_numpy(targets), torch.from_numpy(special)
