"""The reference of the HTTP API, from the OpenAPI document that the server builds out of its routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any


def render() -> str:
    """Markdown: a section per endpoint, by API."""
    from bertie.serve.openapi import describe_api

    document = describe_api()
    schemas = document["components"]["schemas"]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            section = "\n".join(_operation(method.upper(), path, operation, schemas))
            by_tag.setdefault(operation["tags"][0], []).append(section)
    return "\n".join(f"\n## {tag}\n\n" + "\n".join(sections) for tag, sections in by_tag.items())


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} {path}\n"
    yield f"{operation['summary']}.\n"
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        body = json.dumps(content["example"], ensure_ascii=False).replace("'", "'\\''")
        yield f"```console\ncurl localhost:8080{path} -H 'Content-Type: application/json' -d '{body}'\n```\n"
        yield from _fields("Request", _resolve(content["schema"], schemas))
    response = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
    if response is not None:
        yield "<details markdown><summary>Response</summary>\n"
        yield f"{_type(response)}\n"
        for name in _referred(response, schemas, []):
            yield from _fields(name, schemas[name])
        yield "</details>\n"


def _referred(schema: Any, schemas: dict[str, Any], names: list[str]) -> list[str]:
    """The names of all models that a schema refers to, itself first."""
    if isinstance(schema, dict):
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in names:
            names.append(name)
            _referred(schemas[name], schemas, names)
        for value in schema.values():
            _referred(value, schemas, names)
    elif isinstance(schema, list):
        for item in schema:
            _referred(item, schemas, names)
    return names


def _fields(title: str, schema: dict[str, Any]) -> Iterator[str]:
    fields = schema.get("properties", {})
    if not fields:
        return
    rows = []
    for name, field in fields.items():
        required = name in schema.get("required", ())
        default = "required" if required else f"`{json.dumps(field.get('default'), ensure_ascii=False)}`"
        rows.append(f"| `{name}` | {_type(field)} | {default} | {_cell(field.get('description', ''))} |")
    yield "\n".join([f"| {title} | type | default | |", "|---|---|---|---|", *rows]) + "\n"


def _type(schema: dict[str, Any]) -> str:
    from bertie.serve.docs_page import type_name

    return _cell(type_name(schema))


def _cell(text: str) -> str:
    return re.sub(r"([<>*_])(?![^`]*`)", r"\\\1", text.replace("|", "\\|"))


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    resolved: dict[str, Any] = schemas[name] if name else schema
    return resolved
