"""A server's models, with the verbs and the results of the local objects.

A verb that is given many things sends them in several requests, a few of them at a time, and gives results in order.
All that is asked may be asked twice, so what fails for want of room or of a connection is tried again, ever later.

The other side of this is `bertie serve`. Vectors cost no torch here; the results of other verbs are the classes of
`bertie.tasks`, which need it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from bertie._version import __version__
from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError
from bertie.text.tokenizer import checked_text

if TYPE_CHECKING:
    from bertie.search.index import Results
    from bertie.tasks.answer import Answers
    from bertie.tasks.classify import Classification, ZeroShotClassification
    from bertie.tasks.embed import Embedding
    from bertie.tasks.fill_mask import Filled
    from bertie.tasks.rerank import Ranked
    from bertie.tasks.tag import Tagged

URL = "http://127.0.0.1:8080"
ITEMS, CHARACTERS = 64, 200_000  # of one request, at most; a longer text goes alone
PAIRS = 1024  # of texts and labels that a server takes at once
# A server lets one request fill a quarter of its queue, so this many never crowd each other out.
IN_FLIGHT = 4
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the next try, doubled each time
PATIENCE = 60.0  # seconds: a server that wants to be left alone for longer is not waited for

Text = str | tuple[str, str]
Vectors = NDArray[np.float32]
Words = Literal["average", "first", "max", "simple", "none"]
Mode = Literal["hybrid", "dense", "lexical"]
T = TypeVar("T")
S = TypeVar("S")


class ServerError(BertieError):
    """A server that gave no answer though nothing is wrong with what was asked, or none that one can read.

    `status` is that of the last reply, None if none came; `request_id` is what the server's log calls the request.
    """

    def __init__(self, message: str, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.request_id = status, request_id


# --- what a verb asks for, whoever sends it ---


@dataclass(frozen=True, slots=True)
class _Request(Generic[T]):
    """A POST; `first` is the number of its first thing among all."""

    path: str
    body: bytes
    first: int
    read: Callable[[Any], list[T]]


@dataclass(frozen=True, slots=True)
class _Job(Generic[T]):
    """Things of one kind, to be sent in the field `name` of as many requests as they need."""

    path: str
    name: str
    things: Iterable[tuple[Any, int]]  # as JSON has them, and how many characters each has
    options: Mapping[str, Any]
    read: Callable[[Any], list[T]]
    items: int = ITEMS

    def requests(self) -> Iterator[_Request[T]]:
        """Each as soon as it is full."""
        held: list[Any] = []
        first = size = 0
        for thing, characters in self.things:
            if held and (len(held) == self.items or size + characters > CHARACTERS):
                yield self._request(held, first)
                held, first, size = [], first + len(held), 0
            held.append(thing)
            size += characters
        if held:
            yield self._request(held, first)

    def _request(self, held: list[Any], first: int) -> _Request[T]:
        given = {name: value for name, value in self.options.items() if value is not None}
        return _Request(self.path, _json(given | {self.name: held}), first, self.read)


def _json(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


class _Tries:
    """What became of one request so far, and what to do next."""

    def __init__(self, retries: int, where: str, first: int = 0) -> None:
        self.left, self.where, self.first = retries, where, first
        self.pause = FIRST_PAUSE

    def failed(self, error: Exception) -> float:
        """Seconds to wait after there was no reply, or the error that ends it."""
        if not self.left:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ServerError(f"no answer from {self.where}: {what}") from error
        return self._next(0.0)

    def replied(self, response: Any) -> float | None:
        """None: the reply is good. Else as `failed`."""
        if response.status_code == 200:
            return None
        after = _retry_after(response.headers.get("retry-after"))
        if response.status_code in (429, 502, 503) and self.left and after <= PATIENCE:
            return self._next(after)
        raise _error(response, self.where, self.first)

    def _next(self, at_least: float) -> float:
        self.left -= 1
        pause = self.pause * random.uniform(0.5, 1.0)  # so that those who were refused together do not return so
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return at_least + pause


def _retry_after(said: str | None) -> float:
    """Seconds, from either of the two ways to say them."""
    if said is None:
        return 0.0
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return 0.0


def _error(response: Any, where: str, first: int) -> BertieError:
    """A refusal, by its status."""
    status, name = response.status_code, response.headers.get("x-request-id")
    message = _message(response)
    # The server counts from the beginning of the request; whoever reads this, from the beginning of the list.
    message = re.sub(
        r"^(text|question|document) (\d+)", lambda hit: f"{hit[1]} {first + int(hit[2])}", message, count=1
    )
    if status in (400, 413, 422):
        return InputError(message)
    if status == 404:
        return NotFoundError(f"{where}: {message}")
    return ServerError(f"{where} answered {status}: {message}", status, name)


def _message(response: Any) -> str:
    """What an error says, in the shape of whichever API."""
    try:
        body = response.json()
        said = body.get("error", body.get("message"))
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, AttributeError, KeyError):
        return str(response.text)[:200] or str(response.reason_phrase)


def _listed(things: Iterable[T], verb: str, what: str = "texts") -> Iterable[T]:
    if isinstance(things, str | bytes | Mapping) or hasattr(things, "columns") or not isinstance(things, Iterable):
        raise InputError(f"{verb} takes a list of {what}, not {type(things).__name__}; put a single one into a list")
    return things


def _texts(texts: Iterable[str], verb: str, what: str = "text") -> Iterator[tuple[str, int]]:
    for i, text in enumerate(_listed(texts, verb, "queries" if what == "query" else f"{what}s")):
        yield checked_text(text, f"{what} {i}"), len(text)


def _texts_or_pairs(texts: Iterable[Text], verb: str) -> Iterator[tuple[Any, int]]:
    for i, text in enumerate(_listed(texts, verb)):
        if not isinstance(text, tuple | list):
            yield checked_text(text, f"text {i}"), len(text)
        elif len(text) != 2:
            raise InputError(f"text {i} must be a text or a pair of texts, not {len(text)} things")
        else:
            yield [checked_text(one, f"text {i}") for one in text], sum(map(len, text))


def _questions(questions: Iterable[tuple[str, str | Sequence[str]]]) -> Iterator[tuple[Any, int]]:
    for i, one in enumerate(_listed(questions, "answer", "pairs of a question and its documents")):
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise InputError(f"question {i} must be a pair of a question and its documents")
        question, given = checked_text(one[0], f"question {i}"), one[1]
        documents = [given] if isinstance(given, str) else list(_listed(given, f"question {i}", "documents"))
        for document in documents:
            checked_text(document, f"question {i}, document")
        yield {"question": question, "documents": documents}, len(question) + sum(map(len, documents))


# --- what a server says ---


def _vector(item: Any) -> Vectors:
    return np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4").astype(np.float32, copy=False)


def _read(item: Any) -> dict[str, int]:
    return {name: item[name] for name in ("tokens_total", "tokens_read", "windows")}


def _vectors(reply: Any) -> list[Vectors]:
    return [_vector(item) for item in reply["data"]]


def _embeddings(reply: Any) -> list[Embedding]:
    from bertie.tasks.embed import Embedding

    return [Embedding(_vector(item), **_read(item)) for item in reply["data"]]


def _classifications(reply: Any) -> list[Classification]:
    from bertie.tasks.classify import Classification

    return [Classification(**item) for item in reply["results"]]


def _zero_shot(reply: Any) -> list[ZeroShotClassification]:
    from bertie.tasks.classify import ZeroShotClassification

    return [
        ZeroShotClassification(item["label"], item["score"], item["scores"], **_read(item)) for item in reply["results"]
    ]


def _tagged(reply: Any) -> list[Tagged]:
    from bertie.tasks.tag import Span, Tagged

    return [Tagged(tuple(Span(**span) for span in item["spans"]), **_read(item)) for item in reply["results"]]


def _answers(reply: Any) -> list[Answers]:
    from bertie.tasks.answer import Answer, Answers

    return [
        Answers(tuple(Answer(**one) for one in item["answers"]), item["no_answer"], **_read(item))
        for item in reply["results"]
    ]


def _filled(reply: Any) -> list[Filled]:
    from bertie.tasks.fill_mask import Candidate, Filled, Mask

    return [
        Filled(
            tuple(
                Mask(mask["start"], mask["end"], tuple(Candidate(**one) for one in mask["candidates"]))
                for mask in item["masks"]
            ),
            **_read(item),
        )
        for item in reply["results"]
    ]


def _scored(reply: Any) -> list[tuple[float, dict[str, int]]]:
    """In the order in which the documents were sent."""
    return [(one["relevance_score"], _read(one)) for one in sorted(reply["results"], key=lambda one: one["index"])]


def _ranked(scored: Iterable[tuple[float, dict[str, int]]], texts: Sequence[str], top_k: int | None) -> list[Ranked]:
    from bertie.tasks.rerank import Ranked

    found = [Ranked(i, score, texts[i], **read) for i, (score, read) in enumerate(scored)]
    return sorted(found, key=lambda one: (-one.score, one.index))[:top_k]


def _results(reply: Any) -> list[Results]:
    from bertie.search.index import Hit, Results

    return [
        Results(
            one["query"],
            tuple(
                Hit(
                    **hit
                    | {
                        "headings": tuple(hit["headings"]),
                        "highlights": tuple((start, end) for start, end in hit["highlights"]),
                        "source": None,  # a server names no files
                    }
                )
                for hit in one["hits"]
            ),
            one["timings"],
        )
        for one in reply["results"]
    ]


def _block(reply: Any, rows: int | None) -> Vectors:
    """(N + M, N + M) -> (N, M), of N rows; or all of it."""
    whole = np.array(reply["similarity"], dtype=np.float32)
    return whole if rows is None else np.ascontiguousarray(whole[:rows, rows:])


# --- clients ---


class _Asking:
    """What both clients are: an address, and how to ask there."""

    def __init__(
        self,
        url: str = URL,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        retries: int = 8,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise InputError(f"url={url!r} must begin with http:// or https:// and name a host")
        if not timeout > 0:
            raise InputError(f"timeout={timeout} must be above 0 seconds")
        if retries < 0 or in_flight < 1:
            raise InputError(f"retries={retries} must be at least 0, and in_flight={in_flight} at least 1")
        self.url, self.model, self._retries, self._in_flight = url.rstrip("/"), model, retries, in_flight
        self._library = _library()
        headers = {
            "user-agent": f"bertie/{__version__}",
            "content-type": "application/json",
            "x-request-timeout": f"{timeout:g}",  # what takes longer, the server need not do
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        # Whoever finds all connections in use waits for one, however long that takes.
        self._settings = {
            "base_url": self.url,
            "headers": headers,
            "timeout": self._library.Timeout(timeout, pool=None),
            "limits": self._library.Limits(max_connections=in_flight, max_keepalive_connections=in_flight),
        }
        try:
            self._open()
        except self._library.InvalidURL as error:
            raise InputError(f"url={url!r}: {error}") from None

    def _open(self) -> None:
        """Make the connections' pool."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _tries(self, path: str, first: int = 0) -> _Tries:
        return _Tries(self._retries, f"{self.url}{path}", first)

    def _failed(self, tries: _Tries, error: Exception) -> float:
        if isinstance(error, self._library.ReadTimeout):
            tries.left = 0  # the server was at work: to ask again would make it worse
        return tries.failed(error)

    def _understood(self, response: Any, read: Callable[[Any], S]) -> S:
        try:
            return read(response.json())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(
                f"the reply of {response.url} is not as `bertie serve` {__version__} gives it ({error!r:.100}); is it "
                "one, and not much older or newer?",
                response.status_code,
                response.headers.get("x-request-id"),
            ) from error

    # --- the verbs, as what to send ---

    def _embed(
        self, texts: Iterable[str], prompt: str | None, dimensions: int | None, read: Callable[[Any], list[T]]
    ) -> _Job[T]:
        options = {"model": self.model, "prompt": prompt, "dimensions": dimensions, "encoding_format": "base64"}
        # As the model says, which is what it does here, too; OpenAI's API makes the length 1.
        return _Job("/v1/embeddings", "input", _texts(texts, "embed"), options | {"normalize": False}, read)

    def _classify(self, texts: Iterable[Text], head: str | None) -> _Job[Classification]:
        options = {"model": self.model, "head": head}
        return _Job("/classify", "texts", _texts_or_pairs(texts, "classify"), options, _classifications)

    def _zero_shot(
        self, texts: Iterable[str], labels: Sequence[str], template: str | None, multi: bool, head: str | None
    ) -> _Job[ZeroShotClassification]:
        names = [text for text, _ in _texts(labels, "labels=", "label")]
        if not names:
            raise InputError("labels=[] must be at least one")
        options = {"model": self.model, "head": head, "labels": names, "template": template, "multi": multi}
        items = max(1, min(ITEMS, PAIRS // len(names)))
        return _Job("/classify", "texts", _texts(texts, "zero_shot"), options, _zero_shot, items)

    def _tag(self, texts: Iterable[str], words: str, outside: Iterable[str], head: str | None) -> _Job[Tagged]:
        labels = list(_listed(outside, "outside=", "labels"))
        options = {"model": self.model, "head": head, "words": words, "outside": labels}
        return _Job("/tag", "texts", _texts(texts, "tag"), options, _tagged)

    def _answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        top_k: int,
        longest: int,
        threshold: float | None,
        head: str | None,
    ) -> _Job[Answers]:
        options = {
            "model": self.model,
            "head": head,
            "top_k": top_k,
            "longest": longest,
            "threshold": threshold,
        }
        return _Job("/answer", "questions", _questions(questions), options, _answers)

    def _rerank(self, query: str, documents: Sequence[str], head: str | None) -> _Job[tuple[float, dict[str, int]]]:
        options = {"model": self.model, "head": head, "query": checked_text(query, "the query"), "own_scores": True}
        return _Job("/v1/rerank", "documents", _texts(documents, "rerank", "document"), options, _scored)

    def _fill(
        self, texts: Iterable[str], top_k: int, candidates: Sequence[str] | None, head: str | None
    ) -> _Job[Filled]:
        words = None if candidates is None else list(_listed(candidates, "candidates=", "words"))
        options = {"model": self.model, "head": head, "top_k": top_k, "candidates": words}
        return _Job("/fill", "texts", _texts(texts, "fill"), options, _filled)

    def _compare(self, a: Iterable[str], b: Iterable[str] | None) -> tuple[bytes, Callable[[Any], Vectors]]:
        """One request, as each text is to be compared to each."""
        one = [text for text, _ in _texts(a, "similarity")]
        two = None if b is None else [text for text, _ in _texts(b, "similarity")]
        body = {"texts": one + (two or [])} | ({} if self.model is None else {"model": self.model})
        return _json(body), partial(_block, rows=None if two is None else len(one))

    def _search(self, queries: Iterable[str], **options: Any) -> _Job[Results]:
        return _Job("/search", "queries", _texts(queries, "search_each", "query"), options, _results)


def _library() -> Any:
    """httpx, by its older or its newer name; huggingface_hub brings one of them."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            pass
    raise MissingPackageError("a client needs the package httpx2: pip install httpx2")


class Client(_Asking):
    """A server's models, by the verbs of the local objects. Threads may share it.

    `model`: one of the served models; without a name, each verb uses the first that can do it. `timeout`: seconds for
    each request. `retries`: how often a request is sent again if there was no connection or no room; the pauses before
    that grow from a quarter of a second to eight, and are at least as long as the server asks for. `in_flight`:
    requests at a time, and so connections, which are kept.

    >>> with Client("http://127.0.0.1:8080") as client:                               # doctest: +SKIP
    ...     client.embed(["A cat sat on the mat.", "The feline rested."]).shape
    ...     client.tag(["Ada Lovelace was born in London."])[0].spans[0].text
    (2, 384)
    'Ada Lovelace'
    """

    def _open(self) -> None:
        self._http = self._library.Client(**self._settings)
        self._pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="bertie-client")

    def close(self) -> None:
        """Give up the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _send(self, method: str, path: str, body: bytes | None, first: int, read: Callable[[Any], S]) -> S:
        tries = self._tries(path, first)
        while True:
            try:
                response = self._http.request(method, path, content=body)
                pause = tries.replied(response)
            except self._library.RequestError as error:
                pause = self._failed(tries, error)
            if pause is None:
                return self._understood(response, read)
            time.sleep(pause)

    def _ask(self, one: _Request[T]) -> list[T]:
        return self._send("POST", one.path, one.body, one.first, one.read)

    def _each(self, job: _Job[T]) -> Iterator[T]:
        """Results in order, with requests under way while they are looked at."""
        waiting: deque[Future[list[T]]] = deque()
        try:
            for one in job.requests():
                waiting.append(self._pool.submit(self._ask, one))
                if len(waiting) == self._in_flight:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()

    def embed(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """(N, dimension) one vector a text, in order, as `Embedder.embed`; of each vector its first `dimensions`."""
        vectors = list(self._each(self._embed(texts, prompt, dimensions, _vectors)))
        # An empty list has vectors of a length, too: that of an empty text's.
        return np.stack(vectors) if vectors else self.embed([""], prompt=prompt, dimensions=dimensions)[:0]

    def embed_each(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> Iterator[Embedding]:
        """As `embed`, one by one, each with how much of its text was read; few are held at a time."""
        return self._each(self._embed(texts, prompt, dimensions, _embeddings))

    def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> NDArray[np.float32]:
        """(N, M) how alike each of `a` is to each of `b`, or of `a` itself, as `Embedder.similarity`.

        In one request: what is too much for one is better embedded, and compared here.
        """
        body, read = self._compare(a, b)
        return self._send("POST", "/compare", body, 0, read)

    def classify(self, texts: Iterable[Text], *, head: str | None = None) -> list[Classification]:
        """One classification a text or pair, in order, as `Classifier.classify`."""
        return list(self._each(self._classify(texts, head)))

    def zero_shot(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi: bool = False,
        head: str | None = None,
    ) -> list[ZeroShotClassification]:
        """The scores of any labels for each text, as `ZeroShot.classify`."""
        return list(self._each(self._zero_shot(texts, labels, template, multi, head)))

    def tag(
        self,
        texts: Iterable[str],
        *,
        words: Words = "average",
        outside: Iterable[str] = ("O",),
        head: str | None = None,
    ) -> list[Tagged]:
        """The labelled spans of each text, as `Tagger.tag`."""
        return list(self._each(self._tag(texts, words, outside, head)))

    def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        longest: int = 30,
        threshold: float | None = None,
        head: str | None = None,
    ) -> list[Answers]:
        """The best answers to each question from its document or documents, as `Reader.answer`."""
        return list(self._each(self._answer(questions, top_k, longest, threshold, head)))

    def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, head: str | None = None
    ) -> list[Ranked]:
        """The documents, best first, as `Reranker.rerank`; the first `top_k` of them if that is given."""
        texts, top_k = list(_listed(documents, "rerank", "documents")), _at_least_one(top_k)
        return _ranked(self._each(self._rerank(query, texts, head)), texts, top_k)

    def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        head: str | None = None,
    ) -> list[Filled]:
        """The best tokens for each mask of each text, as `MaskedLM.fill`."""
        return list(self._each(self._fill(texts, top_k, candidates, head)))

    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
    ) -> Results:
        """The k passages of the server's index that answer a query best, as `Index.search`."""
        return self.search_each([query], k, mode=mode, rerank=rerank, where=where, depth=depth)[0]

    def search_each(
        self,
        queries: Iterable[str],
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
    ) -> list[Results]:
        """As `search`, of several queries."""
        return list(self._each(self._search(queries, k=k, mode=mode, rerank=rerank, where=where, depth=depth)))

    def models(self) -> list[str]:
        """The names of the served models."""
        return self._send("GET", "/v1/models", None, 0, _names)

    def info(self) -> dict[str, Any]:
        """What is served, with which heads and within which limits."""
        return self._send("GET", "/info", None, 0, dict)

    def ready(self) -> bool:
        """Whether the server takes requests now."""
        try:
            return bool(self._http.get("/health").status_code == 200)
        except self._library.RequestError:
            return False


class AsyncClient(_Asking):
    """As `Client`, for asyncio: the same arguments, and verbs to be awaited. To cancel one takes its requests back.

    >>> async def main():
    ...     async with AsyncClient("http://127.0.0.1:8080") as client:
    ...         return (await client.embed(["A cat sat on the mat."])).shape
    >>> asyncio.run(main())                                                           # doctest: +SKIP
    (1, 384)
    """

    def _open(self) -> None:
        self._http = self._library.AsyncClient(**self._settings)

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, method: str, path: str, body: bytes | None, first: int, read: Callable[[Any], S]) -> S:
        tries = self._tries(path, first)
        while True:
            try:
                response = await self._http.request(method, path, content=body)
                pause = tries.replied(response)
            except self._library.RequestError as error:
                pause = self._failed(tries, error)
            if pause is None:
                return self._understood(response, read)
            await asyncio.sleep(pause)

    async def _ask(self, one: _Request[T]) -> list[T]:
        return await self._send("POST", one.path, one.body, one.first, one.read)

    async def _each(self, job: _Job[T]) -> AsyncIterator[T]:
        waiting: deque[asyncio.Task[list[T]]] = deque()
        try:
            for one in job.requests():
                waiting.append(asyncio.create_task(self._ask(one)))
                if len(waiting) == self._in_flight:
                    for found in await waiting[0]:
                        yield found
                    waiting.popleft()
            while waiting:
                for found in await waiting[0]:
                    yield found
                waiting.popleft()
        finally:
            for left in waiting:
                left.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _all(self, job: _Job[T]) -> list[T]:
        return [one async for one in self._each(job)]

    async def embed(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """As `Client.embed`."""
        vectors = await self._all(self._embed(texts, prompt, dimensions, _vectors))
        if not vectors:
            return (await self.embed([""], prompt=prompt, dimensions=dimensions))[:0]
        return np.stack(vectors)

    def embed_each(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> AsyncIterator[Embedding]:
        """As `Client.embed_each`."""
        return self._each(self._embed(texts, prompt, dimensions, _embeddings))

    async def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> NDArray[np.float32]:
        """As `Client.similarity`."""
        body, read = self._compare(a, b)
        return await self._send("POST", "/compare", body, 0, read)

    async def classify(self, texts: Iterable[Text], *, head: str | None = None) -> list[Classification]:
        """As `Client.classify`."""
        return await self._all(self._classify(texts, head))

    async def zero_shot(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi: bool = False,
        head: str | None = None,
    ) -> list[ZeroShotClassification]:
        """As `Client.zero_shot`."""
        return await self._all(self._zero_shot(texts, labels, template, multi, head))

    async def tag(
        self,
        texts: Iterable[str],
        *,
        words: Words = "average",
        outside: Iterable[str] = ("O",),
        head: str | None = None,
    ) -> list[Tagged]:
        """As `Client.tag`."""
        return await self._all(self._tag(texts, words, outside, head))

    async def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        longest: int = 30,
        threshold: float | None = None,
        head: str | None = None,
    ) -> list[Answers]:
        """As `Client.answer`."""
        return await self._all(self._answer(questions, top_k, longest, threshold, head))

    async def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, head: str | None = None
    ) -> list[Ranked]:
        """As `Client.rerank`."""
        texts, top_k = list(_listed(documents, "rerank", "documents")), _at_least_one(top_k)
        return _ranked(await self._all(self._rerank(query, texts, head)), texts, top_k)

    async def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        head: str | None = None,
    ) -> list[Filled]:
        """As `Client.fill`."""
        return await self._all(self._fill(texts, top_k, candidates, head))

    async def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
    ) -> Results:
        """As `Client.search`."""
        return (await self.search_each([query], k, mode=mode, rerank=rerank, where=where, depth=depth))[0]

    async def search_each(
        self,
        queries: Iterable[str],
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
    ) -> list[Results]:
        """As `Client.search_each`."""
        return await self._all(self._search(queries, k=k, mode=mode, rerank=rerank, where=where, depth=depth))

    async def models(self) -> list[str]:
        """As `Client.models`."""
        return await self._send("GET", "/v1/models", None, 0, _names)

    async def info(self) -> dict[str, Any]:
        """As `Client.info`."""
        return await self._send("GET", "/info", None, 0, dict)

    async def ready(self) -> bool:
        """As `Client.ready`."""
        try:
            return bool((await self._http.get("/health")).status_code == 200)
        except self._library.RequestError:
            return False


def _names(reply: Any) -> list[str]:
    return [one["id"] for one in reply["data"]]


def _at_least_one(top_k: int | None) -> int | None:
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    return top_k
