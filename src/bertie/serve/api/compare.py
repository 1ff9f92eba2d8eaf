"""POST /compare: pairwise similarity."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from bertie.serve.api.base import SENTENCES, Array, BertieRequest, Pooling, ReadCounts, Response
from bertie.serve.context import RequestContext, read_counts
from bertie.serve.service import FLOAT_BYTES, Service, check_finite
from bertie.tasks.embed import Embedder


class CompareRequest(BertieRequest):
    """POST /compare: the similarities of all pairs of texts."""

    texts: Array[str] = Field(examples=[SENTENCES])
    pooling: Pooling | None = Field(None, description="Replaces the model's pooling.")
    overflow: Literal["window", "error", "truncate"] = "window"


class CompareResponse(Response):
    """The (n, n) similarity matrix, and how much of each text was read."""

    model: str
    similarity: list[list[float]]
    results: list[ReadCounts]


def compare(service: Service, request: CompareRequest, context: RequestContext) -> Any:
    """Return the similarity of each text to each other text."""
    service.check_count(request.texts, "texts")
    options: dict[str, Any] = {} if request.pooling is None else {"pooling": request.pooling}
    task = service.task(Embedder, request.model, context, overflow=request.overflow, **options)
    service.check_tokens([(text,) for text in request.texts], task, context)
    service.check_reply(len(request.texts) ** 2 * FLOAT_BYTES)
    results = list(task.embed_each(request.texts))
    check_finite(result.vector for result in results)
    context.add_read(results)
    vectors = np.stack([result.vector for result in results])
    return {
        "model": context.model,
        "similarity": task.compare(vectors, vectors),
        "results": [read_counts(result) for result in results],
    }
