"""Distillation of a fine-tuned classifier or tagger: soft labels from a teacher's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import Batch, pack
from bertie.training.objectives import HeadObjective, Level, Targets, TrainingExample, pool_windows
from bertie.training.pretrain.mlm_distillation import check_weights, kl_divergence


class LogitDistillation(HeadObjective):
    """Soft labels for texts: the teacher's logits t against the student's s,

        (1 − hard) · τ² · KL(softmax(t / τ) ‖ softmax(s / τ)) + hard · −log softmax(s)[label]

    per text, times the text's weight. Windows of one text are first pooled by their
    log-probabilities, as in `SingleLabelObjective`. `add_soft_labels` runs the teacher once and
    stores its logits in the examples, however many epochs follow. Texts without a label have no
    hard term.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> from bertie.training.objectives import TrainingWindow
    >>> teacher = Model(cfg, {"classify": HeadConfig(kind="text", outputs=3)})
    >>> examples = [TrainingExample((TrainingWindow(np.array([1, 2]), np.array([0, 0])),), np.int64(1))]
    >>> objective = LogitDistillation(temperature=2.0, hard=0.1)
    >>> micro_batch = objective.collate(objective.add_soft_labels(teacher, "classify", examples))
    >>> micro_batch.targets.values.shape      # three logits and the label
    torch.Size([1, 4])
    >>> loss = objective.loss(torch.zeros(1, 3), micro_batch.batch, micro_batch.targets)
    """

    level: ClassVar[Level] = "text"

    def __init__(self, temperature: float = 2.0, hard: float = 0.0) -> None:
        check_weights(temperature, hard=hard)
        if hard > 1:
            raise ConfigError(f"hard={hard} must be between 0 and 1: it is a share of the loss")
        self.temperature, self.hard = temperature, hard

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k) or (T, k), values (N, k + 1): the teacher's logits, then the label or −1."""
        s, t = self._pool(outputs, targets), targets.values[:, :-1]
        if s.shape != t.shape:
            raise ConfigError(f"the teacher has {t.shape[1]} classes, the student {s.shape[1]}; they must be the same")
        soft = self.temperature**2 * kl_divergence(s, t, self.temperature)
        if not self.hard:
            return soft
        labels = targets.values[:, -1].long()
        hard = F.cross_entropy(s, labels, reduction="none", ignore_index=-1)
        return (1 - self.hard) * soft + self.hard * hard

    def _pool(self, outputs: Tensor, targets: Targets) -> Tensor:
        return pool_windows(torch.log_softmax(outputs, -1), targets)

    def add_soft_labels(
        self, teacher: Model, head: str, examples: Sequence[TrainingExample], budget: int = 16384
    ) -> list[TrainingExample]:
        """Run the teacher, `budget` tokens at a time, and store its logits before the labels of each example."""
        labelled = list(examples)
        teacher.eval()
        for group in pack([len(example) for example in examples], budget):
            chosen = [examples[i] for i in group]
            windows = [window for example in chosen for window in example.windows]
            batch = Batch.from_ids([w.ids for w in windows], [w.segments for w in windows])
            with torch.no_grad():
                logits = teacher(batch.to(teacher.device), head).float().cpu().numpy()  # (W, k) or (T, k)
            expected = len(batch.ids) if self.level == "token" else len(batch)
            if len(logits) != expected:
                unit = "token" if self.level == "token" else "window"
                raise ConfigError(
                    f"head {head!r} of the teacher gives {len(logits)} rows for {len(batch)} windows of "
                    f"{len(batch.ids)} tokens; {type(self).__name__} needs one row per {unit}"
                )
            for i, example in zip(group, chosen, strict=True):
                rows = len(example) if self.level == "token" else len(example.windows)
                own, logits = np.split(logits, [rows])
                labelled[i] = self._add(example, own)
        return labelled

    def _add(self, example: TrainingExample, logits: np.ndarray) -> TrainingExample:
        logs = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        shares = np.array([window.share for window in example.windows], dtype=np.float32)
        label = -1 if example.value is None else example.value
        return replace(example, value=np.append(shares @ logs, label).astype(np.float32))


class TokenLogitDistillation(LogitDistillation):
    """Soft labels for tokens, for token classification; tokens without weight are ignored.

    All tokens of windows without labels and weights have weight 1 and no hard term.

    >>> from bertie.training.objectives import TrainingWindow
    >>> values, zeros = np.array([[4, 0, 0], [0, 0, 1]]), np.zeros(2, int)        # two logits and the label per token
    >>> examples = [TrainingExample((TrainingWindow(np.array([1, 2]), zeros, 1.0, values, np.ones(2)),))]
    >>> micro_batch = TokenLogitDistillation().collate(examples)
    >>> loss = TokenLogitDistillation().loss(torch.zeros(2, 2), micro_batch.batch, micro_batch.targets)
    """

    level: ClassVar[Level] = "token"

    def _pool(self, outputs: Tensor, targets: Targets) -> Tensor:
        return outputs

    def _add(self, example: TrainingExample, logits: np.ndarray) -> TrainingExample:
        windows = []
        for window in example.windows:
            own, logits = np.split(logits, [len(window)])
            labels = np.full(len(window), -1) if window.values is None else window.values
            weights = np.ones(len(window), dtype=np.float32) if window.weights is None else window.weights
            values = np.concatenate([own, labels[:, None]], axis=1, dtype=np.float32)  # (n, k + 1)
            windows.append(replace(window, values=values, weights=weights))
        return replace(example, windows=tuple(windows))
