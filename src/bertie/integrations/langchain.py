"""LangChain: embeddings, a reranker and an extractive reader.

>>> from bertie.integrations.langchain import BertieEmbeddings
>>> len(BertieEmbeddings().embed_query("What do cats eat?"))
384
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertie.errors import InputError, MissingPackageError
from bertie.integrations.models import embed_documents, embed_query, load_task
from bertie.tasks.answer import Reader
from bertie.tasks.embed import Embedder
from bertie.tasks.rerank import Reranker

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.runnables import Runnable, RunnableConfig
    from pydantic import ConfigDict, Field, PrivateAttr
except ModuleNotFoundError as error:
    raise MissingPackageError(
        "bertie.integrations.langchain needs LangChain: pip install 'bertie[langchain]'"
    ) from error


class BertieEmbeddings(Embeddings):
    """Embed texts with a model: a folder, a hub id, an `Embedder`, or by default the built-in model.

    `query_prompt` and `document_prompt` are prepended to queries and documents; by default the checkpoint's prompts.
    `options` are passed to `Embedder.load`, such as `device`, `precision` and `dimension`.

    >>> embeddings = BertieEmbeddings().embed_documents(["Cats eat meat.", "Bread is baked from flour."])
    >>> len(embeddings), len(embeddings[0])
    (2, 384)
    """

    def __init__(
        self,
        model: str | Path | Embedder | None = None,
        *,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        **options: Any,
    ) -> None:
        self.embedder = load_task(Embedder, model, **options)
        self.query_prompt, self.document_prompt = query_prompt, document_prompt

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents."""
        return embed_documents(self.embedder, texts, self.document_prompt)

    def embed_query(self, text: str) -> list[float]:
        """Embed a query."""
        return embed_query(self.embedder, text, self.query_prompt)


class BertieReranker(BaseDocumentCompressor):
    """Rerank documents with a cross-encoder, for `ContextualCompressionRetriever`; keeps the `top_n` best.

    Each document's score is in `metadata["relevance_score"]`.

    >>> documents = [Document(page_content="Bread is baked."), Document(page_content="Cats eat meat and fish.")]
    >>> BertieReranker(top_n=1).compress_documents(documents, "What do cats eat?")[0].page_content
    'Cats eat meat and fish.'
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    model: Any = None
    top_n: int = Field(3, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)
    _reranker: Reranker = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Load the model."""
        self._reranker = load_task(Reranker, self.model, **self.options)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the best documents, best first."""
        texts = [document.page_content for document in documents]
        ranked = self._reranker.rerank(query, texts, top_k=self.top_n, progress=False) if texts else []
        kept = []
        for item in ranked:
            metadata = documents[item.index].metadata | {"relevance_score": item.score}
            kept.append(documents[item.index].model_copy(update={"metadata": metadata}))
        return kept


class BertieReader(Runnable[dict[str, Any], list[Document]]):
    """Answer a question from documents by extractive question answering: `{"question": …, "documents": […]}`.

    Each answer is a `Document` with the text of the answer, and the metadata of its source document plus `score`,
    `start` and `end` (character offsets). The list is empty if the probability of "no answer" exceeds
    `no_answer_threshold`, by default the model's.

    >>> documents = [Document(page_content="Emma was written by Jane Austen.", metadata={"id": 7})]
    >>> answers = BertieReader().invoke({"question": "Who wrote Emma?", "documents": documents})
    >>> answers[0].page_content, answers[0].metadata["id"], answers[0].metadata["start"]
    ('Jane Austen', 7, 20)
    """

    def __init__(
        self,
        model: str | Path | Reader | None = None,
        *,
        top_k: int = 1,
        no_answer_threshold: float | None = None,
        **options: Any,
    ) -> None:
        self.reader = load_task(Reader, model, **options)
        self.top_k, self.no_answer_threshold = top_k, no_answer_threshold

    def invoke(self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Return the answers, best first."""
        if not isinstance(input, dict) or not {"question", "documents"} <= input.keys():
            raise InputError(f"input={input!r:.80} must be a dict with 'question' and 'documents'")
        documents = [item if isinstance(item, Document) else Document(page_content=item) for item in input["documents"]]
        if not documents:
            return []
        texts = [document.page_content for document in documents]
        options: dict[str, Any] = {"top_k": self.top_k, "no_answer_threshold": self.no_answer_threshold}
        result = self.reader.answer(input["question"], texts, progress=False, **options)
        answers = []
        for span in result.answers if result.has_answer else ():
            place = {"score": span.score, "start": span.start, "end": span.end}
            answers.append(Document(page_content=span.text, metadata=documents[span.document or 0].metadata | place))
        return answers
