"""The interface of losses over embeddings, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from bertie.errors import ConfigError, InputError
from bertie.training.embedding.similarity_functions import Embeddings

Inputs = Literal["pairs", "classes", "scores", "triplets", "lists", "vectors", "labels"]


class EmbeddingLoss(ABC):
    """A loss over the embeddings of a batch's texts."""

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """What a row consists of: see the table of this package."""

    def modules(self, width: int) -> nn.ModuleDict:
        """Modules trained besides the model, for embeddings of this width; none by default."""
        return nn.ModuleDict()

    @abstractmethod
    def loss(self, columns: Sequence[Embeddings], labels: Tensor | None, auxiliary: nn.ModuleDict) -> Tensor:
        """() the mean over the rows; `auxiliary` is what `modules` returned."""


def check_positive(name: str, value: float) -> None:
    """Raise a ConfigError unless the value is positive and finite."""
    if not 0 < value < inf:
        raise ConfigError(f"{name}={value} must be greater than 0, and finite")


def check_columns(
    loss: EmbeddingLoss, columns: Sequence[Embeddings], count: int, *, more: bool = False
) -> Sequence[Embeddings]:
    """Return the columns, or raise unless there are `count` (or more) with equally many rows."""
    name = type(loss).__name__
    if len(columns) < count or (len(columns) > count and not more):
        raise InputError(f"{name} takes {count}{' or more' if more else ''} columns; there are {len(columns)}")
    if len({len(column) for column in columns}) > 1:
        raise InputError(f"{name} needs as many rows in each column; there are {[len(c) for c in columns]}")
    return columns


def check_labels(loss: EmbeddingLoss, labels: Tensor | None, *shape: int) -> Tensor:
    """Return the labels, or raise unless they have this shape."""
    if labels is None or tuple(labels.shape) != shape:
        actual = "none" if labels is None else f"of shape {tuple(labels.shape)}"
        raise InputError(f"{type(loss).__name__} needs labels of shape {shape}; they are {actual}")
    return labels


def check_range(loss: EmbeddingLoss, labels: Tensor, low: float, high: float) -> Tensor:
    """Return the labels, or raise if one is out of range."""
    outside = labels[(labels < low) | (labels > high)]
    if len(outside):
        raise InputError(f"{type(loss).__name__} needs labels from {low} to {high}; one is {outside[0].item():.6g}")
    return labels


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """(B, k), (B, k) logits -> (B,) KL(teacher ‖ student)."""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)


def mean_over_rows(losses: Tensor) -> Tensor:
    """The mean; 0 for a process that has no rows of a batch."""
    return losses.sum() / max(1, len(losses))
