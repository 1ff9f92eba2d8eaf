"""Warnings about texts that a model's vocabulary does not cover: one per call, with counts and an example.

Imports no torch: the command line uses it too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bertie.errors import UnknownTokenWarning
from bertie.text.scripts import OTHER_SCRIPT

MOST = 0.5  # the share of unknown tokens from which any text is reported
MANY = 0.2  # and a text with letters of another script: emoji alone are not another language
EXAMPLE = 40  # characters


class UnknownTokenCounter:
    """Counts the texts of a call that consist largely of unknown tokens."""

    def __init__(self) -> None:
        self.texts = self.flagged = 0
        self.silent = False
        self._example = ""

    def add(self, texts: tuple[str, ...], unknown: int, total: int) -> None:
        """Count one text or pair, with its number of unknown tokens and of all tokens."""
        if unknown > MOST * total or (unknown > MANY * total and any(map(OTHER_SCRIPT.search, texts))):
            self.flagged += 1
            if not self._example:
                self._example = next((text for text in texts if OTHER_SCRIPT.search(text)), texts[0])

    def message(self) -> str:
        """The warning."""
        verb = "consists" if self.flagged == 1 else "consist"
        example = " ".join(self._example[: 4 * EXAMPLE].split())
        shown = example if len(example) <= EXAMPLE else example[: EXAMPLE - 1] + "…"
        subject = "the text" if self.texts == 1 else f"{self.flagged:,} of {self.texts:,} texts"
        where = f" ({shown!r})" if self.texts == 1 else f", such as {shown!r}"
        return (
            f"{subject} {verb} largely of unknown tokens{where}: the model's vocabulary does not cover them, and "
            "results are unreliable; use a model for their language, such as a multilingual one"
        )

    def warn(self) -> None:
        """Warn once if there were such texts."""
        if self.flagged and not self.silent:
            self.silent = True
            warnings.warn(self.message(), UnknownTokenWarning, stacklevel=_outside())


_counter: ContextVar[UnknownTokenCounter | None] = ContextVar("unknown_tokens", default=None)


def current_counter() -> UnknownTokenCounter | None:
    """The counter of the enclosing context, if there is one."""
    return _counter.get()


@contextmanager
def one_warning() -> Iterator[None]:
    """Warn once for all calls of the pipeline inside the context, at its end; also a decorator.

    In a nested context, the outer one counts and warns.
    """
    if _counter.get() is not None:
        yield
        return
    counter = UnknownTokenCounter()
    with _use(counter):
        yield
    counter.warn()


class no_warning:  # a function to its callers, and cheaper than a generator: servers call it a lot
    """Count and warn about nothing inside the context."""

    def __enter__(self) -> None:
        counter = UnknownTokenCounter()
        counter.silent = True
        self._token = _counter.set(counter)

    def __exit__(self, *error: object) -> None:
        _counter.reset(self._token)


@contextmanager
def _use(counter: UnknownTokenCounter) -> Iterator[None]:
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def _outside() -> int:
    """The stack level, as seen from the caller, of the first frame outside of Bertie."""
    level, frame = 1, sys._getframe(1)
    inside = ("bertie", "contextlib")  # also decorators
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in inside:
        level, frame = level + 1, frame.f_back
    return level
