"""The choice of a model for a request, and limits on its items and tokens."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from bertie.serve.limits import Limits
from bertie.serve.registry import Registry
from bertie.serve.service import LARGE_WORK, Service
from bertie.serve.tickets import Cancelled, Ticket
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


def test_texts_of_requests_and_models_are_only_ever_sent_as_json(server: Running) -> None:
    """A browser must not take a quoted name, a label or a title for HTML."""
    tag = "<script>alert(1)</script>"
    for path, body in (
        ("/classify", {"texts": tag, "labels": [tag, "b"], "model": "nli"}),
        ("/fill", {"texts": "a [MASK]", "model": tag}),
        ("/embed", {"inputs": "a", "prompt_name": tag}),
        ("/rerank", {"query": tag, "texts": [tag], "return_text": True, "model": "rerank"}),
        (f"/{tag}", {}),
    ):
        reply = server.post(path, body)
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in reply.headers["content-security-policy"]


def test_a_template_is_filled_and_not_formatted(server: Running) -> None:
    """Widths in a format string would make gigabytes of ten characters."""
    body = {"texts": "a", "labels": ["b", "c"], "model": "nli"}
    for template in ("{:>900000000}", "{0:999999999}", "{0.__class__}", "{label}", "{"):
        reply = server.post("/classify", {**body, "template": template})
        assert (reply.status_code, "must contain {}" in reply.text) == (422, True)
    server.post_json("/classify", {**body, "template": "{{a}} is {}, {}!"})


def test_special_ids_around_a_text_are_dropped_in_linear_time(server: Running) -> None:
    cls, sep = 2, 3
    ids = server.post_json("/tokenize", {"inputs": "a cat", "add_special_tokens": False})[0]
    inside = [token["id"] for token in ids]
    reply = server.post_json("/embed", {"inputs": [cls] * 200_000 + inside + [sep] * 200_000})
    assert reply == server.post_json("/embed", {"inputs": "a cat"})


def test_large_work_is_done_one_request_at_a_time() -> None:
    service, running, most = Service(cast(Registry, {}), Limits()), [0], [0]

    def work(size: int) -> None:
        with service.one_at_a_time(size, Ticket()):
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.02)
            running[0] -= 1

    for size, alone in ((LARGE_WORK + 1, True), (10, False)):
        most[0] = 0
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [size] * 4))
        assert (most[0] == 1) == alone


def test_a_request_that_nobody_waits_for_does_not_wait_for_others() -> None:
    service, ticket = Service(cast(Registry, {}), Limits()), Ticket()
    ticket.cancelled.set()
    with (
        service.one_at_a_time(LARGE_WORK + 1, Ticket()),
        pytest.raises(Cancelled),
        service.one_at_a_time(LARGE_WORK + 1, ticket),
    ):
        pass
