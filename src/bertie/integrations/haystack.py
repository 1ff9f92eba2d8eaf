"""Haystack components: text and document embedders, a ranker and an extractive reader.

>>> from bertie.integrations.haystack import BertieTextEmbedder
>>> len(BertieTextEmbedder().run("What do cats eat?")["embedding"])
384
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from bertie.errors import InputError, MissingPackageError
from bertie.integrations.models import embed_documents, embed_query, load_task
from bertie.tasks.answer import Reader
from bertie.tasks.base import Task
from bertie.tasks.embed import Embedder
from bertie.tasks.rerank import Reranker

try:
    from haystack import Document, ExtractedAnswer, component, default_from_dict, default_to_dict
except ModuleNotFoundError as error:
    raise MissingPackageError("bertie.integrations.haystack needs Haystack: pip install 'bertie[haystack]'") from error

T = TypeVar("T", bound=Task[Any, Any, Any])


class _Component:
    """Base class of components: the model is loaded by `warm_up` or on the first run.

    `model`: a folder or hub id; None: the built-in model. `options` are passed to the task's `load`. Haystack's
    decorator creates a new class, so `super()` without arguments does not work in components.
    """

    def __init__(self, model: str | None, settings: dict[str, Any], options: dict[str, Any] | None) -> None:
        self.model, self.options = model, options or {}
        self._settings = settings
        self._task: Any = None

    def _load(self, kind: type[T]) -> T:
        if self._task is None:
            self._task = load_task(kind, self.model, **self.options)
        task: T = self._task
        return task

    def _as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = default_to_dict(self, model=self.model, options=self.options, **self._settings)
        return data


@component
class BertieTextEmbedder(_Component):
    """Embed a query. `prompt` is prepended to it; by default the checkpoint's query prompt."""

    def __init__(
        self, model: str | None = None, prompt: str | None = None, options: dict[str, Any] | None = None
    ) -> None:
        _Component.__init__(self, model, {"prompt": prompt}, options)
        self.prompt = prompt

    def warm_up(self) -> None:
        """Load the model."""
        self._load(Embedder)

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """Return the embedding of a text."""
        return {"embedding": embed_query(self._load(Embedder), text, self.prompt)}

    def to_dict(self) -> dict[str, Any]:
        """Serialize the component."""
        return self._as_dict()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BertieTextEmbedder:
        """Restore a serialized component."""
        restored: BertieTextEmbedder = default_from_dict(cls, data)
        return restored


@component
class BertieDocumentEmbedder(_Component):
    """Embed documents. `prompt` is prepended to each; by default the checkpoint's document prompt.

    The metadata fields `meta_fields_to_embed` are prepended to the content, each followed by `embedding_separator`.
    """

    def __init__(
        self,
        model: str | None = None,
        prompt: str | None = None,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        options: dict[str, Any] | None = None,
    ) -> None:
        settings = {"prompt": prompt, "meta_fields_to_embed": meta_fields_to_embed}
        _Component.__init__(self, model, settings | {"embedding_separator": embedding_separator}, options)
        self.prompt, self.separator = prompt, embedding_separator
        self.fields = meta_fields_to_embed or []

    def warm_up(self) -> None:
        """Load the model."""
        self._load(Embedder)

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return the documents with their embeddings."""
        texts = []
        for document in documents:
            values = [str(document.meta[name]) for name in self.fields if document.meta.get(name) is not None]
            texts.append(self.separator.join([*values, document.content or ""]))
        embeddings = embed_documents(self._load(Embedder), texts, self.prompt)
        return {"documents": [replace(doc, embedding=row) for doc, row in zip(documents, embeddings, strict=True)]}

    def to_dict(self) -> dict[str, Any]:
        """Serialize the component."""
        return self._as_dict()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BertieDocumentEmbedder:
        """Restore a serialized component."""
        restored: BertieDocumentEmbedder = default_from_dict(cls, data)
        return restored


@component
class BertieRanker(_Component):
    """Rank documents with a cross-encoder; returns the `top_k` best with their scores."""

    def __init__(self, model: str | None = None, top_k: int = 10, options: dict[str, Any] | None = None) -> None:
        if top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        _Component.__init__(self, model, {"top_k": top_k}, options)
        self.top_k = top_k

    def warm_up(self) -> None:
        """Load the model."""
        self._load(Reranker)

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document], top_k: int | None = None) -> dict[str, Any]:
        """Return the best documents, best first."""
        texts = _contents(documents)
        if not texts:
            return {"documents": []}
        ranked = self._load(Reranker).rerank(query, texts, top_k=top_k or self.top_k, progress=False)
        return {"documents": [replace(documents[item.index], score=item.score) for item in ranked]}

    def to_dict(self) -> dict[str, Any]:
        """Serialize the component."""
        return self._as_dict()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BertieRanker:
        """Restore a serialized component."""
        restored: BertieRanker = default_from_dict(cls, data)
        return restored


@component
class BertieExtractiveReader(_Component):
    """Answer a query from documents by extractive question answering.

    Returns the `top_k` best answers. With `no_answer`, an answer without text follows, whose score is the probability
    that the documents contain no answer; if that exceeds `no_answer_threshold` (by default the model's), no other
    answer is returned.
    """

    def __init__(
        self,
        model: str | None = None,
        top_k: int = 1,
        no_answer: bool = True,
        no_answer_threshold: float | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        settings = {"top_k": top_k, "no_answer": no_answer, "no_answer_threshold": no_answer_threshold}
        _Component.__init__(self, model, settings, options)
        self.top_k, self.no_answer, self.no_answer_threshold = top_k, no_answer, no_answer_threshold

    def warm_up(self) -> None:
        """Load the model."""
        self._load(Reader)

    @component.output_types(answers=list[ExtractedAnswer])
    def run(self, query: str, documents: list[Document], top_k: int | None = None) -> dict[str, Any]:
        """Return the answers, best first."""
        texts, answers, no_answer_score = _contents(documents), [], 1.0
        if texts:
            options: dict[str, Any] = {"top_k": top_k or self.top_k, "no_answer_threshold": self.no_answer_threshold}
            result = self._load(Reader).answer(query, texts, progress=False, **options)
            no_answer_score = result.no_answer_score
            for span in result.answers if result.has_answer else ():
                document = documents[span.document or 0]
                place = ExtractedAnswer.Span(span.start or 0, span.end or 0)
                answers.append(
                    ExtractedAnswer(
                        query=query,
                        score=span.score,
                        data=span.text,
                        document=document,
                        context=document.content,
                        document_offset=place,
                        context_offset=place,
                    )
                )
        if self.no_answer:
            answers.append(ExtractedAnswer(query=query, score=no_answer_score))
        return {"answers": answers}

    def to_dict(self) -> dict[str, Any]:
        """Serialize the component."""
        return self._as_dict()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BertieExtractiveReader:
        """Restore a serialized component."""
        restored: BertieExtractiveReader = default_from_dict(cls, data)
        return restored


def _contents(documents: Sequence[Document]) -> list[str]:
    """The texts of documents; a document without text is an error."""
    texts = []
    for i, document in enumerate(documents):
        if document.content is None:
            raise InputError(f"documents[{i}] (id {document.id}) has no text content")
        texts.append(document.content)
    return texts
