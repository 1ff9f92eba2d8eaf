"""Which scripts a vocabulary covers, and which tokens of a text it does not.

A token is unknown if it is the unknown token ([UNK]), or a single letter of a script in which the vocabulary has no
words: the vocabularies of English models contain most alphabets, and spell every Russian or Greek word letter by
letter. Other languages in Latin script are told from English by `bertie.text.english`.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from bertie.text.encoding import Encodings
from bertie.text.english import EnglishDetector, count_non_english
from bertie.text.scripts import OTHER_SCRIPT

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

# A script is covered by this many tokens of several letters, or of one letter where letters are words (Han). English
# vocabularies have up to 10 and 488 (bert-base-uncased), multilingual ones from 126 and 13,550 (mBERT).
WORDS, LETTERS = 50, 2000
PREFIXES = "##", "▁"  # of tokens that continue a word, or begin one


class Coverage:
    """Counts the tokens of texts that a vocabulary does not cover, and those that are not English."""

    def __init__(self, vocabulary: Mapping[str, int], unk_id: int | None) -> None:
        self._uncovered = uncovered_tokens(vocabulary, unk_id)
        self._english = EnglishDetector.for_vocabulary(vocabulary)

    def count_unknown(self, encodings: Encodings) -> IntArray | None:
        """(N,) the unknown tokens of each text; None: there are none."""
        flags = self._uncovered[encodings.ids]
        return count_flagged(flags if encodings.in_text is None else flags & encodings.in_text, encodings.lengths)

    def count_non_english(self, encodings: Encodings) -> IntArray | None:
        """(N,) the tokens of each text that are not English; None: there are none, or another kind of vocabulary."""
        if self._english is None:
            return None
        scores = self._english.score(encodings.ids)
        if encodings.in_text is not None:
            scores = scores * encodings.in_text
        counts = count_non_english(scores, encodings.lengths)
        return None if counts is None else np.minimum(counts, encodings.lengths - encodings.special_counts)


def uncovered_tokens(vocabulary: Mapping[str, int], unk_id: int | None) -> BoolArray:
    """(vocabulary size,) whether each id is the unknown token, or a letter of a script without words.

    >>> vocabulary = {"[UNK]": 0, "cat": 1, "##s": 2, "д": 3, "##а": 4, "α": 5}
    >>> uncovered_tokens(vocabulary, 0).tolist()
    [True, False, False, True, True, True]
    """
    flags = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.bool_)
    if unk_id is not None:
        flags[unk_id] = True
    words: Counter[str] = Counter()
    letters: dict[str, list[int]] = {}
    for token, id in _other_scripts(vocabulary):
        script = _script(token[0])
        if len(token) > 1:
            words[script] += 1
        else:
            letters.setdefault(script, []).append(id)
    for script, ids in letters.items():
        if script != "LATIN" and words[script] < WORDS and len(ids) < LETTERS:
            flags[ids] = True
    return flags


def count_flagged(flags: BoolArray, lengths: IntArray) -> IntArray | None:
    """(N,) number of flagged tokens of each of N concatenated texts; None: there are none."""
    if not flags.any():
        return None
    ends, sums = np.cumsum(lengths), np.concatenate([[0], np.cumsum(flags)])
    counts: IntArray = sums[ends] - sums[ends - lengths]
    return counts


def _other_scripts(vocabulary: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """The tokens that begin with a letter of another script, without the prefixes of the tokenizer, and their ids."""
    for token, id in vocabulary.items():
        if not token.isascii():
            for prefix in PREFIXES:
                token = token.removeprefix(prefix)
            if OTHER_SCRIPT.match(token) and unicodedata.category(token[0])[0] in "LM":
                yield token, id


def _script(letter: str) -> str:
    """The first word of a letter's name, which is its script: CYRILLIC, CJK, HANGUL."""
    return unicodedata.name(letter, "?").partition(" ")[0]
