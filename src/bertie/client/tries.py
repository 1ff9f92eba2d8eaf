"""When to ask again, and what is wrong when there is no more asking."""

from __future__ import annotations

import random
import re
import time
from email.utils import parsedate_to_datetime
from typing import Any

from bertie.errors import BertieError, InputError, NotFoundError

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds before the next try, doubled each time
PATIENCE = 60.0  # seconds: a server that wants to be left alone for longer is not waited for


class ServerError(BertieError):
    """A server that gave no answer though nothing is wrong with what was asked, or none that one can read.

    `status` is that of the last reply, None if none came; `request_id` is what the server's log calls the request.
    """

    def __init__(self, message: str, status: int | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.status, self.request_id = status, request_id


class Tries:
    """What became of one request so far, and what to do next."""

    def __init__(self, retries: int, where: str, first: int = 0) -> None:
        self.left, self.where, self.first = retries, where, first
        self.pause = FIRST_PAUSE

    def failed(self, error: Exception) -> float:
        """Seconds to wait after there was no reply, or the error that ends it."""
        if not self.left:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise ServerError(f"no answer from {self.where}: {what}") from error
        return self._next(0.0)

    def replied(self, response: Any) -> float | None:
        """None: the reply is good. Else as `failed`."""
        if response.status_code == 200:
            return None
        after = retry_after(response.headers.get("retry-after"))
        if response.status_code in (429, 502, 503) and self.left and after <= PATIENCE:
            return self._next(after)
        raise _error(response, self.where, self.first)

    def _next(self, at_least: float) -> float:
        self.left -= 1
        pause = self.pause * random.uniform(0.5, 1.0)  # so that those who were refused together do not return so
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        return at_least + pause


def retry_after(said: str | None) -> float:
    """Seconds, from either of the two ways to say them."""
    if said is None:
        return 0.0
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except ValueError:
        return 0.0


def _error(response: Any, where: str, first: int) -> BertieError:
    """A refusal, by its status."""
    status, name = response.status_code, response.headers.get("x-request-id")
    message = _message(response)
    # The server counts from the beginning of the request; whoever reads this, from the beginning of the list.
    message = re.sub(
        r"^(text|question|document) (\d+)", lambda hit: f"{hit[1]} {first + int(hit[2])}", message, count=1
    )
    if status in (400, 413, 422):
        return InputError(message)
    if status == 404:
        return NotFoundError(f"{where}: {message}")
    return ServerError(f"{where} answered {status}: {message}", status, name)


def _message(response: Any) -> str:
    """What an error says, in the shape of whichever API."""
    try:
        body = response.json()
        said = body.get("error", body.get("message"))
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, AttributeError, KeyError):
        return str(response.text)[:200] or str(response.reason_phrase)
