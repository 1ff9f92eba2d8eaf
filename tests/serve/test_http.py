"""The server on a real port: every endpoint, concurrency, limits, invalid requests, logs."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import TypeAdapter

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve.http import ServerSettings
from bertie.serve.openapi import example
from bertie.serve.registry import Registry
from bertie.serve.routes import Route, all_routes
from bertie.serve.tickets import Closed, Expired, Refused
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from tests.serve.conftest import BlockedQueue, Running, Start, raw_headers, until

POSTS = [route for route in all_routes() if route.method == "POST"]
each_post = pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
SHORT = ["a cat sat", "the dog ran on the mat", "", "find a cat : the dog", "mat"]
LONG = " ".join(["the cat sat on the mat . a dog ran :"] * 9)  # 99 words; the tiny models read 38 per window
TEXTS = [*SHORT, LONG]


# --- every endpoint ---


@pytest.mark.parametrize("route", all_routes(), ids=lambda route: route.path)
def test_examples_get_the_documented_responses(server: Running, route: Route) -> None:
    if route.method == "GET":
        reply = server.client.get(route.path)
    else:
        body = example(route)
        if route.path == "/decode":
            body = {"ids": [2, 5, 7, 3]}
        reply = server.post(route.path, body)
    if route.path in ("/search", "/ask", "/embed_sparse"):  # no index is loaded, no sparse model is served
        assert reply.status_code == 424
        assert set(reply.json()) == {"error", "error_type"}
        return
    assert reply.status_code == 200, reply.text
    TypeAdapter(route.response).validate_json(reply.content, strict=False)


def local_task(registry: Registry, name: str, kind: Any, **options: Any) -> Any:
    """The local task, without a server or an engine."""
    return kind(registry[name].checkpoint, **options)


def as_json(results: Any) -> Any:
    return json.loads(json.dumps([asdict(result) for result in results]))


def close(found: Any, wanted: Any) -> None:
    """Compare up to rounding."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for key, value in wanted.items():
            close(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, two in zip(found, wanted, strict=True):
            close(one, two)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    else:
        assert found == wanted


def test_results_equal_those_of_local_tasks(server: Running, registry: Registry) -> None:
    unit = [one / np.linalg.norm(one) for one in local_task(registry, "embed", Embedder).embed(TEXTS)]
    close(server.post_json("/embed", {"inputs": TEXTS, "model": "embed"}), np.array(unit).tolist())
    raw = server.post_json("/embed", {"inputs": TEXTS, "model": "embed", "normalize": False})
    close(raw, local_task(registry, "embed", Embedder).embed(TEXTS).tolist())
    masked = ["a [MASK] sat", f"{LONG} [MASK] {LONG}"]
    fill = server.post_json("/fill", {"texts": masked, "model": "fill", "top_k": 3})
    close(fill["results"], as_json(local_task(registry, "fill", MaskedLM).fill(masked, top_k=3)))
    classes = server.post_json("/classify", {"texts": TEXTS, "model": "classify"})
    close(classes["results"], as_json(local_task(registry, "classify", Classifier).classify(TEXTS)))
    pairs: Any = [("a cat", "the dog"), ("mat", LONG)]
    classes = server.post_json("/classify", {"texts": pairs, "model": "classify"})
    close(classes["results"], as_json(local_task(registry, "classify", Classifier).classify(pairs)))
    any_labels = {"texts": TEXTS, "model": "nli", "labels": ["cat", "dog"], "template": "find {}", "multi_label": True}
    zero = local_task(registry, "nli", ZeroShot).classify(TEXTS, ["cat", "dog"], template="find {}", multi_label=True)
    found = server.post_json("/classify", any_labels)["results"]
    close(found, as_json(zero))
    tags = server.post_json("/tag", {"texts": TEXTS, "model": "tag"})
    close(tags["results"], as_json(local_task(registry, "tag", Tagger).tag(TEXTS)))
    questions = [{"question": "find cat", "documents": [LONG, "a cat sat"]}, {"question": "dog", "documents": "a dog"}]
    told = server.post_json("/answer", {"questions": questions, "model": "answer", "top_k": 2})
    local = local_task(registry, "answer", Reader)
    asked = [("find cat", [LONG, "a cat sat"]), ("dog", "a dog")]
    close(told["results"], as_json(local.answer(asked, top_k=2)))
    ranked = server.post_json("/v1/rerank", {"query": "find cat", "documents": TEXTS, "model": "rerank"})
    wanted = local_task(registry, "rerank", Reranker).rerank("find cat", TEXTS)  # which applies the same sigmoid
    assert [one["index"] for one in ranked["results"]] == [one.index for one in wanted]
    close([one["relevance_score"] for one in ranked["results"]], [one.score for one in wanted])
    own = server.post_json(
        "/v1/rerank", {"query": "find cat", "documents": TEXTS, "model": "rerank", "model_scores": True}
    )
    close([one["relevance_score"] for one in own["results"]], [one.score for one in wanted])
    bare = server.post_json("/v1/embeddings", {"input": TEXTS, "model": "embed", "normalize": False, "dimensions": 5})
    short = local_task(registry, "embed", Embedder, dimension=5).embed(TEXTS)
    close([one["embedding"] for one in bare["data"]], short.tolist())
    compared = server.post_json("/compare", {"texts": TEXTS, "model": "embed", "pooling": "cls"})
    close(compared["similarity"], local_task(registry, "embed", Embedder, pooling="cls").similarity(TEXTS).tolist())


def test_token_embeddings_equal_the_hidden_states_of_transformers(server: Running, models: dict[str, str]) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    theirs, tokenizer = AutoModel.from_pretrained(models["embed"]), AutoTokenizer.from_pretrained(models["embed"])
    for text, found in zip(SHORT, server.post_json("/embed_all", {"inputs": SHORT, "model": "embed"}), strict=True):
        with torch.no_grad():
            wanted = theirs(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        close(found, wanted.tolist())
    (whole,) = server.post_json("/embed_all", {"inputs": LONG, "model": "embed"})
    (tokens,) = server.post_json("/tokenize", {"inputs": LONG, "model": "embed"})
    assert len(whole) == len(tokens) > 40  # each token once, although there are several windows


# --- concurrency ---

# Models with a max_length of 40 for each endpoint: with these the long text needs several windows.
SHORT_MODELS = {"/predict": "classify", "/rerank": "rerank", "/v1/rerank": "rerank", "/v2/rerank": "rerank"}
SHORT_MODELS |= {f"/{name}": name for name in ("fill", "classify", "tag", "answer")}
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/embed": lambda text: {"inputs": text},
    "/embed_all": lambda text: {"inputs": text},
    "/predict": lambda text: {"inputs": text},
    "/rerank": lambda text: {"query": "find a cat", "texts": [text]},
    "/similarity": lambda text: {"inputs": {"source_sentence": "a cat", "sentences": [text]}},
    "/v1/rerank": lambda text: {"query": "find a cat", "documents": [text]},
    "/v2/rerank": lambda text: {"query": "find a cat", "documents": [text]},
    "/fill": lambda text: {"texts": f"{text} [MASK]"},
    "/classify": lambda text: {"texts": text},
    "/tag": lambda text: {"texts": text},
    "/answer": lambda text: {"questions": {"question": "find a cat", "documents": f"{text} mat"}},
    "/compare": lambda text: {"texts": [text, "a cat"]},
}


def test_results_do_not_depend_on_concurrent_requests(server: Running) -> None:
    """All endpoints at once on one model return what they return alone."""
    jobs = [(path, body(text)) for path, body in BODIES.items() for text in TEXTS]
    jobs += [(path, body | {"model": SHORT_MODELS.get(path, "embed")}) for path, body in jobs]
    kept = ("id",)

    def ask(job: tuple[str, Any]) -> Any:
        said = server.post_json(job[0], job[1])
        return {key: value for key, value in said.items() if key not in kept} if isinstance(said, dict) else said

    before = server.app.service.registry["small"].engine.stats()
    alone = [ask(job) for job in jobs]
    middle = server.app.service.registry["small"].engine.stats()
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, jobs))
    after = server.app.service.registry["small"].engine.stats()
    for one, two in zip(together, alone, strict=True):
        close(one, two)
    assert after.batches - middle.batches < middle.batches - before.batches  # they shared batches


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/embed_all", "/tokenize", "/classify", "/tag", "/fill"])
def test_a_batch_equals_single_requests(server: Running, path: str) -> None:
    field = {"/v1/embeddings": "input", "/embed": "inputs", "/embed_all": "inputs", "/tokenize": "inputs"}
    name = field.get(path, "texts")
    texts = [f"{text} [MASK]" for text in TEXTS] if path == "/fill" else TEXTS

    def items(said: Any) -> list[Any]:
        found = said if isinstance(said, list) else said.get("data", said.get("results"))
        return [{k: v for k, v in one.items() if k != "index"} if isinstance(one, dict) else one for one in found]

    many = items(server.post_json(path, {name: texts}))
    for one, text in zip(many, texts, strict=True):
        close(one, items(server.post_json(path, {name: [text]}))[0])


# --- read counts ---


def test_long_texts_are_read_in_windows_and_the_response_has_the_counts(server: Running) -> None:
    said = server.post_json("/classify", {"texts": [LONG], "model": "classify"})["results"][0]
    assert said["windows"] > 1
    assert said["tokens_read"] == said["tokens_total"] == 99
    cut = server.post_json("/classify", {"texts": [LONG], "model": "classify", "overflow": "truncate"})["results"][0]
    assert (cut["windows"], cut["tokens_read"], cut["tokens_total"]) == (1, 38, 99)
    reply = server.post("/embed", {"inputs": ["a cat", LONG], "model": "embed"})
    assert [reply.headers[f"x-{one}"] for one in ("tokens-total", "tokens-read")] == ["101", "101"]
    assert int(reply.headers["x-windows"]) == said["windows"] + 1
    reply = server.post("/embed", {"inputs": ["a cat", LONG], "model": "embed", "truncate": True})
    assert [reply.headers[f"x-{one}"] for one in ("tokens-total", "tokens-read", "windows")] == ["101", "40", "2"]
    vectors = server.post_json("/v1/embeddings", {"input": [LONG], "model": "embed"})
    assert vectors["data"][0]["windows"] > 1
    assert vectors["usage"] == {"prompt_tokens": 99, "total_tokens": 99}


def test_window_map_covers_the_text(server: Running) -> None:
    found = server.post_json("/windows", {"text": LONG, "model": "embed"})
    assert found["windows"][0]["owns"][0] == 0
    assert found["windows"][-1]["owns"][1] == len(LONG)


def test_responses_contain_no_paths(server: Running, models: dict[str, str]) -> None:
    reply = server.post("/classify", {"texts": "a", "head": "nope", "model": "classify"})
    assert reply.status_code == 422
    assert "nope" in reply.text
    assert models["classify"] not in reply.text
    assert "/tmp" not in reply.text
    for path in ("/info", "/about", "/v1/models"):
        assert "/tmp" not in server.client.get(path).text


# --- invalid requests ---


@each_post
@pytest.mark.parametrize("body", [b"", b"{", b"nul", b'{"a": 1', b"\xff\xfe", b'"\\ud800"', b"[" * 5000])
def test_invalid_json_is_refused(server: Running, route: Route, body: bytes) -> None:
    reply = server.client.post(route.path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "Traceback" not in reply.text


@each_post
def test_invalid_fields_are_named(server: Running, route: Route) -> None:
    for body in ([], 3, "a", {}, {"nope": 1}):
        reply = server.post(route.path, body)
        assert reply.status_code == (400 if route.error_format == "openai" else 422)
        shapes = {"openai": {"error"}, "cohere": {"message", "detail"}, "tei": {"error", "error_type"}}
        assert set(reply.json()) == shapes[route.error_format]


def test_unknown_fields_are_refused_by_our_api_and_ignored_by_the_others(server: Running) -> None:
    reply = server.post("/fill", {"texts": "a [MASK]", "topk": 3})
    assert reply.status_code == 422
    assert reply.json()["error"] == "topk: unknown field; did you mean `top_k`?"
    assert server.post("/embed", {"inputs": "a", "whatever": 3}).status_code == 200


def test_errors_of_tasks_are_passed_on(server: Running) -> None:
    reply = server.post("/fill", {"texts": ["a [MASK]", "a cat"]})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("text 1: no [MASK] in the text")
    reply = server.post("/embed", {"inputs": "a", "prompt_name": "nope"})
    assert (reply.status_code, reply.json()["error_type"]) == (422, "Tokenizer")


def test_paths_and_methods(server: Running) -> None:
    assert server.client.get("/nope").status_code == 404
    assert server.client.get("/embed").status_code == 405
    assert server.client.delete("/embed").status_code == 405
    assert server.client.delete("/").headers["allow"] == "GET, HEAD, POST"
    assert server.client.post("/health").status_code == 405
    assert server.client.head("/health").status_code == 200
    assert server.client.get("/page/../http.py").status_code == 404
    assert server.client.options("/embed", headers={"origin": "http://evil.example"}).status_code == 405


def test_the_content_type_must_be_json(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = server.client.post("/embed", content=b'{"inputs": "a"}', headers={"content-type": kind})
        assert reply.status_code == 415
    kind = "application/json; charset=utf-8"
    assert server.client.post("/embed", content=b'{"inputs": "a"}', headers={"content-type": kind}).status_code == 200


# --- headers ---


def test_request_ids_are_echoed(server: Running) -> None:
    assert server.client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for bad in ("a b", "x" * 200, "<script>"):
        found = server.client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert found != bad
        assert len(found) == 16


def test_security_headers(server: Running) -> None:
    for path in ("/", "/docs", "/info", "/nope"):
        headers = server.client.get(path, headers={"origin": "http://evil.example"}).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert not [name for name in headers if name.startswith("access-control")]
        assert "server" not in headers


def test_other_host_headers_are_refused(start: Start) -> None:
    server = start(ServerSettings(hosts=("localhost", "127.0.0.1")))
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/health", headers={"host": f"localhost:{server.port}"}).status_code == 200
    assert server.client.get("/info", headers={"host": "evil.example"}).status_code == 403


# --- limits ---


def test_too_many_requests_in_flight_are_refused_at_once(strict: Running, blocked: BlockedQueue) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(httpx.post, f"{strict.url}/embed", json={"inputs": "a", "model": "embed"}) for _ in "ab"]
        until(lambda: len(blocked.tickets) == 2)
        reply = strict.post("/embed", {"inputs": "a", "model": "embed"})
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert "connection" not in reply.headers  # it stays open for the retry
        assert reply.json()["error_type"] == "Overloaded"
        assert strict.client.get("/health").status_code == 200
        blocked.release.set()
        assert [one.result().status_code for one in first] == [200, 200]


def test_an_overloaded_server_refuses_requests_unread(
    server: Running, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list(registry)

    def fill(name: str, waiting: int) -> None:
        queue = registry[name].engine.queue
        for lane in (queue.short, queue.long):
            monkeypatch.setattr(lane, "rate", 100.0)
            monkeypatch.setattr(lane, "waiting", waiting)
            monkeypatch.setattr(lane, "ahead", lambda owner: waiting)  # all of it by the same client

    for name in names[1:]:
        fill(name, 100_000)
    body = {"inputs": "a", "model": names[0]}
    assert server.post("/embed", body).status_code == 200, "one of them has time"
    fill(names[0], 7000)
    for content in (b'{"inputs": "a"}', b"this is never read"):
        reply = server.client.post("/embed", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "10", "70 seconds of work, of which 60 may wait"
    assert server.client.get("/health").status_code == 200


def test_a_reloaded_model_is_freed(start: Start, models: dict[str, str]) -> None:
    """Idle threads hold no reference to their last request."""
    registry = Registry({"embed": models["embed"]}, devices=["cpu"], budget=256)
    server = start(over=registry)
    with ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda i: httpx.post(f"{server.url}/embed", json={"inputs": "a"}), range(40))
        assert {one.status_code for one in replies} == {200}
    old = weakref.ref(registry["embed"])
    registry.reload("embed")

    def gone() -> bool:
        gc.collect()
        return old() is None

    until(gone)
    registry.close()


def test_a_disconnected_client_cancels_its_request(server: Running, blocked: BlockedQueue) -> None:
    body = b'{"inputs": "a", "model": "embed"}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
        raw.sendall(raw_headers("/embed", f"content-length: {len(body)}") + body)
        until(lambda: len(blocked.tickets) == 1)
        assert not blocked.tickets[0].cancelled.is_set()
    until(blocked.tickets[0].cancelled.is_set)
    until(lambda: server.app.in_flight == 0)
    blocked.release.set()
    assert server.post("/embed", {"inputs": "a", "model": "embed"}).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Refused("full", 2.5), 429, "Overloaded"),
        (Expired("late"), 503, "Timeout"),
        (Closed("closed"), 503, "Unhealthy"),
        (RuntimeError("the secret text"), 424, "Backend"),
        (MemoryError(), 424, "Backend"),
        (ZeroDivisionError("the secret text"), 500, "Internal"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_engine_errors_have_their_status(
    server: Running, registry: Registry, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    def fail(job: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(registry["embed"].engine.queue, "put", fail)
    reply = server.post("/embed", {"inputs": "the secret text", "model": "embed"})
    assert (reply.status_code, reply.json()["error_type"]) == (status, kind)
    assert "secret" not in reply.text
    assert "secret" not in server.log
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    if status == 429:
        assert reply.headers["retry-after"] == "3"


def test_deadlines(start: Start, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ServerSettings(deadline=20.0))
    seen = []
    queue = registry["embed"].engine.queue
    put = queue.put

    def record(job: Any, **options: Any) -> None:
        seen.append(job.ticket.deadline - time.monotonic())
        put(job, **options)

    monkeypatch.setattr(queue, "put", record)
    body = {"inputs": "a", "model": "embed"}
    for asked in ({}, {"x-request-timeout": "3"}, {"x-request-timeout": "100"}):
        assert server.post("/embed", body, headers=asked).status_code == 200
    assert [round(one) for one in seen] == [20, 3, 20]
    assert server.post("/embed", body, headers={"x-request-timeout": "0.0000001"}).status_code == 503
    for bad in ("0", "-1", "nan", "inf", "soon"):
        assert server.post("/embed", body, headers={"x-request-timeout": bad}).status_code == 422


# --- health and logs ---


def test_health_follows_draining(start: Start) -> None:
    server = start()
    assert (server.client.get("/health").status_code, server.client.get("/health").content) == (200, b"")
    server.app.draining = True
    reply = server.client.get("/health")
    assert reply.status_code == 503
    assert reply.json() == {"error": "unhealthy", "error_type": "Unhealthy"}
    assert server.post("/embed", {"inputs": "a"}).status_code == 200  # requests are still answered


def test_reloading_loses_no_request(start: Start, models: dict[str, str]) -> None:
    registry = Registry({"embed": models["embed"]}, devices=["cpu"], budget=2048)
    server = start(over=registry)
    wanted = server.post_json("/embed", {"inputs": LONG})
    running, stop = threading.Barrier(5), threading.Event()

    def send() -> int:
        count = 0
        with httpx.Client(base_url=server.url, timeout=20) as client:
            running.wait(20)
            while not stop.is_set() or not count:
                reply = client.post("/embed", json={"inputs": LONG})
                assert reply.status_code == 200, reply.text
                close(reply.json(), wanted)
                count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(send) for _ in range(4)]
        running.wait(20)
        for _ in range(3):
            old = registry["embed"]
            server.app.reload()
            assert registry["embed"] is not old
            until(lambda old=old: not old.engine.ready)
        stop.set()
        assert all(client.result() for client in clients)
    registry.close()


def test_requests_share_no_state(server: Running, registry: Registry) -> None:
    """A request does not change the results of later ones."""
    checkpoint = registry["small"].checkpoint
    assert isinstance(checkpoint, Checkpoint)
    first = server.post_json("/embed", {"inputs": "a cat sat", "model": "small"})
    server.post("/embed", {"inputs": "a cat sat", "model": "small", "dimensions": 3})
    assert server.post_json("/embed", {"inputs": "a cat sat", "model": "small"}) == first
