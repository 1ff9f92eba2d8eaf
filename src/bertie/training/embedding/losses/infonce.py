"""InfoNCE with in-batch and hard negatives (multiple negatives ranking)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.training.embedding.losses.base import EmbeddingLoss, check_columns, check_positive
from bertie.training.embedding.similarity_functions import (
    Cosine,
    Embeddings,
    Gather,
    Similarity,
    concatenate,
    gather_across_ranks,
    slice_rows,
    states_of,
    with_states,
)

BLOCK = 1 << 22  # elements; a larger similarity matrix is computed in blocks


@dataclass(frozen=True)
class InfoNCELoss(EmbeddingLoss):
    """Cross-entropy of each anchor's positive among all passages of the batch: the others are negatives.

        mean of −log( exp(scale · s(aᵢ, pᵢ)) / Σⱼ exp(scale · s(aᵢ, cⱼ)) )      c: every p, and every hard negative n

    `symmetric` averages with the other direction, each p among all a. `score` is `Cosine()`, `DotProduct()` with a
    scale near 1 for embeddings that are not normalized, or `MaxSim()`, also with a scale near 1, for late
    interaction. `gather` collects the rows of all processes, so that they serve as negatives too.

    For matching pairs; larger batches are better. No two rows should have the same positive, which would
    count as a negative of the other row.

    >>> a, p = torch.eye(2), torch.eye(2)
    >>> round(InfoNCELoss(scale=1.0).loss([a, p], None, nn.ModuleDict()).item(), 4)     # log(1 + 1/e)
    0.3133
    """

    scale: float = 20.0
    symmetric: bool = False
    score: Similarity = field(default_factory=Cosine)
    gather: Gather = gather_across_ranks

    inputs = "pairs"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        anchors, positives, *negatives = check_columns(self, columns, 2, more=True)
        passages, start = self.gather(positives)
        targets = torch.arange(start, start + len(anchors), device=states_of(positives).device)
        candidates = concatenate([passages, *(self.gather(column)[0] for column in negatives)])
        total = self._cross_entropy(anchors, candidates, targets, self.score.matrix)
        if self.symmetric:  # the transposed scores: MaxSim always matches query tokens to passage tokens
            all_anchors = self.gather(anchors)[0]
            reverse = self._cross_entropy(positives, all_anchors, targets, lambda p, q: self.score.matrix(q, p).T)
            total = (total + reverse) / 2
        return total / max(1, len(anchors))

    def _cross_entropy(
        self,
        texts: Embeddings,
        candidates: Embeddings,
        targets: Tensor,
        similarities: Callable[[Embeddings, Embeddings], Tensor],
    ) -> Tensor:
        """() summed cross-entropy of each text's target among the candidates."""

        def block_loss(rows: Embeddings, others: Embeddings, targets: Tensor) -> Tensor:
            return F.cross_entropy(similarities(rows, others) * self.scale, targets, reduction="sum")

        a, b = states_of(texts), states_of(candidates)
        blocks = -(-len(a) * len(b) // BLOCK)
        if blocks <= 1:
            return block_loss(texts, candidates, targets)
        # The matrix of 16,384 pairs takes a gigabyte, and its gradient another: each block's gradient is
        # computed immediately, and the block freed.
        total, grads_a, grad_b = a.new_zeros(()), [], torch.zeros_like(b)
        b_leaf = b.detach().requires_grad_()
        step = -(-len(texts) // blocks)
        for start in range(0, len(texts), step):
            rows = slice_rows(texts, start, start + step)
            a_leaf = states_of(rows).detach().requires_grad_()
            with torch.enable_grad():
                loss = block_loss(
                    with_states(rows, a_leaf), with_states(candidates, b_leaf), targets[start : start + step]
                )
            block_grad_a, block_grad_b = torch.autograd.grad(loss, (a_leaf, b_leaf))
            total += loss.detach()
            grads_a.append(block_grad_a)
            grad_b += block_grad_b
        # The differences are 0, and carry the precomputed gradients.
        return total + ((a - a.detach()) * torch.cat(grads_a)).sum() + ((b - b.detach()) * grad_b).sum()
