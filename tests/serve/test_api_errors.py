"""Errors in the formats of the three APIs."""

from __future__ import annotations

import pytest

from bertie.serve.api_errors import ERRORS, ApiError
from bertie.serve.openapi import STATUSES


def test_formats() -> None:
    error = ApiError("invalid", "k: must be at least 1", field="k")
    assert error.body("tei") == {"error": "k: must be at least 1", "error_type": "Validation"}
    assert error.body("cohere") == {"message": "k: must be at least 1", "detail": "k: must be at least 1"}
    details = {"message": "k: must be at least 1", "type": "invalid_request_error", "param": "k", "code": "invalid"}
    assert error.body("openai") == {"error": details}
    assert (error.status("tei"), error.status("cohere"), error.status("openai")) == (422, 422, 400)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (ApiError("overloaded", "", retry_after=2.1), {b"retry-after": b"3"}),
        (ApiError("overloaded", "", retry_after=0.0), {b"retry-after": b"1"}),
        (ApiError("method_not_allowed", "", allow="POST"), {b"allow": b"POST"}),
        (ApiError("invalid_api_key", ""), {b"www-authenticate": b"Bearer", b"connection": b"close"}),
        (ApiError("too_large", ""), {b"connection": b"close"}),
        (ApiError("invalid", ""), {}),
    ],
    ids=lambda value: getattr(value, "code", ""),
)
def test_headers(error: ApiError, headers: dict[bytes, bytes]) -> None:
    assert dict(error.headers()) == headers


def test_every_status_is_documented() -> None:
    undocumented = {499, 500}  # never sent, and never expected
    assert {row.status for row in ERRORS.values()} - undocumented <= set(STATUSES)
