"""Counts of words and characters, from which vocabularies are trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tokenizers

from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

# No pre-tokenizer creates words that span whitespace. Texts are therefore split there and the
# pieces counted first, so that each distinct piece is normalized and pre-tokenized once. BERT's
# normalizer deletes some of Python's whitespace as control characters: no split is made there.
_PIECE = re.compile(r"[^\S\x0b\x0c\x1c-\x1f\x85]*[\S\x0b\x0c\x1c-\x1f\x85]+")
_MAX_PIECES = 1 << 19  # distinct pieces held in memory


def count_words(texts: Iterable[str], backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Count the words of texts after normalization and pre-tokenization, sorted by word.

    Memory grows with the number of distinct words, not with the texts.

    >>> from tokenizers import models, normalizers, pre_tokenizers
    >>> backend = tokenizers.Tokenizer(models.WordPiece())
    >>> backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    >>> count_words(["A cat.", "a dog"], backend)
    {'.': 1, 'a': 2, 'cat': 1, 'dog': 1}
    """
    words: Counter[str] = Counter()
    pieces: Counter[str] = Counter()
    for number, text in enumerate(texts):
        checked_text(text, f"text {number + 1}")
        pieces.update(_PIECE.findall(text))
        if len(pieces) > _MAX_PIECES:
            _pre_tokenize(pieces, backend, words)
            pieces.clear()
    _pre_tokenize(pieces, backend, words)
    if not words:
        raise InputError("the texts contain no words to train a tokenizer on")
    return dict(sorted(words.items()))


def _pre_tokenize(pieces: Counter[str], backend: tokenizers.Tokenizer, words: Counter[str]) -> None:
    """Add the words of the counted pieces to `words`."""
    normalize = backend.normalizer.normalize_str if backend.normalizer is not None else str
    pre_tokenizer: Any = backend.pre_tokenizer
    for piece, count in pieces.items():
        for word, _ in pre_tokenizer.pre_tokenize_str(normalize(piece)):
            words[word] += count


def frequent_characters(words: dict[str, int], min_frequency: int, limit: int) -> set[str]:
    """The `limit` most frequent characters; ties are broken by code point."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    common = [character for character, count in counts.items() if count >= min_frequency]
    return set(sorted(common, key=lambda character: (-counts[character], character))[:limit])
