"""Front ends and engines: the same answers as one process, jobs of a lost engine fail at once, reloads are noticed."""

from __future__ import annotations

import gc
import shutil
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve import engine_server
from bertie.serve.engine_client import EngineClient
from bertie.serve.registry import Registry
from bertie.serve.tickets import Refused
from tests.serve.conftest import Running, RunningEngine, Start, until

LONG = "the cat sat on the mat and the dog ran . " * 200
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/embed", {"inputs": ["a cat", "the dog ran"], "model": "embed"}),
    ("/embed", {"inputs": LONG, "model": "embed"}),
    ("/embed", {"inputs": "a cat", "model": "embed", "dimensions": 4, "normalize": False}),
    ("/embed_all", {"inputs": "a cat", "model": "embed"}),
    ("/v1/embeddings", {"input": ["a cat"], "model": "small", "encoding_format": "base64"}),
    ("/classify", {"texts": ["a cat", LONG], "model": "classify"}),
    ("/classify", {"texts": ["a cat"], "labels": ["x", "y"], "model": "nli"}),
    *(
        ("/classify", {"texts": ["a cat"], "labels": ["x", "y"], "model": "small", "method": method})
        for method in ("entailment", "embedding", "combined")
    ),
    ("/fill", {"texts": ["a [MASK] sat"], "model": "fill", "top_k": 3}),
    ("/tag", {"texts": ["a cat", LONG], "model": "tag"}),
    ("/answer", {"questions": [{"question": "who?", "context": "the cat sat"}], "model": "answer"}),
    ("/rerank", {"query": "cat", "texts": ["a dog", "a cat"], "model": "rerank"}),
    ("/predict", {"inputs": "a cat", "model": "classify", "raw_scores": True}),
    ("/attention", {"text": "a cat", "model": "small"}),
    ("/attention_all", {"text": "a cat", "model": "small"}),
    ("/tokenize", {"inputs": "a cat", "model": "embed"}),
]


@pytest.fixture(scope="module", params=[None, 0], ids=["threads", "event loop"])
def served(registry: Registry, request: pytest.FixtureRequest) -> Iterator[Registry]:
    """The same models with engines of their own: with worker threads, or on the event loop as on a GPU."""
    models = Registry(registry._sources, devices=["cpu"], budget=2048, max_wait=60, workers=request.param)
    yield models
    models.close()


@pytest.fixture(scope="module")
def engine(served: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    running = RunningEngine(served, str(tmp_path_factory.mktemp("engine") / "engine.sock"))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def front_end(engine: RunningEngine, served: Registry, start: Start) -> Running:
    remote = Registry(served._sources, engines=EngineClient([engine.path]))
    running = start(over=remote)
    until(lambda: remote.ready)
    return running


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[f"{i} {path}" for i, (path, _) in enumerate(REQUESTS)])
def test_same_reply_as_one_process(front_end: Running, server: Running, path: str, body: dict[str, Any]) -> None:
    assert front_end.post_json(path, body) == server.post_json(path, body)


def test_no_weights_in_a_front_end(front_end: Running) -> None:
    for name in front_end.app.service.names:
        assert front_end.app.service.registry[name].checkpoint.model.device == torch.device("meta")
    described = front_end.client.get("/info").json()
    assert described["max_batch_tokens"] == 2048
    assert described["dispatch"]["embed"]


def test_usage_headers_come_from_the_engine(front_end: Running) -> None:
    reply = front_end.post("/embed", {"inputs": "a cat sat", "model": "embed"})
    assert reply.headers["x-compute-tokens"] == "5"
    assert int(reply.headers["x-inference-time"]) >= 0


def test_requests_of_several_front_ends_share_batches(
    engine: RunningEngine, served: Registry, front_end: Running, start: Start
) -> None:
    other = start(over=Registry(served._sources, engines=EngineClient([engine.path])))
    until(lambda: other.app.service.registry.ready)
    body = {"inputs": "a cat", "model": "embed"}
    with ThreadPoolExecutor(32) as pool:
        expected = front_end.post_json("/embed", body)
        replies = list(pool.map(lambda i: (front_end, other)[i % 2].post_json("/embed", body), range(200)))
    assert replies == [expected] * 200
    tasks = {id(task) for connection in engine.server._front_ends for _, task in connection.tasks.values()}
    assert len(tasks) == len(engine.server._tasks), "both use the same task objects, so that heads are shared too"


def test_errors_of_the_engine(front_end: Running, served: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: Any, **options: Any) -> None:
        raise Refused("full", 3.0)

    monkeypatch.setattr(served["embed"].engine.queue, "put", refuse)
    reply = front_end.post("/embed", {"inputs": "a cat", "model": "embed"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")


def test_deadline(front_end: Running, served: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served["embed"].engine.queue, "put", lambda job, **options: None)
    for text in ("a cat", LONG * 10):  # on the event loop, and in a thread
        reply = front_end.post("/embed", {"inputs": text, "model": "embed"}, headers={"x-request-timeout": "0.3"})
        assert reply.status_code == 503
        assert reply.json()["error_type"] == "Timeout"


def test_a_client_that_disconnects_cancels_its_job(
    front_end: Running, served: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    jobs: list[Any] = []
    monkeypatch.setattr(served["embed"].engine.queue, "put", lambda job, **options: jobs.append(job))
    body = b'{"inputs":"a cat","model":"embed"}'
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front_end.port)) as raw:
        raw.sendall(head % len(body) + body)
        until(lambda: len(jobs) == 1)
    until(lambda: jobs[0].ticket.cancelled.is_set())
    until(lambda: front_end.app.in_flight == 0)


def test_a_lost_engine_is_answered_with_503_and_found_again(
    engine: RunningEngine, front_end: Running, served: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"inputs": "a cat", "model": "embed"}
    expected = front_end.post_json("/embed", body)
    jobs: list[Any] = []
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(served["embed"].engine.queue, "put", lambda job, **options: jobs.append(job))
        waiting = pool.submit(front_end.post, "/embed", body)
        until(lambda: len(jobs) == 1)
        began = time.monotonic()
        engine.stop()
        assert waiting.result(10).status_code == 503
        assert time.monotonic() - began < 5, "at once, not after the deadline"
    assert front_end.post("/embed", body).status_code == 503
    assert front_end.client.get("/ready").status_code == 503
    engine.start()
    until(lambda: front_end.client.get("/ready").status_code == 200)
    assert front_end.post_json("/embed", body) == expected


def test_reload(served: Registry, start: Start, tmp_path: Path) -> None:
    """A front end reads the new tokenizer and configuration after its engine has loaded the new weights."""
    folder = tmp_path / "model"
    shutil.copytree(served._sources["embed"], folder)
    models = Registry({"model": folder}, devices=["cpu"], budget=2048, max_wait=60, workers=served._settings["workers"])
    engine = RunningEngine(models, str(tmp_path / "engine.sock"))
    remote = Registry({"model": folder}, engines=EngineClient([engine.path]))
    running = start(over=remote)
    until(lambda: remote.ready)
    before, old = running.post_json("/embed", {"inputs": "a cat"}), remote["model"]
    changed = Checkpoint.load(folder)
    with torch.no_grad():
        changed.model.encoder.embeddings.words.weight.neg_()
    changed.save(tmp_path / "changed")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "changed", folder)
    engine.server.reload()
    until(lambda: remote["model"] is not old)
    after = running.post_json("/embed", {"inputs": "a cat"})
    assert after != before
    engine.stop()
    models.close(drain=False)


def test_requests_are_answered_after_any_order_of_reloads_and_restarts(
    served: Registry, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a front end that has not read the files again, when the old model is closed."""
    monkeypatch.setattr(engine_server, "RELEASE_SECONDS", 0.05)
    models = Registry(
        {"model": served._sources["embed"]},
        devices=["cpu"],
        budget=2048,
        max_wait=60,
        workers=served._settings["workers"],
    )
    engine = RunningEngine(models, str(tmp_path / "engine.sock"))
    remote = Registry({"model": served._sources["embed"]}, engines=EngineClient([engine.path]))
    running = start(over=remote)
    until(lambda: remote.ready)
    wanted = running.post_json("/embed", {"inputs": "a cat"})
    for step in ("reload", "reload", "restart", "reload", "reload"):
        old = models["model"]
        if step == "reload":
            engine.server.reload()
            until(lambda: not old.engine.ready)  # noqa: B023
        else:
            engine.stop()
            engine.start()
            until(lambda: running.client.get("/ready").status_code == 200)
        assert running.post_json("/embed", {"inputs": "a cat"}) == wanted, step
    engine.stop()
    models.close(drain=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_reloaded_model_is_freed(
    served: Registry, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    """Neither by the tasks of front ends, nor because the garbage collector does not scan what a start has loaded."""
    monkeypatch.setattr(engine_server, "RELEASE_SECONDS", 0.05)
    options: dict[str, Any] = {"devices": ["cpu"], "budget": 2048, "workers": served._settings["workers"]}
    models = Registry({"model": served._sources["embed"]}, **options)
    if frozen:
        gc.freeze()
    try:
        engine = RunningEngine(models, str(tmp_path / "engine.sock"))
        remote = Registry({"model": served._sources["embed"]}, engines=EngineClient([engine.path]))
        running = start(over=remote)
        until(lambda: remote.ready)
        wanted = running.post_json("/embed", {"inputs": "a cat"})
        old = weakref.ref(models["model"].checkpoint.model)
        engine.server.reload()

        def gone() -> bool:
            gc.collect()
            return old() is None

        until(gone)
        assert running.post_json("/embed", {"inputs": "a cat"}) == wanted
        engine.stop()
        models.close(drain=False)
    finally:
        gc.unfreeze()
