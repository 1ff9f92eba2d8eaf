"""The rerank API of Cohere and Jina: /v1/rerank and /v2/rerank."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bertie.serve.api.base import HEAD, PASSAGES, QUERY, Array, CompatibleRequest, Name, ReadCounts, Response
from bertie.serve.api.tei import probability
from bertie.serve.context import RequestContext, read_counts
from bertie.serve.service import Service, check_finite
from bertie.serve.tasks import RawReranker
from bertie.tasks.rerank import Reranker

RESULT_BYTES = 100  # of a result in a reply, without its document


class RerankDocument(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(strict=True)
    text: str


class CohereRerankRequest(CompatibleRequest):
    """POST /v1/rerank and /v2/rerank."""

    query: str = Field(examples=[QUERY])
    documents: Array[str | RerankDocument] = Field(examples=[PASSAGES])
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    model_scores: bool = Field(
        False, description="Extension: scores as `Reranker` returns them, instead of the sigmoid of the logits."
    )
    head: Name | None = Field(None, description=f"Extension. {HEAD}")


class RerankResult(ReadCounts):
    """A document's index in the request and its relevance, from 0 to 1 unless `model_scores` is set."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankUsage(Response):
    """Token counts, without special tokens."""

    total_tokens: int


class RerankResponse(Response):
    """The documents, most relevant first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: RerankUsage
    meta: dict[str, Any]


class CohereError(Response):
    """An error in the formats of Cohere (message) and Jina (detail)."""

    message: str
    detail: str


def rerank_documents(service: Service, request: CohereRerankRequest, context: RequestContext) -> Any:
    """Rank documents by their relevance to a query."""
    service.check_count(request.documents, "documents")
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    kind = Reranker if request.model_scores else RawReranker
    task = service.task(kind, request.model, context, head=request.head)
    service.check_tokens([(request.query, text) for text in texts], task, context)
    service.check_reply(sum(RESULT_BYTES + len(text) * request.return_documents for text in texts[: request.top_n]))
    ranked = task.rerank(request.query, texts)
    context.add_read(ranked)
    check_finite([np.array([document.score for document in ranked], dtype=np.float32)])
    score = float if request.model_scores else probability
    results = [
        {"index": document.index, "relevance_score": score(document.score), **read_counts(document)}
        | ({"document": {"text": document.text}} if request.return_documents else {})
        for document in ranked[: request.top_n]
    ]
    return {
        "id": context.ticket.id,
        "object": "list",
        "model": context.model,
        "results": results,
        "usage": {"total_tokens": context.read["tokens_total"]},
        "meta": {"api_version": {"version": "1"}},
    }
