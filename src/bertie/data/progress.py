"""How far long work is, how fast, and how long it will take: on standard error, if it takes over a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then.

    >>> with Progress("embed", lambda: 0.5) as progress:
    ...     progress.update(1024)
    """

    def __init__(
        self, what: str, fraction: Callable[[], float | None], *, before: int = 0, file: TextIO | None = None
    ) -> None:
        self._what, self._fraction, self._before = what, fraction, before
        self._file = sys.stderr if file is None else file
        self._terminal = self._file.isatty()
        self._rows = 0
        self._start = time.monotonic()
        self._next = self._start + 1
        self._begun: float | None = None  # the fraction at which this run began

    def update(self, rows: int) -> None:
        """So many more are done."""
        self._rows += rows
        now = time.monotonic()
        if self._begun is None:
            # Reading on to where an earlier run stopped took next to no time.
            self._begun = (self._fraction() or 0.0) if self._before else 0.0
        if now < self._next:
            return
        self._next = now + (0.2 if self._terminal else 10)
        self._say(self.line(now), end="" if self._terminal else "\n")

    def line(self, now: float) -> str:
        """As it is shown."""
        seconds = max(now - self._start, 1e-9)
        parts = [f"{self._what}: {self._before + self._rows:,} rows", f"{self._rows / seconds:,.0f}/s"]
        done = self._fraction()
        if done is not None and self._begun is not None and done > self._begun:
            parts += [f"{done:.0%}", f"{_clock(seconds * (1 - done) / (done - self._begun))} left"]
        return "  ".join(parts)

    def _say(self, text: str, end: str) -> None:
        clear = "\r\x1b[K" if self._terminal else ""
        self._file.write(clear + text + end)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        seconds = time.monotonic() - self._start
        if kind is None and seconds > 1:
            total = f"{self._what}: {self._before + self._rows:,} rows in {_clock(seconds)}"
            self._say(f"{total}, {self._rows / seconds:,.0f}/s", end="\n")
        elif self._terminal and seconds > 1:
            self._say("", end="")


def _clock(seconds: float) -> str:
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
