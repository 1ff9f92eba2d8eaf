"""Reranking: score documents against a query with a cross-encoder, which reads both together.

A document beyond the maximum length is read in windows with the query in each, and has the score of its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.config import HeadInfo
from bertie.nn.model import Model
from bertie.nn.row_blocks import in_row_blocks
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, check_pair, check_positive
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.results import RankedDocument, RelevanceResult
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text


class Reranker(Trainable[None, FloatArray, RelevanceResult]):
    """Scores documents against a query.

    >>> reranker = Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2")                                # doctest: +SKIP
    >>> reranker.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text            # doctest: +SKIP
    'Cats eat meat.'

    To train one, pass pairs of query and passage, with 1 for relevant passages and 0 for others:

    >>> reranker = Reranker("path/to/any/encoder").fit(pairs, labels)                                  # doctest: +SKIP
    """

    kind = "classify"
    needs = "a head with one score"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "rerank")

    @property
    def settings(self) -> CrossEncoderConfig:
        """The checkpoint's activation for scores, prompts and text preprocessing."""
        return self.checkpoint.cross_encoder or CrossEncoderConfig.create(1)

    def rerank(self, query: str, documents: Iterable[str], *, top_k: int | None = None) -> list[RankedDocument]:
        """Rank documents by relevance to the query, best first; the first `top_k` if given."""
        check_positive(top_k=top_k)
        checked_text(query, "the query")
        listed = check_list(documents, "rerank", "documents")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed)]
        results = self.run((self.prepare_pair(f"document {i}", query, text) for i, text in enumerate(texts)), texts)
        ranked = [RankedDocument(i, text=texts[i], **asdict(result)) for i, result in enumerate(results)]
        return sorted(ranked, key=lambda document: (-document.score, document.index))[:top_k]

    def predict(self, X: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
        """(n,) scores of pairs of query and document."""
        return np.array([result.score for result in self.predict_each(X)], dtype=np.float32)

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[RelevanceResult]:
        """As `predict`, one by one, with how much of each pair was read."""
        named = ((texts, f"pair {i}") for i, texts in enumerate(check_list(X, "predict", "pairs")))
        inputs = (self.prepare_pair(name, *check_pair(texts, name, "a query and a document")) for texts, name in named)
        return self.run(inputs, X)

    def prepare_pair(self, name: str, query: str, document: str) -> TaskInput[None]:
        """A pair as the checkpoint expects it: with its prompt before the query, lower-cased if it says so."""
        settings = self.settings
        query = settings.prompts.get(settings.default_prompt or "", "") + query
        texts = (query, document)
        return TaskInput(name, tuple(text.lower() for text in texts) if settings.lower_case else texts, None)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(1,) score of each window."""
        scores = in_row_blocks(self.settings.module(), self.head_outputs(model, hidden, batch))
        return PendingCopy.per_text(scores)

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> RelevanceResult:
        """Take the best window."""
        return RelevanceResult(max(float(output[0]) for output in outputs), **text.counts())
