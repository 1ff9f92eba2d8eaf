"""A regularized logistic regression on a model's pooled hidden states, stored as its classification head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.linear_head import NAME
from bertie.evaluation.calibration import best_macro_f1
from bertie.evaluation.linear_models import LogisticRegression
from bertie.nn.heads import pool_mean
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.pipeline.pipeline import Overflow
from bertie.tasks.base import Task
from bertie.tasks.decoding import average_windows
from bertie.text.batch import Batch
from bertie.training.finetune.data import Example

# Inverse penalties, as scikit-learn's C, of features with a variance of 1.
STRENGTHS = (0.0003, 0.003, 0.03, 0.3, 3.0)
FOLDS, MOST_ROWS = 5, 1500  # to choose the penalty by
ITERATIONS = 60  # of L-BFGS


@dataclass(frozen=True, slots=True)
class FeatureTable:
    """Features of texts, and how much of each was read."""

    features: NDArray[np.float64]  # (n, width)
    counts: NDArray[np.int64]  # (n, 3) tokens in total, tokens read, windows

    def take(self, rows: Sequence[int]) -> FeatureTable:
        """Some of the rows."""
        return FeatureTable(self.features[rows], self.counts[rows])

    @staticmethod
    def concatenate(tables: Sequence[FeatureTable]) -> FeatureTable:
        """The rows of several tables."""
        return FeatureTable(*(np.concatenate([getattr(t, name) for t in tables]) for name in ("features", "counts")))


class _HeadInput(Task[None, FloatArray, tuple[FloatArray, dict[str, int]]]):
    """The input of the output layer of a linear head, averaged over the windows of a text."""

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        head = model.head(NAME)
        assert head.norm is not None
        return PendingCopy.per_text(head.norm(pool_mean(hidden, batch).float()))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> tuple[FloatArray, dict[str, int]]:
        return average_windows(text.windows, outputs), text.counts()


def head_features(checkpoint: Checkpoint, examples: Sequence[Example], overflow: Overflow) -> FeatureTable:
    """What the output layer of a linear head reads (`with_linear_head`): its dense layer is the identity."""
    inputs = (TaskInput(f"row {example.row}", example.texts, None) for example in examples)
    rows = list(_HeadInput(checkpoint, overflow=overflow).run(inputs, examples))
    counts = [[count[name] for name in ("tokens_total", "tokens_read", "windows")] for _, count in rows]
    return FeatureTable(np.stack([row for row, _ in rows]).astype(np.float64), np.array(counts, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class LinearHead:
    """The weights of an output layer, with the standardization of its features folded in."""

    weights: NDArray[np.float64]  # (labels, width)
    bias: NDArray[np.float64]  # (labels,)
    strength: float

    @classmethod
    def fit(
        cls, features: NDArray[np.float64], targets: NDArray[np.float64], *, multi_label: bool = False, seed: int = 0
    ) -> LinearHead:
        """Fit to (n, width) features and (n, labels) targets of 0 and 1; the penalty is chosen by cross-validation.

        >>> rng = np.random.default_rng(0)
        >>> targets = np.eye(2)[np.arange(40) % 2]
        >>> features = rng.normal(size=(40, 8)) + 3 * targets @ rng.normal(size=(2, 8)) + 5
        >>> head = LinearHead.fit(features, targets)
        >>> bool(((features @ head.weights.T + head.bias).argmax(1) == targets.argmax(1)).all())
        True
        """
        mean = features.mean(axis=0)
        scale = max(float((features - mean).std()), 1e-12)
        standard = (features - mean) / scale
        strength = _best_strength(standard, targets, multi_label, seed)
        model = _regression(strength, multi_label).fit(standard, targets)
        weights = model.weights.T / scale
        return cls(weights, model.bias - weights @ mean, strength)

    def logits(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n, labels)."""
        return np.asarray(features @ self.weights.T + self.bias)

    @torch.no_grad()
    def store(self, checkpoint: Checkpoint) -> None:
        """Set the output layer of the checkpoint's head."""
        out = checkpoint.model.head(NAME).out
        assert out is not None
        assert out.bias is not None
        out.weight.copy_(torch.from_numpy(self.weights))
        out.bias.copy_(torch.from_numpy(self.bias))


def _regression(strength: float, multi_label: bool) -> LogisticRegression:
    return LogisticRegression(multi_label=multi_label, strength=strength, iterations=ITERATIONS)


def _best_strength(features: NDArray[np.float64], targets: NDArray[np.float64], multi_label: bool, seed: int) -> float:
    """The inverse penalty with the smallest cross-entropy on held-out rows; for multi-label data: the best macro F1.

    Where labels are rare, the penalty with the smallest cross-entropy leaves hardly any of them above a threshold.
    """
    sample = np.random.default_rng(seed).permutation(len(targets))[:MOST_ROWS]
    features, targets = features[sample], targets[sample]
    fold = stratified_folds(targets, FOLDS, seed)
    folds = [i for i in range(FOLDS) if (fold == i).any() and (fold != i).any()]
    scores = {}
    for strength in STRENGTHS:
        held_out = np.full(targets.shape, np.nan)
        for i in folds:
            model = _regression(strength, multi_label).fit(features[fold != i], targets[fold != i])
            held_out[fold == i] = model.predict(features[fold == i])
        rows = ~np.isnan(held_out[:, 0])
        true, predicted = targets[rows], held_out[rows]
        if multi_label:
            scores[strength] = best_macro_f1(true > 0, predicted)
        else:
            scores[strength] = float((true * np.log(np.clip(predicted, 1e-6, 1 - 1e-6))).sum())
    return max(scores, key=lambda strength: scores[strength])


def stratified_folds(targets: NDArray[np.float64], folds: int, seed: int) -> NDArray[np.int64]:
    """(n,) the fold of each row: the rows of a label are dealt to the folds in turn."""
    order = np.random.default_rng(seed).permutation(len(targets))
    by_label = order[np.argsort(targets[order].argmax(axis=1), kind="stable")]
    fold = np.empty(len(targets), dtype=np.int64)
    fold[by_label] = np.arange(len(targets)) % folds
    return fold
