"""The table of routes: every task with an endpoint has a route, and every route obeys every limit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest

from bertie.search.index import Index
from bertie.serve.context import RequestContext
from bertie.serve.http import ServerSettings
from bertie.serve.limits import Limits
from bertie.serve.openapi import describe_api
from bertie.serve.registry import Registry
from bertie.serve.routes import all_routes
from bertie.serve.tickets import Cancelled, Ticket
from bertie.tasks import Embedder, Tagger
from bertie.tasks.registry import TASKS, TaskRow
from tests.checkpoints.test_splade import splade_folder
from tests.serve.conftest import Running, Start


def test_paths_are_unique_and_cover_the_table_of_tasks() -> None:
    paths = [route.path for route in all_routes()]
    assert len(set(paths)) == len(paths)
    assert {row.endpoint for row in TASKS.values() if row.endpoint is not None} <= set(paths)


@dataclass
class ToyResult:
    tokens: int
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


class ToyTagger(Tagger):
    """A task that only the table of tasks knows: the number of tokens of a text."""

    def decode(self, *args: Any) -> Any:
        (window,) = args[1]
        return ToyResult(len(window), len(window) - 2, len(window) - 2, 1)


def test_a_row_in_the_table_of_tasks_is_an_endpoint(
    start: Start, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{ToyTagger.__module__}:ToyTagger"
    monkeypatch.setitem(TASKS, "toy", TaskRow(name="toy", path=path, head_kind="tag", endpoint="/toy"))
    assert "/toy" in describe_api()["paths"]
    server = start()
    reply = server.post_json("/toy", {"texts": ["a cat sat", "the dog"], "model": "tag"})
    assert [result["tokens"] for result in reply["results"]] == [5, 4]
    assert (reply["model"], reply["head"]) == ("tag", "tag")
    assert server.post("/toy", {"texts": []}).status_code == 400


# --- every route obeys every limit ---

LONG = " ".join(["the cat sat on the mat . a dog ran :"] * 9)  # 99 tokens


@dataclass(frozen=True)
class Case:
    """How a route takes texts: its request for a list of texts, and what is checked before a model runs."""

    request: Callable[[list[str]], dict[str, Any]]
    items: bool = True  # whether it takes several
    estimated: bool = True  # whether the size of its reply is estimated before the work


CASES = {  # of every route that takes a body: a new one without a case fails
    "/": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/invocations": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/pipeline/feature-extraction": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/pipeline/sentence-similarity": Case(
        lambda texts: {"inputs": {"source_sentence": "a", "sentences": texts}, "model": "embed"}, estimated=False
    ),
    "/pipeline/fill-mask": Case(lambda texts: {"inputs": [f"{text} [MASK]" for text in texts], "model": "fill"}),
    "/pipeline/text-classification": Case(lambda texts: {"inputs": texts, "model": "classify"}),
    "/pipeline/token-classification": Case(
        lambda texts: {
            "inputs": texts,
            "model": "tag",
            "parameters": {"aggregation_strategy": "none", "ignore_labels": []},
        }
    ),
    "/pipeline/question-answering": Case(
        lambda texts: {"inputs": [{"question": "a", "context": text} for text in texts], "model": "answer"}
    ),
    "/pipeline/zero-shot-classification": Case(
        lambda texts: {"inputs": texts, "parameters": {"candidate_labels": ["dog"]}, "model": "small"}, estimated=False
    ),
    "/v1/embed": Case(lambda texts: {"texts": texts, "model": "embed"}),
    "/v2/embed": Case(lambda texts: {"inputs": [{"content": [{"text": text}]} for text in texts], "model": "embed"}),
    "/v1/embeddings": Case(lambda texts: {"input": texts, "model": "embed"}),
    "/embeddings": Case(lambda texts: {"input": texts, "model": "embed"}),
    "/embed": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/embed_all": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/embed_sparse": Case(lambda texts: {"inputs": texts, "model": "splade"}, estimated=False),
    "/predict": Case(lambda texts: {"inputs": [[text] for text in texts], "model": "classify"}),
    "/rerank": Case(lambda texts: {"query": "a", "texts": texts, "model": "rerank"}),
    "/v1/rerank": Case(lambda texts: {"query": "a", "documents": texts, "model": "rerank"}),
    "/v2/rerank": Case(lambda texts: {"query": "a", "documents": texts, "model": "rerank"}),
    "/similarity": Case(
        lambda texts: {"inputs": {"source_sentence": "a", "sentences": texts}, "model": "embed"}, estimated=False
    ),
    "/tokenize": Case(lambda texts: {"inputs": texts, "model": "embed"}),
    "/decode": Case(lambda texts: {"ids": [[5] * len(text.split()) for text in texts]}, estimated=False),
    "/fill": Case(lambda texts: {"texts": [f"{text} [MASK]" for text in texts], "model": "fill"}),
    "/classify": Case(lambda texts: {"texts": texts, "model": "classify"}),
    "/tag": Case(lambda texts: {"texts": texts, "model": "tag", "aggregation_strategy": "none", "ignore_labels": []}),
    "/choose": Case(
        lambda texts: {"context": "a", "choices": texts if len(texts) != 1 else [*texts, "dog"], "model": "choose"}
    ),
    "/detect_replaced": Case(lambda texts: {"texts": texts, "model": "detect-replaced"}),
    "/answer": Case(lambda texts: {"questions": [{"question": "a", "documents": texts}], "model": "answer"}),
    "/search": Case(lambda texts: {"queries": texts}),
    "/ask": Case(lambda texts: {"questions": texts, "passages": 1}),  # whose tokens count as well
    "/compare": Case(lambda texts: {"texts": texts, "model": "embed"}),
    "/attention": Case(lambda texts: {"text": texts[0], "model": "small"}, items=False, estimated=False),
    "/attention_all": Case(lambda texts: {"text": texts[0], "model": "small"}, items=False, estimated=False),
    "/attribute": Case(lambda texts: {"text": texts[0], "model": "classify"}, items=False),
    "/predict_tokens": Case(lambda texts: {"text": texts[0], "model": "fill"}, items=False),
    "/map": Case(lambda texts: {"texts": [*texts, "a"][: max(2, len(texts))], "model": "embed"}),
    "/windows": Case(lambda texts: {"text": texts[0], "model": "embed"}, items=False, estimated=False),
}
each_case = pytest.mark.parametrize("path", sorted(CASES))


def test_every_route_has_a_case() -> None:
    assert {route.path for route in all_routes() if route.method == "POST"} == set(CASES)


@pytest.fixture(scope="module")
def limited(start: Start, models: dict[str, str], small_folder: Any, tmp_path_factory: Any) -> Iterator[Start]:
    """Servers with all kinds of models and an index."""
    folder = tmp_path_factory.mktemp("limits")
    names = ("embed", "classify", "rerank", "fill", "tag", "answer", "choose", "detect-replaced")
    sources = {"small": str(small_folder / "bertie-small")} | {name: models[name] for name in names}
    registry = Registry(sources | {"splade": str(splade_folder(folder)[0])}, devices=["cpu"], budget=2048, max_wait=60)
    with Index.create(folder / "index", registry["embed"].task(Embedder)) as index:
        index.add(["a cat sat", "the dog ran on the mat"])
        yield lambda **limits: start(ServerSettings(Limits(**limits)), over=registry, index=(index, "embed"))
    registry.close()


@pytest.fixture(scope="module")
def low(limited: Start) -> Running:
    return limited(body=2000, items=3, tokens=60, reply=1 << 20)


@pytest.fixture(scope="module")
def no_reply(limited: Start) -> Running:
    return limited(reply=5)


def message(reply: httpx.Response) -> str:
    error = reply.json()
    text = error.get("message") or error["error"]
    return str(text["message"] if isinstance(text, dict) else text)


@each_case
def test_a_request_within_the_limits_is_answered(low: Running, path: str) -> None:
    low.post_json(path, CASES[path].request(["a cat", "mat", "dog"]))


@each_case
def test_body_limit(low: Running, path: str) -> None:
    reply = low.post(path, CASES[path].request(["a " * 2000]))
    assert (reply.status_code, message(reply)) == (413, "the body may have at most 2,000 bytes")


@each_case
def test_item_limit(low: Running, path: str) -> None:
    if CASES[path].items:
        reply = low.post(path, CASES[path].request(["a"] * 4))
        assert (reply.status_code, message(reply)) == (413, "batch size 4 > maximum allowed batch size 3")


@each_case
def test_token_limit(low: Running, path: str) -> None:
    reply = low.post(path, CASES[path].request([LONG]))
    assert reply.status_code == 413
    assert re.search(r"\b60 tokens", message(reply))
    assert "x-compute-tokens" not in reply.headers, "no model has read any of it"


@each_case
def test_reply_limit(no_reply: Running, path: str) -> None:
    registry = no_reply.app.service.registry
    before = sum(registry[name].engine.stats().tokens for name in registry)
    reply = no_reply.post(path, CASES[path].request(["a cat", "dog"]))
    assert reply.status_code == 413
    assert re.match(r"a reply of about [\d,]+ bytes > maximum of 5", message(reply))
    if CASES[path].estimated:
        assert sum(registry[name].engine.stats().tokens for name in registry) == before, "it is refused before the work"


@each_case
def test_deadline(low: Running, path: str) -> None:
    reply = low.post(path, CASES[path].request(["a cat"]), headers={"x-request-timeout": "0.000001"})
    assert (reply.status_code, message(reply)) == (503, "the deadline of the request has passed")


@each_case
def test_work_stops_for_a_client_that_has_gone(low: Running, path: str) -> None:
    (route,) = [route for route in all_routes() if route.path == path]
    context = RequestContext(Ticket())
    context.ticket.cancelled.set()
    with pytest.raises(Cancelled):
        low.app._execute(route, orjson.dumps(CASES[path].request(["a cat"])), context)


@dataclass(eq=False, slots=True)
class Impatient(Ticket):
    """Cancelled at its fourth look: the first is before the handler."""

    looks: int = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks >= 4:
            self.cancelled.set()
        Ticket.check(self)


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/decode", "/windows", "/attention", "/attention_all", "/predict_tokens", "/embed_all", "/search"],
)
def test_long_work_looks_at_the_deadline_again_and_again(limited: Start, path: str) -> None:
    server = limited(reply=1 << 24)
    (route,) = [route for route in all_routes() if route.path == path]
    text = "cat sat on the mat " * (500 if path == "/windows" else 20_000)
    texts = [text] if not CASES[path].items or path == "/embed_all" else ["cat sat " * 100] * 900
    ticket = Impatient(max_tokens=10**6)
    with pytest.raises(Cancelled):
        server.app._execute(route, orjson.dumps(CASES[path].request(texts)), RequestContext(ticket))
    assert ticket.looks == 4
