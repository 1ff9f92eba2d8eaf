"""Texts beyond a model's maximum length, read in overlapping windows.

A window is the input of one forward pass: the special tokens, a span of the text and, for a pair, the whole shorter
text. Spans begin and end at paragraph, sentence or word boundaries if there are any nearby. Of the windows that
contain a token, the one where it has the most context on both sides owns it, so that each token is owned once.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError
from bertie.text.encoding import Encoding, IntArray

BoolArray = NDArray[np.bool_]

OVERLAP = 0.25  # fraction of a span that is shared with the next one
SLACK = 0.25  # fraction of a span, at its end, in which the strongest boundary is chosen
INSIDE, WORD, LINE, SENTENCE, PARAGRAPH = range(5)  # strength of the boundary before a token
_NEARBY = 8  # characters on each side of a boundary that are examined
_ENDS, _WIDE_ENDS, _CLOSERS = frozenset(".!?…؟।۔"), frozenset("。！？｡"), "\"')]}»”’」』）"
# Scripts written without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x31F0, 0x31FF)),
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)


@dataclass(frozen=True)
class Window:
    """The part of an encoding that is read in one forward pass."""

    whole: Encoding
    indices: IntArray  # (n,) of the window's tokens in the whole encoding
    owned: BoolArray  # (n,) which tokens this window is responsible for
    weight: float  # for averaging over windows: the number of its tokens, those that occur in k windows counted as 1/k

    @cached_property
    def encoding(self) -> Encoding:
        """The tokens that the model reads."""
        return self.whole if len(self.indices) == len(self.whole) else take(self.whole, self.indices)

    @cached_property
    def tokens_read(self) -> int:
        """Number of text tokens that the window owns."""
        return int((self.owned & (self.whole.sequence_ids[self.indices] >= 0)).sum())

    def __len__(self) -> int:
        return len(self.indices)


def take(encoding: Encoding, indices: IntArray) -> Encoding:
    """Select tokens of an encoding."""
    return Encoding(**{f.name: getattr(encoding, f.name)[indices] for f in fields(encoding)})


def whole_window(encoding: Encoding) -> Window:
    """The window of a text that fits into one."""
    return _single(encoding, np.arange(len(encoding)))


def windows(encoding: Encoding, texts: tuple[str, ...], max_length: int) -> list[Window]:
    """Split an encoding with special tokens into windows of at most `max_length` tokens; one window if it fits.

    `texts` are the text, or the two texts of a pair. Of a pair, the longer text is split; both are if the shorter one
    alone would take more than half of the room: then every span of one is combined with every span of the other.
    """
    if len(encoding) <= max_length:
        return [whole_window(encoding)]
    special, parts, room = _parts(encoding, len(texts), max_length, minimum=2)
    sizes = _sizes([len(part) for part in parts], room)
    spans = [
        [(0, len(part))] if size >= len(part) else split_spans(boundary_strengths(encoding, part, text), size)
        for part, text, size in zip(parts, texts, sizes, strict=True)
    ]
    return _from_spans(encoding, special, parts, spans)


def sentence_windows(encoding: Encoding, texts: tuple[str, ...], max_length: int) -> list[Window]:
    """One window per sentence of a single text; a sentence that does not fit into one is split as by `windows`.

    A pair is split as by `windows`.
    """
    if len(texts) > 1 or not len(encoding.sequence_ids[encoding.sequence_ids == 0]):
        return windows(encoding, texts, max_length)
    special, parts, room = _parts(encoding, 1, max_length, minimum=2)
    strengths = boundary_strengths(encoding, parts[0], texts[0])
    bounds = [0, *np.flatnonzero(strengths >= SENTENCE).tolist(), len(strengths)]
    spans = [
        (first + start, first + end)
        for first, last in pairwise(bounds)
        if first < last
        for start, end in split_spans(strengths[first:last], room)
    ]
    return _from_spans(encoding, special, parts, [spans])


def _from_spans(
    encoding: Encoding, special: IntArray, parts: list[IntArray], spans: list[list[tuple[int, int]]]
) -> list[Window]:
    """The windows of each span of one text with each span of the other."""
    owners = [_owners(len(part), own) for part, own in zip(parts, spans, strict=True)]
    counts = [np.bincount(owner, minlength=len(own)) for owner, own in zip(owners, spans, strict=True)]
    repeats = [prod(map(len, spans)) // len(own) for own in spans]  # in how many windows a span occurs
    result = []
    for numbers in product(*(range(len(own)) for own in spans)):
        indices = [special]
        owned = [np.full(len(special), not any(numbers))]  # the first window owns the special tokens
        for k, number in enumerate(numbers):
            start, end = spans[k][number]
            indices.append(parts[k][start:end])
            # A span that is read with each span of the other text owns its tokens the first time.
            first = not any(other for j, other in enumerate(numbers) if j != k)
            owned.append((owners[k][start:end] == number) & first)
        weight = sum(float(counts[k][number]) / repeats[k] for k, number in enumerate(numbers))
        tokens = np.concatenate(indices)
        order = np.argsort(tokens)
        result.append(Window(encoding, tokens[order], np.concatenate(owned)[order], weight))
    return result


def truncate(encoding: Encoding, texts: tuple[str, ...], max_length: int) -> list[Window]:
    """One window with as much of the beginning as fits; of a pair, the longer text is truncated first."""
    if len(encoding) <= max_length:
        return [whole_window(encoding)]
    special, parts, room = _parts(encoding, len(texts), max_length, minimum=1)
    sizes = _sizes([len(part) for part in parts], room)
    kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return [_single(encoding, np.sort(np.concatenate([special, *kept])))]


def _single(encoding: Encoding, indices: IntArray) -> Window:
    return Window(encoding, indices, np.ones(len(indices), dtype=bool), float(len(indices)))


def _parts(encoding: Encoding, count: int, max_length: int, minimum: int) -> tuple[IntArray, list[IntArray], int]:
    """Indices of the special tokens and of each text's tokens, and the room for text beside the special tokens.

    `minimum` tokens of each text must fit: 2 for spans that share a token with the next span and have one of their own.
    """
    special = np.flatnonzero(encoding.sequence_ids < 0)
    parts = [np.flatnonzero(encoding.sequence_ids == number) for number in range(count)]
    room = max_length - len(special)
    if room < minimum * count:
        raise InputError(
            f"a max_length of {max_length} tokens leaves {max(0, room)} for the text beside the special tokens"
        )
    return special, parts, room


def _sizes(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each text fit."""
    if len(lengths) == 1:
        return [room]
    short = min(min(lengths), room // 2)
    return [room - short, short] if lengths[0] > lengths[1] else [short, room - short]


def split_spans(strengths: IntArray, size: int) -> list[tuple[int, int]]:
    """Overlapping spans of at most `size` tokens; `strengths` rates the boundary before each token."""
    total = len(strengths)
    spans: list[tuple[int, int]] = []
    start = 0
    while start + size < total:
        end = _best(strengths, start + size - int(size * SLACK), start + size)
        spans.append((start, end))
        # Back by the overlap, to the best boundary between that and half of it; forward in any case.
        back = max(1, int((end - start) * OVERLAP))
        start = max(_best(strengths, end - back, end - max(1, back // 2)), start + 1)
    # The last span may begin earlier: at the best boundary among those where it is nearly full.
    earliest = max(total - size, spans[-1][0] + 1 if spans else 0)
    spans.append((_best(strengths, earliest, max(earliest, min(start, earliest + int(size * SLACK)))), total))
    return spans


def _best(strengths: IntArray, first: int, last: int) -> int:
    """The strongest boundary from `first` to `last`, the latest of equals."""
    return last - int(np.argmax(strengths[first : last + 1][::-1]))


def _owners(total: int, spans: list[tuple[int, int]]) -> IntArray:
    """(total,) the span in which each token has the most context on both sides; the ends of a text do not count."""
    best = np.full(total, -1, dtype=np.int64)
    owner = np.zeros(total, dtype=np.int64)
    for number, (start, end) in enumerate(spans):
        at, inside = np.arange(start, end), slice(start, end)
        before = at - start if start > 0 else np.full(end - start, total)
        after = end - 1 - at if end < total else np.full(end - start, total)
        context = np.minimum(before, after)
        better = context > best[inside]
        best[inside] = np.where(better, context, best[inside])
        owner[inside] = np.where(better, number, owner[inside])
    return owner


# --- word, sentence and paragraph boundaries ---


def word_starts(encoding: Encoding, part: IntArray, text: str) -> BoolArray:
    """(n,) which of the tokens at `part` begin a word of `text`.

    Words are those of the tokenizer. Some tokenizers split at spaces only, or not at all: inside such a word, a token
    that begins with a space begins a word, a punctuation mark is a word of its own, as for BERT, and so is each token
    in scripts that are written without spaces. No word ends between a letter and its accent.
    """
    words, offsets = encoding.word_ids[part].tolist(), encoding.offsets[part].tolist()
    out = np.ones(len(part), dtype=bool)
    for t in range(1, len(words)):
        end, start = offsets[t - 1][1], offsets[t][0]
        if words[t] == words[t - 1]:
            # A token that shares a character with the previous one belongs to the same word.
            out[t] = 0 < end <= start < len(text) and _breaks(text[end - 1], text[start])
        elif 0 < end == start < len(text):
            out[t] = not _accented(text[end - 1], text[start])
    return out


@lru_cache(1 << 16)
def _accented(before: str, after: str) -> bool:
    """Whether a mark, such as an accent or a vowel sign, belongs to the adjacent letter: byte-level BPE splits them."""
    kinds = {unicodedata.category(before)[0], unicodedata.category(after)[0]}
    return kinds in ({"L", "M"}, {"M"})


@lru_cache(1 << 16)
def _breaks(before: str, after: str) -> bool:
    if after.isspace():
        return not before.isspace()
    if before.isspace() or unicodedata.category(after)[0] == "M" or "\u200d" in (before, after):
        return False
    return any(_is_punctuation(c) or any(low <= ord(c) <= high for low, high in _UNSPACED) for c in (before, after))


def _is_punctuation(c: str) -> bool:
    return unicodedata.category(c)[0] == "P" or (c.isascii() and c.isprintable() and not c.isalnum() and c != " ")


def boundary_strengths(encoding: Encoding, part: IntArray, text: str) -> IntArray:
    """(n,) strength of the boundary before each of the tokens at `part`: from INSIDE a word to PARAGRAPH."""
    out = np.zeros(len(part), dtype=np.int64)
    starts = encoding.offsets[part, 0].tolist()
    for t in np.flatnonzero(word_starts(encoding, part, text))[1:].tolist():
        # Spaces lie between tokens, or belong to one of them: tokenizers differ.
        left, right = text[max(0, starts[t] - _NEARBY) : starts[t]], text[starts[t] : starts[t] + _NEARBY]
        before = left.rstrip()
        gap = left[len(before) :] + right[: len(right) - len(right.lstrip())]
        last = before.rstrip(_CLOSERS)[-1:]
        if gap.count("\n") > 1:
            out[t] = PARAGRAPH
        elif last in _WIDE_ENDS or (gap and last in _ENDS):
            out[t] = SENTENCE
        else:
            out[t] = LINE if "\n" in gap else WORD
    return out
