"""Replies of the application: their headers, and the API errors that exceptions become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext
from bertie.serve.exchange import Header, header_lines
from bertie.serve.tickets import Cancelled, Closed, Expired, Refused, TokenLimitExceeded

JSON = b"application/json"
MAX_MESSAGE = 1000  # characters of an error, which may quote a request
_SECURITY_HEADERS: list[Header] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_API_POLICY = b"default-src 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def constant_headers(content_type: bytes, policy: bytes = _API_POLICY) -> bytes:
    """The headers that all replies of a kind have, formatted once."""
    return header_lines([(b"content-type", content_type), *_SECURITY_HEADERS, (b"content-security-policy", policy)])


_JSON_HEADERS = constant_headers(JSON)


@dataclass(slots=True)
class Reply:
    """A reply before it is sent."""

    status: int
    body: bytes
    constant: bytes = _JSON_HEADERS  # header lines
    headers: list[Header] = field(default_factory=list)


def usage_headers(context: RequestContext, seconds: float) -> list[Header]:
    """Times in milliseconds under the header names of text-embeddings-inference, and how much was read."""
    ticket, read = context.ticket, context.read
    return [
        (b"x-compute-tokens", b"%d" % ticket.tokens),
        (b"x-total-time", b"%d" % (seconds * 1000)),
        (b"x-queue-time", b"%d" % (ticket.queue_s * 1000)),
        (b"x-inference-time", b"%d" % (ticket.device_s * 1000)),
        (b"x-tokens-total", b"%d" % read["tokens_total"]),
        (b"x-tokens-read", b"%d" % read["tokens_read"]),
        (b"x-windows", b"%d" % read["windows"]),
        (b"x-tokens-unknown", b"%d" % read["tokens_unknown"]),
        (b"x-tokens-non-english", b"%d" % read["tokens_non_english"]),
    ]


def to_api_error(error: Exception, hide_paths: Callable[[str], str]) -> ApiError:
    """The API error for an exception. Messages of unexpected exceptions may quote texts and are not passed on."""
    match error:
        case ApiError():
            return error
        case TokenLimitExceeded():
            return ApiError("too_large", str(error))
        case Refused():
            return ApiError("overloaded", "the server is busy; try again later", retry_after=error.retry_after)
        case Expired():
            return ApiError("deadline_exceeded", "the deadline of the request has passed", retry_after=1.0)
        case Cancelled():
            return ApiError("cancelled", "the client has disconnected")
        case Closed():
            return ApiError("unavailable", "the server is restarting or shutting down", retry_after=1.0)
        case MissingPackageError():
            return ApiError("unsupported_by_model", "the server lacks a package that this needs")
        case InputError() | NotFoundError():
            return ApiError("invalid_input", hide_paths(str(error))[:MAX_MESSAGE])
        case BertieError() | RuntimeError() | MemoryError():
            return ApiError("inference_failed", "the model failed on this request")
        case _:
            return ApiError("internal", "internal error; the log has a line with this request's id")
