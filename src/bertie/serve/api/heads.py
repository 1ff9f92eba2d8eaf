"""Bertie's own API for multiple choice and replaced-token detection, and the cost of candidates for masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bertie.serve.api.base import Array, ReadCounts, Response, TaskRequest, Texts
from bertie.serve.context import RequestContext
from bertie.serve.costs import count_tokens
from bertie.serve.service import Service
from bertie.tasks.choose import Chooser
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.replaced_tokens import ReplacedTokenDetector

SCORE_BYTES, WORD_BYTES = 25, 140  # in a reply, of a choice and of a word with its tokens

# --- multiple choice ---

Choices = Annotated[list[str], Field(min_length=2, max_length=1000, fail_fast=True)]


class ChoiceQuestion(BaseModel):
    """A context and its choices."""

    model_config = ConfigDict(strict=True, extra="forbid")
    context: str = Field(examples=["He put the kettle on the stove."])
    choices: Choices = Field(examples=[["It began to sing.", "It flew away."]])


class ChooseRequest(TaskRequest):
    """POST /choose: a context with its choices, or several as `questions`."""

    questions: ChoiceQuestion | Array[ChoiceQuestion]

    @model_validator(mode="before")
    @classmethod
    def _read_single_question(cls, body: Any) -> Any:
        """A single context and its choices may be fields of the body."""
        if type(body) is not dict or "questions" in body or "context" not in body:
            return body
        question = {name: body[name] for name in ("context", "choices") if name in body}
        return {name: value for name, value in body.items() if name not in question} | {"questions": question}


class ChooseItem(ReadCounts):
    """The most probable choice of one context, and the probabilities of all."""

    index: int
    choice: str
    score: float
    scores: list[float]


class ChooseResponse(Response):
    """One result per context."""

    model: str
    head: str | None
    results: list[ChooseItem]


def choose(service: Service, request: ChooseRequest, context: RequestContext) -> Any:
    """Choose among texts."""
    questions = service.as_list(request.questions, "questions")
    pairs = [(item.context, choice) for item in questions for choice in item.choices]
    service.check_count(pairs, "choices")
    task = service.task(Chooser, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens(pairs, task, context)
    service.check_reply(sum(SCORE_BYTES + len(choice) for _, choice in pairs))
    results = task.choose([(item.context, item.choices) for item in questions])
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}


# --- replaced-token detection ---


class DetectReplacedRequest(TaskRequest):
    """POST /detect_replaced."""

    texts: Texts = Field(examples=["The chef ate the meal for his guests."])


class ReplacedSpan(Response):
    """The token or word text[start:end], in characters, and the probability that it was replaced."""

    text: str
    start: int
    end: int
    score: float


class DetectReplacedItem(ReadCounts):
    """The words and tokens of one text."""

    words: list[ReplacedSpan]
    tokens: list[ReplacedSpan]


class DetectReplacedResponse(Response):
    """One result per text."""

    model: str
    head: str | None
    results: list[DetectReplacedItem]


def detect_replaced(service: Service, request: DetectReplacedRequest, context: RequestContext) -> Any:
    """Find words that look replaced."""
    texts = service.as_list(request.texts, "texts")
    task = service.task(ReplacedTokenDetector, request.model, context, head=request.head, overflow=request.overflow)
    service.check_tokens([(text,) for text in texts], task, context)
    service.check_reply_per_token(texts, task.tokenizer, WORD_BYTES, context)
    results = task.detect(texts)
    context.add_read(results)
    return {"model": context.model, "head": task.head, "results": results}


# --- candidates for masks ---


def check_candidates(
    service: Service, task: MaskedLM, texts: Sequence[str], candidates: Sequence[str] | None, context: RequestContext
) -> None:
    """Refuse too many forward passes: candidates of several tokens take one for each token of each candidate."""
    passes = [len(task.candidate_tokens(word)) for word in candidates or ()]
    if all(tokens == 1 for tokens in passes):
        return
    mask, tokens = task.tokenizer.mask_token or "\0", count_tokens(texts, task.tokenizer, context.ticket)
    longest = [min(tokens[text] + max(passes) + 2, task.checkpoint.max_length) for text in texts]
    masked = sum(text.count(mask) * length for text, length in zip(texts, longest, strict=True))
    service.check_token_count(sum(passes) * masked)
