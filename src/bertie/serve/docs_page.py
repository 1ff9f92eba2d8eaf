"""The page at /docs: the OpenAPI description as HTML, without scripts or outside assets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title} {version} API</title>
  <link rel="icon" href="data:,">
  <link rel="stylesheet" href="page/style.css">
</head>
<body class="docs">
  <header class="top"><h1>{title} {version} <span>API</span></h1></header>
  <main>
    <p>{description}</p>
    <p><a href="./">Playground</a> · <a href="openapi.json">OpenAPI document</a></p>
    {contents}
    {sections}
  </main>
</body>
</html>
"""


def render_docs(document: dict[str, Any]) -> bytes:
    """Render an OpenAPI document as an HTML page."""
    info, schemas = document["info"], document["components"]["schemas"]
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    contents, sections = [], []
    for tag, operations in by_tag.items():
        links = ", ".join(f'<a href="#{_anchor(method, path)}">{escape(path)}</a>' for method, path, _ in operations)
        contents.append(f"<dt>{escape(tag)}</dt><dd>{links}</dd>")
        sections.append(f"<h2>{escape(tag)}</h2>")
        sections += ["".join(_operation(*operation, schemas)) for operation in operations]
    page = _PAGE.format(
        title=escape(info["title"]),
        version=escape(info["version"]),
        description=_inline_code(info["description"]),
        contents=f"<dl>{''.join(contents)}</dl>",
        sections="\n".join(sections),
    )
    return page.encode()


def _anchor(method: str, path: str) -> str:
    return escape(f"{method.lower()}-{path.strip('/').replace('/', '-') or 'root'}")


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{_anchor(method, path)}"><h3><code>{escape(method)} {escape(path)}</code></h3>'
    yield f"<p>{escape(operation['summary'])}</p>"
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        yield _fields("Request", _resolve(content["schema"], schemas))
        body = json.dumps(content["example"], ensure_ascii=False).replace("'", "'\\''")
        curl = f"curl localhost:8080{path} -H 'Content-Type: application/json' -d '{body}'"
        yield f'<pre tabindex="0"><code>{escape(curl)}</code></pre>'
    ok = operation["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
    if ok is not None:
        yield f"<p>Response: <code>{escape(type_name(ok))}</code></p>"
        yield from _nested(ok, schemas, set())
    errors = ", ".join(status for status in sorted(operation["responses"]) if status != "200")
    yield f"<p>Error statuses: {escape(errors)}</p></section>" if errors else "</section>"


def _nested(schema: Any, schemas: dict[str, Any], seen: set[str]) -> Iterator[str]:
    """The fields of all models that a schema refers to."""
    if isinstance(schema, dict):
        name = schema.get("$ref", "").rpartition("/")[2]
        if name and name not in seen:
            seen.add(name)
            yield _fields(name, schemas[name])
            schema = schemas[name]
        for value in schema.values():
            yield from _nested(value, schemas, seen)
    elif isinstance(schema, list):
        for item in schema:
            yield from _nested(item, schemas, seen)


def _fields(title: str, schema: dict[str, Any]) -> str:
    fields = schema.get("properties", {})
    columns = ["Field", "Type", "Default"]
    if any("description" in field for field in fields.values()):
        columns.append("Description")
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = ""
    for name, field in fields.items():
        default = "required" if name in schema.get("required", ()) else json.dumps(field.get("default"))
        description = _inline_code(field.get("description", ""))
        cells = [f"<code>{escape(name)}</code>", escape(type_name(field)), escape(default), description]
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells[: len(columns)])}</tr>"
    return (
        f'<div class="scroll" tabindex="0"><table><caption>{escape(title)}</caption><tr>{head}</tr>{body}</table></div>'
    )


def _inline_code(text: str) -> str:
    """HTML of a text with code in backquotes."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    resolved: dict[str, Any] = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return resolved


def type_name(schema: dict[str, Any]) -> str:
    """A JSON schema's type in a few words.

    >>> type_name({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
    'array of string | null'
    """
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(type_name(option) for option in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        items = type_name(schema.get("items") or {})
        return "array" if items == "any" else f"array of ({items})" if " | " in items else f"array of {items}"
    return str(schema.get("type", "any"))
