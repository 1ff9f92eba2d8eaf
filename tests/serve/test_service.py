"""The choice of a model for a request, and limits on its items and tokens."""

from __future__ import annotations

from tests.serve.conftest import Running

LONG = " ".join(["the cat sat on the mat . a dog ran :"] * 9)  # 99 words; the tiny models read 38 per window


def test_items_and_tokens_are_limited(strict: Running) -> None:
    reply = strict.post("/embed", {"inputs": ["a"] * 4})
    assert (reply.status_code, reply.json()["error"]) == (413, "batch size 4 > maximum allowed batch size 3")
    reply = strict.post("/embed", {"inputs": [LONG], "model": "embed"})
    assert (reply.status_code, reply.json()["error_type"]) == (413, "Validation")
    assert "60 tokens" in reply.json()["error"]
    assert strict.post("/embed", {"inputs": [LONG], "model": "embed", "truncate": True}).status_code == 200
    assert strict.post("/v1/rerank", {"query": "a", "documents": ["a"] * 4}).json()["message"].startswith("batch size")
    labels = {"texts": ["a", "b"], "labels": ["a", "b"], "model": "nli"}
    assert strict.post("/classify", labels).status_code == 413  # each label makes a pair with each text


def test_the_first_suitable_model_is_used(server: Running) -> None:
    assert server.post_json("/fill", {"texts": "a [MASK]"})["model"] == "small"
    assert server.post_json("/tag", {"texts": "a cat", "model": "tag"})["model"] == "tag"


def test_an_unknown_model_is_refused_with_the_served_ones(server: Running) -> None:
    ranking = {"query": "a", "documents": ["a"]}
    for path, body in (("/embed", {"inputs": "a"}), ("/fill", {"texts": "a"}), ("/v1/rerank", ranking)):
        reply = server.post(path, {**body, "model": "gpt"})
        assert reply.status_code == 404
        assert "small, embed, classify" in reply.text


def test_unsupported_tasks_are_refused(server: Running) -> None:
    reply = server.post("/rerank", {"query": "a", "texts": ["b"], "model": "embed"})
    assert reply.status_code == 424
    assert reply.json() == {
        "error": "this needs a reranking head, one with a single score, which the model 'embed' lacks",
        "error_type": "Backend",
    }
    reply = server.post("/classify", {"texts": "a", "head": "ner", "model": "small"})
    assert reply.status_code == 422
    assert "'ner'" in reply.json()["error"]
