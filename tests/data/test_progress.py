"""Progress bars: a bar on terminals, a line every ten seconds elsewhere."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

import pytest

from bertie.data import terminal
from bertie.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still until it is moved."""
    now = 100.0

    def move(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(terminal, "width", lambda: 100)
    return move


def last(file: io.StringIO) -> str:
    return re.sub(r"\x1b\[[\d;]*[mK]", "", file.getvalue().split("\r")[-1])


def test_a_terminal_gets_a_bar(clock: Callable[[float], None]) -> None:
    file, done = Terminal(), 0.0
    with Progress("embed", lambda: done, file=file) as progress:
        progress.update(10)
        assert file.getvalue() == ""  # short work stays silent
        clock(10)
        done = 0.25
        progress.update(90, "loss 0.31")
        assert last(file) == "embed ━━━━━━──────────────────  25%  0:30 left  100 rows  10/s  loss 0.31"
        clock(0.01)
        progress.update(1)
        assert "101" not in file.getvalue()  # not for each update
        clock(30)
        progress.update(0)
    assert last(file) == "embed: 101 rows in 0:40, 2.5/s\n"


def test_the_bar_fits_the_terminal(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (30, 50, 60, 70, 200):
        monkeypatch.setattr(terminal, "width", lambda columns=columns: columns)
        file = Terminal()
        with Progress("train", lambda: 0.5, file=file, unit="texts") as progress:
            clock(9)
            progress.update(1000, "loss 0.3111")
            assert len(last(file)) < columns


def test_a_log_gets_a_line_every_ten_seconds(clock: Callable[[float], None]) -> None:
    file, done = io.StringIO(), 0.0
    with Progress("corpus", lambda: done, initial=50, file=file) as progress:
        done = 0.5  # read again by a resumed run, in no time
        progress.update(10)
        for _ in range(4):
            clock(5)
            done += 0.05
            progress.update(10)
    lines = file.getvalue().splitlines()
    assert lines[0] == "corpus: 70 rows  4/s  55%  0:45 left"
    assert lines[1] == "corpus: 90 rows  2.7/s  65%  0:35 left"
    assert len(lines) == 3
    assert "\x1b" not in file.getvalue()


def test_unknown_totals_have_no_bar(clock: Callable[[float], None]) -> None:
    file = Terminal()
    with Progress("index", lambda: None, file=file) as progress:
        clock(4)
        progress.update(100)
        assert last(file) == "index: 100 rows  25/s  0:04"


def test_nothing_is_shown_where_it_is_switched_off(clock: Callable[[float], None]) -> None:
    for file, show in ((Terminal(), False), (io.StringIO(), None)):
        with Progress("embed", lambda: 0.5, file=file, show=show) as progress:
            clock(5)
            progress.update(1)
        assert file.getvalue() == ""


def test_an_error_clears_the_bar(clock: Callable[[float], None]) -> None:
    file = Terminal()
    progress = Progress("embed", lambda: 0.5, file=file)
    clock(5)
    progress.update(1)
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert last(file) == ""
