"""One vocabulary for request fields: other APIs' names are accepted, and unknown ones are named with the likely one."""

from __future__ import annotations

from typing import Any

import pytest

from bertie.serve.api_errors import ApiError
from bertie.serve.fields import ALIASES, rename_fields
from bertie.serve.parsing import validate
from bertie.serve.routes import all_routes
from tests.serve.conftest import Running

QUESTION = {"question": "find cat ?", "documents": "a cat sat on the mat"}
SQUAD = {"question": "find cat ?", "context": "a cat sat on the mat"}


def test_aliases_are_mutual() -> None:
    assert all(name in ALIASES[alias] for name, aliases in ALIASES.items() for alias in aliases)


def test_a_body_with_the_endpoints_own_names_is_not_copied() -> None:
    body = {"texts": "a", "labels": ["b"]}
    assert rename_fields({"texts": 0, "labels": 0, "model": 0}, body) is body


@pytest.mark.parametrize(
    ("path", "usual", "other"),
    [
        ("/fill", {"texts": "a [MASK]", "top_k": 2}, {"inputs": "a [MASK]", "k": 2}),
        ("/fill", {"texts": "a [MASK]", "candidates": ["cat"]}, {"text": "a [MASK]", "targets": ["cat"]}),
        (
            "/classify",
            {"texts": ["a cat"], "labels": ["cat", "dog"], "template": "a {}"},
            {"input": ["a cat"], "candidate_labels": ["cat", "dog"], "hypothesis_template": "a {}"},
        ),
        ("/embed", {"inputs": "a cat", "dimensions": 4}, {"texts": "a cat", "dimension": 4}),
        ("/v1/embeddings", {"input": ["a cat"]}, {"inputs": ["a cat"]}),
        ("/v1/embeddings", {"input": "a", "normalize": False}, {"input": "a", "normalized": False}),
        ("/rerank", {"query": "cat", "texts": ["a", "dog"]}, {"query": "cat", "documents": ["a", "dog"]}),
        ("/answer", {"questions": QUESTION}, QUESTION),
        (
            "/answer",
            {"questions": [QUESTION]},
            {"inputs": SQUAD},
        ),
        ("/compare", {"texts": ["a", "cat"]}, {"sentences": ["a", "cat"]}),
    ],
)
def test_other_names_of_fields(server: Running, path: str, usual: dict[str, Any], other: dict[str, Any]) -> None:
    assert server.post_json(path, usual) == server.post_json(path, other)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/fill", {"texts": "a", "topk": 1}, "topk: unknown field; did you mean `top_k`?"),
        ("/fill", {"texts": "a", "topK": 1}, "topK: unknown field; did you mean `top_k`?"),
        (
            "/classify",
            {"texts": "a", "candidate_label": ["b"]},
            "candidate_label: unknown field; did you mean `labels`?",
        ),
        ("/tag", {"texts": "a", "zzz": 1}, "zzz: unknown field; the fields are model, head, overflow, texts, "),
        ("/tag", {"texts": "a", "inputs": "b"}, "inputs: another name of `texts`, which is there as well"),
        ("/tag", {"texts": "a", "<script>": 1}, "the body: unknown field; the fields are "),
        ("/embed", {"imputs": "a"}, "inputs: Field required; did you mean it by `imputs`?"),
        ("/embed", {"a b": "a"}, "inputs: Field required"),
        ("/answer", {"questions": {**QUESTION, "x": 1}}, "questions.x: unknown field"),
    ],
)
def test_an_unknown_field_is_named_with_the_likely_one(server: Running, path: str, body: Any, message: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(message)


def test_many_unknown_fields_are_refused_at_the_first() -> None:
    for route in all_routes():
        if route.request is not None and route.request.model_config.get("extra") == "forbid":
            with pytest.raises(ApiError, match="unknown field"):
                validate(route.request, {f"k{i}" * 10: 0 for i in range(1000)})
