"""Limits on what one request may ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bertie.serve.api_errors import ApiError

# Keys in the ASGI scope:
ON_DISCONNECT = "bertie.on_disconnect"  # what to call when the client disconnects
FAILURE = "bertie.failure"  # the error with which the connection refuses a request whose body is being read


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of the requests in flight."""

    body: int = 8 * 1024 * 1024  # bytes
    items: int = 1024  # texts, pairs, questions
    tokens: int = 1_000_000  # that a model reads, over all windows
    requests: int = 512  # in flight at a time, each with its own thread
    reply: int = 64 * 1024 * 1024  # bytes


async def read_body(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], limits: Limits) -> bytes:
    """Read a request body, and refuse it as soon as it is known to be too large."""
    declared = get_header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limits.body:
        raise _too_large(limits)
    parts, size = [], 0
    while True:
        message = await receive()
        if FAILURE in scope:
            raise scope[FAILURE]
        if message["type"] == "http.disconnect":
            raise ApiError("cancelled", "the client has disconnected")
        parts.append(bytes(message.get("body", b"")))
        size += len(parts[-1])
        if size > limits.body:
            raise _too_large(limits)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def get_header(scope: dict[str, Any], name: bytes) -> bytes | None:
    """The last header with this lower-case name."""
    last = None
    for key, value in scope["headers"]:
        if key == name:
            last = value
    return last


def check_head(version: str, url: Any, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuse requests that another server in front of this one may read differently (request smuggling).

    `url`: as `httptools.parse_url` returns it. The host of an absolute URL replaces the Host header.
    """
    if version not in ("1.0", "1.1"):
        return ApiError("http_version", "only HTTP/1.1 and HTTP/1.0 are supported")
    names = [name for name, _ in headers if name in (b"host", b"transfer-encoding", b"content-length")]
    if len(set(names)) < len(names):
        return ApiError("invalid_http", "Host, Content-Length and Transfer-Encoding may come only once")
    if version == "1.1" and b"host" not in names:
        return ApiError("invalid_http", "the Host header is missing")
    if b"transfer-encoding" in names:
        encoding = next(value for name, value in headers if name == b"transfer-encoding")
        if version == "1.0" or b"content-length" in names or encoding.strip().lower() != b"chunked":
            message = "Transfer-Encoding must be 'chunked', in HTTP/1.1 and without Content-Length"
            return ApiError("invalid_http", message)
    if url.schema is not None or url.host is not None:  # RFC 9112, section 3.2.2
        if url.schema not in (b"http", b"https") or not url.host:
            return ApiError("invalid_http", "the request target must be a path or an http URL")
        host = url.host if url.port is None else b"%b:%d" % (url.host, url.port)
        headers[:] = [header for header in headers if header[0] != b"host"] + [(b"host", host)]
    return None


def _too_large(limits: Limits) -> ApiError:
    return ApiError("too_large", f"the body may have at most {limits.body:,} bytes")
