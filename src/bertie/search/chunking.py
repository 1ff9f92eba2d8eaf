"""Documents to passages: stretches of at most so many tokens, cut where a reader would cut.

A text is taken apart into units: headings, sentences, lines of code and of tables, and pieces of what is longer than a
passage. Units are put together again until a passage is full; how good it is to cut before each decides where it ends.
Tokens of a unit are counted once, and those of a passage once more, so that the work grows as the length of the text.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

from bertie.errors import InputError
from bertie.search.records import Document, Passage
from bertie.text.tokenizer import Tokenizer, checked_text

ENOUGH = 0.25  # of a passage: with less before it, a heading begins no new one
SLACK = 0.25  # of a passage, in which a good place to cut is looked for
LETTERS = 16  # a token counts for so many at most: to WordPiece, a word of any length may be one unknown token
GLUED, PIECE, SENTENCE, LINE, PARAGRAPH, HEADING = range(-1, 5)  # how good it is to cut before a unit

_FINE, _FULL = 1 / 8, 0.9  # of a passage: pieces that are put together again, and pieces that are passages
_AT_ONCE = 1 << 20  # characters that are tokenized at once: their encodings take a hundred times as much memory
_STRUCTURE = re.compile(
    r"^(?:[ ]{0,3}(?P<fence>`{3,}|~{3,})[^`\n]*$"
    r"|[ ]{0,3}(?P<level>#{1,6})[ \t]+(?P<title>[^\n]*)"
    r"|(?:\A|(?<=\n\n)|(?<=\n\r\n)|(?<===\n))(?P<over>[^\s#|>][^\n]{0,200})\n"
    r"(?P<under>={3,}|-{3,}|~{3,}|\^{3,})[ \t\r]*$"
    r"|(?P<row>[ ]{0,3}\|[^\n]*\n[ ]{0,3}\|))",
    re.MULTILINE,
)
_TABLE = re.compile(r"(?:[ ]{0,3}\|[^\n]*(?:\n|\Z))+")
_LEVELS = {"=": 1, "-": 2, "~": 3, "^": 4}  # of underlined headings
_CLOSERS = "[\"')\\]}»”’」』）]{0,4}"
_BREAK = re.compile(
    rf"(?<=[.!?…؟।۔]){_CLOSERS}\s+"  # the end of a sentence
    rf"|(?<=[。！？｡]){_CLOSERS}\s*"
    r"|\n[^\S\n]*\n\s*"  # a blank line
    r"|\n(?=[ \t]*(?:[-*+•]|\d{1,3}[.)])[ \t])"  # an item of a list follows
    r"|\f\s*"  # a page ends
)
_SPACE = re.compile(r"\s")
_SHORTEST = 5  # characters of a sentence with the space behind it: "1. " is none
_ABBREVIATED = frozenset("Mr. Mrs. Ms. Dr. Prof. St. No. Fig. Vol. vs. cf. al. e.g. i.e. ca. bzw. z.B. d.h.".split())


class _Unit(NamedTuple):
    start: int  # it ends where the next one starts, so that the space behind it is its own
    cut: int  # how good it is to cut before it
    headings: tuple[str, ...]
    block: int = 0  # not 0: the number of the code or table that it is a line of


class _Span(NamedTuple):
    start: int
    fresh: int  # what is before this is in the span before as well
    end: int
    headings: tuple[str, ...]


class Chunker:
    """Cuts documents into passages of at most `size` tokens, special ones included.

    Passages begin at headings, where the one before has enough; they end with paragraphs, sentences, or at least
    words. Neighbours share up to about `overlap` tokens, in whole sentences if these are short enough, and none across
    headings. Code between fences and tables stay whole if they fit. All that is not blank is in some passage.

    >>> from bertie.text.legacy import LegacyTokenizer
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] a b c . #".replace(" ", chr(10)))
    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> chunker = Chunker(Tokenizer.from_folder(folder, recipe), size=10, overlap=0)
    >>> for one in chunker.passages(Document("x", "# A\\n\\na a a a. B b b.\\n\\n## C\\n\\nc c.")):
    ...     print(one.start, one.end, one.headings, repr(one.text))
    0 13 ('A',) '# A\\n\\na a a a.'
    14 20 ('A',) 'B b b.'
    22 32 ('A', 'C') '## C\\n\\nc c.'
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 256, overlap: int = 32) -> None:
        special = len(tokenizer.encode(""))
        if size < special + 8:
            raise InputError(f"size={size} must be at least {special + 8}: {special} special tokens and 8 of the text")
        if not 0 <= overlap <= (size - special) // 2:
            raise InputError(f"overlap={overlap} must be from 0 to {(size - special) // 2}, half of size={size}")
        self.size, self.overlap = size, overlap
        self._tokenizer, self._special, self._room = tokenizer, special, size - special

    def passages(self, document: Document) -> list[Passage]:
        """The passages of a document, in order; none if it is blank."""
        return self.batch([document])[0]

    def batch(self, documents: Sequence[Document]) -> list[list[Passage]]:
        """The passages of each of many documents: faster than one by one."""
        texts = [checked_text(one.text, f"the document {one.id!r}") for one in documents]
        spans: list[list[_Span]] = [[] for _ in texts]
        short = [i for i, text in enumerate(texts) if self._may_fit(text)]
        counts = self._counts(texts[i].strip() for i in short)
        whole = {i for i, count in zip(short, counts, strict=True) if count <= self._room}
        for i in whole:
            spans[i] = _trimmed(texts[i], [_Span(0, 0, len(texts[i]), ())])
        cut = [i for i in range(len(texts)) if i not in whole]
        for i, own in zip(cut, self._packed([texts[i] for i in cut]), strict=True):
            spans[i] = own
        return [
            [Passage(one.id, start, end, one.text[start:end], headings) for start, _, end, headings in own]
            for one, own in zip(documents, spans, strict=True)
        ]

    def _may_fit(self, text: str) -> bool:
        """Whether to see first if all of it is one passage. With headings it may be several, although it fits."""
        return len(text) < 6 * self._room and _STRUCTURE.search(text) is None

    def _packed(self, texts: list[str]) -> list[list[_Span]]:
        """The passages of texts that have units to be put together."""
        taken = [_units(text) for text in texts]
        counts = self._counts(text[a:b] for text, own in zip(texts, taken, strict=True) for a, b in _ends(text, own))
        spans = []
        for text, units in zip(texts, taken, strict=True):
            fine, tokens = self._fine(text, units, counts)
            spans.append(_trimmed(text, _pack(text, fine, tokens, self._room, self.overlap)))
        # A tokenizer may see other words in a passage than in its parts.
        counts = self._counts(text[one.start : one.end] for text, own in zip(texts, spans, strict=True) for one in own)
        return [self._shrunk(text, own, counts) for text, own in zip(texts, spans, strict=True)]

    def _counts(self, texts: Iterable[str]) -> Iterator[int]:
        """How many tokens each text has, without the special ones of the template."""
        for some in _groups(texts):
            yield from [len(one) - self._special for one in self._tokenizer.encode_batch(some)]

    def _fine(self, text: str, units: list[_Unit], counts: Iterator[int]) -> tuple[list[_Unit], list[int]]:
        """Units and how many tokens each counts for, those longer than a passage in pieces."""
        fine: list[_Unit] = []
        tokens: list[int] = []
        blocks: dict[int, int] = {}
        for unit, (start, end) in zip(units, _ends(text, units), strict=True):
            for piece, count in self._pieces(text, start, end, next(counts), _FINE):
                fine.append(unit if piece == start else unit._replace(start=piece, cut=PIECE))
                tokens.append(count)
                blocks[unit.block] = blocks.get(unit.block, 0) + count
        for i in range(1, len(fine)):
            block = fine[i].block
            if block and block == fine[i - 1].block and blocks[block] <= self._room:
                fine[i] = fine[i]._replace(cut=GLUED)
        return fine, tokens

    def _shrunk(self, text: str, spans: list[_Span], counts: Iterator[int]) -> list[_Span]:
        """The same spans; those with too many tokens share none with the one before, and if need be are cut again."""
        found: list[_Span] = []
        for one in spans:
            tokens = next(counts)
            if one.start < one.fresh and (tokens > self._room or one.start <= found[-1].start):
                (one,) = _trimmed(text, [one._replace(start=one.fresh)])
                tokens = next(self._counts([text[one.start : one.end]]))
            if tokens <= self._room:
                found.append(one)
                continue
            starts = [start for start, _ in self._pieces(text, one.start, one.end, tokens, _FULL)]
            found += _trimmed(text, (_Span(a, a, b, one.headings) for a, b in pairwise([*starts, one.end])))
        return found

    def _pieces(self, text: str, start: int, end: int, tokens: int, share: float) -> Iterator[tuple[int, int]]:
        """Where the pieces of a stretch start, and what each counts for: all of it if it fits, else about `share`."""
        tokens = max(tokens, (end - start) // LETTERS)
        if tokens <= self._room or end - start == 1:  # one character with more tokens than that cannot be helped
            yield start, tokens
            return
        letters = (end - start) * self._room / tokens  # that fill a passage
        cuts = [start, *_cuts(text, start, end, max(1, int(letters * share)), int(letters * _FULL)), end]
        parts = list(pairwise(cuts))
        for (low, high), count in zip(parts, self._counts(text[low:high].strip() for low, high in parts), strict=True):
            yield from self._pieces(text, low, high, count, share)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def _ends(text: str, units: list[_Unit]) -> Iterator[tuple[int, int]]:
    return pairwise([*(one.start for one in units), len(text)])


def _trimmed(text: str, spans: Iterable[_Span]) -> list[_Span]:
    """Spans without the space around them, and without those that have nothing else of their own."""
    found = []
    for start, fresh, end, headings in spans:
        whole = text[start:end].rstrip()
        if start + len(whole) > fresh:
            first = start + len(whole) - len(whole.lstrip())
            found.append(_Span(first, max(first, fresh), start + len(whole), headings))
    return found


# --- a text's units ---


def _units(text: str) -> list[_Unit]:
    units: list[_Unit] = []
    path: list[tuple[int, str]] = []  # level and title of the headings that hold here
    headings: tuple[str, ...] = ()
    cut = PARAGRAPH
    at = look = blocks = 0
    unclosed: dict[str, int] = {}  # of which no such fence closes any more
    while (found := _STRUCTURE.search(text, look)) is not None:
        end, level, title = _read(text, found, unclosed)
        if end is None:
            look = found.end() if found["over"] is None else found.end("over")
            continue
        before = len(units)
        units += _prose(text, at, found.start(), cut, headings)
        if len(units) > before:
            cut = PARAGRAPH
        if level:
            while path and path[-1][0] >= level:
                path.pop()
            path.append((level, title))
            headings = tuple(one for _, one in path)
            # A heading right under another one stays with it.
            units.append(_Unit(found.start(), HEADING if cut != GLUED else GLUED, headings))
            cut = GLUED
        else:
            blocks += 1
            for line in re.finditer(r"[^\n]*\S[^\n]*", text[found.start() : end]):
                units.append(_Unit(found.start() + line.start(), cut, headings, blocks))
                cut = PIECE
            cut = PARAGRAPH
        at = look = end
    units += _prose(text, at, len(text), cut, headings)
    return units


def _read(text: str, found: re.Match[str], unclosed: dict[str, int]) -> tuple[int | None, int, str]:
    """Where it ends, and of a heading its level and title; None if it only looks like something."""
    if (fence := found["fence"]) is not None:
        if len(fence) >= unclosed.get(fence[0], len(fence) + 1):
            return None, 0, ""
        close = re.compile(rf"^[ ]{{0,3}}{fence[0]}{{{len(fence)},}}[ \t\r]*$", re.MULTILINE).search(text, found.end())
        if close is None:
            unclosed[fence[0]] = len(fence)
        return (close.end() if close else None), 0, ""
    if found["row"] is not None:
        table = _TABLE.match(text, found.start())
        return (table.end() if table else None), 0, ""
    if (over := found["over"]) is not None:
        title, under = over.strip(), found["under"]
        # In Markdown ~~~ may begin code, below a line of text.
        sound = under[0] in "=-" or len(under) >= len(title)
        return (found.end() if sound else None), _LEVELS[under[0]], title
    title = found["title"].strip().rstrip("#").rstrip()
    return (found.end() if title else None), len(found["level"]), title


def _prose(text: str, low: int, high: int, cut: int, headings: tuple[str, ...]) -> Iterator[_Unit]:
    """The sentences from `low` to `high`; `cut` is how good it is to cut before the first."""
    blank = len(text[low:high]) - len(text[low:high].lstrip())
    start = low + blank
    if start == high:
        return
    yield _Unit(start, cut, headings)
    for found in _BREAK.finditer(text, start, high):
        end = found.end()
        lines = found[0].count("\n")
        if end == high:
            return
        if lines < 2 and not _ends_sentence(text, start, found.start(), end):
            continue
        yield _Unit(end, PARAGRAPH if lines > 1 else LINE if lines or "\f" in found[0] else SENTENCE, headings)
        start = end


def _ends_sentence(text: str, start: int, stop: int, next_: int) -> bool:
    """Whether one that started at `start` ends at `stop`, and another starts at `next_`."""
    if next_ - start < _SHORTEST:
        return False
    if text[stop - 1] != ".":
        return not text[next_].islower() or text[stop - 1] not in "!?…"
    word = text[max(start, stop - 6) : stop].split()[-1]
    initial = len(word) == 2 and word[0].isupper()
    return not (text[next_].islower() or initial or word.lstrip("(\"'") in _ABBREVIATED)


def _cuts(text: str, start: int, end: int, step: int, furthest: int) -> Iterator[int]:
    """Places about `step` characters apart, at lines or words; of a longer word behind it, if `furthest` suffices."""
    at = start
    while at + step < end:
        best = 1 + text.rfind("\n", at + step // 2, at + step)
        best = best or 1 + max(text.rfind(space, at, at + step) for space in " \t\n")
        if best <= at:
            ahead = _SPACE.search(text, at + step, min(end, at + furthest))
            best = ahead.end() if ahead else _whole_letter(text, at, at + step)
        if best >= end:
            return
        yield best
        at = best


def _whole_letter(text: str, low: int, at: int) -> int:
    """A place at or before `at` where no accent is parted from its letter."""
    place = at
    while place > low + 1 and (unicodedata.category(text[place])[0] == "M" or "\u200d" in text[place - 1 : place + 1]):
        place -= 1
    return place if place > low + 1 else at


# --- units to passages ---


def _pack(text: str, units: list[_Unit], tokens: list[int], room: int, overlap: int) -> Iterator[_Span]:
    """Put units together, up to `room` tokens each time."""
    total = len(units)
    before = [0, *accumulate(tokens)]  # (n + 1,) tokens before each unit
    sections = [i for i, one in enumerate(units) if one.cut == HEADING]
    starts = [*(one.start for one in units), len(text)]
    done = low = shared = 0  # units that are in a passage; the first of the next one; tokens it has before that
    start = starts[0] if units else 0
    while done < total:
        limit = bisect_right(before, before[low] + room - shared) - 1
        section = bisect_left(sections, max(done + 1, bisect_left(before, before[done] + ENOUGH * room)))
        if section < len(sections) and sections[section] <= limit:
            high = sections[section]
        elif limit == total:
            high = total
        else:
            fair = bisect_left(before, before[low] + (1 - SLACK) * room - shared)
            high = _best(units, done, limit, fair)
            if (low < done or shared) and (high == done or units[high].cut == GLUED):
                low, shared, start = done, 0, starts[done]  # what is shared with the one before takes the room
                continue
            high = max(high, done + 1)
        yield _Span(start, starts[done], starts[high], _common(units, low, high))
        first, low, done = low, high, high
        if high < total:
            low, shared, start = _back(text, units, before, starts, first, high, overlap)


def _best(units: list[_Unit], done: int, limit: int, fair: int) -> int:
    """The best unit to cut before, from `fair` to `limit`, or an earlier one if those cannot be parted; else `done`."""
    best = max(done, limit)
    for i in range(best, done, -1):
        if units[i].cut > units[best].cut:
            best = i
        if i <= fair and units[best].cut > GLUED:
            break
    return best


def _back(
    text: str, units: list[_Unit], before: list[int], starts: list[int], first: int, high: int, overlap: int
) -> tuple[int, int, int]:
    """Where the passage behind one from `first` to `high` starts: at which unit, with how many tokens before it."""
    if units[high].cut == HEADING or not overlap:
        return high, 0, starts[high]
    sentence = piece = high
    for i in range(high - 1, first, -1):
        if before[high] - before[i] > overlap:
            break
        if units[i].cut >= SENTENCE:
            sentence = i
        elif units[i].cut == PIECE:
            piece = i
        if units[i].cut == HEADING:
            break
    low = sentence if sentence < high else piece
    last = before[high] - before[high - 1]
    if low < high or last <= overlap or units[high - 1].cut == GLUED:
        return low, 0, starts[low]
    # The last sentence alone is too long: its last words.
    letters = starts[high] - starts[high - 1]
    found = _SPACE.search(text, starts[high] - letters * overlap // last, starts[high])
    if found is None:
        return high, 0, starts[high]
    return high, ceil(last * (starts[high] - found.end()) / letters), found.end()


def _common(units: list[_Unit], low: int, high: int) -> tuple[str, ...]:
    """The headings above all units from `low` to `high`."""
    common = units[low].headings
    if common is units[high - 1].headings:
        return common
    for unit in units[low:high]:
        while unit.headings[: len(common)] != common:
            common = common[:-1]
    return common
