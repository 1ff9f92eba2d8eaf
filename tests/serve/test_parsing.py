"""Hostile bodies on every route: time and memory proportional to the body, and a server that goes on answering."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.serve import parsing
from bertie.serve.api.native import AnswerRequest, ClassifyRequest, FillRequest, SearchRequest
from bertie.serve.api.tei import DecodeRequest, EmbedRequest
from bertie.serve.api_errors import ApiError
from bertie.serve.limits import Limits
from bertie.serve.openapi import example
from bertie.serve.parsing import MAX_DEPTH, parse_body
from tests.serve.conftest import Running
from tests.serve.hostile_bodies import POSTS


@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_refusing_a_body_takes_little_more_than_parsing_it(count: int) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.serve.hostile_bodies", "--count", str(count)]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    # A tracer would slow down our code, and not the parser in C that it is compared with.
    untraced = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS_")}
    output = subprocess.run(
        command, cwd=root, env={**untraced, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    ).stdout
    lines = [json.loads(line) for line in output.splitlines()]
    assert {line["route"] for line in lines} == {route.path for route in POSTS}
    slowest, largest = (max(lines, key=lambda line: line[what][0]) for what in ("time", "memory"))
    assert slowest["time"][0] < 6, slowest  # times as long as `json.loads`; it was 12 to 200
    assert sum(line["memory"][0] for line in lines) < 120, largest  # times the bytes of the body; it was 1,200


def test_health_is_answered_while_hostile_bodies_are_refused(server: Running) -> None:
    body = b'{"inputs": [' + b",".join([b"{}"] * 400_000) + b"]}"
    start = time.perf_counter()
    for _ in range(3):
        json.loads(body)
    usual = time.perf_counter() - start
    waits, done = [0.0], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                asked = time.perf_counter()
                assert client.get("/health").status_code == 200
                waits.append(time.perf_counter() - asked)

    thread = threading.Thread(target=ask)
    thread.start()
    for path in ("/embed", "/predict", "/tokenize"):
        reply = server.client.post(path, content=body, headers={"content-type": "application/json"}, timeout=60)
        assert reply.status_code == 413
    done.set()
    thread.join()
    assert max(waits) < 0.5 + 5 * usual


# --- what is refused, and how ---


def refused(model: Any, body: str, **limits: int) -> tuple[str, str, str | None]:
    with pytest.raises(ApiError) as error:
        parse_body(model, body.encode("utf-8", "surrogatepass"), Limits(**limits))
    return error.value.code, error.value.message, error.value.field


def test_long_lists_are_too_large_and_not_invalid() -> None:
    for unit in ("{}", "null", "true", "0.5", '""', "[]", "[[]]"):
        code, message, field = refused(EmbedRequest, '{"inputs": [' + ",".join([unit] * 1025) + "]}")
        assert (code, field) == ("too_large", "inputs")
        assert message == "batch size 1025 > maximum allowed batch size 1024"
    documents = '{"questions": {"question": "a", "documents": [' + ",".join(['""'] * 1025) + "]}}"
    assert refused(AnswerRequest, documents)[0] == "too_large"
    assert refused(ClassifyRequest, json.dumps({"texts": "a", "labels": ["a"] * 1025}))[0] == "too_large"
    nested = json.dumps({"texts": "a", "labels": [[[]] * 1000] * 6})
    assert refused(ClassifyRequest, nested)[:2] == (
        "too_large",
        "labels: too many arrays and objects, of which a body may have 4,096",
    )


def walk(value: Any) -> list[int]:
    """Containers, keys, commas and strings of a value."""
    if not isinstance(value, dict | list):
        return [0, 0, 0, int(isinstance(value, str))]
    keys = len(value) if isinstance(value, dict) else 0
    children = [walk(item) for item in (value.values() if isinstance(value, dict) else value)]
    return [sum(column) for column in zip([1, keys, max(0, len(value) - 1), keys], *children, strict=True)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('[]{}:,"\\é x', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a[:,"\\', max_size=4), inner, max_size=4),
)


@given(JSON_VALUES, st.booleans(), st.sampled_from([1, 2, 7, 1 << 18]))
@settings(max_examples=150, deadline=None)
def test_what_is_counted_before_parsing_is_exact(value: Any, ascii_only: bool, scan: int) -> None:
    body = json.dumps({"x": value}, ensure_ascii=ascii_only).encode()
    wanted = dict(zip(("arrays and objects", "keys", "values", "strings"), walk({"x": value}), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "SCAN_BYTES", scan)
        assert parsing.count_symbols(body) == wanted


def test_large_bodies_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {
        "arrays and objects": '{"inputs": [' + ",".join(["[]"] * 30_000) + "]}",
        "keys": '{"inputs": "a"' + "".join(f',"k{i}":0' for i in range(30_000)) + "}",
        "values": '{"inputs": [' + ",".join(["0"] * 1_010_000) + "]}",
        "strings": '{"inputs": [' + ",".join(['"a"'] * 30_000) + "]}",
    }
    text = json.dumps({"inputs": '[]{}:,"\\' * 20_000})  # which are no arrays, objects, keys and values in a string
    assert len(parse_body(EmbedRequest, text.encode(), Limits()).inputs) == 160_000
    monkeypatch.setattr(parsing, "orjson", None)
    for name, body in bodies.items():
        code, message, _ = refused(EmbedRequest, body)
        assert code == "too_large"
        assert re.fullmatch(rf"the body: [\d,]+ {name} > maximum of [\d,]+", message)


def test_a_list_of_token_ids_may_be_as_long_as_tokens_are_allowed() -> None:
    assert len(parse_body(EmbedRequest, json.dumps({"inputs": [5] * 3000}).encode(), Limits()).inputs) == 3000
    assert refused(EmbedRequest, json.dumps({"inputs": [5] * 3000}), tokens=2999) == (
        "too_large",
        "3,000 token ids > maximum of 2,999 tokens per request",
        "inputs",
    )
    assert refused(DecodeRequest, json.dumps({"ids": [[5] * 1000] * 3}), tokens=2999)[0] == "too_large"
    assert refused(EmbedRequest, json.dumps({"inputs": [5] * 3000 + ["a"]}))[0] == "invalid"


def test_keys_and_nesting_are_limited() -> None:
    wide = {"queries": "a", "where": {f"k{i}": 1 for i in range(1025)}}
    assert refused(SearchRequest, json.dumps(wide)) == ("too_large", "where: 1,025 keys > maximum of 1,024", "where")
    assert refused(SearchRequest, json.dumps(wide["where"])) == (
        "too_large",
        "the body: 1,025 keys > maximum of 1,024",
        None,
    )
    deep = '{"inputs": "a", "other": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}"
    message = f"other: nested more than {MAX_DEPTH} levels deep"
    assert refused(EmbedRequest, deep) == ("invalid", message, "other")
    assert refused(EmbedRequest, '{"inputs": ' + "[" * 2000 + "]" * 2000 + "}")[0] == "invalid_json"


def test_few_items_still_allow_labels_pairs_and_keys() -> None:
    """`--max-items 1` is one text, which may be a pair; the handlers count items."""
    body = {"texts": [["a", "b"]], "labels": ["x", "y", "z"], "multi_label": True, "template": "{}"}
    request = parse_body(ClassifyRequest, json.dumps(body).encode(), Limits(items=1))
    assert request.texts == [["a", "b"]]


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "-1e999", '"\\ud800"', "\ud800", "'a'", "01"])
def test_what_is_not_json_is_refused(text: str) -> None:
    assert refused(AnswerRequest, f'{{"questions": [], "no_answer_threshold": {text}}}')[0] == "invalid_json"


def test_of_two_equal_keys_the_last_one_counts() -> None:
    request = parse_body(FillRequest, b'{"texts": 3, "texts": "a", "top_k": 7, "top_\\u006b": 8}', Limits())
    assert (request.texts, request.top_k) == ("a", 8)


def test_messages_are_in_the_terms_of_json() -> None:
    assert refused(EmbedRequest, '{"inputs": 3}')[1] == "inputs: Input should be a valid array"
    assert refused(FillRequest, '{"texts": ["a", null]}')[1] == "texts.1: Input should be a valid string"
    assert refused(EmbedRequest, "[]")[1] == "the body: Input should be an object"
    assert refused(SearchRequest, '{"queries": "a", "where": 3}')[1] == "where: Input should be an object"
    assert "object" in refused(AnswerRequest, '{"questions": ["a"]}')[1]
    assert refused(FillRequest, '{"texts": "a", "top_k": 1e2}')[1] == "top_k: Input should be a valid integer"
    assert refused(FillRequest, f'{{"texts": "a", "top_k": {"1" * 4000}}}')[0] in ("invalid", "invalid_json")


STRINGS = ("model", "head", "prompt_name", "prompt", "template", "overflow", "truncation_direction", "encoding_format")


def test_errors_do_not_quote_long_strings(server: Running) -> None:
    for route in POSTS:
        assert route.request is not None
        for field in {*STRINGS} & {*route.request.model_fields}:
            reply = server.post(route.path, {**example(route), field: "x" * 2_000_000})
            assert reply.status_code in (400, 404, 422), (route.path, field)
            assert len(reply.content) < 2000, (route.path, field)
