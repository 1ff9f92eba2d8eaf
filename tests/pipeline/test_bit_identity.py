"""The same text has the same result to the bit: alone, in a list, as an iterator, on the command line, and in a server,
alone and together with other requests. On a CPU, with the compiled encoder, in fp32 and int8, for every task.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.cli.main import main
from bertie.config import Precision
from bertie.ops.native import encoder as native
from bertie.serve.engine_client import EngineClient
from bertie.serve.http import App
from bertie.serve.logs import Log
from bertie.serve.registry import Registry
from tests.serve.conftest import Running, RunningEngine, until

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled encoder was not built")

MODEL = "bertie-small"
WORDS = "the river rose after rain and Ada Lovelace walked to London with a letter about trains".split()
TEXTS = [
    "The capital of France is Paris.",
    "Ada Lovelace was born in London, and Charles Babbage in Southwark!",
    "short",
    "Der Fluß stieg über die Ufer — überall.",  # not ASCII: through the tokenizers library
    " ".join(WORDS * 6) + ".",
]
QUERY, LABELS = "Where was Ada Lovelace born?", ["sports", "travel", "science"]
COUNTS = ("tokens_total", "tokens_read", "windows", "tokens_unknown")


def neighbours() -> list[str]:
    """Texts of many lengths."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, n)) for n in draw.integers(1, 70, 14)]


@dataclass
class Case:
    """A task through each of its entry points; all return one plain result per text."""

    alone: Callable[[str], Any]
    listed: Callable[[list[str]], list[Any]]
    each: Callable[[list[str]], Iterator[Any]]
    arguments: Callable[[str], list[str]]  # of the command line
    from_record: Callable[[dict[str, Any]], Any]  # a line of its output
    request: Callable[[str], tuple[str, dict[str, Any]]]
    from_response: Callable[[dict[str, Any]], Any]


def plain(result: Any) -> Any:
    """A result as JSON has it."""
    return json.loads(json.dumps(asdict(result)))


def without_row(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("row", "text", "id")}


def first(response: dict[str, Any]) -> Any:
    return response["results"][0]


def cases(checkpoint: Checkpoint) -> dict[str, Case]:
    embedder, filler, zero_shot = Embedder(checkpoint), MaskedLM(checkpoint), ZeroShot(checkpoint)
    classifier = Classifier(checkpoint, head="sentiment")
    tagger, reader, reranker = Tagger(checkpoint), Reader(checkpoint), Reranker(checkpoint)

    def vector(values: Any) -> list[float]:
        return [float(value) for value in np.asarray(values, np.float32)]

    def masked(texts: list[str]) -> list[str]:
        return [f"[MASK] {text} [MASK]" for text in texts]

    def pairs(texts: list[str]) -> list[tuple[str, str]]:
        return [(QUERY, text) for text in texts]

    def scored(result: Any) -> list[Any]:
        return [result.score, *(getattr(result, name) for name in COUNTS)]

    return {
        "embed": Case(
            lambda text: vector(embedder.embed([text])[0]),
            lambda texts: [vector(row) for row in embedder.embed(texts)],
            lambda texts: (vector(result.vector) for result in embedder.embed_each(iter(texts))),
            lambda text: ["embed", text],
            lambda record: vector(record["vector"]),
            lambda text: ("/v1/embeddings", {"input": text, "model": MODEL}),
            lambda response: vector(response["data"][0]["embedding"]),
        ),
        "fill": Case(
            lambda text: plain(filler.fill(masked([text]))[0]),
            lambda texts: [plain(result) for result in filler.fill(masked(texts))],
            lambda texts: (plain(result) for result in filler.fill_each(iter(masked(texts)))),
            lambda text: ["fill", *masked([text])],
            without_row,
            lambda text: ("/fill", {"texts": masked([text])}),
            first,
        ),
        "classify": Case(
            lambda text: plain(classifier.classify([text])[0]),
            lambda texts: [plain(result) for result in classifier.classify(texts)],
            lambda texts: (plain(result) for result in classifier.classify_each(iter(texts))),
            lambda text: ["classify", text, "--head", "sentiment"],
            without_row,
            lambda text: ("/classify", {"texts": [text], "head": "sentiment"}),
            first,
        ),
        "zero-shot": Case(
            lambda text: plain(zero_shot.classify([text], LABELS)[0]),
            lambda texts: [plain(result) for result in zero_shot.classify(texts, LABELS)],
            lambda texts: (plain(result) for result in zero_shot.classify_each(iter(texts), LABELS)),
            lambda text: ["classify", text, "--labels", ",".join(LABELS)],
            without_row,
            lambda text: ("/classify", {"texts": [text], "labels": LABELS}),
            first,
        ),
        "tag": Case(
            lambda text: plain(tagger.tag([text], aggregation_strategy="none", ignore_labels=())[0]),
            lambda texts: [
                plain(result) for result in tagger.tag(texts, aggregation_strategy="none", ignore_labels=())
            ],
            lambda texts: (
                plain(result) for result in tagger.tag_each(iter(texts), aggregation_strategy="none", ignore_labels=())
            ),
            lambda text: ["tag", text, "--aggregation-strategy", "none", "--ignore-labels", ""],
            without_row,
            lambda text: ("/tag", {"texts": [text], "aggregation_strategy": "none", "ignore_labels": []}),
            first,
        ),
        "answer": Case(
            lambda text: plain(reader.answer(pairs([text]), top_k=3)[0]),
            lambda texts: [plain(result) for result in reader.answer(pairs(texts), top_k=3)],
            lambda texts: (plain(result) for result in reader.answer_each(iter(pairs(texts)), top_k=3)),
            lambda text: ["answer", QUERY, "--context", text, "--top-k", "3"],
            without_row,
            lambda text: ("/answer", {"questions": [{"question": QUERY, "documents": text}], "top_k": 3}),
            first,
        ),
        "rerank": Case(
            lambda text: scored(reranker.rerank(QUERY, [text])[0]),
            lambda texts: [scored(result) for result in reranker.predict_each(pairs(texts))],
            lambda texts: (scored(result) for result in reranker.predict_each(iter(pairs(texts)))),
            lambda text: ["rerank", QUERY, text],
            lambda record: [record["score"], *(record[name] for name in COUNTS)],
            lambda text: ("/v1/rerank", {"query": QUERY, "documents": [text], "model_scores": True}),
            lambda response: [first(response)["relevance_score"], *(first(response)[name] for name in COUNTS)],
        ),
    }


@pytest.fixture(scope="module", params=["fp32", "int8"])
def precision(request: pytest.FixtureRequest) -> Precision:
    name: Precision = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(precision: Precision) -> Checkpoint:
    return Checkpoint.load(MODEL, device="cpu", precision=precision)


@pytest.fixture(scope="module")
def registry(precision: Precision) -> Registry:
    return Registry([MODEL], devices=["cpu"], precision=precision, budget=512, max_wait=60.0, workers=2)


@pytest.fixture(scope="module", params=["one process", "front end and engine"])
def server(
    registry: Registry, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    served, engine = registry, None
    if request.param != "one process":
        path = str(tmp_path_factory.mktemp("engine") / "engine.sock")
        engine = RunningEngine(registry, path)
        served = Registry([MODEL], engines=EngineClient([path]))
    app = App(served, log=Log(io.StringIO()))
    app.close = app.stop  # the models are shared
    running = Running(app, io.StringIO())
    until(lambda: served.ready)
    yield running
    running.stop()
    if engine is not None:
        engine.stop()


def test_texts_in_several_windows(checkpoint: Checkpoint) -> None:
    for name, case in cases(checkpoint.with_max_length(48)).items():
        alone = [case.alone(text) for text in TEXTS]
        assert list(case.each([*neighbours(), *TEXTS]))[-len(TEXTS) :] == alone, name


def test_in_process(checkpoint: Checkpoint) -> None:
    """Alone, in a list, and one by one among others; with one thread and with two."""
    threads = torch.get_num_threads()
    try:
        for name, case in cases(checkpoint).items():
            torch.set_num_threads(1)
            alone = [case.alone(text) for text in TEXTS]
            torch.set_num_threads(2)
            assert case.listed(TEXTS) == alone, name
            many = list(case.each([*neighbours()[:7], *TEXTS, *neighbours()[7:]]))
            assert many[7 : 7 + len(TEXTS)] == alone, name
    finally:
        torch.set_num_threads(threads)


def test_random_batches_and_orders(checkpoint: Checkpoint) -> None:
    """Every task, with batches of random size and order and random numbers of threads: scores are equal to the bit."""
    draw = np.random.default_rng(7)
    texts = [" ".join(draw.choice(WORDS, n)) for n in (1, 2, 3, 5, 9, 17, 31, 64, 90)]
    threads = torch.get_num_threads()
    try:
        for name, case in cases(checkpoint).items():
            torch.set_num_threads(1)
            alone = [case.alone(text) for text in texts]
            for count in (len(texts), 1 + int(draw.integers(len(texts)))):
                torch.set_num_threads(int(draw.integers(1, 4)))
                chosen = draw.permutation(len(texts))[:count].tolist()
                for index, result in zip(chosen, case.listed([texts[i] for i in chosen]), strict=True):
                    assert result == alone[index], f"{name}: text {index} of {chosen}"
    finally:
        torch.set_num_threads(threads)


def test_command_line(checkpoint: Checkpoint, precision: Precision, capsys: pytest.CaptureFixture[str]) -> None:
    for name, case in cases(checkpoint).items():
        text = TEXTS[1]
        assert main([*case.arguments(text), "--json", "-m", MODEL, "--precision", precision, "--device", "cpu"]) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[0])
        assert case.from_record(record) == case.alone(text), name


def test_server_alone_and_with_other_requests(checkpoint: Checkpoint, registry: Registry, server: Running) -> None:
    every = cases(checkpoint)
    for name, case in every.items():
        for text in TEXTS:
            assert case.from_response(server.post_json(*case.request(text))) == case.alone(text), name
    requests = [(case, text) for case in every.values() for text in [*TEXTS, *neighbours()[:4]]]
    with ThreadPoolExecutor(24) as pool:
        responses = list(pool.map(lambda pair: server.post_json(*pair[0].request(pair[1])), requests))
    for (case, text), response in zip(requests, responses, strict=True):
        assert case.from_response(response) == case.alone(text)
    stats = registry[MODEL].engine.stats()
    assert stats.windows > stats.batches, "no two requests shared a batch"
