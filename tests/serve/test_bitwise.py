"""On a CPU, a text has the same result to the last bit offline, alone and in a batch, and through the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from bertie.checkpoints.hub import DEFAULT, built_in
from bertie.serve.registry import Registry
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from tests.serve.conftest import Running, Start

pytestmark = pytest.mark.skipif(DEFAULT not in built_in(), reason="the built-in model is not installed")
TEXTS = [
    "A cat sat on the mat.",
    "Short.",
    "Ada Lovelace was born in London in 1815 and met Charles Babbage there.",
    "The match ended in a draw after extra time. " * 20,
]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def served(request: pytest.FixtureRequest, start: Start) -> Iterator[tuple[Running, Registry]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    registry = Registry([DEFAULT], devices=["cpu"], budget=2048, max_wait=60, precision=request.param)
    yield start(over=registry), registry
    registry.close()
    torch.set_num_threads(threads)


def embed(task: Any, texts: list[str]) -> list[Any]:
    return [{"embedding": vector.tolist()} for vector in task.embed(texts)]


Case = tuple[str, Any, Callable[[str], Any], Callable[[Any, list[str]], list[Any]], str]
LABELS = ["sports", "travel", "science"]
CASES: list[Case] = [
    ("/v1/embeddings", Embedder, lambda text: {"input": [text], "normalize": False}, embed, "data"),
    ("/classify", Classifier, lambda text: {"texts": [text]}, lambda task, texts: task.classify(texts), "results"),
    ("/tag", Tagger, lambda text: {"texts": [text]}, lambda task, texts: task.tag(texts), "results"),
    (
        "/fill",
        MaskedLM,
        lambda text: {"texts": [f"{text} [MASK]"]},
        lambda task, texts: task.fill([f"{text} [MASK]" for text in texts]),
        "results",
    ),
    (
        "/classify",
        ZeroShot,
        lambda text: {"texts": [text], "labels": LABELS},
        lambda task, texts: task.classify(texts, LABELS),
        "results",
    ),
    (
        "/v1/rerank",
        Reranker,
        lambda text: {"query": "Who?", "documents": [text], "model_scores": True},
        lambda task, texts: [
            {"relevance_score": result.score} for result in task.predict_each([("Who?", text) for text in texts])
        ],
        "results",
    ),
    (
        "/answer",
        Reader,
        lambda text: {"questions": [{"question": "Who?", "documents": text}]},
        lambda task, texts: task.answer([("Who?", text) for text in texts]),
        "results",
    ),
]


def bits(value: Any) -> Any:
    """A result with floats as the bits of float32: JSON has the shortest digits that identify one."""
    if isinstance(value, float):
        return np.float32(value).tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list) else value


def plain(result: Any) -> Any:
    return bits(json.loads(json.dumps(result if isinstance(result, dict) else asdict(result))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_results_are_equal_to_the_bit(served: tuple[Running, Registry], case: Case) -> None:
    server, registry = served
    path, kind, body, run, field = case
    task = kind(registry[DEFAULT].checkpoint)
    expected = [plain(result) for result in run(task, TEXTS)]
    assert [plain(run(task, [text])[0]) for text in TEXTS] == expected, "alone, offline"

    def request(text: str) -> Any:
        (item,) = server.post_json(path, body(text))[field]
        return {key: value for key, value in bits(item).items() if key in expected[0]}

    assert [request(text) for text in TEXTS] == expected, "alone, through the server"
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(request, TEXTS * 6)) == expected * 6, "among concurrent requests"
