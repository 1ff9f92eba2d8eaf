"""Rows of texts for losses over vectors: texts that belong together are about the same token."""

from __future__ import annotations

from typing import Any

import numpy as np

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.nn.model import Model
from bertie.nn.sentence_layers import Dense
from bertie.training.embedding.losses import EmbeddingLoss
from bertie.training.embedding.objective import EmbeddingObjective, Output, make_row
from bertie.training.embedding.row_sampler import RowSampler
from bertie.training.loop import Trainer
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.sampling import TrainingTask
from tests.training import tiny

VALUES: dict[str, Any] = {
    "pairs": lambda rng, k: None,
    "triplets": lambda rng, k: None,
    "classes": lambda rng, k: rng.integers(3),
    "scores": lambda rng, k: np.float32(rng.random()),
    "lists": lambda rng, k: rng.standard_normal(k).astype(np.float32),
    "vectors": lambda rng, k: rng.standard_normal(5).astype(np.float32),
}


def rows(inputs: str, count: int, columns: int, seed: int = 0) -> list[TrainingExample]:
    """Every third text in two windows."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        about = rng.permutation(tiny.VOCAB - 6)[: max(1, columns - 1)] + 6
        texts = []
        for column in range(columns):
            topic = about[max(0, column - 1)]
            shares = [0.25, 0.75] if rng.random() < 0.3 else [1.0]
            texts.append([_piece(rng, topic, share) for share in shares])
        found.append(make_row(texts, VALUES[inputs](rng, columns - 1)))
    return found


def _piece(rng: np.random.Generator, topic: int, share: float) -> TrainingWindow:
    one = tiny.piece(rng, 0, share=share)
    one.ids[1:3] = topic
    return one


def begun(loss: EmbeddingLoss, dropout: float = 0.0, output: Output = "dense") -> tuple[Model, EmbeddingObjective]:
    """A model with a dense layer behind its pooling."""
    model = tiny.masked(tiny.VOCAB, 32, dropout, 0.1) if output == "sparse" else tiny.model(dropout)
    objective = EmbeddingObjective(loss, output)
    modules = SentenceModules.create(16, dense=Dense(16, 12), normalize=output == "tokens")
    for parameter in modules.parameters():
        rng = np.random.default_rng(parameter.numel())
        parameter.data.copy_(parameter.new_tensor(rng.standard_normal(parameter.shape) * 0.3))
    objective.attach(model, modules)
    return model, objective


def trainer(
    loss: EmbeddingLoss,
    items: list[TrainingExample],
    *,
    dropout: float = 0.0,
    output: Output = "dense",
    **options: Any,
) -> Trainer:
    model, objective = begun(loss, dropout, output)
    recipe = tiny.recipe(**options.pop("recipe", {}))
    source = TrainingTask("mlm" if output == "sparse" else "", objective, items)
    return Trainer(model, RowSampler(source, recipe), recipe, progress=False, **options)
