"""Cohere's /v1/embed and /v2/embed, and /v1/rerank and /v2/rerank of Cohere and Jina."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.pipeline import Overflow
from bertie.serve.api.base import (
    HEAD,
    PASSAGES,
    QUERY,
    SENTENCES,
    Array,
    CompatibleRequest,
    Name,
    ReadCounts,
    Response,
    TextItem,
    prompt_for,
)
from bertie.serve.api.tei import probability
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext, read_counts
from bertie.serve.service import FLOAT_BYTES, Service, check_finite
from bertie.serve.tasks import RawReranker
from bertie.tasks.late_interaction import LateInteraction
from bertie.tasks.rerank import Reranker

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
RESULT_BYTES = 100  # of a result in a reply, without its document


class CohereRerankRequest(CompatibleRequest):
    """POST /v1/rerank and /v2/rerank."""

    query: str = Field(examples=[QUERY])
    documents: Array[str | TextItem] = Field(examples=[PASSAGES])
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
    document: TextItem | None = None


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


class CohereContent(BaseModel):
    """A part of an input; of its types only texts are supported."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"] = "text"
    text: str


class CohereInput(BaseModel):
    """An input whose parts are read as one text, one after the other."""

    model_config = ConfigDict(strict=True)
    content: Array[CohereContent]


class CohereEmbedRequest(CompatibleRequest):
    """POST /v1/embed and /v2/embed."""

    texts: Array[str] | None = Field(None, examples=[SENTENCES])
    inputs: Array[CohereInput] | None = Field(None, description="Alternative to `texts`.")
    input_type: Name | None = Field(
        None, description="search_query, search_document, …: the model's prompt for it is used, if it has one."
    )
    embedding_types: Array[EmbeddingType] | None = Field(None, description="Default: float.")
    output_dimension: int | None = Field(None, ge=1, description="Keep the first components of each embedding.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="For long texts: NONE refuses them, END reads their beginning; by default, windows."
    )

    def all_texts(self) -> list[str]:
        """The texts of `texts` or `inputs`."""
        if self.inputs is None:
            return self.texts or []
        return ["\n".join(part.text for part in item.content) for item in self.inputs]


class CohereEmbedResponse(Response):
    """The embeddings by type; at /v1/embed without `embedding_types`, a list of them."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: dict[EmbeddingType, list[list[float]] | list[list[int]] | list[str]] | list[list[float]]
    texts: list[str]
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
    task = service.reranker(kind, request.model, context, head=request.head)
    service.check_tokens([(request.query, text) for text in texts], task, context)
    service.check_reply(sum(RESULT_BYTES + len(text) * request.return_documents for text in texts[: request.top_n]))
    ranked = task.rerank(request.query, texts)
    context.add_read(ranked)
    check_finite([np.array([document.score for document in ranked], dtype=np.float32)])
    score = float if request.model_scores or isinstance(task, LateInteraction) else probability
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


def embed_texts(by_type: bool, service: Service, request: CohereEmbedRequest, context: RequestContext) -> Any:
    """Embed texts. `by_type`: the format of /v2/embed, which /v1/embed has if it is asked for types."""
    if request.texts is None and request.inputs is None:
        raise ApiError("invalid", "texts: Field required, or `inputs`", field="texts")
    texts = request.all_texts()
    service.check_count(texts, "texts")
    if request.truncate == "START":
        raise ApiError("invalid_input", "truncate=START is not supported: omit it to read the whole text in windows")
    overflow: Overflow = {None: "window", "NONE": "error", "END": "truncate"}[request.truncate]  # type: ignore[assignment]
    task = service.embedder(
        request.model, context, dimensions=request.output_dimension, overflow=overflow, normalize=True
    )
    service.check_tokens([(text,) for text in texts], task, context)
    types = request.embedding_types or ["float"]
    service.check_reply(sum(map(len, texts)) + len(texts) * task.dimension * FLOAT_BYTES * len(set(types)))
    results = list(task.embed_each(texts, prompt_name=prompt_for(task.modules.prompts, request.input_type)))
    check_finite(result.vector for result in results)
    context.add_read(results)
    rows = {kind: [_encode_row(result.vector, kind) for result in results] for kind in types}
    by_type = by_type or request.embedding_types is not None
    version = {"version": "2" if by_type else "1"}
    return {
        "id": context.ticket.id,
        "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
        "embeddings": rows if by_type else rows["float"],
        "texts": texts,
        "meta": {"api_version": version, "billed_units": {"input_tokens": context.read["tokens_total"]}},
    }


def _encode_row(vector: FloatArray, kind: EmbeddingType) -> Any:
    """An embedding as Cohere has it: base64 of little-endian float32, or the signs, 8 to a byte."""
    if kind == "float":
        return np.ascontiguousarray(vector)
    if kind == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    signs = np.packbits(vector > 0)
    return signs.tolist() if kind == "ubinary" else (signs.astype(np.int16) - 128).tolist()
