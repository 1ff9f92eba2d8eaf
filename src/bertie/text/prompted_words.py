"""Encode texts word by word, after a prompt that every window repeats.

Words are those of GLiNER: letters and digits, joined by hyphens or underscores, or any other character by itself. Each
word is tokenized alone, so that tokens never cross words. The prompt counts as special tokens: windows repeat it, and
it is not part of the text. A word without tokens, such as a control character, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertie.errors import CheckpointError
from bertie.text.encoding import Encoding, Encodings, IntArray
from bertie.text.tokenizer import Tokenizer
from bertie.text.windows import Window

WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


def split_words(text: str) -> list[tuple[int, int]]:
    """The character offsets of a text's words.

    >>> [("Mr. X's e-mail"[a:b]) for a, b in split_words("Mr. X's e-mail")]
    ['Mr', '.', 'X', "'", 's', 'e-mail']
    """
    return [match.span() for match in WORD.finditer(text)]


def _empty() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PromptedEncodings(Encodings):
    """Texts after their prompts, with all details computed eagerly."""

    offsets: IntArray = field(default_factory=_empty)  # (T, 2)
    word_ids: IntArray = field(default_factory=_empty)  # (T,) -1: special tokens and prompts
    special: IntArray = field(default_factory=_empty)  # (T,) whether it is a special token or part of a prompt

    def _encoding(self, index: int, start: int, end: int) -> Encoding:
        special = self.special[start:end].astype(np.bool_)
        return Encoding(
            self.ids[start:end],
            self.segments[start:end],
            self.offsets[start:end],
            self.word_ids[start:end],
            special,
            np.where(special, np.int64(-1), np.int64(0)),
        )


def encode_prompted(tokenizer: Tokenizer, prompts: Sequence[IntArray], texts: Sequence[str]) -> PromptedEncodings:
    """Encode texts, each after the token ids of its prompt, within the special tokens of a single text."""
    before, after = template_ids(tokenizer)
    words = [split_words(text) for text in texts]
    encoded = tokenizer.encode_words([[text[a:b] for a, b in own] for text, own in zip(texts, words, strict=True)])
    ids, offsets, word_ids, special, lengths = [], [], [], [], []
    for prompt, own, (text_ids, text_words) in zip(prompts, words, encoded, strict=True):
        head, count = len(before) + len(prompt), len(text_ids)
        ids += [before, prompt, text_ids, after]
        lengths.append(head + count + len(after))
        bounds = np.array(own, np.int64).reshape(-1, 2)
        offsets += [np.zeros((head, 2), np.int64), bounds[text_words], np.zeros((len(after), 2), np.int64)]
        word_ids += [np.full(head, -1, np.int64), text_words, np.full(len(after), -1, np.int64)]
        special += [np.ones(head, np.int64), np.zeros(count, np.int64), np.ones(len(after), np.int64)]
    flat, is_special, sizes = np.concatenate(ids), np.concatenate(special), np.array(lengths, np.int64)
    return PromptedEncodings(
        flat,
        np.zeros_like(flat),
        sizes,
        sizes - np.array([len(text_ids) for text_ids, _ in encoded], np.int64),
        in_text=is_special == 0,
        offsets=np.concatenate(offsets),
        word_ids=np.concatenate(word_ids),
        special=is_special,
    )


def template_ids(tokenizer: Tokenizer) -> tuple[IntArray, IntArray]:
    """The special tokens before and after a single text."""
    encoding = tokenizer.encode("a")
    text = np.flatnonzero(~encoding.special)
    if not len(text) or not encoding.special[[*range(text[0]), *range(text[-1] + 1, len(encoding))]].all():
        raise CheckpointError(
            "the tokenizer's template for a single text is not supported: a prompt cannot be inserted into it"
        )
    return encoding.ids[: text[0]], encoding.ids[text[-1] + 1 :]


def text_ranges(windows: Sequence[Window]) -> list[tuple[int, int]]:
    """The range of text tokens (start, end) of each window, as indices into the whole encoding."""
    text = np.flatnonzero(windows[0].whole.sequence_ids == 0)
    if not len(text):
        return [(0, 0)] * len(windows)
    inside = [w.indices[(w.indices >= text[0]) & (w.indices <= text[-1])] for w in windows]
    return [(int(own[0]), int(own[-1]) + 1) for own in inside]


def word_starts(encoding: Encoding) -> IntArray:
    """(W,) the index of each word's first token."""
    first = np.ones(len(encoding), np.bool_)
    first[1:] = encoding.word_ids[1:] != encoding.word_ids[:-1]
    starts: IntArray = np.flatnonzero(first & (encoding.word_ids >= 0))
    return starts
