"""Texts without what two copies of one may differ in: case, punctuation, odd spaces."""

from __future__ import annotations

import re
import unicodedata

# A character of a script that is written without spaces between words.
UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])"
)


class _NoPunctuation(dict[int, str | int]):
    """A table for `str.translate` that fills itself: "it's" and "state-of-the-art" are a word, other marks end one."""

    def __missing__(self, code: int) -> str | int:
        kind = unicodedata.category(chr(code))
        self[code] = "" if kind == "Pd" or chr(code) in "'’‘" else " " if kind.startswith("P") else code
        return self[code]


NO_PUNCTUATION = _NoPunctuation()
