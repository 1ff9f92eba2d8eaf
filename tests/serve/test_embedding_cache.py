"""The cache of embeddings: identical results, only misses computed, nothing of a model that was reloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.pipeline.pipeline import NonFiniteError
from bertie.serve.embedding_cache import ENTRY_BYTES, CachedExecutor, EmbeddingCache
from bertie.serve.engine_client import EngineClient
from bertie.serve.http import ServerSettings
from bertie.serve.limits import Limits
from bertie.serve.registry import Registry
from bertie.text.encoding import Encodings
from tests.serve.conftest import Running, RunningEngine, Start, until

LONG = "the cat sat on the mat and the dog ran . " * 200
BODIES: list[dict[str, Any]] = [
    {"inputs": ["a cat", "the dog ran"]},
    {"inputs": ["the dog ran", "the mat", "a cat"]},
    {"inputs": ["a cat", LONG]},
    {"inputs": "a cat", "dimensions": 4, "normalize": False},
    {"inputs": "a cat", "normalize": False},
    {"inputs": "a cat", "prompt": "the "},
]


@pytest.fixture(scope="module")
def cached(registry: Registry, start: Start) -> Iterator[Running]:
    models = Registry(
        {"embed": registry._sources["embed"]}, devices=["cpu"], budget=2048, max_wait=60, cache=EmbeddingCache(1 << 20)
    )
    yield start(over=models)
    models.close(drain=False)


def cache_of(server: Running) -> EmbeddingCache:
    cache = server.app.service.registry.cache
    assert cache is not None
    return cache


def test_same_results_and_only_misses_are_computed(cached: Running, server: Running) -> None:
    for body in [*BODIES, *reversed(BODIES)]:
        expected = server.post("/embed", body | {"model": "embed"})
        for _ in range(2):
            reply = cached.post("/embed", body)
            assert reply.content == expected.content, body
            assert reply.headers["x-tokens-total"] == expected.headers["x-tokens-total"]
        assert reply.headers["x-compute-tokens"] == "0"
    reply = cached.post("/embed", {"inputs": ["a cat", "a new text", "the dog ran"]})
    alone = server.post("/embed", {"inputs": "a new text", "model": "embed"})
    assert reply.headers["x-compute-tokens"] == alone.headers["x-compute-tokens"]
    assert reply.json()[1] == alone.json()[0]


def test_metrics(cached: Running) -> None:
    cached.post_json("/embed", {"inputs": "for the metrics"})
    hits = cache_of(cached).hits
    cached.post_json("/embed", {"inputs": "for the metrics"})
    assert cache_of(cached).hits == hits + 1
    text = cached.client.get("/metrics").text
    assert f"bertie_cache_hits_total {cache_of(cached).hits}\n" in text
    assert f"bertie_cache_misses_total {cache_of(cached).misses}\n" in text
    assert f"bertie_cache_bytes {cache_of(cached).bytes}\n" in text


def test_limits_do_not_depend_on_the_cache(cached: Running, start: Start) -> None:
    strict = start(ServerSettings(limits=Limits(tokens=8)), over=cached.app.service.registry)
    assert strict.post("/embed", {"inputs": "a cat"}).status_code == 200
    assert strict.post("/embed", {"inputs": ["a cat"] * 5}).status_code == 413


def test_many_threads(cached: Running, server: Running) -> None:
    texts = [f"{'a cat ' * (i % 7)} the dog {'ran ' * (i % 5)}" for i in range(35)]
    expected = [server.post_json("/embed", {"inputs": text, "model": "embed"}) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: cached.post_json("/embed", {"inputs": texts[i % 35]}), range(210)))
    assert replies == [expected[i % 35] for i in range(210)]


def test_least_recently_used_rows_are_dropped() -> None:
    cache, row = EmbeddingCache(3 * (ENTRY_BYTES + 16)), np.ones(4, np.float32)
    for key in "abc":
        cache.put(key, row)
    cache.get(["a"])
    cache.put("d", row)
    assert [found is not None for found in cache.get(list("abcd"))] == [True, False, True, True]
    assert cache.bytes == cache.max_bytes
    assert len(cache) == 3
    cache.put("large", np.ones(10_000, np.float32))
    assert len(cache) == 3


def test_a_window_that_fails_is_named_by_its_own_index() -> None:
    class Failing:
        version = 0

        def compute(self, task: Any, windows: Encodings, parameters: Any) -> list[Any]:
            if len(windows) == 1 and windows.ids.tolist() != [3]:
                return [np.ones(2, np.float32)]
            raise NonFiniteError(0)

    executor = CachedExecutor(Failing(), EmbeddingCache(1 << 20), "key")  # type: ignore[arg-type]
    flat = np.array([1, 2, 3])
    executor.compute(None, Encodings(flat[:1], flat[:1], np.array([1])))
    executor.compute(None, Encodings(flat[1:2], flat[1:2], np.array([1])))
    with pytest.raises(NonFiniteError) as raised:
        executor.compute(None, Encodings(flat, flat, np.array([1, 1, 1])))
    assert raised.value.window == 2


def change_weights(folder: Path, other: Path) -> None:
    changed = Checkpoint.load(folder)
    with torch.no_grad():
        changed.model.encoder.embeddings.words.weight.neg_()
    changed.save(other)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


@pytest.mark.parametrize("how", ["reload", "engine reload", "engine restart"])
def test_rows_of_a_replaced_model_never_return(registry: Registry, start: Start, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(registry._sources["embed"], folder)
    options: dict[str, Any] = {"devices": ["cpu"], "budget": 2048, "max_wait": 60}
    cache = EmbeddingCache(1 << 20)
    models = Registry({"model": folder}, **options, cache=cache if how == "reload" else None)
    served, engine = models, None
    if how != "reload":
        engine = RunningEngine(models, str(tmp_path / "engine.sock"))
        served = Registry({"model": folder}, engines=EngineClient([engine.path]), cache=cache)
    running = start(over=served)
    until(lambda: served.ready)
    old = served["model"]
    before = running.post_json("/embed", {"inputs": "a cat"})
    assert running.post_json("/embed", {"inputs": "a cat"}) == before
    assert cache.hits == 1
    change_weights(folder, tmp_path / "changed")
    if engine is None:
        served.reload("model")
    elif how == "engine reload":
        engine.server.reload()
        until(lambda: served["model"] is not old)
    else:
        engine.stop()
        models.close(drain=False)
        until(lambda: not served.ready)
        models = engine.registry = Registry({"model": folder}, **options)
        engine.start()
        until(lambda: served.ready)
    assert running.post_json("/embed", {"inputs": "a cat"}) != before
    assert cache.hits == 1
    if engine is not None:
        engine.stop()
    models.close(drain=False)
