"""Tasks as only a server needs them: numbers before our own reading of them, a vector a token, sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bertie.nn.pooling import splade_pool
from bertie.tasks.base import FloatArray, Task, TaskInput, pooled, reading
from bertie.tasks.classify import Classification, Classifier
from bertie.tasks.rerank import Reranker
from bertie.text.batch import Batch
from bertie.text.windows import Window


class RawReranker(Reranker):
    """Scores as they come out of the head: each API has its own idea of what follows."""

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(1,) logit of each window."""
        return self.by_text(self.rows(hidden, batch))


class RawClassifier(Classifier):
    """Logits instead of probabilities, averaged over windows."""

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Classification:
        """Pool the windows."""
        named = {label: float(pooled(found, outputs)[i]) for i, label in self.info.labels.items()}
        best = max(named, key=lambda label: named[label])
        return Classification(best, named[best], named, True, **reading(found))


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """(n, D) the state of each token of a text, special ones included."""

    vectors: FloatArray
    tokens_total: int
    tokens_read: int
    windows: int


class States(Task[None, FloatArray, TokenVectors]):
    """The encoder's last states. Each token is taken from the window that answers for it."""

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(n, D) of each window."""
        return self.by_token(hidden.float(), batch)

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> TokenVectors:
        """All tokens in order."""
        places = np.concatenate([window.places[window.owned] for window in found])
        rows = np.concatenate([output[window.owned] for window, output in zip(found, outputs, strict=True)])
        return TokenVectors(rows[np.argsort(places, kind="stable")], **reading(found))


@dataclass(frozen=True, slots=True, eq=False)
class SparseEmbedding:
    """(V,) the weight of each word of the vocabulary in a text; most are 0."""

    weights: FloatArray
    tokens_total: int
    tokens_read: int
    windows: int


class Sparse(Task[None, FloatArray, SparseEmbedding]):
    """SPLADE's vectors, by the head for masked words. A weight is the greatest of a text's tokens, in any window."""

    kind = "mlm"
    needs = "a head for masked words"

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(V,) of each window."""
        return self.by_text(splade_pool(self.rows(hidden, batch), batch))

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> SparseEmbedding:
        """The greatest of all windows."""
        return SparseEmbedding(np.max(outputs, axis=0), **reading(found))
