"""How many tokens of a text are not English, for the vocabularies of English models.

A naive Bayes classifier: each token has a score, the logarithm of how much more frequent it is in other languages
(those in Latin script, of `tools/english_scores.py`) than in English. Parts of words have a low limit, since many names
are split into such parts. A block of about 32 tokens is not English if its scores add up to more than `THRESHOLD`. The
scores of common vocabularies are in `english.npz`, by a hash of the vocabulary; other vocabularies have none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
ScoreArray = NDArray[np.int8]

PATH = Path(__file__).with_name("english.npz")
SCALE = 30  # a score of 30 is a logarithm of 1
BLOCK, THRESHOLD = 32, 5.0
PART, SPLIT = 0.5, 1.2  # the highest scores of a part of a word, and of the beginning of a word that is split
MAX_SIZE = 150_000  # multilingual vocabularies are larger, and slow to hash
SPECIAL = re.compile(r"[\[<].+[\]>]")


def regular_tokens(vocabulary: Mapping[str, int]) -> list[str]:
    """The tokens that are scored, sorted: all except special and unused ones, which differ between models.

    >>> regular_tokens({"[PAD]": 0, "the": 1, "##s": 2})
    ['##s', 'the']
    """
    return sorted(token for token in vocabulary if token[:1] not in "[<" or not SPECIAL.fullmatch(token))


def hash_tokens(tokens: list[str]) -> str:
    """The key of a vocabulary in `english.npz`."""
    return hashlib.sha256("\n".join(tokens).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def begins_word(token: str, prefix: str) -> bool:
    """Whether a token is a word or its beginning; `prefix` is the vocabulary's prefix of such tokens, or "".

    >>> begins_word("Ġthe", "Ġ"), begins_word("the", "Ġ"), begins_word("the", ""), begins_word("##s", "")
    (True, False, True, False)
    """
    return token.startswith(prefix) if prefix else not token.startswith("##")


def word_prefix(vocabulary: Mapping[str, int]) -> str:
    """The prefix of tokens that begin a word."""
    return next((prefix for prefix in ("Ġ", "▁") if f"{prefix}the" in vocabulary), "")


class EnglishDetector:
    """Counts the tokens of texts that are not English, for one vocabulary."""

    def __init__(self, scores: ScoreArray, continues: BoolArray) -> None:
        self._scores, self._continues = scores, continues  # by token id: scores, and which tokens continue a word

    @classmethod
    def for_vocabulary(cls, vocabulary: Mapping[str, int]) -> EnglishDetector | None:
        """The detector of a vocabulary; None if it is not one of those known as English."""
        if len(vocabulary) > MAX_SIZE:
            return None
        tokens = regular_tokens(vocabulary)
        with np.load(PATH) as tables:
            if (key := hash_tokens(tokens)) not in tables:
                return None
            table = tables[key]
        ids, size = [vocabulary[token] for token in tokens], max(vocabulary.values()) + 1
        scores, continues = np.zeros(size, np.int8), np.zeros(size, np.bool_)
        scores[ids] = table
        prefix = word_prefix(vocabulary)
        parts = (token for token in tokens if not begins_word(token, prefix))
        continues[[vocabulary[token] for token in parts if token.removeprefix("##")[:1].isalpha()]] = True
        return cls(scores, continues)

    def score(self, ids: IntArray) -> ScoreArray:
        """(T,) the score of each token of concatenated texts."""
        scores, split = self._scores[ids], self._continues[ids[1:]]
        np.minimum(scores[:-1], int(SPLIT * SCALE), out=scores[:-1], where=split)
        return scores


def count_non_english(scores: NDArray[np.integer], lengths: IntArray) -> IntArray | None:
    """(N,) the tokens of N concatenated texts that are in blocks that are not English; None: there are none.

    >>> german, english = [60] * 40, [-60] * 40
    >>> count_non_english(np.array(german + english + english + german), np.array([40, 120])).tolist()
    [40, 30]
    """
    if len(lengths) == 1 and len(scores) < BLOCK:  # a single query to a server
        return lengths if scores.sum(dtype=np.int64) > THRESHOLD * SCALE else None
    blocks = np.maximum(1, (lengths + BLOCK // 2) // BLOCK)
    first = np.cumsum(blocks) - blocks  # the first block of each text
    text = np.repeat(np.arange(len(lengths)), blocks)
    starts = (np.cumsum(lengths) - lengths)[text] + (np.arange(len(text)) - first[text]) * lengths[text] // blocks[text]
    sums = np.concatenate([[0], np.cumsum(scores, dtype=np.int64)])
    ends = np.append(starts[1:], len(scores))
    flagged = sums[ends] - sums[starts] > THRESHOLD * SCALE
    if not flagged.any():
        return None
    counts: IntArray = np.add.reduceat(np.where(flagged, ends - starts, 0), first)
    return counts
