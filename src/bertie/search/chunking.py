"""Split documents into passages of bounded token length, at natural boundaries.

A text is split into units: headings, sentences, lines of code and of tables, and pieces of anything
longer than a passage. Units are packed into passages; the break priority before each unit decides
where a passage ends. Tokens are counted once per unit and once per passage, so that run time is
linear in the length of the text.
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

MIN_FILL = 0.25  # of a passage: with less before it, a heading does not start a new passage
SLACK = 0.25  # of a passage: how far back to search for a good break
MAX_TOKEN_CHARACTERS = 16  # at most, for counting: in WordPiece, a word of any length may be one unknown token
GLUED, PIECE, SENTENCE, LINE, PARAGRAPH, HEADING = range(-1, 5)  # break priority before a unit

_FINE, _FULL = 1 / 8, 0.9  # of a passage: size of pieces that are packed again, and of pieces that are passages
_BATCH_CHARACTERS = 1 << 20  # tokenized per call: encodings take a hundred times as much memory
_STRUCTURE = re.compile(
    r"^(?:[ ]{0,3}(?P<fence>`{3,}|~{3,})[^`\n]*$"
    r"|[ ]{0,3}(?P<level>#{1,6})[ \t]+(?P<title>[^\n]*)"
    r"|(?:\A|(?<=\n\n)|(?<=\n\r\n)|(?<===\n))(?P<over>[^\s#|>][^\n]{0,200})\n"
    r"(?P<under>={3,}|-{3,}|~{3,}|\^{3,})[ \t\r]*$"
    r"|(?P<row>[ ]{0,3}\|[^\n]*\n[ ]{0,3}\|))",
    re.MULTILINE,
)
_TABLE = re.compile(r"(?:[ ]{0,3}\|[^\n]*(?:\n|\Z))+")
_LEVELS = {"=": 1, "-": 2, "~": 3, "^": 4}  # heading levels by underline character
_CLOSERS = "[\"')\\]}»”’」』）]{0,4}"
_BREAK = re.compile(
    rf"(?<=[.!?…؟।۔]){_CLOSERS}\s+"  # end of a sentence
    rf"|(?<=[。！？｡]){_CLOSERS}\s*"
    r"|\n[^\S\n]*\n\s*"  # blank line
    r"|\n(?=[ \t]*(?:[-*+•]|\d{1,3}[.)])[ \t])"  # before a list item
    r"|\f\s*"  # end of a page
)
_SPACE = re.compile(r"\s")
_MIN_SENTENCE = 5  # characters including trailing space: "1. " is not a sentence
_ABBREVIATIONS = frozenset("Mr. Mrs. Ms. Dr. Prof. St. No. Fig. Vol. vs. cf. al. e.g. i.e. ca. bzw. z.B. d.h.".split())


class _Unit(NamedTuple):
    start: int  # it ends where the next unit starts, trailing whitespace included
    priority: int  # of a break before it
    headings: tuple[str, ...]
    block: int = 0  # number of the code block or table that contains it; 0 if none


class _Span(NamedTuple):
    start: int
    fresh: int  # end of the overlap with the previous span
    end: int
    headings: tuple[str, ...]


class Chunker:
    """Splits documents into passages of at most `chunk_size` tokens, special tokens included.

    A passage starts at a heading if the previous one is full enough, and ends at the end of a paragraph,
    a sentence, or at least a word. Adjacent passages overlap by up to about `chunk_overlap` tokens, in
    whole sentences if these are short enough, but not across headings. A fenced code block or a table
    stays in one passage if it fits. Only whitespace is dropped.

    >>> from bertie.text.legacy import LegacyTokenizer
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] a b c . #".replace(" ", chr(10)))
    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> chunker = Chunker(Tokenizer.from_folder(folder, recipe), chunk_size=10, chunk_overlap=0)
    >>> for passage in chunker.split(Document("x", "# A\\n\\na a a a. B b b.\\n\\n## C\\n\\nc c.")):
    ...     print(passage.start, passage.end, passage.headings, repr(passage.text))
    0 13 ('A',) '# A\\n\\na a a a.'
    14 20 ('A',) 'B b b.'
    22 32 ('A', 'C') '## C\\n\\nc c.'
    """

    def __init__(self, tokenizer: Tokenizer, chunk_size: int = 256, chunk_overlap: int = 32) -> None:
        special = len(tokenizer.encode(""))
        if chunk_size < special + 8:
            minimum = f"{special} special tokens and 8 others"
            raise InputError(f"chunk_size={chunk_size} must be at least {special + 8}: {minimum}")
        limit = (chunk_size - special) // 2
        if not 0 <= chunk_overlap <= limit:
            raise InputError(
                f"chunk_overlap={chunk_overlap} must be from 0 to {limit}, half of chunk_size={chunk_size}"
            )
        self.chunk_size, self.chunk_overlap = chunk_size, chunk_overlap
        self._tokenizer, self._special, self._room = tokenizer, special, chunk_size - special

    def split(self, document: Document) -> list[Passage]:
        """Return the passages of a document in order; none if it is blank."""
        return self.split_batch([document])[0]

    def split_batch(self, documents: Sequence[Document]) -> list[list[Passage]]:
        """Return the passages of each document; faster than one call per document."""
        texts = [checked_text(document.text, f"the document {document.id!r}") for document in documents]
        spans: list[list[_Span]] = [[] for _ in texts]
        short = [i for i, text in enumerate(texts) if self._may_fit(text)]
        counts = self._counts(texts[i].strip() for i in short)
        whole = {i for i, count in zip(short, counts, strict=True) if count <= self._room}
        for i in whole:
            spans[i] = _trim(texts[i], [_Span(0, 0, len(texts[i]), ())])
        long = [i for i in range(len(texts)) if i not in whole]
        for i, packed in zip(long, self._pack_texts([texts[i] for i in long]), strict=True):
            spans[i] = packed
        return [
            [Passage(document.id, start, end, document.text[start:end], headings) for start, _, end, headings in packed]
            for document, packed in zip(documents, spans, strict=True)
        ]

    def _may_fit(self, text: str) -> bool:
        """Whether a text may be a single passage; with headings it may be several."""
        return len(text) < 6 * self._room and _STRUCTURE.search(text) is None

    def _pack_texts(self, texts: list[str]) -> list[list[_Span]]:
        """Split texts into units and pack these into spans."""
        units = [_split_units(text) for text in texts]
        unit_texts = (text[a:b] for text, own in zip(texts, units, strict=True) for a, b in _unit_spans(text, own))
        counts = self._counts(unit_texts)
        spans = []
        for text, own in zip(texts, units, strict=True):
            fine, tokens = self._split_long_units(text, own, counts)
            spans.append(_trim(text, _pack(text, fine, tokens, self._room, self.chunk_overlap)))
        # A passage may tokenize differently from its separate units.
        counts = self._counts(
            text[span.start : span.end] for text, own in zip(texts, spans, strict=True) for span in own
        )
        return [self._split_overfull(text, own, counts) for text, own in zip(texts, spans, strict=True)]

    def _counts(self, texts: Iterable[str]) -> Iterator[int]:
        """Count the tokens of each text, without special tokens."""
        for batch in _batches(texts):
            yield from [len(encoding) - self._special for encoding in self._tokenizer.encode_batch(batch)]

    def _split_long_units(self, text: str, units: list[_Unit], counts: Iterator[int]) -> tuple[list[_Unit], list[int]]:
        """Split units longer than a passage; return all units and their token counts."""
        fine: list[_Unit] = []
        tokens: list[int] = []
        blocks: dict[int, int] = {}
        for unit, (start, end) in zip(units, _unit_spans(text, units), strict=True):
            for piece, count in self._pieces(text, start, end, next(counts), _FINE):
                fine.append(unit if piece == start else unit._replace(start=piece, priority=PIECE))
                tokens.append(count)
                blocks[unit.block] = blocks.get(unit.block, 0) + count
        for i in range(1, len(fine)):
            block = fine[i].block
            if block and block == fine[i - 1].block and blocks[block] <= self._room:
                fine[i] = fine[i]._replace(priority=GLUED)
        return fine, tokens

    def _split_overfull(self, text: str, spans: list[_Span], counts: Iterator[int]) -> list[_Span]:
        """Drop the overlap of spans with too many tokens, and split them if necessary."""
        result: list[_Span] = []
        for span in spans:
            tokens = next(counts)
            if span.start < span.fresh and (tokens > self._room or span.start <= result[-1].start):
                (span,) = _trim(text, [span._replace(start=span.fresh)])
                tokens = next(self._counts([text[span.start : span.end]]))
            if tokens <= self._room:
                result.append(span)
                continue
            starts = [start for start, _ in self._pieces(text, span.start, span.end, tokens, _FULL)]
            result += _trim(text, (_Span(a, a, b, span.headings) for a, b in pairwise([*starts, span.end])))
        return result

    def _pieces(self, text: str, start: int, end: int, tokens: int, share: float) -> Iterator[tuple[int, int]]:
        """Yield start and token count of the pieces of a span that does not fit."""
        tokens = max(tokens, (end - start) // MAX_TOKEN_CHARACTERS)
        if tokens <= self._room or end - start == 1:  # a single character cannot be split
            yield start, tokens
            return
        characters = (end - start) * self._room / tokens  # per full passage
        step, furthest = max(1, int(characters * share)), int(characters * _FULL)
        pieces = list(pairwise([start, *_break_positions(text, start, end, step, furthest), end]))
        counts = self._counts(text[low:high].strip() for low, high in pieces)
        for (low, high), count in zip(pieces, counts, strict=True):
            yield from self._pieces(text, low, high, count, share)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _unit_spans(text: str, units: list[_Unit]) -> Iterator[tuple[int, int]]:
    return pairwise([*(unit.start for unit in units), len(text)])


def _trim(text: str, spans: Iterable[_Span]) -> list[_Span]:
    """Strip whitespace around spans, and drop spans that contain nothing but overlap."""
    trimmed = []
    for start, fresh, end, headings in spans:
        content = text[start:end].rstrip()
        if start + len(content) > fresh:
            first = start + len(content) - len(content.lstrip())
            trimmed.append(_Span(first, max(first, fresh), start + len(content), headings))
    return trimmed


# --- text to units ---


def _split_units(text: str) -> list[_Unit]:
    units: list[_Unit] = []
    path: list[tuple[int, str]] = []  # level and title of the current headings
    headings: tuple[str, ...] = ()
    priority = PARAGRAPH
    position = search_from = blocks = 0
    unclosed: dict[str, int] = {}  # fence character -> length of a fence that is never closed
    while (match := _STRUCTURE.search(text, search_from)) is not None:
        end, level, title = _parse_structure(text, match, unclosed)
        if end is None:
            search_from = match.end() if match["over"] is None else match.end("over")
            continue
        before = len(units)
        units += _split_prose(text, position, match.start(), priority, headings)
        if len(units) > before:
            priority = PARAGRAPH
        if level:
            while path and path[-1][0] >= level:
                path.pop()
            path.append((level, title))
            headings = tuple(heading for _, heading in path)
            # A heading directly below another one stays with it.
            units.append(_Unit(match.start(), HEADING if priority != GLUED else GLUED, headings))
            priority = GLUED
        else:
            blocks += 1
            for line in re.finditer(r"[^\n]*\S[^\n]*", text[match.start() : end]):
                units.append(_Unit(match.start() + line.start(), priority, headings, blocks))
                priority = PIECE
            priority = PARAGRAPH
        position = search_from = end
    units += _split_prose(text, position, len(text), priority, headings)
    return units


def _parse_structure(text: str, match: re.Match[str], unclosed: dict[str, int]) -> tuple[int | None, int, str]:
    """Return the end of a structure (None if the match is not one), and a heading's level and title."""
    if (fence := match["fence"]) is not None:
        if len(fence) >= unclosed.get(fence[0], len(fence) + 1):
            return None, 0, ""
        close = re.compile(rf"^[ ]{{0,3}}{fence[0]}{{{len(fence)},}}[ \t\r]*$", re.MULTILINE).search(text, match.end())
        if close is None:
            unclosed[fence[0]] = len(fence)
        return (close.end() if close else None), 0, ""
    if match["row"] is not None:
        table = _TABLE.match(text, match.start())
        return (table.end() if table else None), 0, ""
    if (over := match["over"]) is not None:
        title, under = over.strip(), match["under"]
        # In Markdown ~~~ may open a code block below a line of text.
        valid = under[0] in "=-" or len(under) >= len(title)
        return (match.end() if valid else None), _LEVELS[under[0]], title
    title = match["title"].strip().rstrip("#").rstrip()
    return (match.end() if title else None), len(match["level"]), title


def _split_prose(text: str, low: int, high: int, priority: int, headings: tuple[str, ...]) -> Iterator[_Unit]:
    """Yield the sentences from `low` to `high`; `priority` is that of a break before the first."""
    blank = len(text[low:high]) - len(text[low:high].lstrip())
    start = low + blank
    if start == high:
        return
    yield _Unit(start, priority, headings)
    for match in _BREAK.finditer(text, start, high):
        end = match.end()
        lines = match[0].count("\n")
        if end == high:
            return
        if lines < 2 and not _ends_sentence(text, start, match.start(), end):
            continue
        yield _Unit(end, PARAGRAPH if lines > 1 else LINE if lines or "\f" in match[0] else SENTENCE, headings)
        start = end


def _ends_sentence(text: str, start: int, stop: int, next_: int) -> bool:
    """Whether the sentence that starts at `start` ends at `stop`, and another starts at `next_`."""
    if next_ - start < _MIN_SENTENCE:
        return False
    if text[stop - 1] != ".":
        return not text[next_].islower() or text[stop - 1] not in "!?…"
    word = text[max(start, stop - 6) : stop].split()[-1]
    initial = len(word) == 2 and word[0].isupper()
    return not (text[next_].islower() or initial or word.lstrip("(\"'") in _ABBREVIATIONS)


def _break_positions(text: str, start: int, end: int, step: int, furthest: int) -> Iterator[int]:
    """Yield break positions after lines or words, `step` to `furthest` characters apart."""
    position = start
    while position + step < end:
        best = 1 + text.rfind("\n", position + step // 2, position + step)
        best = best or 1 + max(text.rfind(space, position, position + step) for space in " \t\n")
        if best <= position:
            space = _SPACE.search(text, position + step, min(end, position + furthest))
            best = space.end() if space else _grapheme_boundary(text, position, position + step)
        if best >= end:
            return
        yield best
        position = best


def _grapheme_boundary(text: str, low: int, position: int) -> int:
    """Return a position up to `position` that does not split a grapheme."""
    boundary = position
    while boundary > low + 1 and (
        unicodedata.category(text[boundary])[0] == "M" or "\u200d" in text[boundary - 1 : boundary + 1]
    ):
        boundary -= 1
    return boundary if boundary > low + 1 else position


# --- units to passages ---


def _pack(text: str, units: list[_Unit], tokens: list[int], room: int, overlap: int) -> Iterator[_Span]:
    """Pack units into spans of up to `room` tokens."""
    total = len(units)
    before = [0, *accumulate(tokens)]  # (n + 1,) tokens before each unit
    sections = [i for i, unit in enumerate(units) if unit.priority == HEADING]
    starts = [*(unit.start for unit in units), len(text)]
    done = low = shared = 0  # units already packed; first whole unit of the next span; overlap tokens before it
    start = starts[0] if units else 0
    while done < total:
        limit = bisect_right(before, before[low] + room - shared) - 1
        section = bisect_left(sections, max(done + 1, bisect_left(before, before[done] + MIN_FILL * room)))
        if section < len(sections) and sections[section] <= limit:
            high = sections[section]
        elif limit == total:
            high = total
        else:
            earliest = bisect_left(before, before[low] + (1 - SLACK) * room - shared)
            high = _best_break(units, done, limit, earliest)
            if (low < done or shared) and (high == done or units[high].priority == GLUED):
                low, shared, start = done, 0, starts[done]  # there is no room for the overlap
                continue
            high = max(high, done + 1)
        yield _Span(start, starts[done], starts[high], _common_headings(units, low, high))
        first, low, done = low, high, high
        if high < total:
            low, shared, start = _overlap_start(text, units, before, starts, first, high, overlap)


def _best_break(units: list[_Unit], done: int, limit: int, earliest: int) -> int:
    """Return the best unit to break before, from `earliest` to `limit` if possible."""
    best = max(done, limit)
    for i in range(best, done, -1):
        if units[i].priority > units[best].priority:
            best = i
        if i <= earliest and units[best].priority > GLUED:
            break
    return best


def _overlap_start(
    text: str, units: list[_Unit], before: list[int], starts: list[int], first: int, high: int, overlap: int
) -> tuple[int, int, int]:
    """Return the start of the next span: first whole unit, tokens before it, position."""
    if units[high].priority == HEADING or not overlap:
        return high, 0, starts[high]
    sentence = piece = high
    for i in range(high - 1, first, -1):
        if before[high] - before[i] > overlap:
            break
        if units[i].priority >= SENTENCE:
            sentence = i
        elif units[i].priority == PIECE:
            piece = i
        if units[i].priority == HEADING:
            break
    low = sentence if sentence < high else piece
    last = before[high] - before[high - 1]
    if low < high or last <= overlap or units[high - 1].priority == GLUED:
        return low, 0, starts[low]
    # The last sentence alone is too long: take its last words.
    characters = starts[high] - starts[high - 1]
    space = _SPACE.search(text, starts[high] - characters * overlap // last, starts[high])
    if space is None:
        return high, 0, starts[high]
    return high, ceil(last * (starts[high] - space.end()) / characters), space.end()


def _common_headings(units: list[_Unit], low: int, high: int) -> tuple[str, ...]:
    """Return the headings that units `low` to `high` have in common; if none, those of the first with headings.

    Units before the first heading, such as front matter, have none and do not count.
    """
    first = common = next((unit.headings for unit in units[low:high] if unit.headings), ())
    if first is units[high - 1].headings and first is units[low].headings:
        return first
    for unit in units[low:high]:
        while unit.headings and unit.headings[: len(common)] != common:
            common = common[:-1]
    return common or first
