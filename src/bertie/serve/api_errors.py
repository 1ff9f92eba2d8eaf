"""Errors of the HTTP API: one table of codes and statuses, in three response formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson

ErrorFormat = Literal["tei", "openai", "cohere"]


@dataclass(frozen=True, slots=True)
class _Row:
    """The HTTP status of an error, and its type in the APIs of text-embeddings-inference and OpenAI."""

    status: int
    tei_type: str
    openai_type: str


_INVALID, _RATE_LIMIT, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
ERRORS = {  # by code, which is OpenAI's `code` field as well
    "invalid_http": _Row(400, "Validation", _INVALID),
    "invalid_json": _Row(400, "Validation", _INVALID),
    "invalid_encoding": _Row(400, "Validation", _INVALID),
    "empty": _Row(400, "Empty", _INVALID),
    "invalid_api_key": _Row(401, "Unauthorized", _INVALID),
    "forbidden_host": _Row(403, "Forbidden", _INVALID),
    "model_not_found": _Row(404, "NotFound", _INVALID),
    "not_found": _Row(404, "NotFound", _INVALID),
    "method_not_allowed": _Row(405, "Validation", _INVALID),
    "request_timeout": _Row(408, "Timeout", _INVALID),
    "too_large": _Row(413, "Validation", _INVALID),
    "unsupported_media_type": _Row(415, "Validation", _INVALID),
    "invalid": _Row(422, "Validation", _INVALID),
    "invalid_input": _Row(422, "Tokenizer", _INVALID),
    "unsupported_by_model": _Row(424, "Backend", _INVALID),
    "inference_failed": _Row(424, "Backend", _SERVER),
    "headers_too_large": _Row(431, "Validation", _INVALID),
    "overloaded": _Row(429, "Overloaded", _RATE_LIMIT),
    "rate_limit_exceeded": _Row(429, "Overloaded", _RATE_LIMIT),
    "cancelled": _Row(499, "Cancelled", _INVALID),
    "internal": _Row(500, "Internal", _SERVER),
    "unavailable": _Row(503, "Unhealthy", _SERVER),
    "deadline_exceeded": _Row(503, "Timeout", _SERVER),
    "http_version": _Row(505, "Validation", _INVALID),
}
# After these the client's connection is closed. A 429 keeps it: reconnecting costs both sides more than waiting.
_CLOSE_CONNECTION = ("too_large", "request_timeout", "forbidden_host", "invalid_api_key", "unsupported_media_type")


class ApiError(Exception):
    """A request that fails, with the code that says why.

    >>> ApiError("overloaded", "try again", retry_after=2.1).body("tei")
    {'error': 'try again', 'error_type': 'Overloaded'}
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,  # of the request body
        retry_after: float | None = None,  # seconds
        allow: str | None = None,  # HTTP methods
        accept_encoding: str | None = None,  # of bodies
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.field, self.retry_after, self.allow = code, message, field, retry_after, allow
        self.accept_encoding = accept_encoding

    def status(self, error_format: ErrorFormat) -> int:
        """The HTTP status. OpenAI answers every validation error with 400."""
        status = ERRORS[self.code].status
        return 400 if error_format == "openai" and status == 422 else status

    def body(self, error_format: ErrorFormat) -> dict[str, Any]:
        """The JSON body in the format of an API."""
        row = ERRORS[self.code]
        if error_format == "openai":
            return {"error": {"message": self.message, "type": row.openai_type, "param": self.field, "code": self.code}}
        if error_format == "cohere":
            return {"message": self.message, "detail": self.message}
        return {"error": self.message, "error_type": row.tei_type}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers that belong to the error."""
        headers = []
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.accept_encoding is not None:  # RFC 7694
            headers.append((b"accept-encoding", self.accept_encoding.encode()))
        if self.code == "invalid_api_key":
            headers.append((b"www-authenticate", b"Bearer"))
        if self.code in _CLOSE_CONNECTION:
            headers.append((b"connection", b"close"))
        return headers


def error_response(error: ApiError) -> bytes:
    """A whole HTTP response, for a request that does not reach the application."""
    status, body = HTTPStatus(error.status("tei")), orjson.dumps(error.body("tei"))
    headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), b"connection": b"close"}
    lines = [b"HTTP/1.1 %d %b" % (status, status.phrase.encode())]
    lines += [b"%b: %b" % header for header in (headers | dict(error.headers())).items()]
    return b"\r\n".join([*lines, b"", body])
