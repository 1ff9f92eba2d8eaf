"""The API reference at /docs: every endpoint, its fields and an example, from the OpenAPI document alone."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import httpx

from bertie.serve.docs_page import render_docs, type_name
from bertie.serve.openapi import describe_api
from bertie.serve.routes import all_routes
from tests.serve.conftest import Running

VOID = {"meta", "link", "br"}


class Parser(HTMLParser):
    """Check that elements are closed in order, and collect ids, links and outside assets."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.assets: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.ids |= {value for name, value in attrs if name == "id" and value}
        if tag == "a":
            self.links.add(values["href"] or "")
        elif values.get("src") or values.get("href"):
            self.assets.add(values.get("src") or values.get("href") or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.text += "\n"

    def handle_data(self, data: str) -> None:
        self.text += data


def parse(page: bytes) -> Parser:
    parser = Parser()
    parser.feed(page.decode())
    assert not parser.open
    return parser


def test_every_endpoint_and_every_field_is_described() -> None:
    document = describe_api()
    page = parse(render_docs(document))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f"{method.upper()} {path}" in page.text
            assert operation["summary"] in page.text
    for route in all_routes():
        for name in {} if route.request is None else route.request.model_fields:
            assert name in page.text
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert page.assets == {"data:,", "page/style.css"}, "nothing is loaded from elsewhere"
    assert "<script" not in render_docs(document).decode()


def test_texts_are_escaped() -> None:
    document = describe_api()
    document["info"]["description"] = "<b>& with `a < b`"
    assert "&lt;b&gt;&amp; with <code>a &lt; b</code>" in render_docs(document).decode()


def test_no_text_of_the_description_becomes_an_element() -> None:
    """Names of tasks, fields, labels and models may hold tags: a task of a plugin, a title in an example."""
    tag = "<b onclick=x>"

    def mark(value: Any) -> Any:
        if isinstance(value, dict):
            names = ("paths", "schemas", "properties")
            return {
                key: {f"{name}{tag}": mark(item) for name, item in value[key].items()} if key in names else mark(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [mark(item) for item in value]
        return f"{value}{tag}" if isinstance(value, str) and value not in ("array", "string") else value

    page = render_docs(mark(describe_api(keys=True))).decode()
    assert "<b" not in re.sub("<body", "", page)
    assert "&lt;b onclick=x&gt;" in page
    parse(page.encode())


def test_types_are_unambiguous() -> None:
    pair = {"type": "array", "items": {"type": "string"}}
    texts = {"type": "array", "items": {"anyOf": [{"type": "string"}, pair]}}
    assert type_name(texts) == "array of (string | array of string)"
    assert type_name({"type": "array", "items": {}}) == type_name({"type": "array"}) == "array"


def test_the_examples_work_as_shown(server: Running) -> None:
    reply = server.client.get("/docs")
    assert reply.headers["content-type"].startswith("text/html")
    commands = re.findall(r"curl localhost:8080(\S+) -H '([^:]+): ([^']+)' -d '(.*)'$", parse(reply.content).text, re.M)
    assert len(commands) == sum(route.request is not None for route in all_routes())
    path, name, value, body = next(command for command in commands if command[0] == "/embed")
    answer = httpx.post(server.url + path, headers={name: value}, content=body.encode(), timeout=20)
    assert answer.status_code == 200
