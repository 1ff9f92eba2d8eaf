"""The server as an ASGI application: who may ask, how much, in which thread, and how each API hears of trouble.

There is no framework in between. All requests go one way through one function (`App._answer`), bodies are read as JSON
in the request's own thread instead of on the event loop, where a large one would hold up all others, and four APIs with
three shapes of errors leave little for a framework to do; the description for OpenAPI comes from the same classes that
check what comes in.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError
from bertie.serve import endpoints, views
from bertie.serve.auth import Key, Keys
from bertie.serve.endpoints import ROUTES, Desk, Job, Route, current_job
from bertie.serve.limits import LEFT, Limits, header, read_body
from bertie.serve.logs import Log
from bertie.serve.memory import give_back
from bertie.serve.metrics import Metrics
from bertie.serve.openapi import description
from bertie.serve.problems import Problem, Style
from bertie.serve.queue import Cancelled, Closed, Expired, Refused, Ticket

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.serve.registry import Registry

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
TIDY = 30  # seconds after which freed memory is given back
_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SAFE: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_NOTHING = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_PAGE = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
LOCAL = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server is to behave."""

    limits: Limits = field(default_factory=Limits)
    deadline: float = 30.0  # seconds that a request may take
    hosts: tuple[str, ...] = ()  # names that it may be called by; none: any
    log_texts: bool = False


@dataclass(slots=True)
class _Reply:
    status: int
    body: bytes
    kind: bytes = JSON
    headers: Headers = field(default_factory=list)


class App:
    """The application.

    >>> app = App(Registry(["bertie-small"]), Settings())                # doctest: +SKIP
    >>> uvicorn.run(app)                                                # doctest: +SKIP
    """

    def __init__(
        self,
        registry: Registry,
        settings: Settings | None = None,
        *,
        keys: Keys | None = None,
        index: tuple[Index, str] | None = None,
        metrics: Metrics | None = None,
        log: Log | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.limits = self.settings.limits
        self.desk = Desk(registry, self.limits, index)
        self.keys, self.metrics, self.log = keys, metrics or Metrics(), log or Log()
        self.draining = False  # no longer ready for more, though what comes is answered
        self.under_way = 0
        self._pool = ThreadPoolExecutor(self.limits.requests, thread_name_prefix="bertie-request")
        self._routes = {route.path: route for route in ROUTES}
        self._plain: dict[str, Callable[[], _Reply]] = {
            "/": lambda: self._file("index.html"),
            "/health": self._health,
            "/metrics": lambda: _Reply(200, self.metrics.text().encode(), b"text/plain; version=0.0.4"),
            "/openapi.json": self._description,
            **{f"/page/{name}": lambda name=name: self._file(name) for name in views.FILES},  # type: ignore[misc]
        }
        self._described: bytes | None = None
        self.metrics.before(self._look)

    # --- ASGI ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's life."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)
        else:
            raise RuntimeError(f"only HTTP is spoken here, not {scope['type']!r}")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        ticking = asyncio.create_task(self._tick())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        ticking.cancel()
        self.draining = True
        await asyncio.to_thread(self.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _tick(self) -> None:
        for second in itertools.count():
            self.metrics.save()
            if second % TIDY == 0:
                await asyncio.to_thread(give_back)
            await asyncio.sleep(1)

    def stop(self) -> None:
        """Answer all that wait."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        """Answer all that wait, and let the models go."""
        self.stop()
        self.desk.registry.close()

    def reload(self) -> None:
        """Load all models anew; one that cannot be stays as it was."""
        for name in self.desk.names:
            try:
                self.desk.registry.reload(name)
                self.log("reloaded", model=name)
            except Exception as error:
                self.log.error("reload failed", error, model=name)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        given = header(scope, b"x-request-id")
        name = given if given is not None and _ID.fullmatch(given) else os.urandom(8).hex().encode()
        job = Job(Ticket(name.decode()), self.limits)
        path = scope["path"]
        route = self._routes.get(path)
        known = path if route is not None or path in self._plain else "other"
        said: dict[str, Any] = {}
        try:
            reply = await self._answer(scope, receive, route, job, said)
        except Exception as error:
            problem = self._problem(error, said)
            said["problem"] = problem.kind
            reply = self._refusal(problem, _style(path, route))
            if problem.kind == "internal":
                self.log.error("failed", error, id=job.ticket.id)
        seconds = time.perf_counter() - begun
        reply.headers.append((b"x-request-id", name))
        if job.tokens or job.read["tokens_total"]:
            reply.headers += _spent(job, seconds)
        self.metrics.requests.add(1, known, str(reply.status))
        self.metrics.request_seconds.add(seconds, known)
        if job.ticket.tokens:
            self.metrics.queue_seconds.add(job.ticket.queue_s, known)
        self._log_request(scope, reply, job, said, seconds)
        if said.get("problem") != "cancelled":
            await _send(send, reply)

    def _log_request(self, scope: Scope, reply: _Reply, job: Job, said: dict[str, Any], seconds: float) -> None:
        if reply.status == 200 and scope["path"] in ("/health", "/metrics"):
            return  # asked every few seconds, by machines
        self.log(
            "request",
            id=job.ticket.id,
            method=scope["method"],
            path=scope["path"][:200] if said.get("known") else None,
            status=reply.status,
            seconds=round(seconds, 6),
            queue_s=round(job.ticket.queue_s, 6) or None,
            device_s=round(job.ticket.device_s, 6) or None,
            tokens=job.ticket.tokens or None,
            model=job.model or None,
            key=said.get("key"),
            problem=said.get("problem"),
            body=said.get("body"),
        )

    # --- one request ---

    async def _answer(
        self, scope: Scope, receive: Receive, route: Route | None, job: Job, said: dict[str, Any]
    ) -> _Reply:
        path, method = scope["path"], scope["method"]
        self._check_host(scope)
        plain = self._plain.get(path)
        said["known"] = plain is not None or route is not None
        key = None
        if self.keys is not None and (plain is None or path == "/metrics"):  # what all may see needs none
            key = self.keys.find(header(scope, b"authorization"))
            said["key"] = key.name
        if plain is not None:
            _allow(method, "GET", "HEAD")
            return plain()
        if route is None:
            if path.startswith("/v1/models/"):
                _allow(method, "GET", "HEAD")
                return _Reply(200, orjson.dumps(endpoints.model_item(self.desk, path.removeprefix("/v1/models/"))))
            raise Problem("path", "there is nothing here; /openapi.json says what there is")
        if route.method == "GET":
            _allow(method, "GET", "HEAD")
            return _Reply(200, orjson.dumps(route.work(self.desk, None, job)))
        _allow(method, "POST")
        return await self._post(scope, receive, route, job, key, said)

    async def _post(
        self, scope: Scope, receive: Receive, route: Route, job: Job, key: Key | None, said: dict[str, Any]
    ) -> _Reply:
        if self.under_way >= self.limits.requests:
            raise Problem("full", f"{self.under_way} requests are under way, and no more may be", retry_after=1.0)
        self.desk.registry.check()
        if key is not None:
            key.admit()
        kind = header(scope, b"content-type") or b""
        if kind.partition(b";")[0].strip().lower() != JSON:  # which pages of other sites cannot send unasked
            raise Problem("media", "the body must be sent as 'Content-Type: application/json'")
        job.ticket.deadline = time.monotonic() + _patience(scope, self.settings.deadline)
        self.under_way += 1
        try:
            body = await read_body(scope, receive, self.limits)
            if self.settings.log_texts:
                said["body"] = body[:10_000].decode("utf-8", "replace")
            scope[LEFT] = job.ticket.cancelled.set
            done = await asyncio.get_running_loop().run_in_executor(self._pool, self._work, route, body, job)
            return _Reply(200, done)
        finally:
            self.under_way -= 1
            if key is not None:
                key.spend(job.tokens)

    def _work(self, route: Route, body: bytes, job: Job) -> bytes:
        """In a thread: from JSON to JSON."""
        assert route.takes is not None
        try:
            ask = route.takes.model_validate_json(body)
        except ValidationError as error:
            raise _invalid(error) from None
        if job.ticket.cancelled.is_set():
            raise Problem("cancelled", "the client has left")
        before = current_job.set(job)
        try:
            with job.stack:
                found = route.work(self.desk, ask, job)
        finally:  # or a thread with nothing to do would hold its last request, and so a model that was reloaded since
            current_job.reset(before)
            job.held.clear()
        return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)

    def _problem(self, error: Exception, said: dict[str, Any]) -> Problem:
        """What an error means for a request."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, Refused):
            return Problem("full", "the server is busy; come back later", retry_after=error.retry_after)
        if isinstance(error, Expired):
            return Problem("late", "there was no answer within the time that a request may take", retry_after=1.0)
        if isinstance(error, Cancelled):
            return Problem("cancelled", "the client has left")
        if isinstance(error, Closed):
            return Problem("closing", "the server is shutting down", retry_after=1.0)
        if isinstance(error, MissingPackageError):
            return Problem("unable", "the server lacks a package for this")
        if isinstance(error, InputError | NotFoundError):
            return Problem("input", self._discreet(str(error)))
        if isinstance(error, BertieError | RuntimeError | MemoryError):
            said["error"] = type(error).__name__
            return Problem("backend", "the model failed on this request")
        return Problem("internal", "this should not have happened; the log has a line with this request's id")

    def _discreet(self, text: str) -> str:
        """Without the folders that models were loaded from."""
        for name in self.desk.names:
            source = self.desk.registry[name].checkpoint.source
            if source and source != name:
                text = text.replace(source, name)
        return text

    def _refusal(self, problem: Problem, style: Style) -> _Reply:
        body = orjson.dumps(problem.reply(style))
        return _Reply(problem.status(style), body, JSON, problem.headers())

    def _check_host(self, scope: Scope) -> None:
        """A name that leads here by a trick of some page's DNS is not ours."""
        if self.settings.hosts:
            host = (header(scope, b"host") or b"").decode("latin-1").lower()
            if re.sub(r":\d*$", "", host) not in self.settings.hosts:
                raise Problem("host", "this server does not go by that name; see --allow-host")

    # --- what needs no thread ---

    def _health(self) -> _Reply:
        if self.draining or not self.desk.registry.ready:
            return _Reply(503, orjson.dumps({"error": "unhealthy", "error_type": "Unhealthy"}))
        return _Reply(200, b"", b"text/plain")

    def _description(self) -> _Reply:
        if self._described is None:
            self._described = orjson.dumps(description(keys=self.keys is not None))
        return _Reply(200, self._described)

    def _file(self, name: str) -> _Reply:
        path, kind = views.FILES[name]
        return _Reply(200, path.read_bytes(), kind.encode(), [_PAGE])

    def _look(self) -> None:
        self.metrics.in_flight.set(self.under_way)
        for name, stats in self.desk.registry.stats().items():
            self.metrics.waiting.set(stats.waiting_tokens, name)
            self.metrics.budget.set(stats.budget, name)


def app(registry: Registry, settings: Settings | None = None, **options: Any) -> App:
    """The application over some models; `options` are those of `App`."""
    return App(registry, settings, **options)


def _allow(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise Problem("method", f"{method[:20]} is not allowed here; allowed: {names}", allow=names)


def _style(path: str, route: Route | None) -> Style:
    if route is not None:
        return route.style
    return "openai" if path.startswith("/v1/") else "tei"


def _patience(scope: Scope, most: float) -> float:
    """Seconds that a request may take: what its client says, if that is less than what the server allows."""
    given = header(scope, b"x-request-timeout")
    try:
        asked = most if given is None else float(given)
    except ValueError:
        asked = 0.0
    if not 0 < asked < float("inf"):
        raise Problem("invalid", "X-Request-Timeout must be a number of seconds above 0")
    return min(asked, most)


def _invalid(error: ValidationError) -> Problem:
    """What is wrong with a body, without quoting it."""
    first = min(
        error.errors(include_url=False, include_input=False, include_context=False), key=lambda one: one["type"]
    )
    if first["type"] == "json_invalid":
        return Problem("syntax", "the body is not JSON")
    names = [str(part) for part in first["loc"] if isinstance(part, int) or re.fullmatch(r"[a-z_]+", str(part))]
    where = ".".join(names[:4])
    return Problem("invalid", f"{where or 'the body'}: {first['msg']}", field=where or None)


def _spent(job: Job, seconds: float) -> Headers:
    """What a request took, by text-embeddings-inference's names and in its milliseconds; what was read, by ours."""
    ticket = job.ticket
    return [
        (b"x-compute-tokens", b"%d" % ticket.tokens),
        (b"x-total-time", b"%d" % (seconds * 1000)),
        (b"x-queue-time", b"%d" % (ticket.queue_s * 1000)),
        (b"x-inference-time", b"%d" % (ticket.device_s * 1000)),
        (b"x-tokens-total", b"%d" % job.read["tokens_total"]),
        (b"x-tokens-read", b"%d" % job.read["tokens_read"]),
        (b"x-windows", b"%d" % job.read["windows"]),
    ]


async def _send(send: Send, reply: _Reply) -> None:
    headers = [
        (b"content-type", reply.kind),
        (b"content-length", b"%d" % len(reply.body)),
        *_SAFE,
        *reply.headers,
    ]
    if _PAGE not in reply.headers:
        headers.append(_NOTHING)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
