"""HTTP/1.1 over one connection, with limits on what a client may send, and how slowly it may send and read.

uvicorn's protocol parses requests and runs the application. It limits neither headers nor the time
that a client takes, closes a connection with unread data so that the client may lose its reply,
takes a half-closed connection for a closed one, and parses any number of pipelined requests ahead.
`LimitedProtocol` does none of that.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bertie.serve.api_errors import ApiError, error_app, error_response
from bertie.serve.connections import Connections, State, client_network, received_bytes, reset, unread_bytes
from bertie.serve.limits import FAILURE, ON_DISCONNECT, check_head

HEAD_SLICE = 1024  # bytes of headers to parse at a time; bounds the pipelined requests that are parsed ahead
CHUNK_SLICE = 4096  # of a chunked body
CHUNK_OVERHEAD = 64 * 1024  # bytes by which chunk sizes, extensions and trailers may exceed the body
LINGER_BYTES = 64 * 1024 * 1024  # to discard after a refusal, so that the client reads it
PROBE = b"HTTP/1.1 "  # sent ahead of a reply to see whether a half-closed client is still there
PROBE_SECONDS = 0.3


class LimitedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections, self._limits = connections, connections.limits
        self.address = ""
        self.state = State.RECEIVING
        self.mark = 0.0  # time of the last progress
        self.counted = False
        self.held = 0  # bytes of requests
        self.unsent = 0  # bytes of replies
        self._began = 0.0  # time when the headers, the body or the reply began
        self._active: RequestResponseCycle | None = None  # the latest request that was started
        self._in_message = self._in_headers = False  # part of a request has arrived
        self._phase_began = False  # since the last call of `_update`
        self._head_bytes = self._body_bytes = self._raw_bytes = 0  # of the request that arrives
        self._declared: int | None = None  # its Content-Length
        self._progress = 0  # bytes received since `mark`; while sending: bytes unread at `mark`
        self._unparsed = b""  # received while an earlier request is being answered
        self._refusal: ApiError | None = None  # why parsing was stopped
        self._keep_alive = True
        self._failed = self._eof = self._probed = self._last = False
        self._discarded = 0  # bytes

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection; a client that connects must send a request."""
        super().connection_made(transport)
        self.address = client_network(self.client)
        self._began = self._connections.now
        if self._connections.admit(self):
            self._connections.move(self, State.RECEIVING)
        else:
            self._connections.dropped["refused"] += 1
            self._refuse(ApiError("unavailable", "too many connections", retry_after=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for this client."""
        self._connections.remove(self)
        cycles = [cycle for cycle, _ in self.pipeline]
        if self._active is not None:
            cycles.append(self._active)
        for cycle in cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                on_disconnect = cycle.scope.get(ON_DISCONNECT)
                if on_disconnect is not None:
                    on_disconnect()  # type: ignore[operator]
        self.pipeline.clear()
        self._unparsed = b""
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection open until its complete requests are answered."""
        self._eof = True
        if self.state is State.LINGERING or not self._is_blocked():
            return False
        self._began = self._connections.now
        self._connections.half_closed.add(self)
        return True

    def shutdown(self) -> None:
        """Close the connection, after the reply if a request is being answered or has begun to arrive."""
        self._last = True
        if self._active is not None and not self._active.response_complete:
            self._active.keep_alive = self._keep_alive = False
        elif not self._in_message and not received_bytes(self.transport):
            self.transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection at once, and discard what the client has not read, in the kernel as well."""
        self._connections.dropped[reason] += 1
        reset(self.transport)
        self._connections.remove(self)

    def evict(self, reason: str) -> None:
        """Close the connection in favour of others."""
        if self.state is State.SENDING:
            self.abort(reason)
        elif self.state is State.IDLE:
            self._connections.dropped[reason] += 1
            self.transport.close()
        else:
            self.drop(reason, "the request arrived too slowly for a server without free connections")

    def drop(self, reason: str, message: str, code: str = "request_timeout") -> None:
        """Refuse a request that has not arrived completely."""
        self._connections.dropped[reason] += 1
        self._refuse(ApiError(code, message, retry_after=1.0))

    def check(self) -> None:
        """Drop the connection if its client is too slow; called several times a second."""
        limits, now = self._limits, self._connections.now
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        self._update()
        stalled = now - self.mark >= limits.grace_seconds
        if self.state is State.SENDING:
            size = unread_bytes(self.transport)
            if size > self._progress or self._progress - size >= limits.quantum:
                self._progress = size
                self._connections.move(self, State.SENDING)
            elif stalled or now - self._began >= limits.write_seconds:
                self.abort("write_timeout")
        elif self.state is State.RECEIVING and not self._failed:
            self._check_receiving(stalled, now - self._began)
        elif self.state is State.LINGERING:
            if stalled or now - self._began >= limits.read_seconds:
                self.transport.abort()
        elif self.state is State.IDLE:
            if now - self.mark >= limits.idle_seconds:
                self.abort("write_timeout") if unread_bytes(self.transport) else self.transport.close()
        elif self._eof:
            self._probe()

    def _check_receiving(self, stalled: bool, seconds: float) -> None:
        limits = self._limits
        if self.flow.read_paused:  # by the server
            self._connections.move(self, State.RECEIVING)
        elif not self._in_message or self._in_headers:
            if seconds >= limits.header_seconds or (stalled and self._in_message):
                self.drop("header_timeout", f"no headers arrived within {limits.header_seconds:g} seconds")
        elif seconds >= limits.read_seconds:
            self.drop("read_timeout", f"the body did not arrive within {limits.read_seconds:g} seconds")
        elif stalled:
            self.drop("read_timeout", f"the body arrived at less than {limits.min_rate:,} bytes per second")

    def _probe(self) -> None:
        """Find out whether a half-closed client is gone: its kernel then resets the connection when a reply begins."""
        cycle = self._active
        if cycle is None or cycle.response_started:
            return
        if not self._probed and self._connections.now - self._began >= PROBE_SECONDS:
            self.transport.write(PROBE)
            self._probed = True
        raw = self.transport.get_extra_info("socket")
        if self._probed and raw is not None and raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def _update(self) -> None:
        """Note the state of the connection after an event."""
        if self.state is State.LINGERING:
            return
        connections, active = self._connections, self._active
        unsent = self.transport.get_write_buffer_size()
        if not unsent and self.unsent:
            connections.release_reply(self)
        if active is not None and not active.response_complete and not self.flow.write_paused:
            state = State.RECEIVING if active.more_body else State.BUSY
        elif unsent:
            state = State.SENDING
        elif self._in_message or active is None:
            state = State.RECEIVING
        else:
            state = State.IDLE
        if state is not self.state:
            self._progress = 0
            if state is State.SENDING:
                self._began = connections.now
            connections.move(self, state)
        if state is State.RECEIVING and (self._phase_began or self._progress >= self._limits.quantum):
            if self._phase_began:
                self._began = connections.now
            self._phase_began, self._progress = False, 0
            connections.move(self, state)

    # --- receiving ---

    def data_received(self, data: bytes) -> None:
        """Parse requests, unless an earlier one is still being answered."""
        if self.state is State.LINGERING:
            self._discarded += len(data)
            self._connections.move(self, State.LINGERING)
            if self._discarded > LINGER_BYTES:
                self.transport.abort()
            return
        if self._unparsed or self._is_blocked():
            self._unparsed += data
            if len(self._unparsed) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            self._connections.hold_request(self, len(data))
            return
        self._parse(data)
        self._update()

    def _is_blocked(self) -> bool:
        """Whether earlier requests must be answered, and their replies read, before another one is parsed."""
        active = self._active
        if active is not None and not active.response_complete and (active is not self.cycle or not active.more_body):
            return True
        return bool(self.pipeline) or self.flow.write_paused or self._failed

    def _parse(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            end = at + self._slice_size()
            if not self._feed(data if at == 0 and end >= size else data[at:end]):
                return
            at = end
            if at < size and self._is_blocked():
                self._unparsed = data[at:]
                self._connections.hold_request(self, size - at)
                return

    def _slice_size(self) -> int:
        if not self._in_message or self._in_headers:
            return HEAD_SLICE
        return CHUNK_SLICE if self._declared is None else max(HEAD_SLICE, self._declared - self._body_bytes)

    def _feed(self, data: bytes) -> bool:
        """Parse a slice; return whether the next one may follow."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the request is answered as if it did not ask for another protocol
            self.cycle.keep_alive = self._keep_alive = False
            self._failed = True  # what follows cannot be parsed
            return False
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError("invalid_http", "the request is not valid HTTP/1.1"))
            return False
        self._raw_bytes += len(data)
        if self._in_headers:
            self._progress += len(data)
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes + HEAD_SLICE:
                self._refuse(self._headers_too_large())
                return False
        elif self._in_message:
            if self._declared is None and self._raw_bytes > 2 * self._body_bytes + CHUNK_OVERHEAD:
                self._refuse(ApiError("invalid_http", "the chunked encoding takes more bytes than the body"))
            elif self.cycle.response_complete and self._body_bytes > LINGER_BYTES:
                self.close()
                return False
        return not self._failed

    def _stop_parsing(self, error: ApiError) -> None:
        self._refusal = error
        raise error

    def _headers_too_large(self) -> ApiError:
        limits = self._limits
        message = f"the headers may have at most {limits.header_bytes:,} bytes in {limits.headers} fields"
        return ApiError("headers_too_large", message)

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._in_message = self._in_headers = self._phase_began = True
        self._head_bytes = self._body_bytes = self._raw_bytes = 0
        self._declared = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are ignored."""
        if not self._in_headers:
            return
        name = name.lower()
        self._head_bytes += len(name) + len(value) + 4
        self.headers.append((name, value))
        if self._head_bytes > self._limits.header_bytes or len(self.headers) > self._limits.headers:
            self._stop_parsing(self._headers_too_large())
        if name == b"content-length" and value.isdigit():
            self._declared = int(value)
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        """Run the application, which may refuse a request before its body has arrived."""
        self._head_bytes += len(self.url)
        version = self.parser.get_http_version()
        if self._head_bytes > self._limits.header_bytes:
            self._stop_parsing(self._headers_too_large())
        url = httptools.parse_url(self.url)
        if error := check_head(version, url, self.headers):
            self._stop_parsing(error)
        path = (url.path or b"/").decode("ascii")
        scope = self.scope
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        scope["raw_path"], scope["query_string"] = path.encode(), url.query or b""
        scope["path"] = unquote(path) if "%" in path else path
        self._keep_alive = version == "1.1" and self.parser.should_keep_alive() and not self._last
        self.cycle = self._new_cycle()
        self._in_headers, self._phase_began = False, True
        if self._active is None or (self._active.response_complete and not self.flow.write_paused):
            self._start(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))

    def _new_cycle(self) -> RequestResponseCycle:
        return RequestResponseCycle(
            scope=self.scope,
            transport=self,  # type: ignore[arg-type]  # for `write` and `close`
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            # A client that is refused instead of being told to continue may or may not send its body.
            keep_alive=self._keep_alive and not self.expect_100_continue,
            on_response=self.on_response_complete,
        )

    def _start(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on, unless the request has already been answered."""
        self._body_bytes += len(body)
        self._progress += len(body)
        cycle = self.cycle
        if cycle.response_complete or self._failed:
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()
        self._connections.hold_request(self, len(body))

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self._in_message = False
        cycle = self.cycle
        if self.expect_100_continue and not cycle.response_started:
            cycle.keep_alive = self._keep_alive
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.message_event.set()

    # --- replying ---

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that the application will not read, after those before it, and close the connection."""
        if self._failed:
            return
        self._failed = True
        active = self._active
        running = active is not None and not active.response_complete
        if running and active is self.cycle and active.more_body:  # the application is reading the body
            active.scope[FAILURE] = error  # type: ignore[literal-required]
            active.keep_alive = False
            active.message_event.set()
        elif running or self.pipeline:
            self._keep_alive = self.expect_100_continue = False
            self.scope["method"] = "GET"  # which may not have arrived
            self.pipeline.appendleft((self._new_cycle(), error_app(error)))
        else:
            if self._in_headers or not self._in_message:  # otherwise this is the rest of a request that was answered
                self.write(error_response(error))
            self.close()

    def write(self, data: bytes) -> None:
        """Write a part of a reply; called by the request's cycle."""
        if self._probed:
            data, self._probed = data.removeprefix(PROBE), False
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be written; called by the request's cycle."""
        return self.state is State.LINGERING or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection after a reply; called by the request's cycle.

        Closing a socket with unread data resets the connection, and the client may lose the reply.
        So the write side is closed, and what the client still sends is discarded for a while.
        """
        if self.is_closing():
            return
        if self._eof or not (self._in_message or self._unparsed or self._failed):
            self.transport.close()
            return
        self._connections.move(self, State.LINGERING)
        self._connections.release_request(self)
        self._began, self._unparsed = self._connections.now, b""
        self.flow.resume_reading()
        self.transport.write_eof()

    def on_response_complete(self) -> None:
        """Go on with the next request, if there is one."""
        self.server_state.total_requests += 1
        if not self.pipeline:
            self._connections.release_request(self)
        if self.state is State.LINGERING:
            return
        if size := self.transport.get_write_buffer_size():
            self._connections.hold_reply(self, size)
            self._progress = 0
        self._proceed()

    def resume_writing(self) -> None:
        """Go on with the next request after the client has read its reply."""
        super().resume_writing()
        if self._active is not None and self._active.response_complete:
            self._proceed()

    def _proceed(self) -> None:
        if not self.transport.is_closing():
            if self.flow.write_paused:
                self.flow.pause_reading()
            elif self.pipeline:
                self._start(*self.pipeline.pop())
            elif self._unparsed:
                data, self._unparsed = self._unparsed, b""
                self._connections.release_request(self)
                self._parse(data)
            if not self._is_blocked():
                self.transport.close() if self._eof else self.flow.resume_reading()
        self._update()
