"""The table of endpoints: path, handler, request and response models, error format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from bertie.serve.api import (
    ask,
    cohere,
    compare,
    explain,
    heads,
    huggingface,
    native,
    openai,
    playground,
    tagging,
    tei,
)
from bertie.serve.api_errors import ErrorFormat
from bertie.serve.context import RequestContext
from bertie.serve.service import Service
from bertie.tasks.registry import TASKS

Handler = Callable[[Service, Any, RequestContext], Any]
BERTIE = "Bertie"


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint. Without a request model it answers GET, otherwise POST."""

    path: str
    handler: Handler
    request: type[BaseModel] | None
    response: Any  # a type
    summary: str
    tag: str = BERTIE
    error_format: ErrorFormat = "tei"
    inline: bool = False  # small requests run on the event loop: their work is in proportion to their body

    @property
    def method(self) -> str:
        """GET or POST."""
        return "GET" if self.request is None else "POST"


TEI, OPENAI, COHERE, HUGGING_FACE = "text-embeddings-inference", "OpenAI", "Cohere and Jina", "Hugging Face"
_EMBEDDINGS = Route(
    "/v1/embeddings",
    openai.create_embeddings,
    openai.EmbeddingsRequest,
    openai.EmbeddingsResponse,
    "Embed texts",
    OPENAI,
    "openai",
    inline=True,
)
_RERANK = Route(
    "/v1/rerank",
    cohere.rerank_documents,
    cohere.CohereRerankRequest,
    cohere.RerankResponse,
    "Rank documents by relevance",
    COHERE,
    "cohere",
    inline=True,
)
_EMBED = Route(
    "/v2/embed",
    partial(cohere.embed_texts, True),
    cohere.CohereEmbedRequest,
    cohere.CohereEmbedResponse,
    "Embed texts",
    COHERE,
    "cohere",
    inline=True,
)
_INVOKE = Route(
    "/",
    huggingface.invoke,
    huggingface.InvocationRequest,
    list[Any] | dict[str, Any],
    "Any task, by the inputs, the parameters and the type of the model",
    HUGGING_FACE,
)
_PREDICTIONS = list[tei.Prediction] | list[list[tei.Prediction]]
_SPARSE = list[list[tei.SparseValue]]

# The endpoints of tasks, by name. Their paths stand in the table of tasks (`bertie.tasks.registry`).
_TASK_ENDPOINTS: dict[str, tuple[Handler, type[BaseModel], Any, str, str]] = {
    "embed": (tei.embed, tei.EmbedRequest, list[list[float]], "Embed texts", TEI),
    "sparse": (tei.embed_sparse, tei.EmbedAllRequest, _SPARSE, "Embed texts with a SPLADE model", TEI),
    "rerank": (tei.rerank, tei.RerankRequest, list[tei.Rank], "Rank texts by relevance to a query", TEI),
    "fill": (native.fill, native.FillRequest, native.FillResponse, "Fill-mask", BERTIE),
    "classify": (
        native.classify,
        native.ClassifyRequest,
        native.ClassifyResponse,
        "Text classification, zero-shot if labels are given",
        BERTIE,
    ),
    "tag": (tagging.tag, tagging.TagRequest, tagging.TagResponse, "Token classification: labelled spans", BERTIE),
    "choose": (heads.choose, heads.ChooseRequest, heads.ChooseResponse, "Multiple choice", BERTIE),
    "detect_replaced": (
        heads.detect_replaced,
        heads.DetectReplacedRequest,
        heads.DetectReplacedResponse,
        "Replaced-token detection: words that look wrong",
        BERTIE,
    ),
    "answer": (native.answer, native.AnswerRequest, native.AnswerResponse, "Question answering", BERTIE),
}
_INLINE = ("embed", "rerank", "classify", "tag", "answer")  # fill-mask sorts the vocabulary, and sparse terms are many
_OTHER_ROUTES = (
    _EMBEDDINGS,
    replace(_EMBEDDINGS, path="/embeddings"),
    Route("/v1/models", openai.list_models, None, openai.ModelList, "List the served models", OPENAI, "openai"),
    Route("/embed_all", tei.embed_all, tei.EmbedAllRequest, list[list[list[float]]], "Embed every token", TEI),
    Route(
        "/predict",
        tei.predict,
        tei.PredictRequest,
        _PREDICTIONS,
        "Classify a text or a batch of texts",
        TEI,
        inline=True,
    ),
    Route(
        "/similarity",
        tei.similarity,
        tei.SimilarityRequest,
        list[float],
        "Compare sentences with a text",
        TEI,
        inline=True,
    ),
    Route("/tokenize", tei.tokenize, tei.TokenizeRequest, list[list[tei.TokenData]], "Tokenize texts", TEI),
    Route("/decode", tei.decode, tei.DecodeRequest, list[str], "Decode token ids", TEI),
    Route("/info", tei.info, None, dict[str, Any], "Describe the server, its models and limits", TEI),
    _INVOKE,
    replace(_INVOKE, path="/invocations", summary="Amazon SageMaker's name for POST /"),
    *(
        Route(f"/pipeline/{task}", handler, request, huggingface.RESPONSES[task], task.replace("-", " "), HUGGING_FACE)
        for task, (request, handler) in huggingface.PIPELINES.items()
    ),
    replace(_EMBED, path="/v1/embed", handler=partial(cohere.embed_texts, False)),
    _EMBED,
    _RERANK,
    replace(_RERANK, path="/v2/rerank"),
    Route("/search", native.search, native.SearchRequest, native.SearchResponse, "Search the index"),
    Route("/ask", ask.ask, ask.AskRequest, ask.AskResponse, "Answer questions from the index"),
    Route("/compare", compare.compare, compare.CompareRequest, compare.CompareResponse, "Pairwise similarity of texts"),
    Route("/attention", playground.attention, playground.AttentionRequest, dict[str, Any], "Attention weights"),
    Route(
        "/attention_all",
        explain.attention_all,
        explain.AllAttentionRequest,
        dict[str, Any],
        "Attention weights of all layers and heads",
    ),
    Route(
        "/attribute",
        explain.attribute,
        explain.AttributeRequest,
        explain.AttributeResponse,
        "Which words decided a classification: leave-one-out attribution",
    ),
    Route(
        "/predict_tokens",
        explain.predict_tokens,
        explain.PredictTokensRequest,
        explain.PredictTokensResponse,
        "Predict every token of a text from the others",
    ),
    Route("/map", explain.map_texts, explain.MapRequest, explain.MapResponse, "A map of texts in two dimensions"),
    Route("/windows", playground.windows, playground.WindowsRequest, playground.WindowsResponse, "Windows of a text"),
    Route("/about", playground.about, None, dict[str, Any], "Describe the models and their heads"),
)


def all_routes() -> tuple[Route, ...]:
    """All endpoints. A task without a handler of its own takes texts and returns one result per text."""
    routes = []
    for row in TASKS.values():
        if row.endpoint is None:
            continue
        if row.name in _TASK_ENDPOINTS:
            handler, request, response, summary, tag = _TASK_ENDPOINTS[row.name]
        else:
            handler, request, response = partial(native.run_task, row), native.TextsRequest, native.TextsResponse
            summary, tag = row.name, BERTIE
        routes.append(Route(row.endpoint, handler, request, response, summary, tag, inline=row.name in _INLINE))
    return (*routes, *_OTHER_ROUTES)
