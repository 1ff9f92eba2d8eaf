"""Training objectives: the loss of a micro-batch, given a model.

A training step reads examples. An example is a text in one or more windows, with its labels. Losses
are weighted sums: the gradient of a step is the sum over its micro-batches, and over processes,
divided by the total weight. How a step is split therefore does not change its gradient.
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

Level = Literal[
    "text", "window", "token", "row"
]  # what a label belongs to; "row": selected tokens, such as masked ones
Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class TrainingWindow:
    """One window of a text, with its labels."""

    ids: Array  # (n,)
    segments: Array  # (n,)
    share: float = 1.0  # fraction of its text; the windows of one text sum to 1
    values: Array | None = None  # labels of all tokens (n, …), of the selected ones (m, …) or of the window (…,)
    weights: Array | None = None  # (n,), (m,) or (): the weight of each label; 0 ignores it
    rows: Array | None = None  # (m,) indices of the selected tokens: the head runs on these alone

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One text in windows, with the label of the whole text."""

    windows: tuple[TrainingWindow, ...]
    value: Array | np.generic | None = None
    weight: float = 1.0
    extras: Mapping[str, Array] = field(default_factory=dict)  # arrays that one objective defines and reads

    def __len__(self) -> int:
        """Number of tokens."""
        return sum([len(window.ids) for window in self.windows])


@dataclass(frozen=True, slots=True)
class Targets:
    """Labels as tensors: N texts, windows, tokens or selected tokens, by the objective's level."""

    values: Tensor  # (N, …)
    weights: Tensor  # (N,)
    owner: Tensor  # (W,) the text of each window
    share: Tensor  # (W,) the window's fraction of its text
    rows: Tensor | None = None  # (N,) indices of the selected tokens: the head runs on these alone

    def to(self, device: torch.device | str) -> Targets:
        """Copy to a device."""
        values, weights, owner, share = (send(x, device) for x in (self.values, self.weights, self.owner, self.share))
        return Targets(values, weights, owner, share, None if self.rows is None else send(self.rows, device))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The examples of one forward and backward pass."""

    batch: Batch
    targets: Targets
    weight: float  # summed over all labels
    extras: Mapping[str, Tensor | Batch] = field(default_factory=dict)  # tensors that one objective defines and reads

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy to a device."""
        extras = {name: x.to(device) if isinstance(x, Batch) else send(x, device) for name, x in self.extras.items()}
        return replace(self, batch=self.batch.to(device), targets=self.targets.to(device), extras=extras)


class Objective(ABC):
    """Base class. A loss reads one head's outputs (`HeadObjective`), the whole model
    (`ModelObjective`), or all texts of a step at once (`InBatchObjective`).
    """

    level: ClassVar[Level]
    detect_spikes: bool = False  # whether a loss far above the recent ones means that training diverged

    @abstractmethod
    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """Run the model on a micro-batch -> () its summed loss."""

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples into a flat micro-batch."""
        windows = [window for example in examples for window in example.windows]
        batch = Batch.from_ids([w.ids for w in windows], [w.segments for w in windows])
        owner = np.repeat(np.arange(len(examples)), [len(example.windows) for example in examples])
        if self.level == "text":
            values = np.stack([example.value for example in examples if example.value is not None])
            weights = np.array([example.weight for example in examples], dtype=np.float32)
        else:
            join = np.stack if self.level == "window" else np.concatenate
            values = join([w.values for w in windows if w.values is not None])
            weights = join([w.weights for w in windows if w.weights is not None]).astype(np.float32)
        targets = Targets(
            torch.from_numpy(values),
            torch.from_numpy(weights),
            torch.from_numpy(owner),
            torch.tensor([w.share for w in windows], dtype=torch.float32),
            torch.from_numpy(_flat_rows(windows)) if self.level == "row" else None,
        )
        return MicroBatch(batch, targets, float(weights.sum(dtype=np.float64)))

    def example_weight(self, example: TrainingExample) -> float:
        """Sum the weights of an example's labels."""
        if self.level == "text":
            return example.weight
        return float(sum(w.weights.sum(dtype=np.float64) for w in example.windows if w.weights is not None))


def _flat_rows(windows: Sequence[TrainingWindow]) -> NDArray[np.int64]:
    """(N,) indices of the selected tokens in the concatenated windows."""
    starts = np.cumsum([0, *(len(window) for window in windows[:-1])])
    selected = [window.rows + start for window, start in zip(windows, starts, strict=True) if window.rows is not None]
    return np.concatenate(selected).astype(np.int64)


# --- losses over the outputs of one head ---


class HeadObjective(Objective):
    """A loss over one head's outputs."""

    @abstractmethod
    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """(N,) the loss of each text, window or token; finite for zero outputs, which entries without weight have."""

    def loss(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """Sum weight · loss over all labels; `outputs` are the head's, in float32.

        Entries without weight add nothing to the loss or to its gradient, whatever their outputs
        are.
        """
        weights = targets.weights
        if self.level in ("text", "window"):
            weights = weights[targets.owner if self.level == "text" else batch.text_of_token()]
        outputs = torch.where(weights[:, None] > 0, outputs, 0.0)
        return (self.losses(outputs, batch, targets) * targets.weights).sum()

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """As `Objective.forward`."""
        batch, targets = micro_batch.batch, micro_batch.targets
        hidden = model.hidden(batch, head)
        if targets.rows is not None:
            hidden = hidden[targets.rows]
        outputs = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight)
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self.loss(outputs.float(), batch, targets)


def pool_windows(rows: Tensor, targets: Targets) -> Tensor:
    """(W, k) -> (N, k) the mean over each text's windows, weighted by their shares, as at inference."""
    out = rows.new_zeros(len(targets.weights), rows.shape[1])
    return out.index_add(0, targets.owner, rows * targets.share[:, None])


class SingleLabelObjective(HeadObjective):
    """Cross-entropy of one class per text; windows are pooled by their log-probabilities, as the
    classifier does.

    >>> from bertie.text.batch import Batch
    >>> example = TrainingExample((TrainingWindow(np.array([1, 2]), np.array([0, 0])),), np.int64(1))
    >>> objective = SingleLabelObjective()
    >>> micro_batch = objective.collate([example])
    >>> round(objective.loss(torch.zeros(1, 4), micro_batch.batch, micro_batch.targets).item(), 4)     # log 4
    1.3863
    """

    level = "text"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k), values (N,) classes."""
        logs = pool_windows(torch.log_softmax(outputs, -1), targets)
        return F.cross_entropy(logs, targets.values, reduction="none", label_smoothing=self.smoothing)


class MultiLabelObjective(HeadObjective):
    """Mean binary cross-entropy over the labels of a text."""

    level = "text"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k), values (N, k) between 0 and 1."""
        labels = targets.values * (1 - self.smoothing) + 0.5 * self.smoothing
        return F.binary_cross_entropy_with_logits(pool_windows(outputs, targets), labels, reduction="none").mean(-1)


class RegressionObjective(HeadObjective):
    """Squared error divided by the variance of the training values, so that their scale does not matter."""

    level = "text"

    def __init__(self, variance: float = 1.0) -> None:
        self.variance = variance

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, 1), values (N,)."""
        return (pool_windows(outputs, targets)[:, 0] - targets.values) ** 2 / self.variance


class RelevanceObjective(HeadObjective):
    """Binary cross-entropy of a passage's relevance to a query; its best window counts, as when reranking."""

    level = "text"

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, 1), values (N,) between 0 and 1."""
        lowest = outputs.new_full((len(targets.weights),), torch.finfo(outputs.dtype).min)
        best = lowest.scatter_reduce(0, targets.owner, outputs[:, 0], "amax")
        best = torch.where(targets.weights > 0, best, 0.0)
        return F.binary_cross_entropy_with_logits(best, targets.values, reduction="none")


class TokenClassificationObjective(HeadObjective):
    """Cross-entropy of one class per labelled token."""

    level: ClassVar[Level] = "token"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (T, k), values (T,) classes."""
        return F.cross_entropy(outputs, targets.values, reduction="none", label_smoothing=self.smoothing)


class MaskedLMObjective(TokenClassificationObjective):
    """Masked-language modelling: cross-entropy over the vocabulary; logits are computed for masked
    tokens alone.

    >>> one = np.array([1])
    >>> window = TrainingWindow(np.array([1, 4, 2]), np.zeros(3, int), values=7 * one, weights=one, rows=one)
    >>> objective = MaskedLMObjective()
    >>> micro_batch = objective.collate([TrainingExample((window,))])
    >>> loss = objective.loss(torch.zeros(1, 100), micro_batch.batch, micro_batch.targets)
    >>> micro_batch.targets.rows.tolist(), round(loss.item(), 3)
    ([1], 4.605)
    """

    level = "row"
    detect_spikes = True

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """As `Objective.forward`; the fused loss never holds all logits."""
        targets = micro_batch.targets
        hidden = model.hidden(micro_batch.batch, head)[targets.rows]
        words = model.encoder.embeddings.words.weight
        return model.head(head).fused_linear_cross_entropy(hidden, words, targets.values, targets.weights)


class AnswerSpanObjective(HeadObjective):
    """Extractive question answering: mean cross-entropy of an answer's first and last token in each
    window.

    A window without the answer has its first token as the target.
    """

    level = "window"

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (T, 2), values (W, 2) token indices in the window."""
        owner = batch.text_of_token()
        labelled = targets.weights > 0
        lowest = outputs.new_full((len(labelled), 2), torch.finfo(outputs.dtype).min)
        top = lowest.scatter_reduce(0, owner[:, None].expand(-1, 2), outputs.detach(), "amax")  # (W, 2)
        top = torch.where(labelled[:, None], top, 0.0)
        sums = outputs.new_zeros(len(labelled), 2).index_add(0, owner, (outputs - top[owner]).exp())
        logs = sums.clamp(min=1.0).log() + top  # only the sum over an empty window is below 1
        at = batch.cu_seqlens[:-1].long()[:, None] + targets.values  # (W, 2)
        return (logs - outputs.gather(0, at.clamp(max=len(outputs) - 1))).mean(-1)


class MultipleChoiceObjective(Objective):
    """Multiple choice: cross-entropy over the choices of a context, each with one logit.

    The windows of an example are those of its choices, in order; `extras["choice"]` (W,) says which. The logit of a
    choice in several windows is their mean, weighted by their shares of it.
    """

    level = "text"

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples; "choice" (W,) and "question" (C,) number the choices and contexts of the batch."""
        counts = np.array([int(example.extras["choice"][-1]) + 1 for example in examples])
        first = np.cumsum(counts) - counts  # (N,) the first choice of each context
        choice = np.concatenate(
            [example.extras["choice"] + start for example, start in zip(examples, first, strict=True)]
        )
        extras = {"choice": choice, "question": np.repeat(np.arange(len(examples)), counts), "first": first}
        tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in extras.items()}
        return replace(super().collate(examples), extras=tensors)

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """As `Objective.forward`."""
        batch = micro_batch.batch
        hidden = model.hidden(batch, head)
        outputs = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight)
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self.loss(outputs.float()[:, 0], micro_batch)

    def loss(self, outputs: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Sum weight · loss over all contexts; `outputs` (W,) are the logits of the windows."""
        targets, extras = micro_batch.targets, micro_batch.extras
        choice, question, first = (extras[name] for name in ("choice", "question", "first"))
        assert isinstance(choice, Tensor)
        assert isinstance(question, Tensor)
        assert isinstance(first, Tensor)
        outputs = torch.where(targets.weights[targets.owner] > 0, outputs, 0.0)
        logits = outputs.new_zeros(len(question)).index_add(0, choice, outputs * targets.share)  # (C,)
        lowest = outputs.new_full((len(first),), torch.finfo(outputs.dtype).min)
        top = lowest.scatter_reduce(0, question, logits.detach(), "amax")  # (N,)
        sums = outputs.new_zeros(len(first)).index_add(0, question, (logits - top[question]).exp())
        logs = logits - (sums.log() + top)[question]  # (C,) log-probabilities
        losses = -logs[first + targets.values]
        if self.smoothing:
            counts = outputs.new_zeros(len(first)).index_add(0, question, torch.ones_like(logs))
            mean = outputs.new_zeros(len(first)).index_add(0, question, logs) / counts
            losses = (1 - self.smoothing) * losses - self.smoothing * mean
        return (losses * targets.weights).sum()


# --- losses over the whole model ---


class ModelObjective(Objective):
    """A loss over more than one head's outputs: several heads, hidden states, a teacher.

    It is a sum of means over different units: the step's masked tokens, its texts, its words.
    `counts` holds how many of each the whole step has, so that micro-batches add up to the step's
    gradient. Additional trained modules are in `model.auxiliary`.
    """

    level: ClassVar[Level] = "row"
    detect_spikes = True

    def __init__(self) -> None:
        self.counts: Mapping[str, float] = {}

    @abstractmethod
    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """() the sum of each term's `mean`, to be divided by the step's number of texts."""

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """As `Objective.forward`."""
        return self.loss(model, micro_batch) * float(micro_batch.weight > 0)

    def count(self, example: TrainingExample) -> Mapping[str, float]:
        """Count an example's units of each kind."""
        masked = sum(len(w.rows) for w in example.windows if w.rows is not None)
        return {"texts": 1, "masked": masked, "tokens": len(example)}

    def count_step(self, examples: Sequence[TrainingExample]) -> Mapping[str, float]:
        """Count the units of each kind in a step."""
        total: Counter[str] = Counter()
        for example in examples:
            total.update(self.count(example))
        return total

    def with_counts(self, counts: Mapping[str, float]) -> Self:
        """Copy the objective for a step with these counts."""
        objective = copy(self)
        objective.counts = counts
        return objective

    def mean(self, total: Tensor, unit: str) -> Tensor:
        """Scale a sum over units so that dividing it by the number of texts gives the mean over the step's units."""
        return total * (self.counts["texts"] / max(1.0, self.counts[unit]))

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples into a flat micro-batch; each counts, even without a masked token."""
        return replace(super().collate(examples), weight=float(len(examples)))

    def example_weight(self, example: TrainingExample) -> float:
        """Weight all texts equally."""
        return 1.0


# --- losses that compare all texts of a step ---


class InBatchObjective(Objective):
    """A loss over the embeddings of all texts of a step, such as one with in-batch negatives.

    A step of several micro-batches is trained by gradient caching (Gao et al. 2021): embed all
    micro-batches without a graph, compute the loss and its gradient with respect to each embedding,
    then run each micro-batch again and backpropagate the cached gradients. The loss's own
    parameters are in `model.auxiliary["loss"]`.
    """

    loss: object

    @abstractmethod
    def embed(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """(R, D) the embeddings of a micro-batch."""

    @abstractmethod
    def surrogate_loss(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """() a scalar whose gradients are those cached in `extras`: "gradient" (R, D) and "auxiliary" (flat)."""

    @abstractmethod
    def step_loss(self, model: Model, embeddings: Tensor, micro_batches: Sequence[MicroBatch], total: float) -> Tensor:
        """() the mean loss of a step from this process's embeddings."""

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """Compute the embeddings, or the surrogate loss where gradients are cached."""
        return (self.surrogate_loss if "gradient" in micro_batch.extras else self.embed)(model, micro_batch, head)
