"""Retry policy, and the exceptions for requests that fail."""

from __future__ import annotations

import random
import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

from bertie.errors import BertieError, InputError, NotFoundError

FIRST_PAUSE, MAX_PAUSE = 0.25, 8.0  # seconds before a retry; doubled each time
MAX_RETRY_AFTER = 60.0  # seconds: a server that asks for a longer pause is not retried


class ServerError(BertieError):
    """A server that cannot be reached, refuses a valid request, or sends a response that cannot be parsed.

    `status` is that of the last response, None without one; `request_id` identifies the request in
    the server's log.
    """

    def __init__(self, message: str, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.request_id = status, request_id


class RetryState:
    """The remaining retries of one request, and the next pause."""

    def __init__(self, retries: int, url: str, first: int = 0) -> None:
        self.remaining, self.url, self.first = retries, url, first
        self.pause = FIRST_PAUSE

    def after_failure(self, error: Exception) -> float:
        """Seconds to wait after a failed connection; raises when no retries remain."""
        if not self.remaining:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ServerError(f"no response from {self.url}: {reason}; is `bertie serve` running there?") from error
        return self._next_pause(0.0)

    def after_response(self, response: Any) -> float | None:
        """None if the response is good; otherwise as `after_failure`."""
        if response.status_code == 200:
            return None
        seconds = retry_after(response.headers.get("retry-after"))
        if response.status_code in (429, 502, 503) and self.remaining and seconds <= MAX_RETRY_AFTER:
            return self._next_pause(seconds)
        raise _to_exception(response, self.url, self.first)

    def _next_pause(self, at_least: float) -> float:
        self.remaining -= 1
        pause = self.pause * random.uniform(0.5, 1.0)  # jitter: clients refused together must not return together
        self.pause = min(2 * self.pause, MAX_PAUSE)
        return at_least + pause


def retry_after(value: str | None) -> float:
    """Seconds in a Retry-After header, which is a number or a date."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _to_exception(response: Any, url: str, first: int) -> BertieError:
    """The exception for an error response."""
    status, request_id = response.status_code, response.headers.get("x-request-id")
    # The server counts items from the start of the request; the caller counts from the start of the list.
    message = re.sub(
        r"^(text|question|document) (\d+)",
        lambda match: f"{match[1]} {first + int(match[2])}",
        _error_message(response),
        count=1,
    )
    if status in (400, 413, 422):
        return InputError(message)
    if status == 404:
        return NotFoundError(f"{url}: {message}")
    return ServerError(f"{url} answered {status}: {message}", status, request_id)


def _error_message(response: Any) -> str:
    """The message of an error response in the format of any of the APIs."""
    try:
        body = response.json()
        error = body.get("error", body.get("message"))
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError):
        return str(response.text)[:200] or str(response.reason_phrase)
