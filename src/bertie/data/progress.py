"""Progress bars on standard error, for work that takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO


class Progress:
    """A progress bar with rate and remaining time; a line every ten seconds in log files.

    >>> with Progress("embed", lambda: 0.5) as progress:
    ...     progress.update(1024)
    """

    def __init__(
        self, label: str, fraction: Callable[[], float | None], *, initial: int = 0, file: TextIO | None = None
    ) -> None:
        self._label, self._fraction, self._initial = label, fraction, initial
        self._file = sys.stderr if file is None else file
        self._terminal = self._file.isatty()
        self._rows = 0
        self._start = time.monotonic()
        self._next = self._start + 1
        self._first_fraction: float | None = None  # where this run started

    def update(self, rows: int) -> None:
        """Add completed rows."""
        self._rows += rows
        now = time.monotonic()
        if self._first_fraction is None:
            # Skipping the rows of an earlier run took next to no time.
            self._first_fraction = (self._fraction() or 0.0) if self._initial else 0.0
        if now < self._next:
            return
        self._next = now + (0.2 if self._terminal else 10)
        self._print(self.line(now), end="" if self._terminal else "\n")

    def line(self, now: float) -> str:
        """Return the text of the progress bar."""
        seconds = max(now - self._start, 1e-9)
        parts = [f"{self._label}: {self._initial + self._rows:,} rows", f"{self._rows / seconds:,.0f}/s"]
        done = self._fraction()
        if done is not None and self._first_fraction is not None and done > self._first_fraction:
            parts += [f"{done:.0%}", f"{_format_time(seconds * (1 - done) / (done - self._first_fraction))} left"]
        return "  ".join(parts)

    def _print(self, text: str, end: str) -> None:
        clear = "\r\x1b[K" if self._terminal else ""
        self._file.write(clear + text + end)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.monotonic() - self._start
        if kind is None and seconds > 1:
            total = f"{self._label}: {self._initial + self._rows:,} rows in {_format_time(seconds)}"
            self._print(f"{total}, {self._rows / seconds:,.0f}/s", end="\n")
        elif self._terminal and seconds > 1:
            self._print("", end="")


def _format_time(seconds: float) -> str:
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
