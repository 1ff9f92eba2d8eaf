"""Losses over pairs and triplets: of each row separately, or of the ranking of rows by score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.training.embedding.losses.base import (
    EmbeddingLoss,
    check_columns,
    check_labels,
    check_positive,
    check_range,
    mean_over_rows,
)
from bertie.training.embedding.similarity_functions import Cosine, Embeddings, as_tensor, gather_rows

Distance = Literal["squared", "euclidean", "cosine"]


@dataclass(frozen=True)
class SoftmaxLoss(EmbeddingLoss):
    """Sentence-BERT's classification of pairs, with a linear layer that is discarded after training.

        mean of the cross-entropy of W (u, v, |u − v|) + b with the class

    For pairs with unordered classes, as in NLI: entailment, neutral, contradiction.

    >>> loss = SoftmaxLoss(classes=3)
    >>> auxiliary = loss.modules(width=2)
    >>> loss.loss([torch.ones(4, 2), torch.zeros(4, 2)], torch.tensor([0, 1, 2, 0]), auxiliary).shape
    torch.Size([])
    """

    classes: int

    inputs = "classes"

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ConfigError(f"classes={self.classes} must be at least 2")

    def modules(self, width: int) -> nn.ModuleDict:
        """The linear layer, initialized the same way every time."""
        layer = nn.Linear(3 * width, self.classes)
        nn.init.normal_(layer.weight, std=0.02, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(layer.bias)
        return nn.ModuleDict({"softmax": layer})

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        u, v = map(as_tensor, check_columns(self, columns, 2))
        classes = check_range(self, check_labels(self, labels, len(u)), 0, self.classes - 1)
        logits = auxiliary["softmax"](torch.cat([u, v, (u - v).abs()], -1))  # (B, 3 D) -> (B, classes)
        return mean_over_rows(F.cross_entropy(logits, classes.long(), reduction="none"))


@dataclass(frozen=True)
class CosineSimilarityLoss(EmbeddingLoss):
    """Squared error between the cosine and the score, which is between −1 and 1, usually 0 and 1.

        mean of (cos(a, b) − score)²

    For pairs with similarity scores whose magnitude matters.

    >>> a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> CosineSimilarityLoss().loss([a, b], torch.tensor([0.5]), nn.ModuleDict()).item()
    0.25
    """

    inputs = "scores"

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        a, b = check_columns(self, columns, 2)
        scores = check_range(self, check_labels(self, labels, len(a)), -1, 1)
        return mean_over_rows((Cosine().pairwise(a, b) - scores) ** 2)


@dataclass(frozen=True)
class CoSENTLoss(EmbeddingLoss):
    """Rank pairs by their scores: of any two pairs, the one with the greater score should have the greater cosine.

        log(1 + Σ exp(scale · (cosⱼ − cosᵢ)))      over all i and j of the batch with scoreᵢ > scoreⱼ

    Scores may have any scale: only their order counts. The pairs of all processes are compared. For pairs
    with similarity scores; it usually ranks better than `CosineSimilarityLoss`.

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])     # cosines 1 and 0
    >>> round(CoSENTLoss(scale=1.0).loss([a, b], torch.tensor([5.0, 2.0]), nn.ModuleDict()).item(), 4)  # log(1 + 1/e)
    0.3133
    """

    scale: float = 20.0

    inputs = "scores"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        a, b = check_columns(self, columns, 2)
        scores, order = gather_rows(check_labels(self, labels, len(a))).sort()
        cosines = gather_rows(Cosine().pairwise(a, b))[order] * self.scale
        # In sorted order all i of a j come after it, from the first greater score on. Cumulative sums from the end
        # cover them without a (B, B) matrix.
        after = (-cosines).flip(0).logcumsumexp(0).flip(0)
        after = F.pad(after, (0, 1), value=-inf)[torch.searchsorted(scores, scores, right=True)]
        return F.pad(cosines + after, (1, 0)).logsumexp(0)  # the padding is exp(0) = 1


@dataclass(frozen=True)
class ContrastiveLoss(EmbeddingLoss):
    """Pull positive pairs (1) together, and push negative pairs (0) at least a margin apart.

        mean of ½ (y · d² + (1 − y) · max(0, margin − d)²)      d = 1 − cos(a, b)

    For pairs with binary labels, such as duplicate questions.

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])     # distances 0
    >>> ContrastiveLoss(margin=0.5).loss([a, b], torch.tensor([1.0, 0.0]), nn.ModuleDict()).item()     # ½ · ½ · 0.5²
    0.0625
    """

    margin: float = 0.5

    inputs = "scores"

    def __post_init__(self) -> None:
        check_positive("margin", self.margin)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        a, b = check_columns(self, columns, 2)
        y = check_range(self, check_labels(self, labels, len(a)), 0, 1)
        d = 1 - Cosine().pairwise(a, b)
        return mean_over_rows((y * d**2 + (1 - y) * (self.margin - d).relu() ** 2) / 2)


@dataclass(frozen=True)
class TripletLoss(EmbeddingLoss):
    """The anchor should be closer to the positive than to the negative, by a margin.

        mean of max(0, d(a, p) − d(a, n) + margin)      d = ‖x − y‖² "squared", ‖x − y‖ "euclidean", 1 − cos "cosine"

    For (anchor, positive, negative) rows. `InfoNCELoss` takes the same rows, and usually learns more from
    them, since it also uses in-batch negatives.

    >>> a, p, n = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.1]])
    >>> round(TripletLoss(margin=1.0).loss([a, p, n], None, nn.ModuleDict()).item(), 2)     # 1 − 1.21 + 1
    0.79
    """

    margin: float = 1.0
    distance: Distance = "squared"

    inputs = "triplets"

    def __post_init__(self) -> None:
        check_positive("margin", self.margin)
        if self.distance not in ("squared", "euclidean", "cosine"):
            raise ConfigError(f"distance={self.distance!r} must be squared, euclidean or cosine")

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        anchor, positive, negative = map(as_tensor, check_columns(self, columns, 3))
        gap = self._distance(anchor, positive) - self._distance(anchor, negative)
        return mean_over_rows((gap + self.margin).relu())

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        if self.distance == "cosine":
            return 1 - Cosine().pairwise(a, b)
        return ((a - b) ** 2).sum(-1) if self.distance == "squared" else torch.linalg.vector_norm(a - b, dim=-1)
