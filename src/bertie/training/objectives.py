"""What training makes smaller: each objective says how far a head's outputs are from what was wanted.

A step reads items. An item is one example: the windows of its text with what is wanted of them. Losses are sums, with
a weight for each thing that is asked, so that a step cut into micro-batches, or spread over machines, adds up to the
same gradient: the sum over all its parts divided by the sum of their weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertie.text.batch import Batch, send

if TYPE_CHECKING:
    from bertie.nn.model import Model

Level = Literal["text", "window", "token", "row"]
Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """A window of a text, as the model reads it."""

    ids: Array  # (n,)
    segments: Array  # (n,)
    share: float = 1.0  # of its text; those of one text add up to 1
    values: Array | None = None  # what is wanted of its tokens (n, …), of some of them (m, …) or of itself (…,)
    weights: Array | None = None  # (n,), (m,) or (): how much each of these counts, 0 for what is not asked
    rows: Array | None = None  # (m,) which of its tokens are asked, where few are and a head's outputs are large

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One example: its windows, and what is wanted of the whole."""

    windows: tuple[TrainingWindow, ...]
    value: Array | None = None
    weight: float = 1.0
    extras: Mapping[str, Array] = field(default_factory=dict)  # what only its objective knows

    def __len__(self) -> int:
        return sum([len(piece.ids) for piece in self.windows])


@dataclass(frozen=True, slots=True)
class Targets:
    """What is wanted, as tensors: N texts, windows, tokens or chosen tokens, by the objective's level."""

    values: Tensor  # (N, …)
    weights: Tensor  # (N,)
    owner: Tensor  # (W,) the text that each window belongs to
    share: Tensor  # (W,) how much of it
    rows: Tensor | None = None  # (N,) the chosen tokens: the head is run on these alone

    def to(self, device: torch.device | str) -> Targets:
        """The same on another device."""
        values, weights, owner, share = (send(x, device) for x in (self.values, self.weights, self.owner, self.share))
        return Targets(values, weights, owner, share, None if self.rows is None else send(self.rows, device))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What goes through the model at once."""

    batch: Batch
    targets: Targets
    weight: float  # of all that is asked
    extras: Mapping[str, Tensor | Batch] = field(default_factory=dict)  # what only its objective knows

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device."""
        extras = {name: x.to(device) if isinstance(x, Batch) else send(x, device) for name, x in self.extras.items()}
        return replace(self, batch=self.batch.to(device), targets=self.targets.to(device), extras=extras)


class Objective(ABC):
    """What a step is trained for: over one head's outputs (`HeadObjective`), or over more of the model (`ModelObjective`)."""

    level: ClassVar[Level]
    steady: ClassVar[bool] = False  # whether a loss far above those before it means that something is wrong

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay items end to end."""
        pieces = [piece for item in items for piece in item.windows]
        batch = Batch.from_ids([p.ids for p in pieces], [p.segments for p in pieces])
        owner = np.repeat(np.arange(len(items)), [len(item.windows) for item in items])
        if self.level == "text":
            values = np.stack([item.value for item in items if item.value is not None])
            weights = np.array([item.weight for item in items], dtype=np.float32)
        else:
            given = [p.values for p in pieces if p.values is not None]
            counted = [p.weights for p in pieces if p.weights is not None]
            joined = np.stack if self.level == "window" else np.concatenate
            values, weights = joined(given), joined(counted).astype(np.float32)
        targets = Targets(
            torch.from_numpy(values),
            torch.from_numpy(weights),
            torch.from_numpy(owner),
            torch.tensor([p.share for p in pieces], dtype=torch.float32),
            torch.from_numpy(_rows(pieces)) if self.level == "row" else None,
        )
        return MicroBatch(batch, targets, float(weights.sum(dtype=np.float64)))

    def example_weight(self, item: TrainingExample) -> float:
        """The weight of all that is asked of an item."""
        if self.level == "text":
            return item.weight
        return float(sum(p.weights.sum(dtype=np.float64) for p in item.windows if p.weights is not None))


class HeadObjective(Objective):
    """A loss over a head's outputs."""

    @abstractmethod
    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """(N,) the loss of each text, window or token. What has no weight has a finite one, and outputs of zero."""

    def loss(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """The sum of weight · loss over all that is asked; `outputs` are the head's, in float32.

        Whatever the outputs are where nothing is asked, they add nothing to it or to its gradient.
        """
        weights = targets.weights
        if self.level in ("text", "window"):
            weights = weights[targets.owner if self.level == "text" else batch.text_of_token()]
        outputs = torch.where(weights[:, None] > 0, outputs, 0.0)
        return (self.each(outputs, batch, targets) * targets.weights).sum()


def _rows(pieces: Sequence[TrainingWindow]) -> NDArray[np.int64]:
    """(N,) the chosen tokens of all pieces, laid end to end."""
    starts = np.cumsum([0, *(len(piece) for piece in pieces[:-1])])
    chosen = [piece.rows + start for piece, start in zip(pieces, starts, strict=True) if piece.rows is not None]
    return np.concatenate(chosen).astype(np.int64)


def pooled(rows: Tensor, targets: Targets) -> Tensor:
    """(W, k) -> (N, k) the mean over each text's windows, by their shares: as results are pooled."""
    out = rows.new_zeros(len(targets.weights), rows.shape[1])
    return out.index_add(0, targets.owner, rows * targets.share[:, None])


class SingleLabelObjective(HeadObjective):
    """Cross-entropy of one class a text: windows are pooled by their log-probabilities, as the classifier does.

    >>> from bertie.text.batch import Batch
    >>> item = TrainingExample((TrainingWindow(np.array([1, 2]), np.array([0, 0])),), np.int64(1))
    >>> objective = SingleLabelObjective()
    >>> mini = objective.collate([item])
    >>> round(objective.loss(torch.zeros(1, 4), mini.batch, mini.targets).item(), 4)     # log 4
    1.3863
    """

    level = "text"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k), values (N,) classes."""
        logs = pooled(torch.log_softmax(outputs, -1), targets)
        return F.cross_entropy(logs, targets.values, reduction="none", label_smoothing=self.smoothing)


class MultiLabelObjective(HeadObjective):
    """Each label by itself, right or wrong: the mean of their binary cross-entropies."""

    level = "text"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k), values (N, k) between 0 and 1."""
        wanted = targets.values * (1 - self.smoothing) + 0.5 * self.smoothing
        return F.binary_cross_entropy_with_logits(pooled(outputs, targets), wanted, reduction="none").mean(-1)


class RegressionObjective(HeadObjective):
    """The squared distance from a value, in units of the values' variance so that any scale trains alike."""

    level = "text"

    def __init__(self, variance: float = 1.0) -> None:
        self.variance = variance

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, 1), values (N,)."""
        return (pooled(outputs, targets)[:, 0] - targets.values) ** 2 / self.variance


class RelevanceObjective(HeadObjective):
    """How well a passage answers a query, between 0 and 1: the best window speaks for it, as when reranking."""

    level = "text"

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, 1), values (N,)."""
        lowest = outputs.new_full((len(targets.weights),), torch.finfo(outputs.dtype).min)
        best = lowest.scatter_reduce(0, targets.owner, outputs[:, 0], "amax")
        best = torch.where(targets.weights > 0, best, 0.0)
        return F.binary_cross_entropy_with_logits(best, targets.values, reduction="none")


class TokenClassificationObjective(HeadObjective):
    """Cross-entropy of one class a token, where one is asked."""

    level: ClassVar[Level] = "token"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (T, k), values (T,) classes."""
        return F.cross_entropy(outputs, targets.values, reduction="none", label_smoothing=self.smoothing)


class MaskedLMObjective(TokenClassificationObjective):
    """Cross-entropy over the vocabulary of the tokens that were hidden; logits are computed for these alone.

    >>> one = np.array([1])
    >>> piece = TrainingWindow(np.array([1, 4, 2]), np.zeros(3, int), values=7 * one, weights=one, rows=one)
    >>> objective = MaskedLMObjective()
    >>> mini = objective.collate([TrainingExample((piece,))])
    >>> mini.targets.rows.tolist(), round(objective.loss(torch.zeros(1, 100), mini.batch, mini.targets).item(), 3)
    ([1], 4.605)
    """

    level = "row"
    steady = True


class AnswerSpanObjective(HeadObjective):
    """Where an answer starts and where it ends: cross-entropy over the tokens of each window, the mean of the two.

    A window that does not hold the answer is to point at its first token.
    """

    level = "window"

    def each(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (T, 2), values (W, 2) places inside the window."""
        owner = batch.text_of_token()
        asked = targets.weights > 0
        lowest = outputs.new_full((len(asked), 2), torch.finfo(outputs.dtype).min)
        top = lowest.scatter_reduce(0, owner[:, None].expand(-1, 2), outputs.detach(), "amax")  # (W, 2)
        top = torch.where(asked[:, None], top, 0.0)
        sums = outputs.new_zeros(len(asked), 2).index_add(0, owner, (outputs - top[owner]).exp())
        logs = sums.clamp(min=1.0).log() + top  # below 1 is only the sum over a text without tokens
        at = batch.cu_seqlens[:-1].long()[:, None] + targets.values  # (W, 2)
        return (logs - outputs.gather(0, at.clamp(max=len(outputs) - 1))).mean(-1)


class ModelObjective(Objective):
    """A loss that asks more of the model than one head's outputs: several heads, hidden states, another model.

    It is a sum of means, each over things of its own kind: over a step's hidden tokens, its texts, its words. `counts`
    tell it how many of each a whole step has, so that micro-batches still add up to the step's gradient. What it
    trains besides the model lies in `model.auxiliary`.
    """

    level: ClassVar[Level] = "row"
    steady = True

    def __init__(self) -> None:
        self.counts: Mapping[str, float] = {}

    @abstractmethod
    def of(self, model: Model, mini: MicroBatch) -> Tensor:
        """() the sum of each term's `mean`, to be divided by the number of texts."""

    def count(self, item: TrainingExample) -> Mapping[str, float]:
        """How many things of each kind an item has."""
        return {"texts": 1, "hidden": sum(len(p.rows) for p in item.windows if p.rows is not None), "tokens": len(item)}

    def counted(self, items: Sequence[TrainingExample]) -> Mapping[str, float]:
        """How many things of each kind a step of these items has."""
        total: Counter[str] = Counter()
        for item in items:
            total.update(self.count(item))
        return total

    def with_counts(self, counts: Mapping[str, float]) -> Self:
        """The same objective for a step of so many things."""
        one = copy(self)
        one.counts = counts
        return one

    def mean(self, total: Tensor, of: str) -> Tensor:
        """A sum over things of a kind, such that dividing it by the number of texts gives their mean over the step."""
        return total * (self.counts["texts"] / max(1.0, self.counts[of]))

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay items end to end. They count even where nothing is hidden."""
        return replace(super().collate(items), weight=float(len(items)))

    def example_weight(self, item: TrainingExample) -> float:
        """Texts count alike."""
        return 1.0
