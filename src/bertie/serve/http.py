"""The server as an ASGI application: authentication, limits, threads, and errors in the format of each API.

There is no web framework. All requests take one path through `App._respond`. Bodies are parsed in
the request's own thread rather than on the event loop, where a large one would delay all others.
Four APIs with three error formats leave little for a framework to do, and the OpenAPI description
comes from the classes that validate requests.
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
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError
from bertie.pipeline.unknown_tokens import no_warning
from bertie.serve.api.openai import describe_model
from bertie.serve.api_errors import ApiError, ErrorFormat
from bertie.serve.auth import Key, Keys
from bertie.serve.connections import ConnectionLimits
from bertie.serve.context import RequestContext
from bertie.serve.docs_page import render_docs
from bertie.serve.json_reply import count_values, dump_json
from bertie.serve.limits import ON_DISCONNECT, Limits, get_header, read_body
from bertie.serve.logs import Log
from bertie.serve.memory import trim_memory
from bertie.serve.metrics import Metrics
from bertie.serve.openapi import describe_api
from bertie.serve.parsing import parse_body
from bertie.serve.queue import Cancelled, Closed, Expired, Refused, Ticket, TokenLimitExceeded, current_ticket
from bertie.serve.routes import Route, all_routes
from bertie.serve.service import LARGE_WORK, Service
from bertie.serve.static import STATIC_FILES

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.serve.registry import Registry

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON = b"application/json"
TRIM_SECONDS = 30  # between two calls of malloc_trim
MAX_MESSAGE = 1000  # characters of an error, which may quote a request
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_SECURITY_HEADERS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_API_POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
_PAGE_POLICY = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server."""

    limits: Limits = field(default_factory=Limits)
    deadline: float = 30.0  # seconds that a request may take
    hosts: tuple[str, ...] = ()  # allowed Host headers; empty: any
    log_texts: bool = False
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


@dataclass(slots=True)
class _Reply:
    status: int
    body: bytes
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)


class App:
    """The ASGI application.

    >>> app = App(Registry(["bertie-small"]), ServerSettings())         # doctest: +SKIP
    >>> uvicorn.run(app)                                                # doctest: +SKIP
    """

    def __init__(
        self,
        registry: Registry,
        settings: ServerSettings | None = None,
        *,
        keys: Keys | None = None,
        index: tuple[Index, str] | None = None,
        metrics: Metrics | None = None,
        log: Log | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.limits = self.settings.limits
        self.service = Service(registry, self.limits, index)
        self.keys, self.metrics, self.log = keys, metrics or Metrics(), log or Log()
        self.draining = False  # /health answers 503, but requests are still answered
        self.in_flight = 0
        self._pool = ThreadPoolExecutor(self.limits.requests, thread_name_prefix="bertie-request")
        self._routes = {route.path: route for route in all_routes()}
        self._resources: dict[str, Callable[[], _Reply]] = {  # GET without a handler, and without a key
            "/": lambda: self._file("index.html"),
            "/docs": lambda: _Reply(200, self._docs, b"text/html; charset=utf-8", [_PAGE_POLICY]),
            "/health": self._health,
            "/ping": self._health,
            "/metrics": lambda: _Reply(200, self.metrics.text().encode(), b"text/plain; version=0.0.4"),
            "/openapi.json": lambda: _Reply(200, orjson.dumps(self._description)),
            **{f"/page/{name}": lambda name=name: self._file(name) for name in STATIC_FILES},  # type: ignore[misc]
        }
        self.metrics.add_collector(self._update_gauges)

    # --- ASGI ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan protocol."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is supported, not {scope['type']!r}")
        started = time.perf_counter()
        given_id = get_header(scope, b"x-request-id")
        request_id = given_id if given_id and _REQUEST_ID.fullmatch(given_id) else os.urandom(8).hex().encode()
        context = RequestContext(Ticket(request_id.decode(), max_tokens=self.limits.tokens))
        try:
            reply = await self._respond(scope, receive, context)
        except Exception as error:
            reply = self._error_reply(error, scope["path"], context)
        seconds = time.perf_counter() - started
        reply.headers.append((b"x-request-id", request_id))
        if context.ticket.submitted_tokens or context.read["tokens_total"]:
            reply.headers += _usage_headers(context, seconds)
        if self.draining and (b"connection", b"close") not in reply.headers:
            reply.headers.append((b"connection", b"close"))
        self._record(scope, reply, context, seconds)
        if context.error_code != "cancelled":
            await _send(send, reply)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        housekeeping = asyncio.create_task(self._run_housekeeping())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        housekeeping.cancel()
        self.draining = True
        await asyncio.to_thread(self.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _run_housekeeping(self) -> None:
        for second in itertools.count():
            try:
                self.metrics.save()
                if second % TRIM_SECONDS == 0:
                    await asyncio.to_thread(trim_memory)
            except OSError as error:  # a full disk must not end this loop
                self.log.error("housekeeping failed", error)
            if self.keys is not None and await asyncio.to_thread(self.keys.has_changed):
                await asyncio.to_thread(self.reload_keys)
            await asyncio.sleep(1)

    def stop(self) -> None:
        """Finish the requests in flight."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        """Finish the requests in flight, and close the engines."""
        self.stop()
        self.service.registry.close()

    def reload(self) -> None:
        """Reload the API keys and all models; what fails to load stays as it was."""
        self.reload_keys()
        for name in self.service.names:
            try:
                self.service.registry.reload(name)
                self.log("reloaded", model=name)
            except Exception as error:
                self.log.error("reload failed", error, model=name)

    def reload_keys(self) -> None:
        """Read the key file again; if it is invalid, the old keys stay."""
        if self.keys is None:
            return
        try:
            self.keys.reload()
            self.log("keys reloaded", keys=len(self.keys))
        except (BertieError, OSError) as error:
            line = re.search(r", line (\d+): ", str(error))  # the rest of the message may quote the file
            self.log.error("keys not reloaded", error, line=line and int(line[1]), reason="the old keys stay valid")

    # --- one request ---

    async def _respond(self, scope: Scope, receive: Receive, context: RequestContext) -> _Reply:
        path, method = scope["path"], scope["method"]
        self._check_host(scope)
        resource, route = self._resources.get(path), self._routes.get(path)
        context.known_path = resource is not None or route is not None
        if resource is not None and (route is None or method in ("GET", "HEAD")):  # "/" is both
            if path == "/metrics":
                self._authenticate(scope, context)
            _check_method(method, "GET", "HEAD")
            return resource()
        key = self._authenticate(scope, context)
        if route is None:
            if not path.startswith("/v1/models/"):
                raise ApiError("not_found", "there is no such endpoint; /docs lists them")
            _check_method(method, "GET", "HEAD")
            return _Reply(200, orjson.dumps(describe_model(self.service, path.removeprefix("/v1/models/"))))
        if route.request is None:
            _check_method(method, "GET", "HEAD")
            return _Reply(200, orjson.dumps(route.handler(self.service, None, context)))
        _check_method(method, *(("POST",) if resource is None else ("GET", "HEAD", "POST")))
        self._admit(scope, key, context)
        try:
            body = await read_body(scope, receive, self.limits)
            self._check_in_flight()  # a request takes a place, and a thread, only when all of it is there
            return _Reply(200, await self._run(route, body, scope, context))
        finally:
            if key is not None:
                key.finish(context.ticket.submitted_tokens)

    async def _run(self, route: Route, body: bytes, scope: Scope, context: RequestContext) -> bytes:
        """Execute a request in its own thread."""
        if self.settings.log_texts:
            context.body = body[:10_000].decode("utf-8", "replace")
        scope[ON_DISCONNECT] = context.ticket.cancelled.set
        self.in_flight += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._execute, route, body, context)
        finally:
            self.in_flight -= 1

    def _execute(self, route: Route, body: bytes, context: RequestContext) -> bytes:
        """Parse a body, call the handler and serialize its response, in the request's thread."""
        assert route.request is not None
        with self.service.one_at_a_time(len(body), context.ticket):
            request = parse_body(route.request, body, self.limits)
        context.ticket.check()
        reset = current_ticket.set(context.ticket)
        try:
            with context.stack, no_warning():  # its response has the counts
                response = route.handler(self.service, request, context)
        finally:  # an idle thread must not keep a model that has been reloaded since
            current_ticket.reset(reset)
            context.models.clear()
        context.ticket.check()
        with self.service.one_at_a_time(count_values(response, LARGE_WORK), context.ticket):
            reply = dump_json(response, context.ticket.check)
        self.service.check_reply(len(reply))
        return reply

    def _authenticate(self, scope: Scope, context: RequestContext) -> Key | None:
        if self.keys is None:
            return None
        key = self.keys.find(get_header(scope, b"authorization"))
        context.key = key.name
        return key

    def _check_host(self, scope: Scope) -> None:
        """Refuse unknown Host headers, against DNS rebinding."""
        if self.settings.hosts:
            host = (get_header(scope, b"host") or b"").decode("latin-1").lower()
            if re.sub(r":\d*$", "", host) not in self.settings.hosts:
                raise ApiError("forbidden_host", "this Host is not allowed; see --allow-host")

    def _admit(self, scope: Scope, key: Key | None, context: RequestContext) -> None:
        """Refuse a request before its body is read, if the server is overloaded or the headers are wrong."""
        self._check_in_flight()
        self.service.registry.check()
        content_type = get_header(scope, b"content-type") or b""
        if content_type.partition(b";")[0].strip().lower() != JSON:  # which other sites cannot send without CORS
            raise ApiError("unsupported_media_type", "the body must be sent as 'Content-Type: application/json'")
        context.ticket.deadline = time.monotonic() + _timeout(scope, self.settings.deadline)
        if key is not None:
            key.admit()

    def _check_in_flight(self) -> None:
        if self.in_flight >= self.limits.requests:
            message = f"{self.in_flight} requests are in flight, the maximum"
            raise ApiError("overloaded", message, retry_after=1.0)

    # --- errors, metrics and the log ---

    def _error_reply(self, error: Exception, path: str, context: RequestContext) -> _Reply:
        api_error = self._to_api_error(error)
        context.error_code = api_error.code
        if api_error.code == "internal":
            self.log.error("failed", error, id=context.ticket.id)
        route = self._routes.get(path)
        error_format: ErrorFormat = "openai" if path.startswith("/v1/") else "tei"
        error_format = error_format if route is None else route.error_format
        body = orjson.dumps(api_error.body(error_format))
        return _Reply(api_error.status(error_format), body, JSON, api_error.headers())

    def _to_api_error(self, error: Exception) -> ApiError:
        """The API error for an exception. Messages of unexpected exceptions may quote texts and are not passed on."""
        match error:
            case ApiError():
                return error
            case TokenLimitExceeded():
                return ApiError("too_large", str(error))
            case Refused():
                return ApiError("overloaded", "the server is busy; try again later", retry_after=error.retry_after)
            case Expired():
                return ApiError("deadline_exceeded", "the deadline of the request has passed", retry_after=1.0)
            case Cancelled():
                return ApiError("cancelled", "the client has disconnected")
            case Closed():
                return ApiError("unavailable", "the server is shutting down", retry_after=1.0)
            case MissingPackageError():
                return ApiError("unsupported_by_model", "the server lacks a package that this needs")
            case InputError() | NotFoundError():
                return ApiError("invalid_input", self._hide_paths(str(error))[:MAX_MESSAGE])
            case BertieError() | RuntimeError() | MemoryError():
                return ApiError("inference_failed", "the model failed on this request")
            case _:
                return ApiError("internal", "internal error; the log has a line with this request's id")

    def _hide_paths(self, text: str) -> str:
        """Replace the paths that models were loaded from by their names."""
        for name in self.service.names:
            source = self.service.registry[name].checkpoint.source
            if source and source != name:
                text = text.replace(source, name)
        return text

    def _record(self, scope: Scope, reply: _Reply, context: RequestContext, seconds: float) -> None:
        """Count and log a request."""
        path, ticket = scope["path"], context.ticket
        endpoint = path if path in self._routes or path in self._resources else "other"
        self.metrics.requests.add(1, endpoint, str(reply.status))
        self.metrics.request_seconds.add(seconds, endpoint)
        if ticket.tokens:
            self.metrics.queue_seconds.add(ticket.queue_s, endpoint)
            self.metrics.unknown.add(context.read["tokens_unknown"], endpoint)
        if reply.status == 200 and path in ("/health", "/ping", "/metrics"):
            return  # polled every few seconds
        self.log(
            "request",
            id=ticket.id,
            method=scope["method"],
            path=path[:200] if context.known_path else None,
            status=reply.status,
            seconds=round(seconds, 6),
            queue_s=round(ticket.queue_s, 6) or None,
            device_s=round(ticket.device_s, 6) or None,
            tokens=ticket.tokens or None,
            model=context.model or None,
            key=context.key,
            error=context.error_code,
            body=context.body,
        )

    def _update_gauges(self) -> None:
        self.metrics.in_flight.set(self.in_flight)
        for name, stats in self.service.registry.stats().items():
            self.metrics.waiting.set(stats.waiting_tokens, name)
            self.metrics.budget.set(stats.budget, name)

    # --- resources ---

    def _health(self) -> _Reply:
        if self.draining or not self.service.registry.ready:
            return _Reply(503, orjson.dumps({"error": "unhealthy", "error_type": "Unhealthy"}))
        return _Reply(200, b"", b"text/plain")

    @cached_property
    def _description(self) -> dict[str, Any]:
        return describe_api(keys=self.keys is not None)

    @cached_property
    def _docs(self) -> bytes:
        return render_docs(self._description)

    def _file(self, name: str) -> _Reply:
        path, content_type = STATIC_FILES[name]
        return _Reply(200, path.read_bytes(), content_type.encode(), [_PAGE_POLICY])


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError("method_not_allowed", f"{method[:20]} is not allowed here; allowed: {names}", allow=names)


def _timeout(scope: Scope, maximum: float) -> float:
    """Seconds that a request may take: the client's X-Request-Timeout, at most what the server allows."""
    value = get_header(scope, b"x-request-timeout")
    try:
        seconds = maximum if value is None else float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ApiError("invalid", "X-Request-Timeout must be a number of seconds above 0")
    return min(seconds, maximum)


def _usage_headers(context: RequestContext, seconds: float) -> Headers:
    """Times in milliseconds under the header names of text-embeddings-inference, and how much was read."""
    ticket, read = context.ticket, context.read
    return [
        (b"x-compute-tokens", b"%d" % ticket.tokens),
        (b"x-total-time", b"%d" % (seconds * 1000)),
        (b"x-queue-time", b"%d" % (ticket.queue_s * 1000)),
        (b"x-inference-time", b"%d" % (ticket.device_s * 1000)),
        (b"x-tokens-total", b"%d" % read["tokens_total"]),
        (b"x-tokens-read", b"%d" % read["tokens_read"]),
        (b"x-windows", b"%d" % read["windows"]),
        (b"x-tokens-unknown", b"%d" % read["tokens_unknown"]),
    ]


async def _send(send: Send, reply: _Reply) -> None:
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", b"%d" % len(reply.body)),
        *_SECURITY_HEADERS,
        *reply.headers,
    ]
    if _PAGE_POLICY not in reply.headers:
        headers.append(_API_POLICY)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
