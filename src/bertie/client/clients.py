"""The synchronous and the asynchronous client."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import wraps
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from bertie._version import __version__
from bertie.client import requests, responses
from bertie.client.methods import ClientMethods
from bertie.client.requests import Call, Request
from bertie.client.retries import RetryState, ServerError
from bertie.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from bertie.tasks.results import EmbeddingResult

URL = "http://127.0.0.1:8080"
IN_FLIGHT = 4

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, repr=False)
class _BaseClient(ClientMethods):
    """What both clients share: the URL, the options and the retry policy."""

    url: str = URL
    _: KW_ONLY
    api_key: InitVar[str | None] = None
    model: str | None = None
    timeout: float = 60.0
    retries: int = 8
    in_flight: int = IN_FLIGHT

    def __post_init__(self, api_key: str | None) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise InputError(f"url={self.url!r} must start with http:// or https:// and have a host")
        if not self.timeout > 0:
            raise InputError(f"timeout={self.timeout} must be above 0 seconds")
        if self.retries < 0 or self.in_flight < 1:
            raise InputError(f"retries={self.retries} must be at least 0, and in_flight={self.in_flight} at least 1")
        self._httpx = _import_httpx()
        try:
            self._httpx.URL(self.url)
        except self._httpx.InvalidURL as error:
            raise InputError(f"url={self.url!r}: {error}") from None
        self.url = self.url.rstrip("/")
        headers = {
            "user-agent": f"bertie/{__version__}",
            "content-type": "application/json",
            "x-request-timeout": f"{self.timeout:g}",  # after which the server stops working on it
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        # pool=None: waiting for a free connection does not count against the timeout.
        self._settings = {
            "base_url": self.url,
            "headers": headers,
            "timeout": self._httpx.Timeout(self.timeout, pool=None),
            "limits": self._httpx.Limits(max_connections=self.in_flight, max_keepalive_connections=self.in_flight),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _retry_state(self, request: Request[Any]) -> RetryState:
        return RetryState(self.retries, f"{self.url}{request.path}", request.first)

    def _after_failure(self, state: RetryState, error: Exception) -> float:
        if isinstance(error, self._httpx.ReadTimeout):
            state.remaining = 0  # the server was working on it: sending it again would add to its load
        return state.after_failure(error)


def _import_httpx() -> Any:
    """Import httpx under its newer or older name; huggingface_hub depends on one of them."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            pass
    raise MissingPackageError("the client needs the package httpx2: pip install httpx2")


def _http_arguments(request: Request[Any]) -> dict[str, Any]:
    return {"method": "GET" if request.body is None else "POST", "url": request.path, "content": request.body}


def _parse(response: Any, request: Request[T]) -> list[T]:
    try:
        return request.parse(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(
            f"the response of {response.url} is not one of `bertie serve` {__version__} ({error!r:.100}); is it "
            "another server, or another version?",
            response.status_code,
            response.headers.get("x-request-id"),
        ) from error


class Client(_BaseClient):
    """A client with the methods of the local task objects. It is thread-safe.

    `model`: one of the served models; by default each method uses the first one with a suitable
    head. `timeout`: seconds per request. `retries`: how often a request is repeated if there is no
    connection or the server is overloaded; the pauses grow from 0.25 to 8 seconds, and are at least
    as long as Retry-After says. `in_flight`: concurrent requests, and so connections, which are
    kept alive.

    >>> with Client("http://127.0.0.1:8080") as client:                               # doctest: +SKIP
    ...     client.embed(["A cat sat on the mat.", "The feline rested."]).shape
    ...     client.tag(["Ada Lovelace was born in London."])[0].spans[0].text
    (2, 384)
    'Ada Lovelace'
    """

    def __post_init__(self, api_key: str | None) -> None:
        super().__post_init__(api_key)
        self._http = self._httpx.Client(**self._settings)
        self._pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="bertie-client")

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def embed_each(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimension: int | None = None,
    ) -> Iterator[EmbeddingResult]:
        """Iterate over embeddings, each with how much of its text was read; only requests in flight are held."""
        items = requests.check_texts(texts, "embed")
        prompts = {"prompt": prompt, "prompt_name": prompt_name}
        return self._send_all(self._embed_requests(items, responses.parse_embeddings, prompts, dimension))

    def ready(self) -> bool:
        """Whether the server accepts requests."""
        try:
            return bool(self._http.get("/health").status_code == 200)
        except self._httpx.RequestError:
            return False

    @staticmethod
    def _method(build: Callable[..., Call[T, R]]) -> Callable[..., R]:
        @wraps(build)
        def method(self: Client, *args: Any, **options: Any) -> R:
            call = build(self, *args, **options)
            return call.combine(list(self._send_all(call.requests)))

        return method

    def _send_all(self, pending: Iterable[Request[T]]) -> Iterator[T]:
        """Send requests, a few at a time, and yield results in order."""
        waiting: deque[Future[list[T]]] = deque()
        try:
            for request in pending:
                waiting.append(self._pool.submit(self._send, request))
                if len(waiting) == self.in_flight:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for unfinished in waiting:
                unfinished.cancel()

    def _send(self, request: Request[T]) -> list[T]:
        state = self._retry_state(request)
        while True:
            try:
                response = self._http.request(**_http_arguments(request))
                pause = state.after_response(response)
            except self._httpx.RequestError as error:
                pause = self._after_failure(state, error)
            if pause is None:
                return _parse(response, request)
            time.sleep(pause)


class AsyncClient(_BaseClient):
    """The client for asyncio: the arguments of `Client`, and methods to await. Cancelling one cancels its requests.

    >>> async def main():
    ...     async with AsyncClient("http://127.0.0.1:8080") as client:
    ...         return (await client.embed(["A cat sat on the mat."])).shape
    >>> asyncio.run(main())                                                           # doctest: +SKIP
    (1, 384)
    """

    def __post_init__(self, api_key: str | None) -> None:
        super().__post_init__(api_key)
        self._http = self._httpx.AsyncClient(**self._settings)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def embed_each(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimension: int | None = None,
    ) -> AsyncIterator[EmbeddingResult]:
        """Iterate over embeddings, as `Client.embed_each`."""
        items = requests.check_texts(texts, "embed")
        prompts = {"prompt": prompt, "prompt_name": prompt_name}
        return self._send_all(self._embed_requests(items, responses.parse_embeddings, prompts, dimension))

    async def ready(self) -> bool:
        """Whether the server accepts requests."""
        try:
            return bool((await self._http.get("/health")).status_code == 200)
        except self._httpx.RequestError:
            return False

    @staticmethod
    def _method(build: Callable[..., Call[T, R]]) -> Callable[..., Coroutine[Any, Any, R]]:
        @wraps(build)
        async def method(self: AsyncClient, *args: Any, **options: Any) -> R:
            call = build(self, *args, **options)
            return call.combine([result async for result in self._send_all(call.requests)])

        return method

    async def _send_all(self, pending: Iterable[Request[T]]) -> AsyncIterator[T]:
        waiting: deque[asyncio.Task[list[T]]] = deque()
        try:
            for request in pending:
                waiting.append(asyncio.create_task(self._send(request)))
                if len(waiting) == self.in_flight:
                    for result in await waiting[0]:
                        yield result
                    waiting.popleft()
            while waiting:
                for result in await waiting[0]:
                    yield result
                waiting.popleft()
        finally:
            for unfinished in waiting:
                unfinished.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _send(self, request: Request[T]) -> list[T]:
        state = self._retry_state(request)
        while True:
            try:
                response = await self._http.request(**_http_arguments(request))
                pause = state.after_response(response)
            except self._httpx.RequestError as error:
                pause = self._after_failure(state, error)
            if pause is None:
                return _parse(response, request)
            await asyncio.sleep(pause)
