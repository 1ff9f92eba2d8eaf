"""Requests on the event loop: handlers are ordinary blocking functions, and wait for the engine without a thread.

A request runs in a greenlet. When it waits for a forward pass, the greenlet is suspended, and the event loop continues
with others; when the engine is done, it is resumed. A thread per request would cost more than all the rest of a short
request, and its threads would compete for the interpreter. Only what is small runs here: whatever takes long without
waiting would delay all other requests of the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

from bertie.serve.lanes import QueuedJob

T = TypeVar("T")


class LoopRunner:
    """Runs functions on an event loop. All methods but `wake` must be called in its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[QueuedJob, tuple[_RequestGreenlet, Callable[[QueuedJob], None]]] = {}
        self._done: deque[QueuedJob] = deque()
        self._scheduled = False

    def run(self, function: Callable[[], T], on_return: Callable[[T], None]) -> None:
        """Call a function, which must not raise, until it waits; `on_return` gets what it returns, then or later."""
        self._switch(_RequestGreenlet(self, function, on_return))

    def wait(self, job: QueuedJob, give_up: Callable[[QueuedJob], None]) -> None:
        """Suspend the calling request until its job is done; `give_up` must end it if nobody waits any more."""
        if job.unanswered:
            current = getcurrent()
            assert isinstance(current, _RequestGreenlet)
            assert current.parent is not None
            self._waiting[job] = (current, give_up)
            current.parent.switch()

    def soon(self, function: Callable[[], None]) -> None:
        """Call a function after the requests that have arrived by now have run until they wait."""
        self._loop.call_soon(function)

    def wake(self, job: QueuedJob) -> None:
        """Resume the request that waits for a job; may be called from any thread."""
        self._done.append(job)
        if not self._scheduled:  # one event for all jobs of a batch
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._resume)
            except RuntimeError:  # the loop is closed, and nobody waits any more
                self._done.clear()

    def expire(self) -> None:
        """End the jobs that are cancelled, or whose deadline has passed; called several times a second."""
        now = time.monotonic()
        for job, (_, give_up) in list(self._waiting.items()):
            ticket = job.ticket
            if ticket.cancelled.is_set() or (ticket.deadline is not None and ticket.deadline <= now):
                give_up(job)

    def _resume(self) -> None:
        self._scheduled = False
        while self._done:
            waiting = self._waiting.pop(self._done.popleft(), None)
            if waiting is not None:
                self._switch(waiting[0])

    @staticmethod
    def _switch(request: _RequestGreenlet) -> None:
        result = request.switch()
        if request.dead:
            request.on_return(result)


class _RequestGreenlet(greenlet):
    """One request."""

    def __init__(self, runner: LoopRunner, function: Callable[[], Any], on_return: Callable[[Any], None]) -> None:
        super().__init__(function)
        self.runner, self.on_return = runner, on_return


def current_runner() -> LoopRunner | None:
    """The runner of the calling request; None: it has a thread of its own."""
    current = getcurrent()
    return current.runner if isinstance(current, _RequestGreenlet) else None
