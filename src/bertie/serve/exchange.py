"""One request and its reply on an HTTP/1.1 connection."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from bertie.serve.api_errors import ApiError

Header = tuple[bytes, bytes]

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_date: tuple[int, bytes] = (0, b"")  # the second, and the header of that second


class Connection(Protocol):
    """What an exchange needs of its connection."""

    def write(self, data: bytes) -> None:
        """Write a part of a reply."""

    def is_closing(self) -> bool:
        """Whether nothing more can be written."""

    def close(self) -> None:
        """Close the connection after what was written."""

    def on_reply(self) -> None:
        """Continue with the next request."""


class Exchange:
    """A request as it arrives, and its reply. All methods are called on the event loop."""

    __slots__ = (
        "_continue",
        "body",
        "client",
        "connection",
        "disconnected",
        "headers",
        "keep_alive",
        "max_body",
        "method",
        "more_body",
        "on_disconnect",
        "path",
        "replied",
        "started",
        "state",
    )

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        headers: dict[bytes, bytes],
        *,
        client: str = "",
        keep_alive: bool = True,
        expects_continue: bool = False,
    ) -> None:
        """`client`: the network that the request comes from. `headers`: by lower-case name; of several, the last."""
        self.connection, self.method, self.path, self.headers = connection, method, path, headers
        self.client, self.keep_alive, self._continue = client, keep_alive, expects_continue
        self.body = bytearray()
        self.max_body = sys.maxsize  # bytes, which the application sets
        self.more_body = True
        self.disconnected = self.replied = False
        self.started = time.perf_counter()
        self.on_disconnect: Callable[[], None] | None = None
        self.state: object = None  # of the application

    def disconnect(self) -> None:
        """The client has disconnected."""
        if not self.replied and not self.disconnected:
            self.disconnected = True
            if self.on_disconnect is not None:
                self.on_disconnect()

    def accept(self) -> None:
        """The application will read the body: tell a client that waits for it."""
        if self._continue and not self.connection.is_closing():
            self._continue = False
            self.connection.write(_CONTINUE)

    def reply(self, status: int, constant: bytes, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Send the whole reply; `constant` are header lines that were formatted before."""
        if self.replied:
            raise RuntimeError("a request was answered twice")
        if self.disconnected:
            self.replied = True
            return
        if (b"connection", b"close") in headers:
            self.keep_alive = False
            headers = [header for header in headers if header != (b"connection", b"close")]
        lines = [_STATUS_LINES[status], _date_line(), constant, b"content-length: %d\r\n" % len(body)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        if self.method != "HEAD":
            lines.append(body)
        self.connection.write(b"".join(lines))
        self.replied = True
        if not self.keep_alive:
            self.connection.close()
        self.connection.on_reply()


class Application(Protocol):
    """What answers requests. Each is answered exactly once, by `Exchange.reply`, at once or later."""

    def begin(self, exchange: Exchange) -> None:
        """Handle a request whose headers have arrived; it may be answered before its body has."""

    def complete(self, exchange: Exchange) -> None:
        """Handle a request whose body has arrived as well."""

    def refuse(self, exchange: Exchange, error: ApiError) -> None:
        """Answer a request with an error of the connection."""


def header_lines(headers: Sequence[Header]) -> bytes:
    """Headers as they are sent."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def _date_line() -> bytes:
    global _date
    now = int(time.time())
    if now != _date[0]:
        _date = (now, b"date: %b\r\n" % formatdate(now, usegmt=True).encode())
    return _date[1]
