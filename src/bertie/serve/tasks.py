"""Tasks that only the server offers: raw logits, sparse embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from bertie.nn.model import Model
from bertie.nn.pooling import splade_pool
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.base import Task
from bertie.tasks.classify import Classifier
from bertie.tasks.decoding import average_windows
from bertie.tasks.rerank import Reranker
from bertie.tasks.results import ClassificationResult
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings


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


@dataclass(frozen=True, slots=True, eq=False)
class SparseEmbeddingResult:
    """(V,) the weight of each vocabulary term in a text; most are 0."""

    weights: FloatArray
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0


class SparseEmbedder(Task[None, FloatArray, SparseEmbeddingResult]):
    """SPLADE embeddings from the masked-language-modelling head. A term's weight is the maximum over all windows."""

    kind = "mlm"
    needs = "a masked-language-modelling head"

    def output_costs(self, windows: Encodings, parameters: Sequence[None] | None) -> Sequence[int]:
        """The logits of a token over the vocabulary take about as long as reading it."""
        return [int(n) for n in windows.lengths]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(V,) term weights of each window."""
        return PendingCopy.per_text(splade_pool(self.head_outputs(model, hidden, batch), batch))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> SparseEmbeddingResult:
        """The maximum over windows."""
        return SparseEmbeddingResult(np.max(outputs, axis=0), **text.counts())
