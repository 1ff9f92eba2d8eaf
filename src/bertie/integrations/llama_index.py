"""LlamaIndex: embeddings, a reranker and an extractive response synthesizer.

>>> from bertie.integrations.llama_index import BertieEmbedding
>>> len(BertieEmbedding().get_text_embedding("Cats eat meat."))
384
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertie.errors import InputError, MissingPackageError
from bertie.integrations.models import embed_documents, embed_query, load_task
from bertie.tasks.answer import Reader
from bertie.tasks.embed import Embedder
from bertie.tasks.rerank import Reranker

try:
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.llms import MockLLM
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts.mixin import PromptDictType
    from llama_index.core.response_synthesizers.base import BaseSynthesizer
    from llama_index.core.schema import NodeWithScore, QueryBundle
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "bertie.integrations.llama_index needs LlamaIndex: pip install 'bertie[llama-index]'"
    ) from error


class BertieEmbedding(BaseEmbedding):
    """Embed texts with a model: a folder, a hub id, an `Embedder`, or by default the built-in model.

    `query_prompt` and `text_prompt` are prepended to queries and texts; by default the checkpoint's prompts.
    `options` are passed to `Embedder.load`, such as `device`, `precision` and `dimension`.

    >>> len(BertieEmbedding().get_query_embedding("What do cats eat?"))
    384
    """

    query_prompt: str | None = None
    text_prompt: str | None = None
    _embedder: Embedder = PrivateAttr()

    def __init__(
        self,
        model: str | Path | Embedder | None = None,
        *,
        query_prompt: str | None = None,
        text_prompt: str | None = None,
        embed_batch_size: int = 256,
        **options: Any,
    ) -> None:
        embedder = load_task(Embedder, model, **options)
        super().__init__(
            model_name=str(embedder.checkpoint.source),
            embed_batch_size=embed_batch_size,
            query_prompt=query_prompt,  # type: ignore[call-arg]
            text_prompt=text_prompt,
        )
        self._embedder = embedder

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex serializes the component."""
        return "BertieEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed_query(self._embedder, query, self.query_prompt)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return embed_documents(self._embedder, texts, self.text_prompt)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


class BertieRerank(BaseNodePostprocessor):
    """Rerank nodes with a cross-encoder; keeps the `top_n` best with their scores.

    >>> from llama_index.core.schema import TextNode
    >>> nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("Bread is baked.", "Cats eat meat and fish.")]
    >>> BertieRerank(top_n=1).postprocess_nodes(nodes, query_str="What do cats eat?")[0].node.get_content()
    'Cats eat meat and fish.'
    """

    top_n: int = 5
    _reranker: Reranker = PrivateAttr()

    def __init__(self, model: str | Path | Reranker | None = None, *, top_n: int = 5, **options: Any) -> None:
        if top_n < 1:
            raise InputError(f"top_n={top_n} must be at least 1")
        super().__init__(top_n=top_n)  # type: ignore[call-arg]
        self._reranker = load_task(Reranker, model, **options)

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex serializes the component."""
        return "BertieRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise InputError("BertieRerank needs the query: pass query_bundle or query_str")
        if not nodes:
            return []
        texts = [node.node.get_content() for node in nodes]
        ranked = self._reranker.rerank(query_bundle.query_str, texts, top_k=self.top_n, progress=False)
        return [NodeWithScore(node=nodes[item.index].node, score=item.score) for item in ranked]


class BertieSynthesizer(BaseSynthesizer):
    """Answer from the retrieved nodes by extractive question answering, without a language model.

    The response is a span of a node, or `empty_response` if the probability of "no answer" exceeds
    `no_answer_threshold`, by default the model's.

    >>> BertieSynthesizer().get_response("Who wrote Emma?", ["Emma was written by Jane Austen."])
    'Jane Austen'
    """

    def __init__(
        self,
        model: str | Path | Reader | None = None,
        *,
        no_answer_threshold: float | None = None,
        empty_response: str = "No answer was found.",
        **options: Any,
    ) -> None:
        super().__init__(llm=MockLLM(), empty_response=empty_response)  # the base class requires an LLM
        self.reader = load_task(Reader, model, **options)
        self.no_answer_threshold = no_answer_threshold

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        return None

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Return the best answer in the texts."""
        if not text_chunks:
            return self._empty_response
        options: dict[str, Any] = {"no_answer_threshold": self.no_answer_threshold, "progress": False}
        result = self.reader.answer(query_str, list(text_chunks), **options)
        return result.best.text if result.has_answer else self._empty_response

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> str:
        """Return the best answer in the texts."""
        return await asyncio.to_thread(self.get_response, query_str, text_chunks, **response_kwargs)
