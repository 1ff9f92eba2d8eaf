"""Structured logging: one JSON object per line on standard error, with the event, the time and the request id.

Neither texts nor exception messages are logged, since messages may quote texts. Stack traces are
logged on request only.

Whoever reads the log may stop reading: a pager, a paused terminal, a log collector that hangs. A
write then blocks as soon as the pipe is full. So a thread writes, and the server never waits for it.
"""

from __future__ import annotations

import atexit
import os
import select
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Lock, Thread
from typing import Any, TextIO

import orjson

STANDARD_ERROR = 2  # descriptor
DELAY = 0.01  # seconds for which lines are collected: waking the thread for each line costs more than writing it
MAX_WRITE = 4096  # bytes at a time, or one line: so much is atomic in a pipe, and lines of processes do not interleave
MAX_PENDING = 4 * 1024 * 1024  # bytes that wait to be written; beyond it, lines are dropped and counted


class LogWriter:
    """Write lines to a file descriptor in a thread; `write` never blocks.

    >>> reading, writing = os.pipe()
    >>> writer = LogWriter(writing)
    >>> writer.write("ready\\n")
    >>> writer.flush(), os.read(reading, 100)
    (True, b'ready\\n')
    """

    def __init__(self, descriptor: int = STANDARD_ERROR, max_pending: int = MAX_PENDING) -> None:
        self._descriptor, self._max_pending = descriptor, max_pending
        self._lines: deque[bytes] = deque()
        self._pending = 0  # bytes, of these and of those that are being written
        self._dropped = 0  # lines
        self._changed = Condition()
        self._waiting = False  # whether the thread waits for lines
        self._thread: Thread | None = None

    def write(self, line: str) -> None:
        """Queue a line, or drop it if too much is waiting."""
        data = line.encode()
        with self._changed:
            if self._pending + len(data) > self._max_pending:
                self._dropped += 1
                return
            self._pending += len(data)
            self._lines.append(data)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="bertie-log", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            if self._waiting:
                self._waiting = False
                self._changed.notify_all()

    def flush(self, seconds: float = 1.0) -> bool:
        """Wait until everything is written, but not for long; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._lines or self._dropped):
                    self._waiting = True
                    self._changed.wait_for(lambda: self._lines or self._dropped)
            time.sleep(DELAY)
            while data := self._take():
                with suppress(OSError):  # a closed log must not stop the server
                    self._write_all(data)
                with self._changed:
                    self._pending -= len(data)
                    self._changed.notify_all()

    def _take(self) -> bytes:
        """The next lines; none if all are written."""
        with self._changed:
            if not self._lines and self._dropped:
                line = _format_line(time.time(), "log lines dropped", {"lines": self._dropped}).encode()
                self._lines.append(line)
                self._pending, self._dropped = self._pending + len(line), 0
            lines: list[bytes] = []
            size = 0
            while self._lines and (not lines or size + len(self._lines[0]) <= MAX_WRITE):
                lines.append(self._lines.popleft())
                size += len(lines[-1])
            return b"".join(lines)

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has made the terminal or the pipe non-blocking
                select.select([], [self._descriptor], [])


def _format_line(seconds: float, event: str, fields: dict[str, Any]) -> str:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
    record = {"time": stamp, "event": event, **{key: value for key, value in fields.items() if value is not None}}
    return orjson.dumps(record, default=str).decode() + "\n"


class Log:
    """Write events as JSON lines, by default to standard error.

    >>> import io
    >>> out = io.StringIO()
    >>> Log(out, clock=lambda: 0.0)("request", status=200)
    >>> out.getvalue()
    '{"time":"1970-01-01T00:00:00.000Z","event":"request","status":200}\\n'
    """

    def __init__(
        self, out: TextIO | LogWriter | None = None, *, traces: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self._out, self._traces, self._clock = out or LogWriter(), traces, clock
        self._lock, self._closed = Lock(), False

    def __call__(self, event: str, **fields: Any) -> None:
        """Write an event with the fields that are not None."""
        with suppress(OSError, ValueError), self._lock:  # a closed pipe must not stop the server
            if not self._closed:
                self._out.write(_format_line(self._clock(), event, fields))

    def close(self, event: str, **fields: Any) -> None:
        """Write the last event, and wait a moment until everything is written; threads that still run log no more."""
        with suppress(OSError, ValueError), self._lock:
            self._closed = True
            self._out.write(_format_line(self._clock(), event, fields))
            self._out.flush()

    def error(self, event: str, error: BaseException, **fields: Any) -> None:
        """Write an exception: its class and the line in our own code; the stack trace if enabled."""
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if "bertie" in frame.filename]
        at = f"{own_frames[-1].name}:{own_frames[-1].lineno}" if own_frames else None
        stack = "".join(traceback.format_exception(error)) if self._traces else None
        self(event, error=type(error).__name__, at=at, stack=stack, **fields)
