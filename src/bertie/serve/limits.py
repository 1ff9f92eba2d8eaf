"""Limits on what one request may send, and how slowly.

uvicorn limits neither the time that request headers may take to arrive nor, with its fast parser,
their size; `LimitedProtocol` does both. It also tells a running request that its client has
disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertie.serve.api_errors import ApiError

MAX_HEADER_BYTES = 32 * 1024  # of the request line and all headers
HEADER_SECONDS = 10.0  # in which they must arrive
ON_DISCONNECT = "bertie.on_disconnect"  # key in the ASGI scope: what to call when the client disconnects


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of the requests in flight."""

    body: int = 8 * 1024 * 1024  # bytes
    items: int = 1024  # texts, pairs, questions
    tokens: int = 1_000_000  # that a model reads, over all windows
    read_seconds: float = 30.0  # in which the body must arrive
    requests: int = 512  # in flight at a time, each with its own thread
    reply: int = 64 * 1024 * 1024  # bytes


async def read_body(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], limits: Limits) -> bytes:
    """Read a request body, and refuse it as soon as it is known to be too large or too slow."""
    declared = get_header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.body:
        raise _too_large(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError("cancelled", "the client has disconnected")
                parts.append(bytes(message.get("body", b"")))
                size += len(parts[-1])
                if size > limits.body:
                    raise _too_large(limits)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        late = f"the body did not arrive within {limits.read_seconds:g} seconds"
        raise ApiError("request_timeout", late) from None


def get_header(scope: dict[str, Any], name: bytes) -> bytes | None:
    """The last header with this lower-case name."""
    last = None
    for key, value in scope["headers"]:
        if key == name:
            last = value
    return last


def _too_large(limits: Limits) -> ApiError:
    return ApiError("too_large", f"the body may have at most {limits.body:,} bytes")


class LimitedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on request headers, which reports disconnected clients."""

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0  # of headers that are incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer: a client that connects must send a request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for this client."""
        self._stop_timer()
        on_disconnect = self.scope.get(ON_DISCONNECT) if self.scope else None
        if on_disconnect is not None and self.cycle is not None and not self.cycle.response_complete:
            on_disconnect()  # type: ignore[operator]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count bytes that belong to headers."""
        timer = self._timer
        super().data_received(data)
        if self._timer is not None and self._timer is timer:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Start the timer at a request's first byte; for the first request it runs since the connection."""
        super().on_message_begin()
        if self._timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().on_headers_complete()

    def _start_timer(self) -> None:
        self._header_bytes = 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
