"""Endpoints that look into models: attribution, predictions for every token, attention of all heads, maps of texts."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from bertie.errors import InputError
from bertie.serve.api.base import SENTENCES, Array, BertieRequest, Label, Pooling, ReadCounts, Response, TaskRequest
from bertie.serve.api.native import CANDIDATE_BYTES, FillCandidate
from bertie.serve.attention import MAX_TOKENS, all_attention
from bertie.serve.context import RequestContext, read_counts
from bertie.serve.costs import count_tokens
from bertie.serve.service import FLOAT_BYTES, Service, check_finite
from bertie.tasks.attribution import MAX_PIECES, leave_one_out
from bertie.tasks.classify import Classifier
from bertie.tasks.embed import Embedder
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.text_map import check_texts, map_vectors

PIECE_BYTES, POINT_BYTES = 80, 40  # of a word, and of a point with its cluster, in a reply

# --- attribution ---


class AttributeRequest(TaskRequest):
    """POST /attribute: which words of a text or a pair decided its label, by leave-one-out attribution."""

    text: str | Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        examples=["A delight from start to finish."]
    )
    label: Label | None = Field(None, description="The label to explain; by default the predicted one.")
    max_pieces: int = Field(
        MAX_PIECES, ge=1, le=MAX_TOKENS, description="Maximum number of groups of words that are left out in turn."
    )


class PieceItem(Response):
    """text[start:end] of the first or the second text, and by how much the label's probability falls without it."""

    text: str
    start: int
    end: int
    weight: float
    sequence: int


class AttributeResponse(ReadCounts):
    """The words of a text with their weights, which are negative for those that spoke against the label."""

    model: str
    head: str | None
    label: str
    score: float
    pieces: list[PieceItem]


def attribute(service: Service, request: AttributeRequest, context: RequestContext) -> Any:
    """Classify a text without each of its words."""
    task = service.task(Classifier, request.model, context, head=request.head, overflow=request.overflow)
    text = request.text if isinstance(request.text, str) else (request.text[0], request.text[1])
    as_item = (text,) if isinstance(text, str) else text
    service.check_tokens([as_item], task, context)  # before copies of a long text are made
    variants, _ = leave_one_out(text, request.max_pieces)
    service.check_tokens([as_item] + [(v,) if isinstance(v, str) else v for v in variants], task, context)
    service.check_reply(len(variants) * PIECE_BYTES + sum(map(len, as_item)))
    (result,) = task.attribute([text], label=request.label, max_pieces=request.max_pieces)
    context.add_read([result])
    fields = {name: getattr(result, name) for name in ("label", "score", "pieces")}
    return {"model": context.model, "head": task.head, **fields, **read_counts(result)}


# --- predictions for every token ---


class PredictTokensRequest(TaskRequest):
    """POST /predict_tokens: what is predicted in place of each token of a short text, from all others."""

    text: str = Field(examples=["Paris is the capital of France."])
    top_k: int = Field(5, ge=1, le=100)


class TokenPredictionItem(Response):
    """The token text[start:end], its log-probability and rank, and the most probable tokens in its place."""

    text: str
    start: int
    end: int
    log_likelihood: float
    rank: int
    candidates: list[FillCandidate]


class PredictTokensResponse(ReadCounts):
    """The predictions for every token, and the pseudo-log-likelihood of the text, their sum."""

    model: str
    log_likelihood: float
    tokens: list[TokenPredictionItem]


def predict_tokens(service: Service, request: PredictTokensRequest, context: RequestContext) -> Any:
    """Mask each token of a text in turn."""
    task = service.task(MaskedLM, request.model, context, head=request.head, overflow=request.overflow)
    (count,) = count_tokens([request.text], task.tokenizer, context.ticket).values()
    service.check_token_count(count * (count + task.tokenizer.special_count))
    if count > MAX_TOKENS:
        raise InputError(f"text has {count} tokens, and each token is predicted for at most {MAX_TOKENS}; shorten it")
    service.check_reply(count * (PIECE_BYTES + request.top_k * CANDIDATE_BYTES))
    (result,) = task.predict_tokens([request.text], top_k=request.top_k)
    context.add_read([result])
    fields = {"log_likelihood": result.log_likelihood, "tokens": result.tokens}
    return {"model": context.model, **fields, **read_counts(result)}


# --- the attention of all layers and heads ---


class AllAttentionRequest(BertieRequest):
    """POST /attention_all: the attention weights of every layer and head for a short text."""

    text: str = Field(examples=[SENTENCES[0]])


def attention_all(service: Service, request: AllAttentionRequest, context: RequestContext) -> Any:
    """Return weights[layer][head][query][key]."""
    context.model = service.candidates(request.model)[0]
    served = service.use_model(context.model, context)
    tokens = count_tokens([request.text], service.tokenizer(context.model, context), context.ticket)
    service.check_token_count(sum(tokens.values()))
    with service.one_at_a_time(1 << 20, context.ticket):
        return served.call(all_attention, request.text)


# --- maps of texts ---


class MapRequest(BertieRequest):
    """POST /map: texts as points in two dimensions, and clusters of similar texts."""

    texts: Array[str] = Field(examples=[[*SENTENCES, "Stock markets fell on Friday."]])
    clusters: int | None = Field(
        None, ge=1, description="Number of clusters; default: that of the best silhouette score."
    )
    pooling: Pooling | None = Field(None, description="Replaces the model's pooling.")


class MapResponse(Response):
    """A point of the unit square and a cluster for each text, and a name for each cluster: its distinctive words."""

    model: str
    points: list[tuple[float, float]]
    clusters: list[int]
    labels: list[str]
    results: list[ReadCounts]


def map_texts(service: Service, request: MapRequest, context: RequestContext) -> Any:
    """Project the embeddings of texts by t-SNE."""
    service.check_count(request.texts, "texts")
    check_texts(len(request.texts), request.clusters)
    options: dict[str, Any] = {} if request.pooling is None else {"pooling": request.pooling}
    task = service.task(Embedder, request.model, context, **options)
    service.check_tokens([(text,) for text in request.texts], task, context)
    service.check_reply(len(request.texts) * (POINT_BYTES + 4 * FLOAT_BYTES))
    results = list(task.embed_each(request.texts))
    check_finite(result.vector for result in results)
    context.add_read(results)
    vectors = np.stack([result.vector for result in results])
    with service.one_at_a_time(len(vectors) ** 2, context.ticket):
        found = map_vectors(vectors, request.texts, clusters=request.clusters, check=context.ticket.check)
    return {
        "model": context.model,
        "points": found.points.round(4),
        "clusters": found.clusters,
        "labels": found.labels,
        "results": [read_counts(result) for result in results],
    }
