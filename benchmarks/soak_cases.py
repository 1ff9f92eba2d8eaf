"""The requests of the soak test, with the expected responses from the local task objects, and malformed requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from benchmarks.serve_servers import ROOT
from bertie.client import responses
from bertie.errors import BertieError
from bertie.tasks import Classifier, MaskedLM, Reader, Reranker, Tagger, ZeroShot

TOLERANCE = 1e-4
LABELS = ("love", "war")
QUESTION = "Who was it?"


@dataclass(frozen=True)
class Case:
    """A request and the expected response."""

    path: str
    body: bytes
    parse: Callable[[Any], Any]
    expected: Any

    def find_error(self, body: bytes) -> str | None:
        """What is wrong with a response, if anything."""
        try:
            result = self.parse(json.loads(body))
        except Exception as error:
            return f"{self.path}: unreadable response ({error!r:.100})"
        if is_close(result, self.expected):
            return None
        return f"{self.path}: {result!r:.200} is not {self.expected!r:.200}"


def is_close(a: Any, b: Any) -> bool:
    """Whether two results are equal up to rounding."""
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and is_close(asdict(a), asdict(b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOLERANCE * max(1.0, abs(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_close(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(is_close, a, b))
    if hasattr(a, "tolist") and hasattr(b, "tolist"):
        return is_close(a.tolist(), b.tolist())
    return bool(a == b)


def make_cases(model: str | None, count: int = 24) -> list[Case]:
    """Requests for each task that the model has a head for, with short and long texts."""
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.checkpoints.hub import default_model
    from bertie.tasks import Embedder

    checkpoint = Checkpoint.load(model or default_model())
    draw = random.Random(0)
    words = (ROOT / "src" / "bertie" / "recipes" / "examples" / "book.txt").read_text().split()

    def text() -> str:
        size, start = min(900, int(draw.lognormvariate(2.8, 1.0)) + 2), draw.randrange(len(words))
        return " ".join(words[start : start + size])

    def texts() -> list[str]:
        return [text() for _ in range(draw.choice([1, 1, 1, 2, 5]))]

    cases: list[Case] = []
    for make in (_embed, _openai):
        embedder = Embedder(checkpoint)
        cases += [make(embedder, texts()) for _ in range(count)]
    for kind, make_case in _TASKS.items():
        with suppress(BertieError):  # the model has no head for the task
            task: Any = kind(checkpoint)
            cases += [make_case(task, texts()) for _ in range(count)]
    draw.shuffle(cases)
    return cases


def make_short_cases(model: str | None, count: int = 20) -> list[Case]:
    """Requests of one short text, whose latency is measured."""
    from bertie.checkpoints.hub import default_model
    from bertie.tasks import Embedder

    task = Embedder.load(model or default_model())
    return [_embed(task, [f"a short text, number {i}"]) for i in range(count)]


def _case(path: str, body: dict[str, Any], parse: Callable[[Any], Any], expected: Any) -> Case:
    return Case(path, json.dumps(body).encode(), parse, expected)


def _embed(task: Any, texts: list[str]) -> Case:
    return _case("/embed", {"inputs": texts, "normalize": False}, list, task.embed(texts).tolist())


def _openai(task: Any, texts: list[str]) -> Case:
    vectors = task.embed(texts)
    unit = vectors / (vectors**2).sum(1, keepdims=True) ** 0.5
    return _case("/v1/embeddings", {"input": texts, "encoding_format": "base64"}, responses.parse_vectors, list(unit))


def _classify(task: Any, texts: list[str]) -> Case:
    return _case("/classify", {"texts": texts}, responses.parse_classifications, task.classify(texts))


def _tag(task: Any, texts: list[str]) -> Case:
    return _case("/tag", {"texts": texts}, responses.parse_tags, task.tag(texts))


def _answer(task: Any, texts: list[str]) -> Case:
    questions = [{"question": QUESTION, "documents": text} for text in texts]
    expected = task.answer([(QUESTION, text) for text in texts])
    return _case("/answer", {"questions": questions}, responses.parse_answers, expected)


def _parse_reranked(response: Any) -> Any:
    return [counts for _, counts in responses.parse_scores(response)]


def _zero_shot_scores(results: Any) -> Any:
    """In one order: equally probable labels may come in either."""
    return [dict(sorted(result.scores.items())) for result in results]


def _parse_zero_shot(response: Any) -> Any:
    return _zero_shot_scores(responses.parse_zero_shot(response))


def _rerank(task: Any, texts: list[str]) -> Case:
    expected = [responses.read_counts(asdict(pair)) for pair in task.predict_each([(QUESTION, text) for text in texts])]
    return _case("/v1/rerank", {"query": QUESTION, "documents": texts}, _parse_reranked, expected)


def _zero_shot(task: Any, texts: list[str]) -> Case:
    body = {"texts": texts[:1], "labels": list(LABELS), "multi_label": True}
    expected = _zero_shot_scores(task.classify(texts[:1], LABELS, multi_label=True))
    return _case("/classify", body, _parse_zero_shot, expected)


def _fill(task: Any, texts: list[str]) -> Case:
    masked = [f"{text} {task.tokenizer.mask_token} {texts[0]}" for text in texts]
    return _case("/fill", {"texts": masked}, responses.parse_masks, task.fill(masked))


_TASKS: dict[Any, Callable[[Any, list[str]], Case]] = {
    Classifier: _classify,
    Tagger: _tag,
    Reader: _answer,
    Reranker: _rerank,
    ZeroShot: _zero_shot,
    MaskedLM: _fill,
}

POISON = (
    b'{"texts": ["\\ud800"]}',
    b'{"texts": ["a\\u0000b\\u200b\\ufeff\\ufffe"]}',
    json.dumps({"texts": ["x" * 200_000]}).encode(),
    json.dumps({"texts": ["\u0301" * 20_000]}).encode(),
    json.dumps({"texts": ["[MASK]" * 2000]}).encode(),
    b'{"texts": [""]}',
    b'{"texts": []}',
    json.dumps({"texts": ["a", {"b": 1}]}).encode(),
    json.dumps({"texts": ["👩‍👩‍👧‍👦" * 3000]}).encode(),
    b'{"texts": ["\xff\xfe"]}',
)
GARBAGE = (
    b"\x00" * 100 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Type: application/json\r\n\r\n{{{",
    b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\n{}",
    b"DELETE /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /tag HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"y" * 40_000,
)
