"""The description of all endpoints for OpenAPI 3.1, made from the classes that check requests."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from bertie._version import __version__
from bertie.serve.endpoints import ROUTES, Route
from bertie.serve.schemas import ModelItem, OpenAIError, RankError, TeiError

REF = "#/components/schemas/{model}"
ERRORS = {"openai": OpenAIError, "rank": RankError, "tei": TeiError}
STATUSES = (400, 401, 404, 408, 413, 415, 422, 424, 429, 503)
WORDS = {
    400: "The body is not JSON, or there is nothing in it",
    401: "No key, or an unknown one",
    403: "The server does not go by that name",
    404: "There is no such model or address",
    405: "Another method is wanted",
    408: "The body came too slowly",
    413: "Too large: the body, the items or their tokens",
    415: "The body is not sent as application/json",
    422: "A field is wrong",
    424: "The model cannot do this, or failed on it",
    429: "Too busy, or the key's limit is reached; Retry-After says when to come back",
    503: "Not ready, shutting down, or no answer within the time that a request may take",
}


def description(*, keys: bool = False) -> dict[str, Any]:
    """The whole document. `keys`: whether requests need one.

    >>> sorted(description()["paths"])[0]
    '/about'
    """
    kinds: list[tuple[Any, Any, TypeAdapter[Any]]] = []
    for route in ROUTES:
        if route.takes is not None:
            kinds.append(((route.path, "in"), "validation", TypeAdapter(route.takes)))
        kinds.append(((route.path, "out"), "serialization", TypeAdapter(route.gives)))
    kinds.append((("model", "out"), "serialization", TypeAdapter(ModelItem)))
    kinds += [((style, "error"), "serialization", TypeAdapter(error)) for style, error in ERRORS.items()]
    found, shared = TypeAdapter.json_schemas(kinds, ref_template=REF)
    schemas: dict[Any, Any] = {key: schema for (key, _), schema in found.items()}
    paths: dict[str, Any] = {
        route.path: {route.method.lower(): _operation(route, schemas)} for route in ROUTES
    } | _others(schemas)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Bertie",
            "version": __version__,
            "description": "Encoder-only transformers behind one port. Nothing is cut without a word: what is longer "
            "than the model reads at once is read in windows, and each reply says what was read.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": shared.get("$defs", {})},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": route.path.strip("/").replace("/", "_"),
        "responses": {"200": _reply("What was asked for", schemas[route.path, "out"])} | _errors(route, schemas),
    }
    if route.takes is not None:
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[route.path, "in"], "example": example(route)}},
        }
    return said


def example(route: Route) -> dict[str, Any]:
    """A request, of the examples of its fields."""
    assert route.takes is not None
    return _example(route.takes)


def _example(model: Any) -> dict[str, Any]:
    made = {}
    for name, field in model.model_fields.items():
        if field.examples:
            made[name] = field.examples[0]
        elif field.is_required():
            inner = next(one for one in (field.annotation, *getattr(field.annotation, "__args__", ())) if _is(one))
            made[name] = _example(inner)
    return made


def _is(kind: Any) -> bool:
    return hasattr(kind, "model_fields")


def _reply(words: str, schema: Any) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _errors(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    schema = schemas[route.style, "error"]
    some = STATUSES if route.takes is not None else (401,)
    return {str(status): _reply(WORDS[status], schema) for status in (*some, 403, 405, 500) if status in WORDS}


def _others(schemas: dict[Any, Any]) -> dict[str, Any]:
    tei = schemas["tei", "error"]
    plain = {"200": {"description": "As it says", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    ready = {"200": {"description": "Ready"}, "503": _reply(WORDS[503], tei)}
    one = {"200": _reply("The model", schemas["model", "out"]), "404": _reply(WORDS[404], schemas["openai", "error"])}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {
        "/v1/models/{model}": {
            "get": {
                "tags": ["OpenAI"],
                "summary": "One model",
                "operationId": "v1_model",
                "parameters": [name],
                "responses": one,
            }
        },
        "/health": {"get": {"tags": ["Server"], "summary": "Whether it is ready", "responses": ready}},
        "/metrics": {"get": {"tags": ["Server"], "summary": "For Prometheus", "responses": plain}},
    }
