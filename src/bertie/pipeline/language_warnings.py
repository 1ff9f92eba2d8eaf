"""Warnings about texts that are not in a language of the model: one per call and kind, with counts and an example.

Imports no torch: the command line uses it too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from bertie.errors import BertieWarning, NonEnglishWarning, UnknownTokenWarning
from bertie.text.scripts import OTHER_SCRIPT

MOST = 0.5  # the share of unknown or non-English tokens from which any text is reported
MANY = 0.2  # and of unknown tokens, a text with letters of another script: emoji alone are not another language
FEW = 0.05  # the share of non-English texts up to which there is no warning: some are lists of names
EXAMPLE = 40  # characters
ADVICE = "results are unreliable; use a model for their language, such as a multilingual one"


@dataclass(slots=True)
class _Reported:
    """The texts of a call that are reported for one reason."""

    texts: int = 0
    example: str = ""

    def add(self, example: str) -> None:
        self.texts += 1
        self.example = self.example or example

    def describe(self, texts: int, verbs: tuple[str, str]) -> str:
        """Which of the call's texts, with an example and the verb for one or several."""
        example = " ".join(self.example[: 4 * EXAMPLE].split())
        shown = repr(example if len(example) <= EXAMPLE else example[: EXAMPLE - 1] + "…")
        verb = verbs[self.texts > 1]
        if texts == 1:
            return f"the text {verb} ({shown})"
        return f"{self.texts:,} of {texts:,} texts {verb}, such as {shown}"


class LanguageCounter:
    """Counts the texts of a call that consist largely of unknown tokens, or are not in English."""

    def __init__(self) -> None:
        self.texts = 0
        self.silent = False
        self._unknown, self._non_english = _Reported(), _Reported()

    def add(self, texts: tuple[str, ...], unknown: int, non_english: int, total: int) -> None:
        """Count one text or pair, with its numbers of unknown, of non-English and of all tokens."""
        if unknown > MOST * total or (unknown > MANY * total and any(map(OTHER_SCRIPT.search, texts))):
            self._unknown.add(next((text for text in texts if OTHER_SCRIPT.search(text)), texts[0]))
        elif non_english > MOST * total:
            self._non_english.add(max(texts, key=len))

    def messages(self) -> Iterator[tuple[type[BertieWarning], str]]:
        """The warnings."""
        if self._unknown.texts:
            which = self._unknown.describe(
                self.texts, ("consists largely of unknown tokens", "consist largely of unknown tokens")
            )
            yield UnknownTokenWarning, f"{which}: the model's vocabulary does not cover them, and {ADVICE}"
        if self._non_english.texts > FEW * self.texts:
            which = self._non_english.describe(
                self.texts, ("does not seem to be in English", "do not seem to be in English")
            )
            yield NonEnglishWarning, f"{which}: the model's vocabulary is English, and {ADVICE}"

    def warn(self) -> None:
        """Warn once of each kind, if there were such texts."""
        if not self.silent:
            for category, message in self.messages():
                self.silent = True
                warnings.warn(message, category, stacklevel=_outside())


_counter: ContextVar[LanguageCounter | None] = ContextVar("language_counter", default=None)


def current_counter() -> LanguageCounter | None:
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
    counter = LanguageCounter()
    with _use(counter):
        yield
    counter.warn()


class no_warning:  # a function to its callers, and cheaper than a generator: servers call it a lot
    """Count and warn about nothing inside the context."""

    def __enter__(self) -> None:
        counter = LanguageCounter()
        counter.silent = True
        self._token = _counter.set(counter)

    def __exit__(self, *error: object) -> None:
        _counter.reset(self._token)


@contextmanager
def _use(counter: LanguageCounter) -> Iterator[None]:
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
