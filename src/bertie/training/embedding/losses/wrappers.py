"""Losses around another loss: Matryoshka dimensions, and SPLADE's FLOPS regularizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.training.embedding.losses.base import EmbeddingLoss, Inputs, check_columns, check_positive
from bertie.training.embedding.similarity_functions import (
    Embeddings,
    as_tensor,
    gather_rows,
    states_of,
    with_states,
)


@dataclass(frozen=True)
class MatryoshkaLoss(EmbeddingLoss):
    """The inner loss over truncated embeddings too, so that embeddings can be shortened at inference.

        Σ weight · loss(the first d components of each embedding, normalized)      over the dimensions d

    Weights are 1 by default. Modules of the inner loss exist once per dimension.

    >>> from bertie.training.embedding.losses import InfoNCELoss
    >>> a, p = torch.tensor([[1.0, 0.0], [1.0, 5.0]]), torch.tensor([[1.0, 0.0], [1.0, 5.0]])
    >>> loss = MatryoshkaLoss(InfoNCELoss(), dimensions=(2, 1))
    >>> round(loss.loss([a, p], None, nn.ModuleDict()).item(), 4)     # one component does not separate them: log 2
    0.6931
    """

    inner: EmbeddingLoss
    dimensions: tuple[int, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.dimensions or min(self.dimensions) < 1 or len(set(self.dimensions)) < len(self.dimensions):
            raise ConfigError(f"dimensions={self.dimensions} must be one or more distinct numbers of at least 1")
        if self.weights is not None:
            if len(self.weights) != len(self.dimensions):
                raise ConfigError(f"weights={self.weights} must be {len(self.dimensions)} numbers, one per dimension")
            for weight in self.weights:
                check_positive("weights", weight)

    @property
    def inputs(self) -> Inputs:
        """Those of the inner loss."""
        return self.inner.inputs

    def modules(self, width: int) -> nn.ModuleDict:
        """Those of the inner loss for each dimension."""
        if max(self.dimensions) > width:
            raise ConfigError(f"dimensions={self.dimensions} must be at most {width}, the embeddings' width")
        modules = {str(dimension): self.inner.modules(dimension) for dimension in self.dimensions}
        return nn.ModuleDict({name: inner for name, inner in modules.items() if len(inner)})

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        total = states_of(columns[0]).new_zeros(())
        for dimension, weight in zip(self.dimensions, self.weights or (1.0,) * len(self.dimensions), strict=True):
            name = str(dimension)
            inner = auxiliary[name] if name in auxiliary else nn.ModuleDict()
            assert isinstance(inner, nn.ModuleDict)
            total = total + weight * self.inner.loss(
                [_truncate(column, dimension) for column in columns], labels, inner
            )
        return total


def _truncate(column: Embeddings, dimension: int) -> Embeddings:
    """The first components of each embedding, normalized."""
    states = states_of(column)
    if dimension > states.shape[-1]:
        raise ConfigError(f"dimension {dimension} must be at most {states.shape[-1]}, the embeddings' width")
    return with_states(column, F.normalize(states[:, :dimension], dim=-1))


@dataclass(frozen=True)
class SpladeLoss(EmbeddingLoss):
    """A loss over sparse SPLADE embeddings plus the FLOPS regularizer, which drives most term weights to 0.

        inner + query_weight · R(queries) + passage_weight · R(all others)      R = Σ over terms (mean over texts)²

    R is over the texts of all processes. The inner loss is usually
    `InfoNCELoss(scale=1.0, score=DotProduct())`. Larger weights make embeddings sparser.

    >>> from bertie.training.embedding.losses import InfoNCELoss
    >>> from bertie.training.embedding.similarity_functions import DotProduct
    >>> q, p = torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0, 1.0]])
    >>> inner = InfoNCELoss(scale=1.0, score=DotProduct())     # 0: the positive is the only candidate
    >>> loss = SpladeLoss(inner, query_weight=0.1, passage_weight=0.01)
    >>> round(loss.loss([q, p], None, nn.ModuleDict()).item(), 4)     # 0.1 · 4 + 0.01 · (9 + 1)
    0.5
    """

    inner: EmbeddingLoss
    query_weight: float
    passage_weight: float

    def __post_init__(self) -> None:
        for name, weight in (("query_weight", self.query_weight), ("passage_weight", self.passage_weight)):
            if not 0 <= weight < inf:
                raise ConfigError(f"{name}={weight} must be 0 or greater, and finite")

    @property
    def inputs(self) -> Inputs:
        """Those of the inner loss."""
        return self.inner.inputs

    def modules(self, width: int) -> nn.ModuleDict:
        """Those of the inner loss."""
        return self.inner.modules(width)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        queries, *passages = map(as_tensor, check_columns(self, columns, 2, more=True))
        penalty = self.query_weight * _flops(queries) + self.passage_weight * _flops(torch.cat(passages))
        return self.inner.loss(columns, labels, auxiliary) + penalty


def _flops(weights: Tensor) -> Tensor:
    """(B, V) -> () sum over terms of the squared mean weight over the texts of all processes."""
    total = gather_rows(weights.sum(0, keepdim=True)).sum(0)  # (V,)
    count = gather_rows(weights.new_tensor([len(weights)])).sum()
    return ((total / count) ** 2).sum()
