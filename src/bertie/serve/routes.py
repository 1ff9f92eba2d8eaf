"""The table of endpoints: path, handler, request and response models, error format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from bertie.serve.api import cohere, native, openai, playground, tei
from bertie.serve.api_errors import ErrorFormat
from bertie.serve.context import RequestContext
from bertie.serve.service import Service


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint. Without a request model it answers GET, otherwise POST."""

    path: str
    handler: Callable[[Service, Any, RequestContext], Any]
    request: type[BaseModel] | None
    response: Any  # a type
    summary: str
    tag: str = "Bertie"
    error_format: ErrorFormat = "tei"

    @property
    def method(self) -> str:
        """GET or POST."""
        return "GET" if self.request is None else "POST"


TEI, OPENAI, COHERE = "text-embeddings-inference", "OpenAI", "Cohere and Jina"
_EMBEDDINGS = Route(
    "/v1/embeddings",
    openai.create_embeddings,
    openai.EmbeddingsRequest,
    openai.EmbeddingsResponse,
    "Embed texts",
    OPENAI,
    "openai",
)
_RERANK = Route(
    "/v1/rerank",
    cohere.rerank_documents,
    cohere.CohereRerankRequest,
    cohere.RerankResponse,
    "Rank documents by relevance",
    COHERE,
    "cohere",
)
_INVOKE = Route(
    "/",
    tei.invoke,
    tei.InvocationRequest,
    list[Any],
    "Embed, predict or rerank, by the type of the model",
    TEI,
)
_PREDICTIONS = list[tei.Prediction] | list[list[tei.Prediction]]
_SPARSE = list[list[tei.SparseValue]]

ROUTES = (
    _EMBEDDINGS,
    replace(_EMBEDDINGS, path="/embeddings"),
    Route("/v1/models", openai.list_models, None, openai.ModelList, "List the served models", OPENAI, "openai"),
    Route("/embed", tei.embed, tei.EmbedRequest, list[list[float]], "Embed texts", TEI),
    Route("/embed_all", tei.embed_all, tei.EmbedAllRequest, list[list[list[float]]], "Embed every token", TEI),
    Route("/embed_sparse", tei.embed_sparse, tei.EmbedAllRequest, _SPARSE, "Embed texts with a SPLADE model", TEI),
    Route("/predict", tei.predict, tei.PredictRequest, _PREDICTIONS, "Classify a text or a batch of texts", TEI),
    Route("/rerank", tei.rerank, tei.RerankRequest, list[tei.Rank], "Rank texts by relevance to a query", TEI),
    Route("/similarity", tei.similarity, tei.SimilarityRequest, list[float], "Compare sentences with a text", TEI),
    Route("/tokenize", tei.tokenize, tei.TokenizeRequest, list[list[tei.TokenData]], "Tokenize texts", TEI),
    Route("/decode", tei.decode, tei.DecodeRequest, list[str], "Decode token ids", TEI),
    Route("/info", tei.info, None, dict[str, Any], "Describe the server, its models and limits", TEI),
    _INVOKE,
    replace(_INVOKE, path="/invocations", summary="Amazon SageMaker's name for POST /"),
    _RERANK,
    replace(_RERANK, path="/v2/rerank"),
    Route("/fill", native.fill, native.FillRequest, native.FillResponse, "Fill-mask"),
    Route("/classify", native.classify, native.ClassifyRequest, native.ClassifyResponse, "Classify texts"),
    Route("/tag", native.tag, native.TagRequest, native.TagResponse, "Token classification: labelled spans"),
    Route("/answer", native.answer, native.AnswerRequest, native.AnswerResponse, "Question answering"),
    Route("/search", native.search, native.SearchRequest, native.SearchResponse, "Search the index"),
    Route("/compare", native.compare, native.CompareRequest, native.CompareResponse, "Pairwise similarity of texts"),
    Route("/attention", playground.attention, playground.AttentionRequest, dict[str, Any], "Attention weights"),
    Route("/windows", playground.windows, playground.WindowsRequest, playground.WindowsResponse, "Windows of a text"),
    Route("/about", playground.about, None, dict[str, Any], "Describe the models and their heads"),
)
