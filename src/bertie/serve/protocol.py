"""HTTP/1.1 over one connection, with limits on what a client may send, and how slowly it may send and read.

httptools parses; the application is called when the headers of a request have arrived, and again
with its body. There is no ASGI server in between: none limits the headers or the time that a client
takes, and the messages, tasks and events of that interface would cost a request more than the
parsing. A connection with unread data is not closed before the client can read its reply, a
half-closed one is not taken for a closed one, and few pipelined requests are parsed ahead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from urllib.parse import unquote

import httptools

from bertie.serve.api_errors import ApiError, error_response
from bertie.serve.connection_progress import PROBE, MonitoredProtocol
from bertie.serve.connections import Connections, State, client_network, received_bytes
from bertie.serve.exchange import Application, Exchange
from bertie.serve.limits import body_too_large, check_head

HIGH_WATER = 64 * 1024  # bytes of pipelined requests after which nothing more is read
HEAD_SLICE = 1024  # bytes of headers to parse at a time; bounds the pipelined requests that are parsed ahead
CHUNK_SLICE = 4096  # of a chunked body
CHUNK_OVERHEAD = 64 * 1024  # bytes by which chunk sizes, extensions and trailers may exceed the body
LINGER_BYTES = 64 * 1024 * 1024  # to discard after a refusal, so that the client reads it


class HttpProtocol(MonitoredProtocol):
    """One connection."""

    def __init__(self, app: Application, connections: Connections) -> None:
        super().__init__(connections)
        self._app = app
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with "Connection: close" is ignored, and not an error of that request.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._busy = False  # parsing or starting requests: a reply that comes meanwhile continues nothing
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._latest: Exchange | None = None  # the latest request whose headers have arrived
        self._pipeline: deque[tuple[Exchange, ApiError | None]] = deque()  # not started; with the error to answer
        self._head_bytes = self._body_bytes = self._raw_bytes = 0  # of the request that arrives
        self._declared: int | None = None  # its Content-Length
        self._expects_continue = False
        self._unparsed = b""  # received while an earlier request is being answered
        self._refusal: ApiError | None = None  # why parsing was stopped
        self._keep_alive = True
        self._last = False
        self._discarded = 0  # bytes

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; a client that connects must send a request."""
        self.transport = transport  # type: ignore[assignment]  # of a stream
        self.address = client_network(transport.get_extra_info("peername"))
        self._began = self._connections.now
        if self._connections.admit(self):
            self._connections.move(self, State.RECEIVING)
        else:
            self._connections.dropped["refused"] += 1
            self._refuse(ApiError("unavailable", "too many connections", retry_after=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for this client."""
        self._connections.remove(self)
        exchanges = [exchange for exchange, _ in self._pipeline]
        if self._active is not None:
            exchanges.append(self._active)
        for exchange in exchanges:
            exchange.disconnect()
        self._pipeline.clear()
        self._unparsed = b""

    def eof_received(self) -> bool:
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
        if self._active is not None and not self._active.replied:
            self._active.keep_alive = self._keep_alive = False
        elif not self._in_message and not received_bytes(self.transport):
            self.transport.close()

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
            if len(self._unparsed) > HIGH_WATER:
                self._pause_reading()
            self._connections.hold_request(self, len(data))
            return
        self._busy = True
        self._parse(data)
        self._busy = False
        self._proceed()

    def _is_blocked(self) -> bool:
        """Whether earlier requests must be answered, and their replies read, before another one is parsed."""
        active = self._active
        if active is not None and not active.replied and (active is not self._latest or not active.more_body):
            return True
        return bool(self._pipeline) or self._write_paused or self._failed

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
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the request is answered as if it did not ask for another protocol
            self._keep_alive = False
            self._failed = True  # what follows cannot be parsed
            if self._latest is not None and self._latest.replied:
                self.close()
            elif self._latest is not None:
                self._latest.keep_alive = False
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
            elif self._latest is not None and self._latest.replied and self._body_bytes > LINGER_BYTES:
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
        self._url, self._headers, self._expects_continue = b"", [], False
        self._in_message = self._in_headers = self._phase_began = True
        self._head_bytes = self._body_bytes = self._raw_bytes = 0
        self._declared = None

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are ignored."""
        if not self._in_headers:
            return
        name = name.lower()
        self._head_bytes += len(name) + len(value) + 4
        self._headers.append((name, value))
        if self._head_bytes > self._limits.header_bytes or len(self._headers) > self._limits.headers:
            self._stop_parsing(self._headers_too_large())
        if name == b"content-length" and value.isdigit():
            self._declared = int(value)
        elif name == b"expect":
            self._expects_continue = value.lower() == b"100-continue"

    def on_headers_complete(self) -> None:
        """Call the application, which may answer a request before its body has arrived."""
        self._head_bytes += len(self._url)
        version = self._parser.get_http_version()
        if self._head_bytes > self._limits.header_bytes:
            self._stop_parsing(self._headers_too_large())
        url = httptools.parse_url(self._url)
        if error := check_head(version, url, self._headers):
            self._stop_parsing(error)
        path = (url.path or b"/").decode("ascii")
        self._keep_alive = version == "1.1" and self._parser.should_keep_alive() and not self._last
        exchange = self._latest = Exchange(
            self,
            self._parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            dict(self._headers),
            client=self.address,
            # A client that is refused instead of being told to continue may or may not send its body.
            keep_alive=self._keep_alive and not self._expects_continue,
            expects_continue=self._expects_continue,
        )
        self._in_headers, self._phase_began = False, True
        if self._active is None or (self._active.replied and not self._write_paused):
            self._start(exchange)
        else:
            self._pipeline.append((exchange, None))

    def _start(self, exchange: Exchange, error: ApiError | None = None) -> None:
        """Begin to answer a request."""
        self._active = exchange
        if error is not None:
            self._app.refuse(exchange, error)
            return
        self._app.begin(exchange)
        if not exchange.replied and not exchange.more_body:
            self._app.complete(exchange)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, unless the request has already been answered."""
        self._body_bytes += len(body)
        self._progress += len(body)
        exchange = self._latest
        if exchange is None or exchange.replied or self._failed:
            return
        exchange.body += body
        self._connections.hold_request(self, len(body))
        if len(exchange.body) > exchange.max_body and not exchange.replied:
            self._app.refuse(exchange, body_too_large(exchange.max_body))

    def on_message_complete(self) -> None:
        """The whole request is there."""
        self._in_message = False
        exchange = self._latest
        if exchange is None:
            return
        if self._expects_continue and not exchange.replied:
            exchange.keep_alive = self._keep_alive
        if not exchange.replied:
            exchange.more_body = False
            if exchange is self._active:
                self._app.complete(exchange)

    # --- replying ---

    def _refuse(self, error: ApiError) -> None:
        """Answer a request that the application will not read, after those before it, and close the connection."""
        if self._failed:
            return
        self._failed = True
        active = self._active
        if active is not None and active.replied:
            active = None
        if active is not None and active is self._latest and active.more_body:  # the application waits for its body
            active.keep_alive = False
            self._app.refuse(active, error)
        elif active is not None or self._pipeline:
            self._keep_alive = self._expects_continue = False
            exchange = Exchange(self, "GET", "", {}, client=self.address, keep_alive=False)  # which may not be known
            self._pipeline.append((exchange, error))
        else:
            if self._in_headers or not self._in_message:  # otherwise this is the rest of a request that was answered
                self.write(error_response(error))
            self.close()

    def write(self, data: bytes) -> None:
        """Write a part of a reply; called by the exchange."""
        if self._probed:
            data, self._probed = data.removeprefix(PROBE), False
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be written; called by the exchange."""
        return self.state is State.LINGERING or self.transport.is_closing()

    def close(self) -> None:
        """Close the connection after a reply; called by the exchange.

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
        self._resume_reading()
        self.transport.write_eof()

    def on_reply(self) -> None:
        """Continue with the next request, if there is one; called by the exchange."""
        if not self._pipeline:
            self._connections.release_request(self)
        if self.state is State.LINGERING:
            return
        if size := self.transport.get_write_buffer_size():
            self._connections.hold_reply(self, size)
            self._progress = 0
        if not self._busy:
            self._proceed()

    def pause_writing(self) -> None:
        """The client reads its replies slowly; called by the transport."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Continue with the next request after the client has read its reply; called by the transport."""
        self._write_paused = False
        if self._active is not None and self._active.replied and not self._busy:
            self._proceed()

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    def _proceed(self) -> None:
        """Start and parse what has arrived, as far as no earlier request must be answered before."""
        self._busy = True
        while self._can_proceed():
            if self._pipeline:
                self._start(*self._pipeline.popleft())
            else:
                data, self._unparsed = self._unparsed, b""
                self._connections.release_request(self)
                self._parse(data)
        self._busy = False
        if not self.transport.is_closing() and self.state is not State.LINGERING:
            if self._write_paused:
                self._pause_reading()
            elif not self._is_blocked():
                self.transport.close() if self._eof else self._resume_reading()
        self._update()

    def _can_proceed(self) -> bool:
        if self.is_closing() or self._write_paused or (self._active is not None and not self._active.replied):
            return False
        return bool(self._pipeline) or bool(self._unparsed and not self._failed)
