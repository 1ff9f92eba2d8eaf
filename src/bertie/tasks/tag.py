"""Labelled spans: names, parts of speech, anything that a model says of each token.

Each token is taken from the window where it has most context on both sides. Words speak with one voice (`words`), then
neighbours join into spans by the scheme that the labels show: BIO, BIOES, BILOU, or plain labels.

What a word is, the tokenizer says (`bertie.text.windows.word_starts`). transformers agrees for WordPiece; for other
tokenizers it guesses by spaces, so that "London." would be one word with its full stop, and a Chinese sentence one
word. Spans have no space at their ends, even where the tokenizer counts one to the word behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import Ask, FloatArray, Task, listed, owned, reading, singles, softmax, trimmed
from bertie.text.batch import Batch
from bertie.text.tokenizer import IntArray
from bertie.text.windows import Window, word_starts

Words = Literal["average", "first", "max", "simple", "none"]
WORDS = ("average", "first", "max", "simple", "none")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of text with its label: `text[start:end]`."""

    label: str
    start: int
    end: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Tagged:
    """A text's spans, in order."""

    spans: tuple[Span, ...]
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class _Options:
    words: Words
    outside: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Unit:
    """A token or a word, with its label: the part of a span that it stands for (B, I, …), and its kind."""

    label: str
    part: str
    kind: str
    score: float
    start: int
    end: int


class Tagger(Task[_Options, FloatArray, Tagged]):
    """Finds labelled spans.

    >>> tagger = Tagger.load("path/to/a/ner/model")                                     # doctest: +SKIP
    >>> tagger.tag(["Ada Lovelace was born in London."])[0].spans[0].text               # doctest: +SKIP
    'Ada Lovelace'
    """

    head = "tag"

    def tag(self, texts: Iterable[str], *, words: Words = "average", outside: Iterable[str] = ("O",)) -> list[Tagged]:
        """The spans of each text, in order.

        `words`: the pieces of a word agree on the label of their mean probabilities ("average"), of the first piece
        ("first") or of the surest ("max"); "simple": each piece for itself; "none": each piece is a span of its own.
        `outside`: labels that mark no span.
        """
        return list(self.tag_each(texts, words=words, outside=outside))

    def tag_each(
        self, texts: Iterable[str], *, words: Words = "average", outside: Iterable[str] = ("O",)
    ) -> Iterator[Tagged]:
        """As `tag`, one by one."""
        if words not in WORDS:
            raise InputError(f"words={words!r} must be one of {', '.join(WORDS)}")
        options = _Options(words, frozenset(listed(outside, "outside=", "labels")))
        return self.run(singles(texts, "tag", options))

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[Ask[_Options]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(n, labels) logits of each window."""
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(self, ask: Ask[_Options], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Tagged:
        """Tokens to words to spans."""
        (text,), options, whole = ask.texts, ask.options, found[0].whole
        read, logits = owned(found, outputs)
        alone = options.words in ("none", "simple")
        starts = np.arange(len(read)) if alone else np.flatnonzero(word_starts(whole, read, text))
        units = self._units(softmax(logits), whole.offsets[read], starts, options.words)
        spans = []
        for group in ([unit] for unit in units) if options.words == "none" else _join(units):
            first = group[0]
            if options.outside.isdisjoint((first.label, first.kind)):
                start, end = trimmed(text, first.start, group[-1].end)
                score = float(np.mean([unit.score for unit in group]))
                label = first.label if options.words == "none" else first.kind
                spans.append(Span(label, start, end, text[start:end], score))
        return Tagged(tuple(spans), **reading(found))

    def _units(self, scores: FloatArray, offsets: IntArray, starts: IntArray, words: Words) -> Iterator[_Unit]:
        labels = self.checkpoint.labels
        known = frozenset(labels.values())
        for low, high in zip(starts, np.append(starts, len(scores))[1:], strict=True):
            pieces = scores[low:high]
            if words == "first" or len(pieces) == 1:
                row = pieces[0]
            elif words == "max":
                row = pieces[int(pieces.max(axis=1).argmax())]
            else:
                row = pieces.mean(axis=0)
            best = int(row.argmax())
            yield _Unit(
                labels[best],
                *_split(labels[best], known),
                float(row[best]),
                int(offsets[low][0]),
                int(offsets[high - 1][1]),
            )


_FIRST, _LAST = "BSU", "ESLU"  # BIO: Begin, Inside; BIOES adds End and Single; BILOU says Last and Unit


def _split(label: str, known: frozenset[str]) -> tuple[str, str]:
    """The part of a span that a label stands for, and its kind; a plain label goes on with its like."""
    part, dash, kind = label.partition("-")
    scheme = part in ("B", "I") or (part in ("E", "S", "L", "U") and f"B-{kind}" in known)  # "E-mail" is a plain one
    return (part, kind) if dash and scheme else ("I", label)


def _join(units: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    """Neighbours of one kind, until a label says that a span begins or has ended."""
    group: list[_Unit] = []
    for unit in units:
        if group and (unit.kind != group[-1].kind or unit.part in _FIRST or group[-1].part in _LAST):
            yield group
            group = []
        group.append(unit)
    if group:
        yield group
