"""Endpoints for the playground: what the models can do, attention weights, and the windows of a text."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import NotFoundError
from bertie.serve.api.base import PASSAGES, QUERY, SENTENCES, BertieRequest, Response
from bertie.serve.attention import attention as attention_weights
from bertie.serve.context import RequestContext
from bertie.serve.costs import check_tokens, count_tokens
from bertie.serve.service import Service
from bertie.serve.tickets import Ticket
from bertie.tasks.registry import TASKS
from bertie.tasks.zero_shot import entailment_label
from bertie.text.windows import windows as split_windows


class AttentionRequest(BertieRequest):
    """POST /attention: the attention weights of one layer for a short text."""

    text: str = Field(examples=[SENTENCES[0]])
    layer: int | None = Field(None, ge=0, description="Counted from 0; by default the last layer.")
    head: int | None = Field(None, ge=0, description="Counted from 0; by default the mean over heads.")


class WindowsRequest(BertieRequest):
    """POST /windows: the windows of a text; with `pair`, those of `pair` with `text` as the first segment."""

    text: str = Field(examples=[QUERY])
    pair: str | None = Field(None, examples=[PASSAGES[1]])


class WindowSpan(Response):
    """The characters that a window reads, from start to end, and the part whose results it provides."""

    start: int
    end: int
    owns: tuple[int, int]
    tokens: int


class WindowsResponse(Response):
    """All windows of a text."""

    windows: list[WindowSpan]
    tokens_total: int
    tokens_read: int


def attention(service: Service, request: AttentionRequest, context: RequestContext) -> Any:
    """Return the attention weights of a short text."""
    context.model = service.candidates(request.model)[0]
    served = service.use_model(context.model, context)
    tokens = count_tokens([request.text], service.tokenizer(context.model, context), context.ticket)
    service.check_token_count(sum(tokens.values()))
    return served.call(attention_weights, request.text, layer=request.layer, head=request.head)


def windows(service: Service, request: WindowsRequest, context: RequestContext) -> Any:
    """Return the windows of a text."""
    context.model = service.candidates(request.model)[0]
    texts = (request.text,) if request.pair is None else (request.text, request.pair)
    checkpoint = service.use_model(context.model, context).checkpoint
    check_tokens([texts], service.tokenizer(context.model, context), context.ticket, checkpoint.max_length)
    result = map_windows(checkpoint, texts, context.ticket)
    service.check_token_count(sum(window["tokens"] for window in result["windows"]))
    return result


def about(service: Service, request: None, context: RequestContext) -> Any:
    """Describe the models and their heads."""
    models = [describe(name, service.registry[name].checkpoint) for name in service.names]
    index = None
    if service.passages is not None:
        index = {"name": service.index_name, "passages": service.passages, "queries": service.sample_queries}
    return {"models": models, "default": service.names[0], "index": index}


def describe(name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    """A model's size, and its heads by task with their labels and calibration.

    >>> describe("bertie-small", Checkpoint.load("bertie-small"))["tasks"]["tag"][0]["head"]         # doctest: +SKIP
    'ner'
    """
    cfg, tokenizer = checkpoint.model.config, checkpoint.tokenizer
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in TASKS.values():
        for head, info in checkpoint.heads.items():
            if row.endpoint is not None and row.head_kind is not None and row.task_class._fits(info):
                calibration = info.calibration
                tasks.setdefault(row.name, []).append(
                    {
                        "head": head,
                        "labels": list(info.labels.values()),
                        "temperature": calibration.temperature,
                        "abstain_below": calibration.abstain_below,
                        "precision": calibration.precision,
                        "pairs": entailment_label(info) is not None,  # it classifies pairs of texts
                    }
                )
    return {
        "name": name,
        "layers": cfg.depth,
        "heads": cfg.heads,
        "width": cfg.width,
        "max_length": checkpoint.max_length,
        "parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
        "mask_token": None if tokenizer is None else tokenizer.mask_token,
        "tasks": tasks,
    }


def map_windows(checkpoint: Checkpoint, texts: tuple[str, ...], ticket: Ticket) -> dict[str, Any]:
    """The windows of a text in characters; of a pair, those of the second text.

    `start` to `end` is what a window reads, and `owns` the part whose results it provides.
    """
    if checkpoint.tokenizer is None:
        raise NotFoundError(f"{checkpoint.source} has no tokenizer, and reading texts needs one")
    item = (texts[0], texts[1]) if len(texts) == 2 else texts[0]
    encoding = checkpoint.tokenizer.encode_batch([item])[0]
    ticket.check()
    rows, tokens_read = [], 0
    for window in split_windows(encoding, texts, checkpoint.max_length):
        ticket.check()
        inside = window.encoding.sequence_ids == len(texts) - 1
        offsets = [window.encoding.offsets[tokens] for tokens in (inside, inside & window.owned)]
        (start, end), owns = ((int(span[0, 0]), int(span[-1, 1])) if len(span) else (0, 0) for span in offsets)
        rows.append({"start": start, "end": end, "owns": list(owns), "tokens": len(window)})
        tokens_read += window.tokens_read
    return {"windows": rows, "tokens_total": int((encoding.sequence_ids >= 0).sum()), "tokens_read": tokens_read}
