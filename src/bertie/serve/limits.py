"""Limits on what one request may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bertie.serve.api_errors import ApiError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request, and of the requests in flight."""

    body: int = 8 * 1024 * 1024  # bytes
    items: int = 1024  # texts, pairs, questions
    tokens: int = 1_000_000  # that a model reads, over all windows
    requests: int = 512  # in flight at a time
    reply: int = 64 * 1024 * 1024  # bytes


def check_head(version: str, url: Any, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuse requests that another server in front of this one may read differently (request smuggling).

    `url`: as `httptools.parse_url` returns it. The host of an absolute URL replaces the Host header.
    """
    if version not in ("1.0", "1.1"):
        return ApiError("http_version", "only HTTP/1.1 and HTTP/1.0 are supported")
    names = [name for name, _ in headers if name in (b"host", b"transfer-encoding", b"content-length")]
    if len(set(names)) < len(names):
        return ApiError("invalid_http", "Host, Content-Length and Transfer-Encoding may occur only once")
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


def body_too_large(limit: int) -> ApiError:
    """The error for a body of more bytes."""
    return ApiError("too_large", f"the body may have at most {limit:,} bytes")


def request_seconds(header: bytes | None, most: float) -> float:
    """Seconds that a request may take: the client's X-Request-Timeout, at most what the server allows.

    >>> request_seconds(b"2.5", 30.0), request_seconds(b"60", 30.0), request_seconds(None, 30.0)
    (2.5, 30.0, 30.0)
    """
    try:
        seconds = most if header is None else float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ApiError("invalid", "X-Request-Timeout must be a number of seconds above 0")
    return min(seconds, most)
