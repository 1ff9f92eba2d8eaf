"""Progress bars on standard error, for work that takes longer than a second."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from bertie.data import terminal

FIRST, TERMINAL, LOG = 1.0, 0.1, 10.0  # seconds to the first display, and between two on a terminal and in a log
TICK = 0.5  # seconds after which the times on a terminal are updated, whatever the work does
BAR = 24  # columns


class Progress:
    """A progress bar with rate and remaining time; in log files a line every ten seconds.

    Args:
        label: what is being done.
        fraction: returns the share of the work that is done, or None if the total is unknown.
        initial: rows that an earlier, interrupted run has done.
        start: the share of the work that was done before (default: that of the first update, if rows were).
        file: where to display (default: standard error).
        unit: what `update` counts.
        show: False: nothing; None: on a terminal or in a notebook only.

    >>> with Progress("embed", lambda: 0.5) as progress:
    ...     progress.update(1024)
    """

    def __init__(
        self,
        label: str,
        fraction: Callable[[], float | None],
        *,
        initial: int = 0,
        start: float | None = None,
        file: TextIO | None = None,
        unit: str = "rows",
        show: bool | None = True,
    ) -> None:
        self._label, self._fraction, self._initial, self._unit = label, fraction, initial, unit
        self._file = sys.stderr if file is None else file
        self._terminal = terminal.is_interactive(self._file)
        if show is False or (show is None and not self._terminal):
            self._file, self._terminal = io.StringIO(), False
        self._rows, self._detail = 0, ""
        self._start = time.monotonic()
        self._next = self._start + FIRST
        self._last = self._start  # time of the last update
        self._first_fraction = start  # where this run started
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._ticker: threading.Thread | None = None

    def update(self, rows: int, detail: str = "") -> None:
        """Add completed rows; `detail` is displayed after them, as "loss 0.31"."""
        self._rows += rows
        self._detail = detail or self._detail
        now = self._last = time.monotonic()
        if self._first_fraction is None:
            # Skipping the rows of an earlier run took next to no time.
            self._first_fraction = (self._fraction() or 0.0) if self._initial else 0.0
        if now < self._next:
            return
        self._next = now + (TERMINAL if self._terminal else LOG)
        self._print(self.line(now), end="" if self._terminal else "\n")

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._print(text, end="\n")

    def _tick(self) -> None:
        while not self._stop.wait(TICK):
            if (now := time.monotonic()) >= self._next:
                self._print(self.line(now), end="")

    def line(self, now: float) -> str:
        """Return the text of the progress bar."""
        seconds = max(now - self._start, 1e-9)
        worked = max(self._last - self._start, 1e-9) if self._rows else seconds
        counts = [f"{self._initial + self._rows:,} {self._unit}", f"{_format_rate(self._rows / worked)}/s"]
        counts += [self._detail] if self._detail else []
        done = self._fraction()
        if done is None or self._first_fraction is None or done <= self._first_fraction:
            return self._fit("  ".join([f"{self._label}: {counts[0]}", *counts[1:], format_time(seconds)]))
        remaining = worked * (1 - done) / (done - self._first_fraction) - (seconds - worked)
        left = f"{format_time(max(0.0, remaining))} left"
        if not self._terminal:
            return "  ".join([f"{self._label}: {counts[0]}", *counts[1:], f"{done:.0%}", left])
        head, tail = f"{self._label} ", "  ".join([f" {done:4.0%}", left, *counts])
        room = min(BAR, terminal.width() - 1 - len(head) - len(tail))
        return self._fit(head + (self._bar(done, room) if room >= 8 else "") + tail)

    def _bar(self, done: float, columns: int) -> str:
        halves = round(min(1.0, max(0.0, done)) * 2 * columns)
        full = "━" * (halves // 2) + ("╸" if halves % 2 else "")
        rest = "─" * (columns - len(full))
        return terminal.style(full, "cyan", file=self._file) + terminal.style(rest, "dim", file=self._file)

    def _fit(self, text: str) -> str:
        """Keep a terminal from wrapping the line, which could then not be cleared."""
        has_style = "\x1b" in text
        return text if not self._terminal or has_style else text[: max(20, terminal.width() - 1)]

    def _print(self, text: str, end: str) -> None:
        clear = "\r\x1b[K" if self._terminal else ""
        with self._lock:
            self._file.write(clear + text + end)
            self._file.flush()

    def __enter__(self) -> Self:
        if self._terminal:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ticker is not None:
            self._stop.set()
            self._ticker.join()
        seconds = time.monotonic() - self._start
        if kind is None and seconds > FIRST:
            total = f"{self._label}: {self._initial + self._rows:,} {self._unit} in {format_time(seconds)}"
            self._print(f"{total}, {_format_rate(self._rows / seconds)}/s", end="\n")
        elif self._terminal and seconds > FIRST:
            self._print("", end="")


def _format_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def format_time(seconds: float) -> str:
    """Format a duration as minutes and seconds, or hours, minutes and seconds.

    >>> format_time(65), format_time(3665)
    ('1:05', '1:01:05')
    """
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
