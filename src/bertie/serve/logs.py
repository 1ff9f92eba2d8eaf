"""Structured logging: one JSON object per line on standard error, with the event, the time and the request id.

Neither texts nor exception messages are logged, since messages may quote texts. Stack traces are
logged on request only.
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
    """Write events as JSON lines.

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
        """Write an event with the fields that are not None."""
        now = self._clock()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        record = {"time": stamp, "event": event, **{key: value for key, value in fields.items() if value is not None}}
        line = orjson.dumps(record, default=str).decode() + "\n"
        with suppress(OSError, ValueError):  # a closed log must not stop the server
            (self._out or sys.stderr).write(line)  # one write, so that lines of several workers do not interleave

    def error(self, event: str, error: BaseException, **fields: Any) -> None:
        """Write an exception: its class and the line in our own code; the stack trace if enabled."""
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if "bertie" in frame.filename]
        at = f"{own_frames[-1].name}:{own_frames[-1].lineno}" if own_frames else None
        stack = "".join(traceback.format_exception(error)) if self._traces else None
        self(event, error=type(error).__name__, at=at, stack=stack, **fields)


class LogHandler(logging.Handler):
    """Write uvicorn's own messages in the same format."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.INFO)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record."""
        if record.exc_info and record.exc_info[1] is not None:
            self._log.error("server", record.exc_info[1], level=record.levelname)
        elif record.levelno >= logging.WARNING:
            self._log("server", level=record.levelname, message=record.getMessage())
