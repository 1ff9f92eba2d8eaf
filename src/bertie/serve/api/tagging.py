"""POST /tag: token classification, and zero-shot entities."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from bertie.serve.api.base import Array, Label, Name, ReadCounts, Response, TaskRequest, Texts
from bertie.serve.api.native import SPAN_BYTES
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext
from bertie.serve.service import Service
from bertie.tasks.tag import Tagger
from bertie.tasks.zero_shot_tag import ZeroShotTagger


class TagRequest(TaskRequest):
    """POST /tag: spans by a head's labels; with `labels`, spans with these labels, by a GLiNER model."""

    texts: Texts = Field(examples=["Ada Lovelace was born in London."])
    aggregation_strategy: Literal["average", "first", "max", "simple", "none"] = "average"
    ignore_labels: Array[Name] = Field(["O"], description="Labels that are not entities.")
    labels: Array[Label] | None = Field(None, description="Entity types for zero-shot NER.")
    threshold: float = Field(0.5, ge=0, le=1, description="With `labels`: the minimum score of a span.")
    flat: bool = Field(True, description="With `labels`: true: spans do not overlap; false: spans may be nested.")
    multi_label: bool = Field(False, description="With `labels`: a span may have several labels.")


class TagSpan(Response):
    """A labelled span: text[start:end], in characters."""

    label: str
    start: int
    end: int
    text: str
    score: float


class TagItem(ReadCounts):
    """The spans of one text."""

    spans: list[TagSpan]


class TagResponse(Response):
    """One result per text."""

    model: str
    head: str | None
    results: list[TagItem]


def tag(service: Service, request: TagRequest, context: RequestContext) -> Any:
    """Find labelled spans, such as named entities."""
    texts = service.as_list(request.texts, "texts")
    if request.labels is not None:
        return _tag_labels(service, request, context, texts, request.labels)
    if request.multi_label or not request.flat or request.threshold != 0.5:
        raise ApiError("invalid", "`threshold`, `flat` and `multi_label` require `labels`", field="labels")
    task = service.task(Tagger, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens([(text,) for text in texts], task, context)
    if request.aggregation_strategy == "none" and not request.ignore_labels:  # every token is a span
        service.check_reply_per_token(texts, task.tokenizer, SPAN_BYTES, context)
    results = task.tag(texts, aggregation_strategy=request.aggregation_strategy, ignore_labels=request.ignore_labels)
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}


def _tag_labels(
    service: Service, request: TagRequest, context: RequestContext, texts: list[str], labels: list[str]
) -> Any:
    """Find spans with the labels of the request."""
    service.check_count(labels, "labels")
    task = service.task(ZeroShotTagger, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens([(text,) for text in texts], task, context)
    most = 1 if request.flat and not request.multi_label else task.settings.head.max_width * len(labels)
    service.check_reply_per_token(texts, task.tokenizer, SPAN_BYTES * most, context)
    results = task.tag(texts, labels, threshold=request.threshold, flat=request.flat, multi_label=request.multi_label)
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}
