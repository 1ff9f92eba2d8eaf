"""Documents in the order in which they answer a query, by a cross-encoder that reads both together.

A document beyond reach is read in windows with the query in each, and is worth its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bertie.errors import InputError
from bertie.hub import Checkpoint
from bertie.sentence import CrossEncoderConfig
from bertie.tasks.base import FloatArray, Long, Task, reading
from bertie.text.batch import Batch
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score; `index` is its place in the list that was given."""

    index: int
    score: float
    text: str
    tokens_total: int
    tokens_read: int
    windows: int


class Reranker(Task[tuple[str, str], tuple[float, dict[str, int]]]):
    """Scores documents against a query.

    >>> reranker = Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2")                                # doctest: +SKIP
    >>> reranker.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text            # doctest: +SKIP
    'Cats eat meat.'
    """

    head = "classify"

    def __init__(self, checkpoint: Checkpoint, *, long: Long = "window") -> None:
        super().__init__(checkpoint, long=long)
        labels = len(checkpoint.labels)
        if labels != 1:
            raise InputError(f"reranking needs a model with one score; {checkpoint.source} has {labels} labels")
        self.activation = (checkpoint.cross_encoder or CrossEncoderConfig.fresh(1)).module()

    def rerank(self, query: str, documents: Iterable[str], *, top_k: int | None = None) -> list[Ranked]:
        """The documents, best first; the first `top_k` of them if that is given."""
        if isinstance(documents, str):
            raise InputError("rerank takes a list of documents; put a single one into a list")
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        texts = list(documents)
        scored = self.run((query, text) for text in texts)
        ranked = [Ranked(i, score, texts[i], **read) for i, (score, read) in enumerate(scored)]
        return sorted(ranked, key=lambda one: (-one.score, one.index))[:top_k]

    def score(self, pairs: Iterable[tuple[str, str]]) -> list[float]:
        """The score of each pair of query and document, in order."""
        return [score for score, _ in self.run(pairs)]

    def texts(self, item: tuple[str, str]) -> tuple[str, ...]:
        """The query, then the document."""
        return item

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """(1,) score of each window."""
        scores: Tensor = self.activation(self.rows(hidden, batch))
        return self.by_text(scores)

    def decode(
        self, item: tuple[str, str], found: Sequence[Window], outputs: Sequence[FloatArray]
    ) -> tuple[float, dict[str, int]]:
        """The best window."""
        return max(float(output[0]) for output in outputs), reading(found)
