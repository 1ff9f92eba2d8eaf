"""Reranking: score documents against a query with a cross-encoder, which reads both together.

A document beyond the maximum length is read in windows with the query in each, and has the score of its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.arguments import explain_arguments
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

    @overload
    def rerank(  # type: ignore[overload-overlap]
        self, query: str, documents: str, *, top_k: int | None = None, progress: bool | None = None
    ) -> RankedDocument: ...
    @overload
    def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, progress: bool | None = None
    ) -> list[RankedDocument]: ...
    @explain_arguments
    def rerank(self, query: str, documents: Any, *, top_k: int | None = None, progress: bool | None = None) -> Any:
        """Rank documents by relevance to the query, best first; the first `top_k` if given.

        A single document returns a single result. `progress`: whether to show a progress bar; None: on a terminal or
        in a notebook.
        """
        check_positive(top_k=top_k)
        if isinstance(documents, str):
            return self.rerank(query, [documents], progress=progress)[0]
        checked_text(query, "the query")
        listed = check_list(documents, "rerank", "documents")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed)]
        pairs = (self.prepare_pair(f"document {i}", query, text) for i, text in enumerate(texts))
        results = self.collect(texts, lambda texts: self.run(pairs, texts), "rerank", progress, unit="documents")
        ranked = [RankedDocument(i, text=texts[i], **asdict(result)) for i, result in enumerate(results)]
        return sorted(ranked, key=lambda document: (-document.score, document.index))[:top_k]

    @overload
    def predict(self, X: tuple[str, str], *, progress: bool | None = None) -> float: ...
    @overload
    def predict(self, X: Iterable[tuple[str, str]], *, progress: bool | None = None) -> NDArray[np.float32]: ...
    @explain_arguments
    def predict(self, X: Any, *, progress: bool | None = None) -> Any:
        """(n,) scores of (query, document) pairs; for a single pair, a float."""
        if isinstance(X, tuple) and len(X) == 2 and all(isinstance(text, str) for text in X):
            return float(self.predict([X], progress=progress)[0])
        results = self.collect(check_list(X, "predict", "pairs"), self.predict_each, "predict", progress, unit="pairs")
        return np.array([result.score for result in results], dtype=np.float32)

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[RelevanceResult]:
        """Like `predict`, but yield results one by one, with how much of each pair was read."""
        named = ((texts, f"pair {i}") for i, texts in enumerate(check_list(X, "predict", "pairs")))
        inputs = (self.prepare_pair(name, *check_pair(texts, name, "a query and a document")) for texts, name in named)
        return self.run(inputs, X)

    def prepare_pair(self, name: str, query: str, document: str) -> TaskInput[None]:
        """Create the input of a pair, with the checkpoint's prompt and casing."""
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
