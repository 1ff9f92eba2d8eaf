"""A tiny model, and items that it can learn from: what a text is about is its second token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.training.loop import Trainer
from bertie.training.objectives import (
    SingleLabelObjective,
    TokenClassificationObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.sampling import TrainingTask

CLASSES = 3
VOCAB = 40


def model(dropout: float = 0.0, seed: int = 0) -> Model:
    cfg = EncoderConfig(
        vocab=VOCAB,
        width=16,
        layer_map=(0, 1),
        heads=2,
        head_width=8,
        kv_heads=2,
        ff_width=32,
        activation="gelu",
        embeddings=EmbeddingConfig(width=16, segments=2),
        positions=(Learned(32),),
        patterns=(Full(), Full()),
        max_length=32,
        dropout=dropout,
        attention_dropout=dropout,
        init_std=0.1,
    )
    torch.manual_seed(seed)
    heads = {
        "classify": HeadConfig(kind="text", outputs=CLASSES, dropout=dropout),
        "tag": HeadConfig(kind="token", outputs=2, dropout=dropout),
    }
    return Model(cfg, heads)


def masked(vocab: int, max_length: int, dropout: float, std: float) -> Model:
    """One for hidden tokens."""
    shape = replace(
        model().config,
        vocab=vocab,
        embeddings=EmbeddingConfig(width=16),
        positions=(Learned(max_length),),
        max_length=max_length,
        dropout=dropout,
        init_std=std,
    )
    torch.manual_seed(0)
    return Model(shape, {"mlm": HeadConfig(kind="vocabulary", outputs=vocab, dense=16, activation="gelu", tied=True)})


def piece(
    rng: np.random.Generator, about: int, length: int | None = None, share: float = 1.0, **asked: Any
) -> TrainingWindow:
    n = int(rng.choice([4, 6, 9])) if length is None else length
    ids = rng.integers(CLASSES + 2, VOCAB, n)
    ids[0], ids[1] = 0, 1 + about
    return TrainingWindow(ids, np.zeros(n, dtype=np.int64), share, **asked)


def items(count: int, seed: int = 0, *, windows: int = 1, length: int | None = None) -> list[TrainingExample]:
    """Texts of one class of three; every fourth in several windows, if asked for."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        about = int(rng.integers(CLASSES))
        parts = windows if i % 4 == 0 else 1
        shares = rng.dirichlet(np.ones(parts)) if parts > 1 else [1.0]
        weight = float(rng.choice([0.5, 1.0, 2.0]))
        found.append(
            TrainingExample(tuple(piece(rng, about, length, share) for share in shares), np.int64(about), weight)
        )
    return found


def tagged(count: int, seed: int = 0, *, length: int | None = None) -> list[TrainingExample]:
    """Each token is one of an even or an odd id; the first is not asked for."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        one = piece(rng, 0, length)
        weights = np.ones(len(one), dtype=np.float32)
        weights[0] = 0.0
        found.append(TrainingExample((TrainingWindow(one.ids, one.segments, 1.0, one.ids % 2, weights),)))
    return found


def source(count: int = 32, seed: int = 0, **options: Any) -> TrainingTask:
    return TrainingTask("classify", SingleLabelObjective(), items(count, seed, **options))


def two_sources(count: int = 24, **options: Any) -> list[TrainingTask]:
    return [
        source(count, **options),
        TrainingTask("tag", TokenClassificationObjective(), tagged(count // 2, 5, **options)),
    ]


def accuracy(of: Model, held: list[TrainingExample]) -> float:
    """Of classes, over windows as the classifier pools them."""
    objective = SingleLabelObjective()
    mini = objective.collate(held)
    with torch.no_grad():
        logs = torch.log_softmax(of(mini.batch, "classify"), -1)
    pooled = torch.zeros(len(held), CLASSES).index_add(0, mini.targets.owner, logs * mini.targets.share[:, None])
    return float((pooled.argmax(1) == mini.targets.values).double().mean())


def recipe(**changes: Any) -> Recipe:
    return Recipe(**({"epochs": 2, "lr": 3e-3, "batch_size": 8, "dropout": None, "max_grad_norm": 1.0} | changes))


def trainer(of: Model, sources: TrainingTask | list[TrainingTask], how: Recipe, **options: Any) -> Trainer:
    return Trainer(
        of, [sources] if isinstance(sources, TrainingTask) else sources, how, **({"progress": False} | options)
    )


def weights(of: Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in of.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=atol, rtol=0.0, msg=lambda said, name=name: f"{name}: {said}")


def without_key_biases(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Softmax does not see them: their gradient is rounding alone, which Adam makes as large as any other."""
    out = {}
    for name, tensor in weights.items():
        kept = tensor.clone()
        if name.endswith("qkv.bias"):
            kept[16:32] = 0
        out[name] = kept
    return out
