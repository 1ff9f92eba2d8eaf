"""Tasks that only the server offers: raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.classify import Classifier
from bertie.tasks.decoding import average_windows
from bertie.tasks.rerank import Reranker
from bertie.tasks.results import ClassificationResult
from bertie.text.batch import Batch


class RawReranker(Reranker):
    """Scores without activation: each API applies its own."""

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(1,) logit of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))


class RawClassifier(Classifier):
    """Logits instead of probabilities, averaged over windows."""

    def decode(self, text: WindowedText[Any], outputs: Sequence[FloatArray]) -> ClassificationResult:
        """Average the windows."""
        logits = average_windows(text.windows, outputs)
        by_label = {label: float(logits[i]) for i, label in self.info.labels.items()}
        best = max(by_label, key=lambda label: by_label[label])
        return ClassificationResult(best, by_label[best], by_label, None, **text.counts())
