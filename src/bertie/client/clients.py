"""Two clients that send what the verbs ask for: one for threads, one for asyncio."""

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
from bertie.client import calls, replies
from bertie.client.calls import Call, Request
from bertie.client.tries import ServerError, Tries
from bertie.client.verbs import Verbs
from bertie.errors import InputError, MissingPackageError

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedding

URL = "http://127.0.0.1:8080"
# A server lets one request fill a quarter of its queue, so this many never crowd each other out.
IN_FLIGHT = 4

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, repr=False)
class _Asking(Verbs):
    """What both clients are: an address, and how to ask there."""

    url: str = URL
    _: KW_ONLY
    api_key: InitVar[str | None] = None
    model: str | None = None
    timeout: float = 60.0
    retries: int = 8
    in_flight: int = IN_FLIGHT

    def __post_init__(self, api_key: str | None) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise InputError(f"url={self.url!r} must begin with http:// or https:// and name a host")
        if not self.timeout > 0:
            raise InputError(f"timeout={self.timeout} must be above 0 seconds")
        if self.retries < 0 or self.in_flight < 1:
            raise InputError(f"retries={self.retries} must be at least 0, and in_flight={self.in_flight} at least 1")
        self._library = _library()
        try:
            self._library.URL(self.url)
        except self._library.InvalidURL as error:
            raise InputError(f"url={self.url!r}: {error}") from None
        self.url = self.url.rstrip("/")
        headers = {
            "user-agent": f"bertie/{__version__}",
            "content-type": "application/json",
            "x-request-timeout": f"{self.timeout:g}",  # what takes longer, the server need not do
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        # Whoever finds all connections in use waits for one, however long that takes.
        self._settings = {
            "base_url": self.url,
            "headers": headers,
            "timeout": self._library.Timeout(self.timeout, pool=None),
            "limits": self._library.Limits(max_connections=self.in_flight, max_keepalive_connections=self.in_flight),
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _tries(self, one: Request[Any]) -> Tries:
        return Tries(self.retries, f"{self.url}{one.path}", one.first)

    def _failed(self, tries: Tries, error: Exception) -> float:
        if isinstance(error, self._library.ReadTimeout):
            tries.left = 0  # the server was at work: to ask again would make it worse
        return tries.failed(error)


def _library() -> Any:
    """httpx, by its older or its newer name; huggingface_hub brings one of them."""
    for name in ("httpx2", "httpx"):
        try:
            return import_module(name)
        except ModuleNotFoundError:
            pass
    raise MissingPackageError("a client needs the package httpx2: pip install httpx2")


def _sent(one: Request[Any]) -> dict[str, Any]:
    return {"method": "GET" if one.body is None else "POST", "url": one.path, "content": one.body}


def _understood(response: Any, one: Request[T]) -> list[T]:
    try:
        return one.read(response.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(
            f"the reply of {response.url} is not as `bertie serve` {__version__} gives it ({error!r:.100}); is it "
            "one, and not much older or newer?",
            response.status_code,
            response.headers.get("x-request-id"),
        ) from error


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

    def __post_init__(self, api_key: str | None) -> None:
        super().__post_init__(api_key)
        self._http = self._library.Client(**self._settings)
        self._pool = ThreadPoolExecutor(self.in_flight, thread_name_prefix="bertie-client")

    def close(self) -> None:
        """Give up the connections."""
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def embed_each(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> Iterator[Embedding]:
        """As `embed`, one by one, each with how much of its text was read; few are held at a time."""
        things, options = calls.texts(texts, "embed"), {"prompt": prompt, "dimensions": dimensions}
        return self._each(self._vectors(things, replies.embeddings, **options))

    def ready(self) -> bool:
        """Whether the server takes requests now."""
        try:
            return bool(self._http.get("/health").status_code == 200)
        except self._library.RequestError:
            return False

    @staticmethod
    def _asking(plan: Callable[..., Call[T, R]]) -> Callable[..., R]:
        @wraps(plan)
        def verb(self: Client, *args: Any, **options: Any) -> R:
            call = plan(self, *args, **options)
            return call.finish(list(self._each(call.requests)))

        return verb

    def _each(self, requests: Iterable[Request[T]]) -> Iterator[T]:
        """Results in order, with requests under way while they are looked at."""
        waiting: deque[Future[list[T]]] = deque()
        try:
            for one in requests:
                waiting.append(self._pool.submit(self._ask, one))
                if len(waiting) == self.in_flight:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for left in waiting:
                left.cancel()

    def _ask(self, one: Request[T]) -> list[T]:
        tries = self._tries(one)
        while True:
            try:
                response = self._http.request(**_sent(one))
                pause = tries.replied(response)
            except self._library.RequestError as error:
                pause = self._failed(tries, error)
            if pause is None:
                return _understood(response, one)
            time.sleep(pause)


class AsyncClient(_Asking):
    """As `Client`, for asyncio: the same arguments, and verbs to be awaited. To cancel one takes its requests back.

    >>> async def main():
    ...     async with AsyncClient("http://127.0.0.1:8080") as client:
    ...         return (await client.embed(["A cat sat on the mat."])).shape
    >>> asyncio.run(main())                                                           # doctest: +SKIP
    (1, 384)
    """

    def __post_init__(self, api_key: str | None) -> None:
        super().__post_init__(api_key)
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

    def embed_each(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> AsyncIterator[Embedding]:
        """As `Client.embed_each`."""
        things, options = calls.texts(texts, "embed"), {"prompt": prompt, "dimensions": dimensions}
        return self._each(self._vectors(things, replies.embeddings, **options))

    async def ready(self) -> bool:
        """As `Client.ready`."""
        try:
            return bool((await self._http.get("/health")).status_code == 200)
        except self._library.RequestError:
            return False

    @staticmethod
    def _asking(plan: Callable[..., Call[T, R]]) -> Callable[..., Coroutine[Any, Any, R]]:
        @wraps(plan)
        async def verb(self: AsyncClient, *args: Any, **options: Any) -> R:
            call = plan(self, *args, **options)
            return call.finish([one async for one in self._each(call.requests)])

        return verb

    async def _each(self, requests: Iterable[Request[T]]) -> AsyncIterator[T]:
        waiting: deque[asyncio.Task[list[T]]] = deque()
        try:
            for one in requests:
                waiting.append(asyncio.create_task(self._ask(one)))
                if len(waiting) == self.in_flight:
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

    async def _ask(self, one: Request[T]) -> list[T]:
        tries = self._tries(one)
        while True:
            try:
                response = await self._http.request(**_sent(one))
                pause = tries.replied(response)
            except self._library.RequestError as error:
                pause = self._failed(tries, error)
            if pause is None:
                return _understood(response, one)
            await asyncio.sleep(pause)
