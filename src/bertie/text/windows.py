"""Text beyond a model's max_length, read in overlapping windows.

A window is what the model reads at once: the special tokens, the short text of a pair whole, and a stretch of the long
one. Stretches end and begin at paragraphs, sentences or words where there are any nearby. Of the windows that hold a
token, the one where it has most context on both sides answers for it, so that each token is answered for once.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError
from bertie.text.encoding import Encoding, IntArray

BoolArray = NDArray[np.bool_]

OVERLAP = 0.25  # of a stretch, shared with the next one
SLACK = 0.25  # of a stretch, in which a good place to cut is looked for
INSIDE, WORD, LINE, SENTENCE, PARAGRAPH = range(5)  # how good it is to cut before a token
_NEARBY = 8  # characters on each side of a cut that are looked at
_ENDS, _WIDE_ENDS, _CLOSERS = frozenset(".!?…؟।۔"), frozenset("。！？｡"), "\"')]}»”’」』）"
# Scripts written without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x31F0, 0x31FF)),
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)),
)


@dataclass(frozen=True)
class Window:
    """A part of an encoding that the model reads at once."""

    whole: Encoding
    places: IntArray  # (n,) of the window's tokens in the whole
    owned: BoolArray  # (n,) the tokens that this window answers for
    weight: float  # where windows are pooled: its tokens, those that recur in k windows as 1/k

    @cached_property
    def encoding(self) -> Encoding:
        """What the model reads."""
        return self.whole if len(self.places) == len(self.whole) else take(self.whole, self.places)

    @cached_property
    def tokens_read(self) -> int:
        """How many tokens of the text it answers for."""
        return int((self.owned & (self.whole.sequence_ids[self.places] >= 0)).sum())

    def __len__(self) -> int:
        return len(self.places)


def take(encoding: Encoding, places: IntArray) -> Encoding:
    """Some tokens of an encoding."""
    return Encoding(**{f.name: getattr(encoding, f.name)[places] for f in fields(encoding)})


def windows(encoding: Encoding, texts: tuple[str, ...], max_length: int) -> list[Window]:
    """Cut an encoding with special tokens into windows of at most `max_length` tokens. One that fits is one window.

    `texts` are the text, or the two of a pair. Of a pair the longer text is cut; both, if the shorter one alone would
    take more than half of the room: then every stretch of one meets every stretch of the other.
    """
    if len(encoding) <= max_length:
        return [_single(encoding, np.arange(len(encoding)))]
    special, parts, room = _parts(encoding, len(texts), max_length, least=2)
    rooms = _rooms([len(part) for part in parts], room)
    spans = [
        [(0, len(part))] if size >= len(part) else stretches(strengths(encoding, part, text), size)
        for part, text, size in zip(parts, texts, rooms, strict=True)
    ]
    owners = [_owners(len(part), one) for part, one in zip(parts, spans, strict=True)]
    counts = [np.bincount(owner, minlength=len(one)) for owner, one in zip(owners, spans, strict=True)]
    times = [prod(len(one) for one in spans) // len(one) for one in spans]  # how often a stretch recurs
    found = []
    for numbers in product(*(range(len(one)) for one in spans)):
        places = [special]
        owned = [np.full(len(special), not any(numbers))]  # those of the whole belong to the first window
        for which, number in enumerate(numbers):
            low, high = spans[which][number]
            places.append(parts[which][low:high])
            # A stretch that recurs beside each stretch of the other text answers for its tokens the first time.
            first = not any(other for k, other in enumerate(numbers) if k != which)
            owned.append((owners[which][low:high] == number) & first)
        weight = sum(float(counts[which][number]) / times[which] for which, number in enumerate(numbers))
        at = np.concatenate(places)
        order = np.argsort(at)
        found.append(Window(encoding, at[order], np.concatenate(owned)[order], weight))
    return found


def beginning(encoding: Encoding, texts: tuple[str, ...], max_length: int) -> list[Window]:
    """One window with as much of the beginning as fits, of a pair cut at the longer text first."""
    if len(encoding) <= max_length:
        return [_single(encoding, np.arange(len(encoding)))]
    special, parts, room = _parts(encoding, len(texts), max_length, least=1)
    sizes = _rooms([len(part) for part in parts], room)
    kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    return [_single(encoding, np.sort(np.concatenate([special, *kept])))]


def _single(encoding: Encoding, places: IntArray) -> Window:
    return Window(encoding, places, np.ones(len(places), dtype=bool), float(len(places)))


def _parts(encoding: Encoding, count: int, max_length: int, least: int) -> tuple[IntArray, list[IntArray], int]:
    """The places of the special tokens and of each text, and how many tokens of text fit beside the special ones.

    `least`: of each text; 2 for stretches that share a token with their neighbour and have one for themselves.
    """
    special = np.flatnonzero(encoding.sequence_ids < 0)
    parts = [np.flatnonzero(encoding.sequence_ids == source) for source in range(count)]
    room = max_length - len(special)
    if room < least * count:
        raise InputError(
            f"a max_length of {max_length} tokens leaves {max(0, room)} for the text beside the special tokens"
        )
    return special, parts, room


def _rooms(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each text fit."""
    if len(lengths) == 1:
        return [room]
    short = min(min(lengths), room // 2)
    return [room - short, short] if lengths[0] > lengths[1] else [short, room - short]


def stretches(cuts: IntArray, size: int) -> list[tuple[int, int]]:
    """Overlapping stretches of at most `size` tokens; `cuts` say how good it is to cut before each token."""
    total = len(cuts)
    found: list[tuple[int, int]] = []
    low = 0
    while low + size < total:
        high = _best(cuts, low + size - int(size * SLACK), low + size)
        found.append((low, high))
        # Back by the overlap, to the best place between that and half of it; onward in any case.
        back = max(1, int((high - low) * OVERLAP))
        low = max(_best(cuts, high - back, high - max(1, back // 2)), low + 1)
    # The last one has room to look further back: to the best place among those where it is nearly full.
    earliest = max(total - size, found[-1][0] + 1 if found else 0)
    found.append((_best(cuts, earliest, max(earliest, min(low, earliest + int(size * SLACK)))), total))
    return found


def _best(cuts: IntArray, first: int, last: int) -> int:
    """The best place to cut from `first` to `last`, the latest of equals."""
    return last - int(np.argmax(cuts[first : last + 1][::-1]))


def _owners(total: int, spans: list[tuple[int, int]]) -> IntArray:
    """(total,) the number of the span where each token has most context on both sides. A text's ends cost nothing."""
    best = np.full(total, -1, dtype=np.int64)
    owner = np.zeros(total, dtype=np.int64)
    for number, (low, high) in enumerate(spans):
        at, inside = np.arange(low, high), slice(low, high)
        before = at - low if low > 0 else np.full(high - low, total)
        after = high - 1 - at if high < total else np.full(high - low, total)
        context = np.minimum(before, after)
        better = context > best[inside]
        best[inside] = np.where(better, context, best[inside])
        owner[inside] = np.where(better, number, owner[inside])
    return owner


# --- where words, sentences and paragraphs begin ---


def word_starts(encoding: Encoding, part: IntArray, text: str) -> BoolArray:
    """(n,) which of the tokens at `part` begin a word of `text`.

    A word is what the tokenizer takes for one. Some take all between two spaces: inside that, a punctuation mark is a
    word of its own, as it is to BERT, and so is each piece in scripts that are written without spaces. No word ends
    between a letter and its accent.
    """
    words, offsets = encoding.word_ids[part].tolist(), encoding.offsets[part].tolist()
    out = np.ones(len(part), dtype=bool)
    for t in range(1, len(words)):
        end, start = offsets[t - 1][1], offsets[t][0]
        if words[t] == words[t - 1]:
            # A token that shares a character with the one before it goes on with it.
            out[t] = 0 < end <= start < len(text) and _breaks(text[end - 1], text[start])
        elif 0 < end == start < len(text):
            out[t] = not _accented(text[end - 1], text[start])
    return out


@lru_cache(1 << 16)
def _accented(before: str, after: str) -> bool:
    """Whether a mark, such as an accent or a vowel sign, belongs to the letter beside it: byte-level BPE parts them."""
    kinds = {unicodedata.category(before)[0], unicodedata.category(after)[0]}
    return kinds in ({"L", "M"}, {"M"})


@lru_cache(1 << 16)
def _breaks(before: str, after: str) -> bool:
    if before.isspace() or unicodedata.category(after)[0] == "M" or "\u200d" in (before, after):
        return False
    return any(_is_punctuation(c) or any(low <= ord(c) <= high for low, high in _UNSPACED) for c in (before, after))


def _is_punctuation(c: str) -> bool:
    return unicodedata.category(c)[0] == "P" or (c.isascii() and c.isprintable() and not c.isalnum() and c != " ")


def strengths(encoding: Encoding, part: IntArray, text: str) -> IntArray:
    """(n,) how good it is to cut before each of the tokens at `part`: from INSIDE a word to PARAGRAPH."""
    out = np.zeros(len(part), dtype=np.int64)
    starts = encoding.offsets[part, 0].tolist()
    for t in np.flatnonzero(word_starts(encoding, part, text))[1:].tolist():
        # Spaces may lie between two tokens, or belong to either: tokenizers differ.
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
