"""The application: routes, authentication, limits, and errors in the format of each API.

There is no web framework, and no ASGI: four APIs with three error formats leave little for them to do.
A request is admitted by its headers (`App.begin`) and runs when its body is there (`App.complete`).
Small ones run on the event loop (`loop_runner`); others in a thread, where parsing, tokenizing or
serializing megabytes delays nobody.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import orjson

from bertie.errors import BertieError
from bertie.pipeline.language_warnings import no_warning
from bertie.serve.api.openai import describe_model
from bertie.serve.api_errors import ApiError, ErrorFormat
from bertie.serve.auth import Key, Keys
from bertie.serve.compression import Decompressor, content_encoding, decompress
from bertie.serve.connections import ConnectionLimits
from bertie.serve.context import RequestContext
from bertie.serve.exchange import Exchange
from bertie.serve.json_reply import count_values, dump_json
from bertie.serve.limits import Limits, body_too_large, request_seconds
from bertie.serve.logs import Log
from bertie.serve.loop_runner import LoopRunner
from bertie.serve.memory import trim_memory
from bertie.serve.metrics import Metrics
from bertie.serve.parsing import parse_body
from bertie.serve.replies import JSON, PAGE_POLICY, Reply, constant_headers, to_api_error, usage_headers
from bertie.serve.routes import Route, all_routes
from bertie.serve.service import LARGE_WORK, Service
from bertie.serve.static import STATIC_FILES
from bertie.serve.tickets import Ticket, current_ticket
from bertie.serve.tracing import Tracing

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.serve.registry import Registry

SMALL_BODY = 16 * 1024  # bytes, and
SMALL_STRINGS = 80  # strings, of a request that runs on the event loop
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
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
class _Admitted:
    """A request whose body is awaited or being processed."""

    route: Route
    key: Key | None
    context: RequestContext
    encoding: str | None  # of the body


class App:
    """The application.

    >>> app = App(Registry(["bertie-small"]), ServerSettings())         # doctest: +SKIP
    >>> serve(app, bind_socket("127.0.0.1", 8080))                      # doctest: +SKIP
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
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.limits = self.settings.limits
        self.service = Service(registry, self.limits, index)
        self.keys, self.metrics, self.log = keys, metrics or Metrics(), log or Log()
        self.tracing = tracing
        self._decompressor = Decompressor(self.limits.body, self.settings.connections.request_bytes)
        self.draining = False  # /health answers 503, but requests are still answered
        self.in_flight = 0
        self._random = random.Random(os.urandom(16))  # of request ids; os.urandom for each would take 20 µs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: LoopRunner | None = None
        self._pool = ThreadPoolExecutor(self.limits.requests, thread_name_prefix="bertie-request")
        self._routes = {route.path: route for route in all_routes()}
        self._resources: dict[str, Callable[[], Reply]] = {  # GET without a handler, and without a key
            "/": lambda: self._file("index.html"),
            "/docs": lambda: Reply(200, self._docs, constant_headers(b"text/html; charset=utf-8", PAGE_POLICY)),
            "/health": self._health,
            "/ping": self._health,
            "/ready": self._ready,
            "/metrics": lambda: Reply(
                200, self.metrics.text().encode(), constant_headers(b"text/plain; version=0.0.4")
            ),
            "/openapi.json": lambda: Reply(200, orjson.dumps(self._description)),
            **{f"/page/{name}": lambda name=name: self._file(name) for name in STATIC_FILES},  # type: ignore[misc]
        }
        self.metrics.add_collector(self._update_gauges)

    # --- the event loop ---

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run on an event loop, which calls `sweep` several times a second and `maintain` every second."""
        self._loop, self._runner = loop, LoopRunner(loop)
        if self.service.registry.engines is not None:
            self.service.registry.engines.start(loop)

    def sweep(self) -> None:
        """End the requests whose deadline has passed."""
        if self._runner is not None:
            self._runner.expire()

    def maintain(self, *, trim: bool) -> None:
        """Save the metrics, reload API keys that have changed, and return free memory; in a thread."""
        try:
            self.metrics.save()
            if trim:
                trim_memory()
        except OSError as error:  # a full disk must not end this
            self.log.error("housekeeping failed", error)
        if self.keys is not None and self.keys.has_changed():
            self.reload_keys()

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
        if self.service.registry.engines is not None:  # which reload the models, and tell this process
            return
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

    def begin(self, exchange: Exchange) -> None:
        """Answer a request that has no body to wait for, refuse it, or admit it."""
        given = _REQUEST_ID.fullmatch(exchange.headers.get(b"x-request-id", b""))
        request_id = given[0].decode() if given else f"{self._random.getrandbits(64):016x}"
        context = RequestContext(Ticket(request_id, max_tokens=self.limits.tokens))
        try:
            reply = self._begin(exchange, context)
        except Exception as error:
            reply = self._error_reply(error, exchange.path, context)
        if reply is not None:
            self._finish(exchange, context, reply)

    def _begin(self, exchange: Exchange, context: RequestContext) -> Reply | None:
        """The reply; None: the request is admitted, and its body is needed."""
        path, method = exchange.path, exchange.method
        self._check_host(exchange)
        resource, route = self._resources.get(path), self._routes.get(path)
        context.known_path = resource is not None or route is not None
        if resource is not None and (route is None or method in ("GET", "HEAD")):  # "/" is both
            if path == "/metrics":
                self._authenticate(exchange, context)
            _check_method(method, "GET", "HEAD")
            return resource()
        key = self._authenticate(exchange, context)
        if route is None:
            if not path.startswith("/v1/models/"):
                raise ApiError("not_found", "there is no such endpoint; /docs lists them")
            _check_method(method, "GET", "HEAD")
            return Reply(200, orjson.dumps(describe_model(self.service, path.removeprefix("/v1/models/"))))
        if route.request is None:
            _check_method(method, "GET", "HEAD")
            return Reply(200, orjson.dumps(route.handler(self.service, None, context)))
        _check_method(method, *(("POST",) if resource is None else ("GET", "HEAD", "POST")))
        encoding = self._admit(exchange, context)
        if key is not None:
            key.admit()
        exchange.state = _Admitted(route, key, context, encoding)
        exchange.max_body = self.limits.body
        exchange.on_disconnect = partial(self._disconnect, exchange)
        declared = exchange.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.limits.body:
            raise body_too_large(self.limits.body)
        exchange.accept()
        return None

    def complete(self, exchange: Exchange) -> None:
        """Run a request whose body is there: on the event loop, or in a thread if it may take long."""
        admitted, body = exchange.state, bytes(exchange.body)
        assert isinstance(admitted, _Admitted)
        assert self._runner is not None
        route, context, encoding = admitted.route, admitted.context, admitted.encoding
        exchange.body.clear()
        inline = route.inline and len(body) <= SMALL_BODY
        try:
            self._check_in_flight()  # a request takes a place only when all of it is there
            # What decides is the size of the body without its encoding: at most that much is decompressed here.
            if inline and encoding is not None and (small := decompress(body, encoding, SMALL_BODY)) is not None:
                body, encoding = small, None
        except ApiError as error:
            self.refuse(exchange, error)
            return
        self.in_flight += 1
        exchange.on_disconnect = context.ticket.cancelled.set
        run = partial(self._run, route, body, context, encoding)
        on_return = partial(self._return, exchange)
        if inline and encoding is None and body.count(b'"') <= 2 * SMALL_STRINGS:
            self._runner.run(run, on_return)
        else:
            self._pool.submit(self._run_in_thread, run, on_return)

    def refuse(self, exchange: Exchange, error: ApiError) -> None:
        """Answer a request with an error of its connection, or of its body."""
        admitted = exchange.state
        context = admitted.context if isinstance(admitted, _Admitted) else RequestContext(Ticket())
        self._finish(exchange, context, self._error_reply(error, exchange.path, context))

    def _disconnect(self, exchange: Exchange) -> None:
        """The client has gone before its body has arrived."""
        self.refuse(exchange, ApiError("cancelled", "the client has disconnected"))

    def _run(self, route: Route, body: bytes, context: RequestContext, encoding: str | None) -> Reply:
        try:
            with self._decompressor.hold(body, encoding) as plain:
                return Reply(200, self._execute(route, plain, context))
        except Exception as error:
            return self._error_reply(error, route.path, context)

    def _run_in_thread(self, run: Callable[[], Reply], on_return: Callable[[Reply], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(on_return, run())

    def _return(self, exchange: Exchange, reply: Reply) -> None:
        """A request has run."""
        self.in_flight -= 1
        admitted = exchange.state
        assert isinstance(admitted, _Admitted)
        self._finish(exchange, admitted.context, reply)

    def _finish(self, exchange: Exchange, context: RequestContext, reply: Reply) -> None:
        """Count, log and send a reply."""
        seconds = time.perf_counter() - exchange.started
        if isinstance(exchange.state, _Admitted) and exchange.state.key is not None:
            exchange.state.key.finish(context.ticket.submitted_tokens)
        exchange.state = None
        reply.headers.append((b"x-request-id", context.ticket.id.encode()))
        if context.ticket.submitted_tokens or context.read["tokens_total"]:
            reply.headers += usage_headers(context, seconds)
        if self.draining and (b"connection", b"close") not in reply.headers:
            reply.headers.append((b"connection", b"close"))
        self._record(exchange, reply, context, seconds)
        exchange.reply(reply.status, reply.constant, reply.body, reply.headers)

    def _execute(self, route: Route, body: bytes, context: RequestContext) -> bytes:
        """Parse a body, call the handler and serialize its response."""
        assert route.request is not None
        if self.settings.log_texts:
            context.body = body[:10_000].decode("utf-8", "replace")
        with self.service.one_at_a_time(len(body), context.ticket):
            request = parse_body(route.request, body, self.limits)
        context.ticket.check()
        reset = current_ticket.set(context.ticket)
        try:
            with no_warning():  # its response has the counts
                response = route.handler(self.service, request, context)
        finally:
            current_ticket.reset(reset)
            context.release()
        context.ticket.check()
        size = count_values(response, LARGE_WORK)
        with self.service.one_at_a_time(size, context.ticket):
            reply = dump_json(response, context.ticket.check, size)
        self.service.check_reply(len(reply))
        return reply

    def _authenticate(self, exchange: Exchange, context: RequestContext) -> Key | None:
        if self.keys is None:
            return None
        key = self.keys.find(exchange.headers.get(b"authorization"))
        context.key = key.name
        return key

    def _check_host(self, exchange: Exchange) -> None:
        """Refuse unknown Host headers, against DNS rebinding."""
        if self.settings.hosts:
            host = exchange.headers.get(b"host", b"").decode("latin-1").lower()
            if re.sub(r":\d*$", "", host) not in self.settings.hosts:
                raise ApiError("forbidden_host", "this Host is not allowed; see --allow-host")

    def _admit(self, exchange: Exchange, context: RequestContext) -> str | None:
        """Refuse a request before its body is read, if the server is overloaded or the headers are wrong.

        Returns the encoding of a compressed body.
        """
        self._check_in_flight()
        context.ticket.owner = context.key or exchange.client
        self.service.registry.check(context.ticket.owner)
        content_type = exchange.headers.get(b"content-type", b"")
        if content_type.partition(b";")[0].strip().lower() != JSON:  # which other sites cannot send without CORS
            raise ApiError("unsupported_media_type", "the body must be sent as 'Content-Type: application/json'")
        context.ticket.deadline = time.monotonic() + request_seconds(
            exchange.headers.get(b"x-request-timeout"), self.settings.deadline
        )
        return content_encoding(exchange.headers.get(b"content-encoding"))

    def _check_in_flight(self) -> None:
        if self.in_flight >= self.limits.requests:
            message = f"{self.in_flight} requests are in flight, the maximum"
            raise ApiError("overloaded", message, retry_after=1.0)

    # --- errors, metrics and the log ---

    def _error_reply(self, error: Exception, path: str, context: RequestContext) -> Reply:
        api_error = to_api_error(error, self._hide_paths)
        context.error_code = api_error.code
        if api_error.code == "internal":
            self.log.error("failed", error, id=context.ticket.id)
        route = self._routes.get(path)
        by_path: ErrorFormat = "openai" if path.startswith("/v1/") else "tei"
        error_format = by_path if route is None else route.error_format
        body = orjson.dumps(api_error.body(error_format))
        return Reply(api_error.status(error_format), body, headers=api_error.headers())

    def _hide_paths(self, text: str) -> str:
        """Replace the paths that models were loaded from by their names."""
        for name in self.service.names:
            source = self.service.registry[name].checkpoint.source
            if source and source != name:
                text = text.replace(source, name)
        return text

    def _record(self, exchange: Exchange, reply: Reply, context: RequestContext, seconds: float) -> None:
        """Count and log a request."""
        path, ticket = exchange.path, context.ticket
        endpoint = path if path in self._routes or path in self._resources else "other"
        self.metrics.requests.add(1, endpoint, str(reply.status))
        self.metrics.request_seconds.add(seconds, endpoint)
        if ticket.tokens:
            self.metrics.queue_seconds.add(ticket.queue_s, endpoint)
        if ticket.submitted_tokens:
            self.metrics.unknown.add(context.read["tokens_unknown"], endpoint)
            self.metrics.non_english.add(context.read["tokens_non_english"], endpoint)
        if reply.status == 200 and path in ("/health", "/ping", "/ready", "/metrics"):
            return  # polled every few seconds
        if self.tracing is not None:
            self.tracing.record(exchange, context, reply.status, seconds)
        self.log(
            "request",
            id=ticket.id,
            method=exchange.method,
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
        if self.service.registry.cache is not None:
            self.metrics.count_cache(self.service.registry.cache)
        if self.service.registry.engines is None:  # otherwise the engines report them
            for name, load in self.service.registry.loads().items():
                self.metrics.waiting.set(load.waiting_tokens, name)
                self.metrics.budget.set(load.budget, name)

    # --- resources ---

    def _health(self) -> Reply:
        if self.draining or not self.service.registry.ready:
            return Reply(503, orjson.dumps({"error": "unhealthy", "error_type": "Unhealthy"}))
        return Reply(200, b"", constant_headers(b"text/plain"))

    def _ready(self) -> Reply:
        """As /health, and warmed up."""
        warm = all(load.warm for load in self.service.registry.loads().values())
        return self._health() if warm else Reply(503, orjson.dumps({"error": "warming up", "error_type": "Unhealthy"}))

    @cached_property
    def _description(self) -> dict[str, Any]:
        from bertie.serve.openapi import describe_api  # a tenth of a second, which a server's start need not wait for

        return describe_api(keys=self.keys is not None)

    @cached_property
    def _docs(self) -> bytes:
        from bertie.serve.docs_page import render_docs

        return render_docs(self._description)

    def _file(self, name: str) -> Reply:
        path, content_type = STATIC_FILES[name]
        return Reply(200, path.read_bytes(), constant_headers(content_type.encode(), PAGE_POLICY))


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        names = ", ".join(allowed)
        raise ApiError("method_not_allowed", f"{method[:20]} is not allowed here; allowed: {names}", allow=names)
