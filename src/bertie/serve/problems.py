"""What can go wrong with a request, and how each API says it: one table of statuses, three shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["tei", "openai", "rank"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A row of the table: the status, text-embeddings-inference's type, OpenAI's type and code."""

    status: int
    tei: str
    openai: str
    code: str | None = None


_BAD, _LIMIT, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"
KINDS = {
    "syntax": _Kind(400, "Validation", _BAD, "invalid_json"),
    "empty": _Kind(400, "Empty", _BAD, "empty"),
    "key": _Kind(401, "Unauthorized", _BAD, "invalid_api_key"),
    "host": _Kind(403, "Forbidden", _BAD, "forbidden_host"),
    "model": _Kind(404, "NotFound", _BAD, "model_not_found"),
    "path": _Kind(404, "NotFound", _BAD, "not_found"),
    "method": _Kind(405, "Validation", _BAD, "method_not_allowed"),
    "slow": _Kind(408, "Timeout", _BAD, "request_timeout"),
    "large": _Kind(413, "Validation", _BAD, "too_large"),
    "media": _Kind(415, "Validation", _BAD, "unsupported_media_type"),
    "invalid": _Kind(422, "Validation", _BAD, "invalid"),
    "input": _Kind(422, "Tokenizer", _BAD, "invalid_input"),
    "unable": _Kind(424, "Backend", _BAD, "unsupported_by_model"),
    "backend": _Kind(424, "Backend", _SERVER, "inference_failed"),
    "full": _Kind(429, "Overloaded", _LIMIT, "overloaded"),
    "rate": _Kind(429, "Overloaded", _LIMIT, "rate_limit_exceeded"),
    "cancelled": _Kind(499, "Cancelled", _BAD, "cancelled"),
    "internal": _Kind(500, "Internal", _SERVER, "internal"),
    "closing": _Kind(503, "Unhealthy", _SERVER, "unavailable"),
    "late": _Kind(503, "Timeout", _SERVER, "deadline_exceeded"),
}


class Problem(Exception):
    """A request that gets no result, and why.

    >>> Problem("full", "try again", retry_after=2.1).reply("tei")
    {'error': 'try again', 'error_type': 'Overloaded'}
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,  # methods
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.field, self.retry_after, self.allow = kind, message, field, retry_after, allow
        self.row = KINDS[kind]

    def status(self, style: Style) -> int:
        """OpenAI answers whatever is wrong with a request with 400."""
        return 400 if style == "openai" and self.row.status == 422 else self.row.status

    def reply(self, style: Style) -> dict[str, Any]:
        """The body."""
        if style == "openai":
            row = self.row
            return {"error": {"message": self.message, "type": row.openai, "param": self.field, "code": row.code}}
        if style == "rank":
            return {"message": self.message, "detail": self.message}
        return {"error": self.message, "error_type": self.row.tei}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """When to come back; what to bring along; and an end to connections that are misused.

        Who is asked to come back keeps the connection: to connect anew is work for both.
        """
        found = []
        if self.retry_after is not None:
            found.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.kind == "key":
            found.append((b"www-authenticate", b"Bearer"))
        if self.kind in ("large", "slow", "host", "key", "media"):
            found.append((b"connection", b"close"))
        return found
