"""One request on its way through the engine, and the errors with which it may end."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from bertie.errors import BertieError


class Refused(BertieError):
    """The queue is full. Nothing was done; a retry after `retry_after` seconds may succeed."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Expired(BertieError, TimeoutError):
    """The deadline passed before the result was ready."""


class Cancelled(BertieError):
    """The request was cancelled by its caller."""


class Closed(BertieError):
    """The engine is stopping or has stopped. Another one, or this one after a restart, may accept the request."""


class TokenLimitExceeded(BertieError):
    """The windows of a request have more tokens together than one request may have."""


class CancelFlag:
    """What can be set once; as `threading.Event` without waiting, which costs more to make."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Set it."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set


@dataclass(eq=False, slots=True)
class Ticket:
    """One request on its way through the engine; the workers add up what it used.

    `cancelled.set()` removes its windows from the queue. `deadline` is a time of `time.monotonic()`.
    """

    id: str = ""
    deadline: float | None = None
    max_tokens: int | None = None  # that the windows of the request may have together
    owner: str = ""  # an API key, or a client's address: the owners of jobs take turns
    cancelled: CancelFlag = field(default_factory=CancelFlag)
    submitted_tokens: int = 0  # in all windows that were put into a queue
    queued: float = 0.0  # when its first windows were put into a queue; a time of `time.perf_counter()`
    queue_s: float = 0.0  # from arrival until its first window was taken
    device_s: float = 0.0  # its share, by tokens, of the time of its batches
    tokens: int = 0  # that the model read for it
    batch_tokens: int = 0  # of the largest batch that it was part of

    def check(self) -> None:
        """Raise `Cancelled` or `Expired` if nobody waits for the result any more. Long work calls it now and then."""
        if self.cancelled.is_set():
            raise Cancelled("the request was cancelled")
        if self.deadline is not None and self.deadline <= time.monotonic():
            raise Expired("the deadline passed before the result was ready")

    def error(self) -> Cancelled | Expired:
        """Why nobody waits for the result any more."""
        if self.cancelled.is_set():
            return Cancelled("the request was cancelled")
        return Expired("the deadline passed during the forward pass")


current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)
