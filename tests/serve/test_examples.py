"""The examples of the playground: the built-in model answers each of them as expected.

They stand in `serve/page/examples.json` with the answers that are expected; here each goes through a server, as the
page sends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bertie.checkpoints import hub
from bertie.serve.registry import Registry
from bertie.serve.static import STATIC_FILES
from tests.serve.conftest import Running, Start

pytestmark = pytest.mark.skipif(hub.DEFAULT not in hub.built_in(), reason="there is no built-in model here")

EXAMPLES: dict[str, list[dict[str, Any]]] = json.loads(STATIC_FILES["examples.json"][0].read_text(encoding="utf-8"))
CASES = [
    pytest.param(view, example, id=f"{view}: {example['name']}")
    for view, examples in EXAMPLES.items()
    for example in examples
]
Fields = dict[str, Any]
Post = Callable[[str, Any], Any]


@pytest.fixture(scope="module")
def built_in(start: Start) -> Any:
    registry = Registry([hub.DEFAULT], devices=["cpu"], max_wait=60)
    yield start(over=registry)
    registry.close()


def lines(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def content(value: Any) -> str:
    """A text, or that of a file without its first paragraph."""
    if isinstance(value, str):
        return value
    return STATIC_FILES[value["file"]][0].read_text(encoding="utf-8").split("\n\n", 1)[1]


def check_fill(post: Post, fields: Fields, expected: list[str]) -> None:
    (result,) = post("/fill", {"texts": [fields["text"]], "top_k": 1})["results"]
    assert [mask["candidates"][0]["text"].strip().lower() for mask in result["masks"]] == expected


def check_tokens(post: Post, fields: Fields, expected: str | None) -> None:
    tokens = post("/predict_tokens", {"text": fields["text"]})["tokens"]
    if expected is None:  # nothing is out of place
        assert all(token["rank"] <= 5 for token in tokens)
    else:
        assert min(tokens, key=lambda token: token["log_likelihood"])["text"] == expected


def check_attention(post: Post, fields: Fields, expected: str | None) -> None:
    found = post("/attention_all", {"text": fields["text"]})
    assert np.shape(found["weights"])[:2] == (found["layers"], found["heads"])
    if "token" in fields:
        assert not found["tokens"][int(fields["token"])]["special"]
    if expected is not None:
        pieces = post("/attribute", {"text": fields["text"], "head": "sentiment"})["pieces"]
        assert max(pieces, key=lambda piece: piece["weight"])["text"].strip() == expected


def check_tag(post: Post, fields: Fields, expected: list[list[str]]) -> None:
    (result,) = post("/tag", {"texts": [fields["text"]]})["results"]
    assert [[span["text"], span["label"]] for span in result["spans"]] == expected


def check_answer(post: Post, fields: Fields, expected: str) -> None:
    question = {"question": fields["question"], "documents": content(fields["context"])}
    (result,) = post("/answer", {"questions": [question]})["results"]
    assert expected in result["answers"][0]["text"]


def check_classify(post: Post, fields: Fields, expected: str) -> None:
    if fields.get("labels") == "zero-shot":
        labels = [label.strip() for label in fields["candidates"].split(",")]
        body: dict[str, Any] = {"texts": [fields["text"]], "labels": labels}
    else:
        text = [fields["text"], fields["pair"]] if "pair" in fields else fields["text"]
        body = {"texts": [text], "head": fields["head"]}
    (result,) = post("/classify", body)["results"]
    assert result["label"] == expected


def check_similarity(post: Post, fields: Fields, expected: list[list[int]]) -> None:
    similarity = np.array(post("/compare", {"texts": lines(fields["texts"]), "pooling": "mean"})["similarity"])
    np.fill_diagonal(similarity, -1)
    for a, b in expected:
        assert similarity[a].argmax() == b
        assert similarity[b].argmax() == a


def check_map(post: Post, fields: Fields, expected: list[list[int]]) -> None:
    """Most neighbours on the map are of the same group, and no point is far from all of its group."""
    texts = lines(fields["texts"])
    points = np.array(post("/map", {"texts": texts})["points"])
    group = np.concatenate([np.full(end - start, i) for i, (start, end) in enumerate(expected)])
    assert len(group) == len(texts)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1) + 9 * np.eye(len(texts))
    assert (group[distances.argmin(1)] == group).mean() >= 0.75


def check_rerank(post: Post, fields: Fields, expected: int) -> None:
    ranks = post("/rerank", {"query": fields["query"], "texts": lines(fields["documents"])})
    assert ranks[0]["index"] == expected


CHECKS: dict[str, Callable[[Post, Fields, Any], None]] = {
    "fill": check_fill,
    "tokens": check_tokens,
    "attention": check_attention,
    "tag": check_tag,
    "answer": check_answer,
    "classify": check_classify,
    "similarity": check_similarity,
    "map": check_map,
    "rerank": check_rerank,
}


def test_every_view_has_several_examples() -> None:
    assert EXAMPLES.keys() == CHECKS.keys()
    assert all(len(examples) >= 2 for examples in EXAMPLES.values())


@pytest.mark.parametrize(("view", "example"), CASES)
def test_the_first_answer_is_the_expected_one(built_in: Running, view: str, example: dict[str, Any]) -> None:
    CHECKS[view](built_in.post_json, example["fields"], example.get("expect"))
