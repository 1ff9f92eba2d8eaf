"""The OpenAPI 3.1 description of all endpoints, generated from the request and response models."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from bertie._version import __version__
from bertie.serve.api.cohere import CohereError
from bertie.serve.api.huggingface import InvocationRequest
from bertie.serve.api.openai import ModelData, OpenAIError
from bertie.serve.api.tei import TeiError
from bertie.serve.fields import ALIASES
from bertie.serve.routes import Route, all_routes

REF = "#/components/schemas/{model}"
ERROR_MODELS = {"openai": OpenAIError, "cohere": CohereError, "tei": TeiError}
POST_STATUSES = (400, 401, 404, 408, 413, 415, 422, 424, 429, 431, 503, 505)
STATUSES = {
    400: "The request is not valid HTTP, or its body is not valid JSON, or empty",
    401: "The API key is missing or unknown",
    403: "The Host header is not allowed",
    404: "There is no such model or endpoint",
    405: "The method is not allowed",
    408: "The headers or the body arrived too slowly",
    413: "Too large: the body, the number of items, their tokens or the reply",
    415: "The body was not sent as application/json, or has an unknown Content-Encoding",
    422: "A field is invalid",
    424: "The model does not support this, or failed",
    429: "Overloaded, or the key's rate limit is reached; see Retry-After",
    431: "Too many headers, or too large ones",
    503: "Not ready, shutting down, or the deadline has passed",
    505: "Neither HTTP/1.1 nor HTTP/1.0",
}


def describe_api(*, keys: bool = False) -> dict[str, Any]:
    """The OpenAPI document. `keys`: whether requests need an API key.

    >>> sorted(describe_api()["paths"])[:2]
    ['/', '/about']
    """
    routes = all_routes()
    models: list[tuple[Any, Any, TypeAdapter[Any]]] = []
    for route in routes:
        if route.request is not None:
            models.append(((route.path, "request"), "validation", TypeAdapter(route.request)))
        models.append(((route.path, "response"), "serialization", TypeAdapter(route.response)))
    models.append((("model", "response"), "serialization", TypeAdapter(ModelData)))
    models += [((name, "error"), "serialization", TypeAdapter(model)) for name, model in ERROR_MODELS.items()]
    by_key_and_mode, shared = TypeAdapter.json_schemas(models, ref_template=REF)
    schemas: dict[Any, Any] = {key: schema for (key, _), schema in by_key_and_mode.items()}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Bertie",
            "version": __version__,
            "description": "Inference with encoder-only transformers. Texts longer than the model's maximum length are "
            "read in overlapping windows, and each response says how much was read.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {route.path: {route.method.lower(): _operation(route, schemas)} for route in routes}
        | _other_paths(schemas),
        "components": {"schemas": shared.get("$defs", {})},
    }
    for route in routes:
        if route.request is not None:
            _name_aliases(document["components"]["schemas"].get(route.request.__name__, {}))
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _name_aliases(schema: dict[str, Any]) -> None:
    """Add to each field the other names that it is accepted under."""
    fields = schema.get("properties", {})
    for name, field in fields.items():
        others = [alias for alias in ALIASES.get(name, ()) if alias not in fields]
        if others and "Other names" not in field.get("description", ""):
            field["description"] = f"{field.get('description', '')} Other names: {', '.join(others)}.".strip()


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_") or "invoke",
        "responses": {"200": _response("The result", schemas[route.path, "response"])} | _errors(route, schemas),
    }
    if route.request is not None:
        content = {"schema": schemas[route.path, "request"], "example": example(route)}
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
    return operation


def example(route: Route) -> dict[str, Any]:
    """An example request, from the examples of the fields."""
    assert route.request is not None
    return _example(route.request)


def _example(model: Any) -> dict[str, Any]:
    if model is InvocationRequest:
        return dict(model.EXAMPLE)
    fields = {}
    for name, field in model.model_fields.items():
        if field.examples:
            fields[name] = field.examples[0]
        elif field.is_required():
            types = (field.annotation, *getattr(field.annotation, "__args__", ()))
            fields[name] = _example(next(kind for kind in types if hasattr(kind, "model_fields")))
    return fields


def _response(description: str, schema: Any) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    schema = schemas[route.error_format, "error"]
    statuses = POST_STATUSES if route.request is not None else (401,)
    return {str(status): _response(STATUSES[status], schema) for status in (*statuses, 403, 405)}


def _other_paths(schemas: dict[Any, Any]) -> dict[str, Any]:
    """The endpoints that are not in the table of routes."""
    text = {"200": {"description": "The metrics", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    health = {"200": {"description": "Ready"}, "503": _response(STATUSES[503], schemas["tei", "error"])}
    model = {
        "200": _response("The model", schemas["model", "response"]),
        "404": _response(STATUSES[404], schemas["openai", "error"]),
    }
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models/{model}": {
            "get": {
                "tags": ["OpenAI"],
                "summary": "Describe a model",
                "operationId": "v1_model",
                "parameters": [name],
                "responses": model,
            }
        },
        "/health": {"get": {"tags": ["Server"], "summary": "Readiness", "responses": health}},
        "/ping": {"get": {"tags": ["Server"], "summary": "Readiness, for Amazon SageMaker", "responses": health}},
        "/metrics": {"get": {"tags": ["Server"], "summary": "Prometheus metrics", "responses": text}},
    }
