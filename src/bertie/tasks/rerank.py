"""Documents in the order in which they answer a query, by a cross-encoder that reads both together.

A document beyond max_length is read in windows with the query in each, and is worth its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.config import HeadInfo
from bertie.tasks.base import FloatArray, TaskInput, at_least_one, listed, pair, reading
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Scored:
    """How well a document answers a query."""

    score: float
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score; `index` is its place in the list that was given."""

    index: int
    score: float
    text: str
    tokens_total: int
    tokens_read: int
    windows: int


class Reranker(Trainable[None, FloatArray, Scored]):
    """Scores documents against a query.

    >>> reranker = Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2")                                # doctest: +SKIP
    >>> reranker.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text            # doctest: +SKIP
    'Cats eat meat.'

    Or trains one, on pairs of query and passage, 1 where the passage answers and 0 where it does not:

    >>> reranker = Reranker("path/to/any/encoder").fit(pairs, labels)                                  # doctest: +SKIP
    """

    kind = "classify"
    needs = "a head with one score"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "rerank")

    @property
    def settings(self) -> CrossEncoderConfig:
        """What the checkpoint says of its scores and of how pairs are prepared."""
        return self.checkpoint.cross_encoder or CrossEncoderConfig.create(1)

    def rerank(self, query: str, documents: Iterable[str], *, top_k: int | None = None) -> list[Ranked]:
        """The documents, best first; the first `top_k` of them if that is given."""
        at_least_one(top_k=top_k)
        checked_text(query, "the query")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed(documents, "rerank", "documents"))]
        scored = self.run(self.prepare_pair(f"document {i}", query, text) for i, text in enumerate(texts))
        ranked = [Ranked(i, text=texts[i], **asdict(one)) for i, one in enumerate(scored)]
        return sorted(ranked, key=lambda one: (-one.score, one.index))[:top_k]

    def predict(self, X: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
        """(n,) the score of each pair of query and document."""
        return np.array([one.score for one in self.predict_each(X)], dtype=np.float32)

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[Scored]:
        """As `predict`, one by one, each with how much of its texts was read."""
        named = ((texts, f"pair {i}") for i, texts in enumerate(listed(X, "predict", "pairs")))
        return self.run(self.prepare_pair(name, *pair(texts, name, "a query and a document")) for texts, name in named)

    def prepare_pair(self, name: str, query: str, document: str) -> TaskInput[None]:
        """A pair as the checkpoint wants it: its prompt goes before the query."""
        settings = self.settings
        query = settings.prompts.get(settings.default_prompt or "", "") + query
        texts = (query, document)
        return TaskInput(name, tuple(text.lower() for text in texts) if settings.lower_case else texts, None)

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(1,) score of each window."""
        scores: Tensor = self.settings.module()(self.rows(hidden, batch))
        return self.by_text(scores)

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Scored:
        """The best window."""
        return Scored(max(float(output[0]) for output in outputs), **reading(found))
