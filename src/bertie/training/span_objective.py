"""The loss of span heads: binary cross-entropy of each span and label, or focal loss, as in the package `gliner`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertie.nn.model import Model
from bertie.nn.span_head import SpanHead, SpanLayout, span_bounds
from bertie.text.batch import Batch
from bertie.training.objectives import MicroBatch, Objective, Targets, TrainingExample

LABELS = "labels"  # in the extras of an example: indices of the tokens that stand for its labels, in each window


class SpanObjective(Objective):
    """The sum over the labels of each span of at most `max_width` words, per word.

    A training window has `rows`, the first token of each word; `weights`, one per word, which count for all spans that
    begin there; and `values` (n, 3): first word, last word and label of each labelled span. The example's extras have
    `labels`. With gamma > 0 it is the focal loss (Lin et al. 2017), whose alpha, if not negative, weights positives.
    """

    level = "row"

    def __init__(self, max_width: int, *, alpha: float = -1.0, gamma: float = 0.0, smoothing: float = 0.0) -> None:
        self.max_width, self.alpha, self.gamma, self.smoothing = max_width, alpha, gamma, smoothing

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples into a flat micro-batch, with a target for each span and label."""
        windows = [(window, example.extras[LABELS]) for example in examples for window in example.windows]
        batch = Batch.from_ids([window.ids for window, _ in windows], [window.segments for window, _ in windows])
        words, labels, values, weights = [], [], [], []
        for window, own in windows:
            assert window.rows is not None
            assert window.values is not None
            assert window.weights is not None
            words.append(window.rows.astype(np.int64))
            labels.append(own.astype(np.int64))
            values.append(self._targets(len(window.rows), len(own), window.values))
            bounds = span_bounds(len(window.rows), self.max_width)
            weights.append(np.repeat(window.weights[bounds[:, 0]], len(own)).astype(np.float32))
        layout = SpanLayout.of_windows(words, labels, batch)
        owner = np.repeat(np.arange(len(examples)), [len(example.windows) for example in examples])
        share = torch.tensor([window.share for window, _ in windows], dtype=torch.float32)
        targets = Targets(
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(np.concatenate(weights)),
            torch.from_numpy(owner),
            share,
        )
        counts = {"word_counts": layout.word_counts, "label_counts": layout.label_counts}
        extras = {"words": layout.words, "labels": layout.labels} | {n: torch.tensor(c) for n, c in counts.items()}
        return MicroBatch(batch, targets, sum(map(self.example_weight, examples)), extras)

    def _targets(self, words: int, labels: int, spans: NDArray[np.generic]) -> NDArray[np.float32]:
        """(S * C,) 1 for the labels of labelled spans, in the order of the head's logits."""
        targets = np.zeros((len(span_bounds(words, self.max_width)), labels), np.float32)
        starts = np.cumsum([0, *(words - width for width in range(min(words, self.max_width)))])
        for first, last, label in spans.astype(np.int64).tolist():
            targets[starts[last - first] + first, label] = 1.0
        return targets.ravel()

    def forward(self, model: Model, micro_batch: MicroBatch, head: str) -> Tensor:
        """As `Objective.forward`."""
        batch, targets, extras = micro_batch.batch, micro_batch.targets, micro_batch.extras
        rows = {name: x for name, x in extras.items() if isinstance(x, Tensor)}
        counts = [rows[name].tolist() for name in ("word_counts", "label_counts")]
        span_head = model.head(head)
        assert isinstance(span_head, SpanHead)
        logits = span_head.span_logits(model.hidden(batch, head), SpanLayout(rows["words"], rows["labels"], *counts))
        with torch.autocast(batch.ids.device.type, enabled=False):
            flat = torch.cat([x.flatten() for x in logits]).float()
            return (self.losses(flat, targets.values) * targets.weights).sum()

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(N,) the loss of each span and label."""
        smooth = targets * (1 - self.smoothing) + 0.5 * self.smoothing
        losses = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
        if self.gamma > 0:
            p = torch.sigmoid(logits)
            losses = losses * (1 - (p * smooth + (1 - p) * (1 - smooth))) ** self.gamma
        if self.alpha >= 0:
            losses = losses * (self.alpha * smooth + (1 - self.alpha) * (1 - smooth))
        return losses

    def example_weight(self, example: TrainingExample) -> float:
        """The number of words, those in several windows counted once."""
        return float(sum(w.weights.sum(dtype=np.float64) for w in example.windows if w.weights is not None))
