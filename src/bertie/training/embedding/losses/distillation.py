"""Losses that distil a teacher's scores of passages, or its embeddings, into an embedder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bertie.errors import InputError
from bertie.training.embedding.losses.base import (
    EmbeddingLoss,
    check_columns,
    check_labels,
    check_positive,
    kl_divergence,
    mean_over_rows,
)
from bertie.training.embedding.similarity_functions import (
    Cosine,
    DotProduct,
    Embeddings,
    Similarity,
    as_tensor,
    gather_rows,
)


@dataclass(frozen=True)
class MarginMSELoss(EmbeddingLoss):
    """Squared error of the margin between the first passage and each other one, against a teacher's margin.

        mean over rows and j > 1 of (scale · (s(q, p₁) − s(q, pⱼ)) − (t₁ − tⱼ))²

    `score` is `DotProduct()`, `Cosine()` with a scale of the size of the teacher's margins, or `MaxSim()`. Distils a
    cross-encoder into an embedder. The first passage need not be the best.

    >>> q, p, n = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])     # margin 1
    >>> MarginMSELoss().loss([q, p, n], torch.tensor([[7.0, 4.0]]), nn.ModuleDict()).item()     # (1 − 3)²
    4.0
    """

    scale: float = 1.0
    score: Similarity = field(default_factory=DotProduct)

    inputs = "lists"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        student, teacher = _list_scores(self, self.score, columns, labels)
        student = student * self.scale
        errors = (student[:, :1] - student[:, 1:]) - (teacher[:, :1] - teacher[:, 1:])
        return mean_over_rows((errors**2).mean(-1))


@dataclass(frozen=True)
class KLDivergenceLoss(EmbeddingLoss):
    """KL divergence between the teacher's and the student's distributions over each query's passages.

        mean of Σⱼ Pⱼ log(Pⱼ / Qⱼ)      P = softmax over j of teacher_scale · tⱼ, Q of scale · s(q, pⱼ)

    The teacher's scores are logits; for scores between 0 and 1 use a `teacher_scale` of about 10, or P is
    nearly uniform. `score` is `DotProduct()`, `Cosine()` with a scale of about 20, or `MaxSim()`. Distils a
    cross-encoder into an embedder, with several passages per query.

    >>> q, p, n = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])     # 3 and 2
    >>> KLDivergenceLoss().loss([q, p, n], torch.tensor([[8.0, 7.0]]), nn.ModuleDict()).item()
    0.0
    """

    scale: float = 1.0
    score: Similarity = field(default_factory=DotProduct)
    teacher_scale: float = 1.0

    inputs = "lists"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)
        check_positive("teacher_scale", self.teacher_scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`."""
        student, teacher = _list_scores(self, self.score, columns, labels)
        return mean_over_rows(kl_divergence(student * self.scale, teacher * self.teacher_scale))


@dataclass(frozen=True)
class SimilarityDistillationLoss(EmbeddingLoss):
    """`similarity_distillation` over the texts of all processes: match the teacher's in-batch similarities.

    Distils one embedder into another, whose embeddings may have another width.

    >>> embeddings = torch.eye(3)
    >>> SimilarityDistillationLoss().loss([embeddings], embeddings, nn.ModuleDict()).item()
    0.0
    """

    scale: float = 20.0

    inputs = "vectors"

    def __post_init__(self) -> None:
        check_positive("scale", self.scale)

    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """As `EmbeddingLoss.loss`; labels are the teacher's embeddings (B, D')."""
        (student,) = map(as_tensor, check_columns(self, columns, 1))
        if labels is None or labels.ndim != 2 or len(labels) != len(student):
            actual = "none" if labels is None else f"of shape {tuple(labels.shape)}"
            name = type(self).__name__
            raise InputError(f"{name} needs labels of shape ({len(student)}, teacher's width); they are {actual}")
        return similarity_distillation(gather_rows(student), gather_rows(labels), self.scale)


def similarity_distillation(student: Tensor, teacher: Tensor, scale: float = 20.0) -> Tensor:
    """(B, D), (B, D') -> () KL divergence between the softmax distributions of in-batch similarities.

        mean over i of Σⱼ Pᵢⱼ log(Pᵢⱼ / Qᵢⱼ)      Pᵢ = softmax over j ≠ i of scale · cos(tᵢ, tⱼ), Q the same of s

    >>> similarity_distillation(torch.eye(3), torch.eye(3)[[1, 2, 0]]).item()
    0.0
    """
    ours, theirs = (_without_diagonal(Cosine().matrix(x, x) * scale) for x in (student, teacher))
    return mean_over_rows(kl_divergence(ours, theirs))


def _without_diagonal(matrix: Tensor) -> Tensor:
    """(B, B) -> (B, B − 1)."""
    count = len(matrix)
    # Without its first element, each run of B + 1 elements ends with one of the diagonal.
    return matrix.flatten()[1:].view(max(0, count - 1), count + 1)[:, :-1].reshape(count, max(0, count - 1))


def _list_scores(
    loss: EmbeddingLoss, score: Similarity, columns: Sequence[Embeddings], labels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(B, k) the student's and the teacher's scores of each row's passages."""
    queries, *passages = check_columns(loss, columns, 3, more=True)
    teacher = check_labels(loss, labels, len(queries), len(passages))
    return torch.stack([score.pairwise(queries, column) for column in passages], 1), teacher
