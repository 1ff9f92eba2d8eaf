"""Normalize texts before duplicates are compared: case, punctuation, and scripts without spaces."""

from __future__ import annotations

import re
import unicodedata

# Characters of scripts that are written without spaces between words.
UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])"
)


class _NoPunctuation(dict[int, str | int]):
    """A lazily filled table for `str.translate`: removes apostrophes and hyphens, makes other punctuation spaces."""

    def __missing__(self, code: int) -> str | int:
        kind = unicodedata.category(chr(code))
        self[code] = "" if kind == "Pd" or chr(code) in "'’‘" else " " if kind.startswith("P") else code
        return self[code]


NO_PUNCTUATION = _NoPunctuation()


def normalize_words(text: str) -> str:
    """Case-folded words without punctuation, separated by spaces; a text of nothing but punctuation keeps it.

    >>> normalize_words("It's  the LAZY dog.")
    'its the lazy dog'
    """
    # Line by line: most lines are ASCII in many languages, and then ten times as fast.
    return " ".join(filter(None, map(_normalize_line, text.split("\n")))) or " ".join(_casefold(text).split())


def _casefold(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _normalize_line(line: str) -> str:
    words = _casefold(line).translate(NO_PUNCTUATION)
    return " ".join((words if words.isascii() else UNSPACED.sub(r" \1 ", words)).split())
