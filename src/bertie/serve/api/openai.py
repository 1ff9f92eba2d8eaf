"""OpenAI's API: /v1/embeddings, with what Jina's and Voyage's add to it, and /v1/models."""

from __future__ import annotations

import base64
from typing import Any, Literal

from pydantic import Field

from bertie.serve.api.base import (
    SENTENCES,
    Array,
    CompatibleRequest,
    Ids,
    Name,
    Pooling,
    ReadCounts,
    Response,
    TextItem,
    prompt_for,
)
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext, read_counts
from bertie.serve.service import FLOAT_BYTES, Service, check_finite


class EmbeddingsRequest(CompatibleRequest):
    """POST /v1/embeddings."""

    input: str | Array[str] | Ids | Array[Ids] | TextItem | Array[TextItem | str] = Field(examples=[SENTENCES])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Keep the first components of each embedding.")
    user: str | None = None
    prompt: Name | None = Field(None, description="Extension: prepended to each text, such as `query: `.")
    prompt_name: Name | None = Field(None, description="Extension: the name of one of the model's prompts.")
    pooling: Pooling | None = Field(None, description="Extension: replaces the model's pooling.")
    task: Name | None = Field(
        None, description="Jina: retrieval.query, retrieval.passage, …: the model's prompt for it, if it has one."
    )
    input_type: Name | None = Field(None, description="Voyage: query or document, as `task`.")
    late_chunking: bool = Field(False, description="Jina: true is refused.")
    normalize: bool = Field(True, description="Extension: false returns the embeddings as the model computes them.")


class EmbeddingData(ReadCounts):
    """One embedding; base64 encodes little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Response):
    """Token counts, without special tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Response):
    """Embeddings in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingsUsage


class ModelData(Response):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Response):
    """All served models."""

    object: Literal["list"]
    data: list[ModelData]


class OpenAIErrorBody(Response):
    """The error."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Response):
    """An error in OpenAI's format."""

    error: OpenAIErrorBody


def create_embeddings(service: Service, request: EmbeddingsRequest, context: RequestContext) -> Any:
    """Embed texts, normalized to length 1 by default."""
    if request.late_chunking:
        raise ApiError("invalid_input", "late_chunking=true is not supported: each text is embedded on its own")
    options: dict[str, Any] = {} if request.pooling is None else {"pooling": request.pooling}
    if request.normalize:
        options["normalize"] = True
    task = service.embedder(request.model, context, dimensions=request.dimensions, **options)
    texts = service.texts(request.input, task, "input", context)
    service.check_reply(len(texts) * task.dimension * (FLOAT_BYTES if request.encoding_format == "float" else 6))
    prompt, prompt_name = request.prompt, request.prompt_name
    if prompt is None and prompt_name is None:
        prompt_name = prompt_for(task.modules.prompts, request.task or request.input_type)
    results = list(task.embed_each(texts, prompt=prompt, prompt_name=prompt_name))
    check_finite(result.vector for result in results)
    context.add_read(results)
    data = []
    for index, result in enumerate(results):
        embedding: Any = result.vector
        if request.encoding_format == "base64":
            embedding = base64.b64encode(result.vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": embedding, **read_counts(result)})
    total = context.read["tokens_total"]
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": context.model, "usage": usage}


def list_models(service: Service, request: None, context: RequestContext) -> Any:
    """List the served models."""
    return {"object": "list", "data": [describe_model(service, name) for name in service.names]}


def describe_model(service: Service, name: str) -> dict[str, Any]:
    """One served model, in OpenAI's format."""
    service.check_model(name)
    return {"id": name, "object": "model", "created": service.started, "owned_by": "bertie"}
