"""The input of character-based models such as ELMo: words, and the ids of their characters.

The ids are those of AllenNLP's `ELMoCharacterMapper` and of bilm-tf. A word is its UTF-8 bytes (0 to 255) between a
begin and an end marker, padded with a padding character to a fixed length, usually 50. These padding characters are
part of the model: they have an embedding, and the convolution reads them. All ids are then shifted by one, since 0
stands for no character at all; in a flat batch it does not occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = range(256, 261)  # after the bytes
CHARACTERS = 261  # with the five above, without 0
MARKERS = 2  # of the beginning and the end of each word
# Words that stand for the boundaries of sentences, as in the vocabularies of bilm-tf.
BOUNDARIES = {"<S>": BEGIN_SENTENCE, "</S>": END_SENTENCE}

# Letters and digits with what joins them (don't, well-known, U.S, 3.5, 1,000), or any other single character. Python
# counts accents and vowel signs that are characters of their own among neither; all are U+0300 here, see `_marked`.
_WORD = re.compile("[\\w\u0300]+(?:(?:['’.\\-]|(?<=\\d),(?=\\d))[\\w\u0300]+)*|[^\\w\\s]\u0300*")
_MARK = "\u0300"
_JOINERS = "\u200c\u200d"


def split_words(text: str) -> list[tuple[int, int]]:
    """Split a text into words: the start and end of each.

    A word is a run of letters and digits, together with apostrophes, hyphens and full stops inside it, and commas
    between digits; every other non-whitespace character is a separate word. Languages without spaces between words
    need a word segmenter.

    >>> text = "It's 3.5% of Mr. O'Neil's well-known paper (2018)."
    >>> [text[start:end] for start, end in split_words(text)]
    ["It's", '3.5', '%', 'of', 'Mr', '.', "O'Neil's", 'well-known', 'paper', '(', '2018', ')', '.']
    """
    return [match.span() for match in _WORD.finditer(text if text.isascii() else _marked(text))]


def _marked(text: str) -> str:
    """The text with all combining characters and joiners replaced by the same mark."""
    return "".join(_MARK if category(c)[0] == "M" or c in _JOINERS else c for c in text)


def character_ids(words: Iterable[str], length: int = 50) -> NDArray[np.int64]:
    """(n, length) ids of the characters of each word; longer words are truncated, see `is_cut`.

    >>> character_ids(["a", "<S>"], 5).tolist()
    [[259, 98, 260, 261, 261], [259, 257, 260, 261, 261]]
    """
    rows = [_word_bytes(word)[: length - MARKERS] for word in words]
    ids = np.full((len(rows), length), PADDING, np.int64)
    ids[:, 0] = BEGIN_WORD
    for row, values in zip(ids, rows, strict=True):
        row[1 : len(values) + 1] = values
        row[len(values) + 1] = END_WORD
    ids += 1
    return ids


def is_cut(word: str, length: int = 50) -> bool:
    """Whether a word has more bytes than the model reads: `length` without the two markers.

    >>> is_cut("x" * 48), is_cut("x" * 49)
    (False, True)
    """
    return len(_word_bytes(word)) > length - MARKERS


def _word_bytes(word: str) -> Sequence[int]:
    return [BOUNDARIES[word]] if word in BOUNDARIES else list(word.encode("utf-8"))
