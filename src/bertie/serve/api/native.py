"""Bertie's own API: one endpoint per task, and search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from bertie.pipeline.inputs import text_inputs
from bertie.serve.api.base import (
    QUERY,
    SENTENCES,
    Array,
    Label,
    Name,
    ReadCounts,
    Response,
    TaskRequest,
    Texts,
)
from bertie.serve.api.heads import check_candidates
from bertie.serve.api_errors import ApiError
from bertie.serve.context import READ_COUNTS, RequestContext
from bertie.serve.fields import ALIASES
from bertie.serve.service import Service
from bertie.tasks.answer import Reader
from bertie.tasks.classify import Classifier
from bertie.tasks.decoding import WindowPooling
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.registry import TaskRow
from bertie.tasks.rerank import Reranker

# Bytes in a reply of a candidate for a mask, a label's score, a span and a hit, without their texts:
CANDIDATE_BYTES, SCORE_BYTES, SPAN_BYTES, HIT_BYTES = 60, 25, 70, 200
SEARCH_QUERIES = 32  # that are searched at a time

# --- any task ---


class TextsRequest(TaskRequest):
    """A request for a task that reads single texts."""

    texts: Texts = Field(examples=[SENTENCES])


class TextsResponse(Response):
    """One result per text."""

    model: str
    head: str | None
    results: list[Any]


def run_task(row: TaskRow, service: Service, request: TextsRequest, context: RequestContext) -> Any:
    """Run a task that has no handler of its own."""
    texts = service.as_list(request.texts, "texts")
    task = service.task(row.task_class, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens([(text,) for text in texts], task, context)
    results = list(task.run(text_inputs(texts, row.name, None)))
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}


# --- fill-mask ---


class FillRequest(TaskRequest):
    """POST /fill."""

    texts: Texts = Field(examples=["Paris is the [MASK] of France."])
    top_k: int = Field(5, ge=1, le=1000)
    candidates: Array[Label] | None = Field(None, description="Rank only these words or phrases.")


class FillCandidate(Response):
    """A token for a mask, and its probability; `id` is null for a candidate of several tokens."""

    token: str
    id: int | None
    score: float
    text: str


class FillMaskItem(Response):
    """A mask and its most probable tokens."""

    start: int
    end: int
    candidates: list[FillCandidate]


class FillItem(ReadCounts):
    """The masks of one text."""

    masks: list[FillMaskItem]


class FillResponse(Response):
    """One result per text."""

    model: str
    mask_token: str
    results: list[FillItem]


def fill(service: Service, request: FillRequest, context: RequestContext) -> Any:
    """Predict tokens for masks."""
    texts = service.as_list(request.texts, "texts")
    task = service.task(MaskedLM, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens([(text,) for text in texts], task, context)
    masks = sum(text.count(task.tokenizer.mask_token or "\0") for text in texts)
    count = request.top_k if request.candidates is None else min(request.top_k, len(request.candidates))
    service.check_reply(masks * count * CANDIDATE_BYTES)
    check_candidates(service, task, texts, request.candidates, context)
    results = task.fill(texts, top_k=request.top_k, candidates=request.candidates)
    context.add_read(results)
    return {"model": context.model, "mask_token": task.tokenizer.mask_token, "results": results}


# --- text classification ---


class ClassifyRequest(TaskRequest):
    """POST /classify: texts or pairs by a head's labels; with `labels`, zero-shot classification of texts."""

    texts: str | Array[str | Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(
        examples=[["A delight from start to finish."]]
    )
    labels: Array[Label] | None = Field(None, description="Labels for zero-shot classification.")
    template: str | None = Field(
        None, max_length=1000, description="With `labels`: the hypothesis template, with {} for the label."
    )
    method: Literal["auto", "entailment", "embedding", "combined"] = Field(
        "auto", description="With `labels`: by entailment, by the nearest label embedding, or by both."
    )
    multi_label: bool = Field(False, description="With `labels`: score each label independently; several may apply.")
    window_size: Annotated[int, Field(ge=16)] | Literal["sentence"] | None = Field(
        None, description="Without `labels`: the maximum number of tokens per window, or one window per sentence."
    )
    window_pooling: WindowPooling = Field("mean", description="Without `labels`: how the windows are combined.")


class ClassifyItem(ReadCounts):
    """A text's label. `confident`: whether its score reaches the head's abstention threshold; null if it has none."""

    label: str
    score: float
    scores: dict[str, float]
    confident: bool | None = None


class ClassifyResponse(Response):
    """One result per text."""

    model: str
    head: str | None
    results: list[ClassifyItem]


def classify(service: Service, request: ClassifyRequest, context: RequestContext) -> Any:
    """Classify texts or pairs."""
    texts = service.as_list(request.texts, "texts")
    if request.labels is None:
        if request.template is not None or request.multi_label or request.method != "auto":
            raise ApiError("invalid", "`template`, `multi_label` and `method` require `labels`", field="labels")
        task = service.task(Classifier, request.model, context, head=request.head, overflow=request.overflow)
        pairs = [text if isinstance(text, str) else (text[0], text[1]) for text in texts]
        service.check_tokens([(text,) if isinstance(text, str) else text for text in pairs], task, context)
        service.check_reply(len(texts) * sum(SCORE_BYTES + len(label) for label in task.info.labels.values()))
        windows: dict[str, Any] = {"window_size": request.window_size, "window_pooling": request.window_pooling}
        results: Sequence[Any] = task.classify(pairs, **windows)
        head = task.head
    else:
        if request.window_size is not None or request.window_pooling != "mean":
            raise ApiError(
                "invalid", "`window_size` and `window_pooling` are not allowed with `labels`", field="labels"
            )
        if not all(isinstance(text, str) for text in texts):
            raise ApiError("invalid", "zero-shot classification takes single texts, not pairs", field="texts")
        service.check_count(range(len(texts) * len(request.labels)), "labels")
        zero_shot = service.zero_shot(
            request.model, context, head=request.head, overflow=request.overflow, method=request.method
        )
        method = zero_shot.resolve_method(request.method)
        by_embedding = [(text,) for text in (*texts, *request.labels)]
        pairs_read = [(text, label) for text in texts for label in request.labels]
        service.check_tokens(by_embedding if method == "embedding" else pairs_read, zero_shot, context)
        results = zero_shot.classify(
            texts, request.labels, template=request.template, multi_label=request.multi_label, method=method
        )
        head = None if method == "embedding" else zero_shot.head
    context.add_read(results)
    return {"model": context.model, "head": head, "results": results}


# --- question answering ---


class Question(BaseModel):
    """A question and the document or documents to answer it from."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: str = Field(examples=["Who wrote Emma?"])
    documents: Texts = Field(
        examples=["Emma is a novel by Jane Austen."],
        validation_alias=AliasChoices("documents", *ALIASES["documents"]),
    )


class AnswerRequest(TaskRequest):
    """POST /answer."""

    questions: Question | Array[Question]
    top_k: int = Field(1, ge=1, le=100)
    max_answer_length: int = Field(30, ge=1, le=1000, description="The maximum number of tokens in an answer.")
    no_answer_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The highest probability of no answer at which a question is answered; by default the head's own, "
        "if one was fitted, otherwise 1: always.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_single_question(cls, body: Any) -> Any:
        """A single question and its document may be fields of the body."""
        if type(body) is not dict or "questions" in body or "question" not in body:
            return body
        names = {"question", "documents", *ALIASES["documents"]}
        question = {name: value for name, value in body.items() if name in names}
        return {name: value for name, value in body.items() if name not in names} | {"questions": question}


class AnswerSpanItem(Response):
    """documents[document][start:end]; an empty text without offsets means no answer."""

    text: str
    start: int | None
    end: int | None
    score: float = Field(description="Its probability among the best spans and no answer.")
    logit: float = Field(description="The sum of its start and end logits.")
    document: int | None


class AnswerItem(ReadCounts):
    """The best answers to one question."""

    answers: list[AnswerSpanItem]
    no_answer_score: float
    no_answer_logit: float


class AnswerResponse(Response):
    """One result per question."""

    model: str
    head: str | None
    results: list[AnswerItem]


def answer(service: Service, request: AnswerRequest, context: RequestContext) -> Any:
    """Answer questions with spans of documents."""
    questions = service.as_list(request.questions, "questions")
    pairs: list[tuple[str, str | Sequence[str]]] = [(item.question, item.documents) for item in questions]
    items = []
    for question, documents in pairs:
        if not isinstance(documents, str):
            service.check_count(documents, "documents")
        items += [(question, text) for text in ([documents] if isinstance(documents, str) else documents)]
    service.check_count(items, "documents")
    task = service.task(Reader, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens(items, task, context)
    longest = min(request.max_answer_length, max(len(document) for _, document in items))  # a token has a character
    service.check_reply(len(pairs) * request.top_k * (SPAN_BYTES + longest))
    results = task.answer(
        pairs,
        top_k=request.top_k,
        max_answer_length=request.max_answer_length,
        no_answer_threshold=request.no_answer_threshold,
    )
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}


# --- semantic search ---


class SearchRequest(BaseModel):
    """POST /search."""

    model_config = ConfigDict(strict=True, extra="forbid")
    queries: Texts = Field(examples=[QUERY])
    k: int = Field(10, ge=1, le=1000)
    mode: Literal["hybrid", "dense", "lexical", "sparse"] = "hybrid"
    rerank: bool = False
    rerank_weight: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The weight of the reranker's score against that of the retrieval; 1: the reranker alone. By "
        "default 1 for a cross-encoder, and 0.2 for one of several heads of a model.",
    )
    where: dict[str, str | int | float | bool | Array[str | int | float | bool]] = Field(default_factory=dict)
    depth: int = Field(100, ge=1, le=1000)
    weights: dict[Literal["dense", "lexical", "sparse", "rerank"], float] | None = None
    prompt: Name | None = Field(None, description="Prepended to each query, instead of the index's prompt.")
    prompt_name: Name | None = Field(None, description="The name of one of the model's prompts, instead of `prompt`.")


class SearchHitItem(Response):
    """A passage."""

    document: str
    text: str
    start: int
    end: int
    headings: list[str]
    score: float
    scores: dict[str, float]
    highlights: list[tuple[int, int]]
    metadata: dict[str, str | int | float | bool]


class SearchItem(ReadCounts):
    """The passages for one query; the counts are those of the query."""

    query: str
    hits: list[SearchHitItem]
    timings: dict[str, float]


class SearchResponse(Response):
    """One result per query."""

    model: str
    passages: int
    results: list[SearchItem]


def search(service: Service, request: SearchRequest, context: RequestContext) -> Any:
    """Search the index."""
    queries = service.as_list(request.queries, "queries")
    reranker = service.reranker(Reranker, None, context) if request.rerank else None
    index = service.index(context)
    options: dict[str, Any] = {"mode": request.mode, "where": request.where, "weights": request.weights}
    options["rerank_weight"] = request.rerank_weight
    embedder = index.embedder
    given = request.prompt is not None or request.prompt_name is not None
    prompt = embedder.prompt_text(request.prompt, request.prompt_name) if given else index.config["query_prompt"]
    service.check_tokens([(query,) for query in queries], embedder, context)
    service.check_reply(len(queries) * min(request.k, len(index)) * HIT_BYTES)
    results: list[Any] = []
    size = 0
    for first in range(0, len(queries), SEARCH_QUERIES):  # the hits of all queries may be gigabytes
        context.ticket.check()
        group = queries[first : first + SEARCH_QUERIES]
        found = index.search_batch(group, request.k, rerank=reranker, depth=request.depth, prompt=prompt, **options)
        size += sum(HIT_BYTES + len(hit.text) for result in found for hit in result)
        service.check_reply(size)
        read = embedder.pipeline.read(embedder.inputs(group, embedder.options(prompt)))
        for result, query in zip(found, read, strict=True):
            counts = query.counts()
            for name in READ_COUNTS:
                context.read[name] += counts[name]
            hits = [{name: getattr(hit, name) for name in SearchHitItem.model_fields} for hit in result]
            results.append({"query": result.query, "hits": hits, "timings": result.timings, **counts})
    return {"model": context.model, "passages": len(index), "results": results}
