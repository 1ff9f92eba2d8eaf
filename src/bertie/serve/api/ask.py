"""POST /ask: answer questions from the index."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from bertie.serve.api.base import QUERY, Array, ReadCounts, Response, Texts
from bertie.serve.api.native import HIT_BYTES, SearchHitItem
from bertie.serve.context import READ_COUNTS, RequestContext, read_counts
from bertie.serve.service import Service
from bertie.tasks.answer import Reader
from bertie.tasks.rerank import Reranker


class AskRequest(BaseModel):
    """POST /ask."""

    model_config = ConfigDict(strict=True, extra="forbid")
    questions: Texts = Field(
        description="Other names: question, queries, query, inputs.",
        examples=[QUERY],
        validation_alias=AliasChoices("questions", "question", "queries", "query"),
    )
    passages: int = Field(5, ge=1, le=100, description="Number of retrieved passages to read.")
    top_k: int = Field(1, ge=1, le=100, description="Answers per question.")
    no_answer_threshold: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The highest probability of no answer at which a question is answered; by default that of the "
        "question answering head, if one was fitted, otherwise 1: always.",
    )
    mode: Literal["hybrid", "dense", "lexical", "sparse"] = "hybrid"
    rerank: bool = False
    where: dict[str, str | int | float | bool | Array[str | int | float | bool]] = Field(default_factory=dict)


class FoundAnswerItem(Response):
    """An answer and its place: characters start to end of a document."""

    text: str
    score: float = Field(description="Its probability among the best spans and no answer.")
    document: str
    start: int
    end: int
    passage: SearchHitItem


class AskItem(ReadCounts):
    """The answers to one question, none if there is no answer; the counts are those of the passages."""

    question: str
    answers: list[FoundAnswerItem]
    no_answer_score: float
    timings: dict[str, float]


class AskResponse(Response):
    """One result per question."""

    model: str
    passages: int
    results: list[AskItem]


def ask(service: Service, request: AskRequest, context: RequestContext) -> Any:
    """Answer questions from the best passages of the index."""
    questions = service.as_list(request.questions, "questions")
    reader = service.task(Reader, None, context)
    reranker = service.reranker(Reranker, None, context) if request.rerank else None
    index = service.index(context)
    service.check_tokens([(question,) for question in questions], index.embedder, context)
    service.check_reply(len(questions) * request.top_k * HIT_BYTES)
    options: dict[str, Any] = {"reader": reader, "rerank": reranker, "mode": request.mode, "where": request.where}
    options |= {"top_k": request.top_k, "no_answer_threshold": request.no_answer_threshold}
    results: list[Any] = []
    size = 0
    for question in questions:
        context.ticket.check()
        result = index.ask(question, request.passages, **options)
        counts = read_counts(result)
        for name in READ_COUNTS:
            context.read[name] += counts[name]
        answers = []
        for answer in result.answers:
            hit = {name: getattr(answer.passage, name) for name in SearchHitItem.model_fields}
            size += HIT_BYTES + len(answer.passage.text)
            fields = {name: getattr(answer, name) for name in FoundAnswerItem.model_fields if name != "passage"}
            answers.append(fields | {"passage": hit})
        service.check_reply(size)
        item = {"question": question, "answers": answers, "no_answer_score": result.no_answer_score}
        results.append(item | {"timings": result.timings} | counts)
    return {"model": context.model, "passages": len(index), "results": results}
