"""What a stranger may ask of the server: how much, and how slowly.

uvicorn limits neither how long a head may take nor, with its fast parser, how large it may be; `Protocol` does. It also
tells a request that its client has left, which costs nothing as long as none does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bertie.serve.problems import Problem

MAX_HEAD = 32 * 1024  # bytes of a request's first line and headers
HEAD_SECONDS = 10.0  # in which they must arrive
LEFT = "bertie.left"  # in a request's scope: what to call when its client has left


@dataclass(frozen=True, slots=True)
class Limits:
    """For one request."""

    body: int = 8 * 1024 * 1024  # bytes
    items: int = 1024  # texts, pairs, questions
    tokens: int = 1_000_000  # that a model reads, in all windows together
    read_seconds: float = 30.0  # in which the body must arrive
    requests: int = 512  # under way at a time, each with a thread of its own


async def read_body(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], limits: Limits) -> bytes:
    """A request's body, refused as soon as it is known to be too large or too slow."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.body:
        raise _too_large(limits)
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.read_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Problem("cancelled", "the client has left")
                parts.append(bytes(message.get("body", b"")))
                size += len(parts[-1])
                if size > limits.body:
                    raise _too_large(limits)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise Problem("slow", f"the body did not arrive within {limits.read_seconds:g} seconds") from None


def header(scope: dict[str, Any], name: bytes) -> bytes | None:
    """The last header of a name, in lower case."""
    found = None
    for key, value in scope["headers"]:
        if key == name:
            found = value
    return found


def _too_large(limits: Limits) -> Problem:
    return Problem("large", f"the body may have at most {limits.body:,} bytes")


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the head, and with a word to requests whose client has left."""

    _timer: asyncio.TimerHandle | None = None
    _head = 0  # bytes of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects must say something."""
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever works for this client can stop."""
        self._end()
        left = self.scope.get(LEFT) if self.scope else None
        if left is not None and self.cycle is not None and not self.cycle.response_complete:
            left()  # type: ignore[operator]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        before = self._timer
        super().data_received(data)
        if self._timer is not None and self._timer is before:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """The first byte of a request; the first of all was expected already."""
        super().on_message_begin()
        if self._timer is None:
            self._begin()

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._end()
        super().on_headers_complete()

    def _begin(self) -> None:
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
