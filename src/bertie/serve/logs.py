"""One JSON object a line, on standard error: what happened, when, and to which request.

Neither texts nor what exceptions say is written, as that may quote them; a stack only where it was asked for.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

import orjson


class Log:
    """Writes events.

    >>> import io
    >>> out = io.StringIO()
    >>> Log(out, clock=lambda: 0.0)("request", status=200)
    >>> out.getvalue()
    '{"time":"1970-01-01T00:00:00.000Z","event":"request","status":200}\\n'
    """

    def __init__(
        self, out: TextIO | None = None, *, traces: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._out, self._traces, self._clock = out, traces, clock

    def __call__(self, event: str, **fields: Any) -> None:
        """Write one."""
        now = self._clock()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        said = {"time": stamp, "event": event, **{key: value for key, value in fields.items() if value is not None}}
        line = orjson.dumps(said, default=str).decode() + "\n"
        with suppress(OSError, ValueError):  # that nobody reads it is no reason to answer nobody
            (self._out or sys.stderr).write(line)  # at once, so that lines of several workers do not mix

    def error(self, event: str, error: BaseException, **fields: Any) -> None:
        """Write an exception: its kind and the place in our own code; all of it, if stacks were asked for."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "bertie" in frame.filename]
        at = f"{ours[-1].name}:{ours[-1].lineno}" if ours else None
        stack = "".join(traceback.format_exception(error)) if self._traces else None
        self(event, error=type(error).__name__, at=at, stack=stack, **fields)


class Handler(logging.Handler):
    """uvicorn's own messages in the same form."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        if record.exc_info and record.exc_info[1] is not None:
            self._log.error("server", record.exc_info[1], level=record.levelname)
        elif record.levelno >= logging.WARNING:
            self._log("server", level=record.levelname, message=record.getMessage())
