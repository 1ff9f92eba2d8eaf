"""Text beyond a model's reach, read in overlapping windows.

A window is what the model reads at once: the special tokens, the short text of a pair whole, and a stretch of the long
one. Stretches end and begin at paragraphs, sentences or words where there are any nearby. Of the windows that hold a
token, the one where it has most context on both sides answers for it, so that each token is answered for once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError
from bertie.text.tokenizer import Encoding, IntArray

OVERLAP = 0.25  # of a stretch, shared with the next one
SLACK = 0.25  # of a stretch, in which a good place to cut is looked for
SENTENCE_ENDS = frozenset(".!?。！？…؟।")


@dataclass(frozen=True)
class Window:
    """A part of an encoding that the model reads at once."""

    whole: Encoding
    places: IntArray  # (n,) of the window's tokens in the whole
    owned: NDArray[np.bool_]  # (n,) the tokens that this window answers for

    @cached_property
    def encoding(self) -> Encoding:
        """What the model reads."""
        return take(self.whole, self.places)

    @cached_property
    def tokens_read(self) -> int:
        """How many tokens of the text it answers for: its weight where windows are pooled."""
        return int((self.owned & (self.whole.sources[self.places] >= 0)).sum())

    def __len__(self) -> int:
        return len(self.places)


def take(encoding: Encoding, places: IntArray) -> Encoding:
    """Some tokens of an encoding."""
    return Encoding(**{f.name: getattr(encoding, f.name)[places] for f in fields(encoding)})


def windows(encoding: Encoding, texts: tuple[str, ...], reach: int) -> list[Window]:
    """Cut an encoding with special tokens into windows of at most `reach` tokens. One that fits is one window.

    `texts` are the text, or the two of a pair. Of a pair the longer text is cut; both, if the shorter one alone would
    take more than half of the room.
    """
    everything = np.arange(len(encoding))
    if len(encoding) <= reach:
        return [Window(encoding, everything, np.ones(len(encoding), dtype=bool))]
    parts = [np.flatnonzero(encoding.sources == source) for source in range(len(texts))]
    room = reach - int((encoding.sources < 0).sum())
    if room < 2 * len(parts):
        raise InputError(f"a reach of {reach} tokens leaves {room} for the text beside the special tokens")
    spans = [
        [(0, len(part))] if size >= len(part) else stretches(_strengths(encoding, part, text), size)
        for part, text, size in zip(parts, texts, _rooms([len(p) for p in parts], room), strict=True)
    ]
    owners = [_owners(len(part), one) for part, one in zip(parts, spans, strict=True)]
    found = []
    for numbers in product(*(range(len(one)) for one in spans)):
        kept, owned = encoding.sources < 0, np.zeros(len(encoding), dtype=bool)
        if not any(numbers):
            owned |= kept  # the special tokens of the whole belong to the first window
        for which, number in enumerate(numbers):
            low, high = spans[which][number]
            kept[parts[which][low:high]] = True
            # Where both texts are cut, a stretch recurs beside each stretch of the other: its first time counts.
            if not any(other for k, other in enumerate(numbers) if k != which):
                owned[parts[which][owners[which] == number]] = True
        places = np.flatnonzero(kept)
        found.append(Window(encoding, places, owned[places]))
    return found


def beginning(encoding: Encoding, texts: tuple[str, ...], reach: int) -> list[Window]:
    """One window with as much of the beginning as fits, of a pair cut at the longer text first."""
    parts = [np.flatnonzero(encoding.sources == source) for source in range(len(texts))]
    special = np.flatnonzero(encoding.sources < 0)
    sizes = _rooms([len(part) for part in parts], max(0, reach - len(special)))
    kept = [part[:size] for part, size in zip(parts, sizes, strict=True)]
    places = np.sort(np.concatenate([special, *kept]))
    return [Window(encoding, places, np.ones(len(places), dtype=bool))]


def _rooms(lengths: list[int], room: int) -> list[int]:
    """How many tokens of each text fit."""
    if len(lengths) == 1:
        return [room]
    short = min(min(lengths), room // 2)
    return [room - short, short] if lengths[0] > lengths[1] else [short, room - short]


def stretches(strengths: IntArray, size: int) -> list[tuple[int, int]]:
    """Overlapping stretches of at most `size` tokens; `strengths` say how good it is to cut before each token."""
    total = len(strengths)
    found: list[tuple[int, int]] = []
    low = 0
    while low + size < total:
        high = _best(strengths, low + size - int(size * SLACK), low + size)
        found.append((low, high))
        # Back by the overlap, to the best place between that and half of it; onward in any case.
        back = max(1, int((high - low) * OVERLAP))
        low = max(_best(strengths, high - back, high - back // 2), low + 1)
    # The last one has room to look further back, where a sentence begins or else as far as it can.
    earliest = max(total - size, found[-1][0] + 1 if found else 0)
    found.append((_best(strengths, earliest, max(earliest, min(low, earliest + int(size * SLACK)))), total))
    return found


def _best(strengths: IntArray, first: int, last: int) -> int:
    """The best place to cut from `first` to `last`, the latest of equals."""
    span = strengths[first : last + 1]
    return last - int(np.argmax(span[::-1])) if len(span) else last


def _strengths(encoding: Encoding, part: IntArray, text: str) -> IntArray:
    """(n,) how good it is to cut before each token: 0 inside a word, 1 between words, 2 sentences, 3 lines."""
    words, offsets = encoding.words[part], encoding.offsets[part]
    out = np.zeros(len(part), dtype=np.int64)
    out[1:] = words[1:] != words[:-1]
    for t in np.flatnonzero(out).tolist():
        end, start = int(offsets[t - 1][1]), int(offsets[t][0])
        # A space may belong to the token before or after it, depending on the tokenizer.
        gap = text[end:start] + text[start : start + 1]
        if "\n" in gap or text[max(0, end - 1) : end] == "\n":
            out[t] = 3
        elif text[max(0, end - 1) : end] in SENTENCE_ENDS:
            out[t] = 2
    return out


def _owners(total: int, spans: list[tuple[int, int]]) -> IntArray:
    """(total,) the number of the span where each token has most context on both sides. A text's ends cost nothing."""
    at = np.arange(total)
    best = np.full(total, -1, dtype=np.int64)
    owner = np.zeros(total, dtype=np.int64)
    for number, (low, high) in enumerate(spans):
        inside = slice(low, high)
        before = at[inside] - low if low > 0 else np.full(high - low, total)
        after = high - 1 - at[inside] if high < total else np.full(high - low, total)
        context = np.minimum(before, after)
        better = context > best[inside]
        best[inside] = np.where(better, context, best[inside])
        owner[inside] = np.where(better, number, owner[inside])
    return owner
