"""Cleaning and normalization of raw text, for corpora of any language.

A document is one text; its lines are paragraphs. Each cleaner is a function from text to text, named in
`CLEANERS`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable

from bertie.data.normalize import UNSPACED, normalize_words
from bertie.errors import InputError

# Control characters except tab and newline, byte order marks, lone surrogates, and noncharacters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff\ud800-\udfff]")
_OTHER_SPACE, _SPACES = re.compile(r"[^\S\n ]"), re.compile(" {2,}")


def nfc(text: str) -> str:
    """Normalize to Unicode NFC.

    >>> len("e\\u0301"), len(nfc("e\\u0301"))
    (2, 1)
    """
    return unicodedata.normalize("NFC", text)


def strip_controls(text: str) -> str:
    """Remove control and invalid characters; those that separate words become spaces. Tabs and newlines stay.

    >>> strip_controls("a\\x00b\\x0cc\\ufeff")
    'ab c'
    """
    return _CONTROLS.sub(lambda match: " " if match[0].isspace() else "", text)


def collapse_spaces(text: str) -> str:
    """Collapse whitespace within lines to single spaces, and strip lines.

    >>> collapse_spaces(" a \\t b\\u00a0c \\n d")
    'a b c\\nd'
    """
    return "\n".join(line.strip(" ") for line in _SPACES.sub(" ", _OTHER_SPACE.sub(" ", text)).split("\n"))


def drop_lines_without_letters(text: str) -> str:
    """Drop lines without a letter of any script: rules, page numbers, columns of figures.

    >>> drop_lines_without_letters("One.\\n* * *\\n1984\\n文")
    'One.\\n文'
    """
    return "\n".join(line for line in text.split("\n") if any(map(str.isalpha, line)))


# Always applied in this order.
CLEANERS: dict[str, Callable[[str], str]] = {
    "nfc": nfc,
    "controls": strip_controls,
    "spaces": collapse_spaces,
    "letters": drop_lines_without_letters,
}


def clean_text(text: str, names: Iterable[str]) -> str:
    """Apply the named cleaners, and drop empty lines.

    >>> clean_text("a  b\\n \\n\\x07c", ["spaces", "controls"])
    'a b\\nc'
    """
    chosen = set(names)
    if not chosen <= CLEANERS.keys():
        raise InputError(f"clean={sorted(chosen - CLEANERS.keys())} must be among {', '.join(CLEANERS)}")
    for name, clean in CLEANERS.items():
        if name in chosen:
            text = clean(text)
    return "\n".join(line for line in text.split("\n") if line and not line.isspace())


def is_long_enough(text: str, min_characters: int, min_words: int) -> bool:
    """Whether a text has enough characters and words. In scripts without spaces each character is a word.

    >>> is_long_enough("two words", 5, 2), is_long_enough("two words", 5, 3), is_long_enough("没有空格", 0, 4)
    (True, False, True)
    """
    return len(text) >= min_characters and (min_words < 2 or len(UNSPACED.sub(r" \1 ", text).split()) >= min_words)


def title_key(title: str) -> str:
    """Reduce a title to its letters and digits, for comparison.

    WikiText has "Meridian , Mississippi" and "Edson 's Ridge" where Wikipedia has no such spaces.

    >>> title_key("American Beauty ( 1999 film )") == title_key("American Beauty (1999 film)")
    True
    """
    return normalize_words(title).replace(" ", "")
