"""Losses over single texts with class labels: all pairs of a batch are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertie.training.embedding.losses.base import EmbeddingLoss, check_columns, check_labels, check_positive
from bertie.training.embedding.similarity_functions import Cosine, Embeddings, gather_across_ranks


@dataclass(frozen=True)
class SupervisedContrastiveLoss(EmbeddingLoss):
    """Cross-entropy of the texts with an anchor's label among all other texts (SupCon, Khosla et al. 2020).

        mean over i of −mean over j of log( exp(scale · cos(i, j)) / Σₖ exp(scale · cos(i, k)) )

    j are the other texts of i's label, k all other texts. A text whose label no other text has contributes 0. For few
    labelled texts: every pair of a batch is used, and each text is encoded once.

    >>> loss = SupervisedContrastiveLoss(scale=1.0)
    >>> texts, labels = torch.eye(2)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1])
    >>> round(loss.loss([texts], labels, nn.ModuleDict()).item(), 4)     # log(1 + 2/e)
    0.5514
    """

    scale: float = 10.0

    inputs = "labels"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        (texts,) = check_columns(self, columns, 1)
        own = check_labels(self, labels, len(texts))
        others, start = gather_across_ranks(texts)
        classes = gather_across_ranks(own)[0]
        itself = torch.arange(len(own), device=own.device)[:, None] + start == torch.arange(
            len(others), device=own.device
        )
        logits = (Cosine().matrix(texts, others) * self.scale).masked_fill(itself, -torch.inf)
        same = (own[:, None] == classes) & ~itself  # (B, N)
        likelihood = logits.log_softmax(1).masked_fill(~same, 0.0).sum(1) / same.sum(1).clamp(min=1)
        return -likelihood.sum() / max(1, len(own))
