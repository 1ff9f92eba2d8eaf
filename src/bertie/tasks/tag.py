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
from bertie.tasks.base import FloatArray, Task, TaskInput, listed, owned, reading, singles, softmax, trimmed
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.encoding import Encoding, IntArray
from bertie.text.tokenizer import checked_text
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


class Tagger(Trainable[_Options, FloatArray, Tagged]):
    """Finds labelled spans.

    >>> tagger = Tagger.load("path/to/a/ner/model")                                     # doctest: +SKIP
    >>> tagger.tag(["Ada Lovelace was born in London."])[0].spans[0].text               # doctest: +SKIP
    'Ada Lovelace'

    Or trains one, on lists of words with a tag for each:

    >>> tagger = Tagger("path/to/any/encoder").fit(words, tags)                         # doctest: +SKIP
    """

    kind = "tag"

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
        return self.run(singles(texts, "tag", self.options(words=words, outside=outside)))

    def options(self, *, words: Words = "average", outside: Iterable[str] = ("O",)) -> _Options:
        """What `tag` is asked with, checked."""
        if words not in WORDS:
            raise InputError(f"words={words!r} must be one of {', '.join(WORDS)}")
        return _Options(words, frozenset(listed(outside, "outside=", "labels")))

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[_Options]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(n, labels) logits of each window."""
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(self, ask: TaskInput[_Options], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Tagged:
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
        labels = self.info.labels
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
                *split_tag(labels[best], known),
                float(row[best]),
                int(offsets[low][0]),
                int(offsets[high - 1][1]),
            )

    def predict(self, X: Iterable[Sequence[str]]) -> list[list[str]]:
        """The tag of each word of each list."""
        return [list(tags) for tags, _ in self.tag_words(X)]

    def tag_words(self, X: Iterable[Sequence[str]]) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
        """The tag of each word of each list, and how much of the list was read."""
        task = _GivenWords(self.checkpoint, overflow=self.overflow, head=self.head)
        several = enumerate(listed(X, "predict", "lists of words"))
        return task.run(_joined(words, f"text {i}") for i, words in several)


Places = tuple[tuple[int, int], ...]


class _GivenWords(Task[Places, FloatArray, tuple[Sequence[str], dict[str, int]]]):
    """One tag for each word of a list: that of its beginning, as long as the tokenizer takes it for one word."""

    kind = "tag"

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[Places]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(
        self, ask: TaskInput[Places], found: Sequence[Window], outputs: Sequence[FloatArray]
    ) -> tuple[Sequence[str], dict[str, int]]:
        whole, labels = found[0].whole, self.info.labels
        read, logits = owned(found, outputs)
        word, sub = align_words(whole, ask.texts[0], ask.options)
        word, sub = word[read], sub[read]
        sums = np.zeros((len(ask.options), len(labels)))
        asked = (word >= 0) & (sub == 0)
        np.add.at(sums, word[asked], softmax(logits[asked]))
        best = sums.argmax(1)  # a word that the tokenizer makes nothing of has the first label
        return [labels[int(i)] for i in best], reading(found)


def _joined(words: Sequence[str], name: str) -> TaskInput[Places]:
    """A list of words as a text, with the words' places in it."""
    if isinstance(words, str):
        raise InputError(f"{name} must be a list of words, not a text; for texts there is tag()")
    words = [checked_text(word, f"{name}, word {i}") for i, word in enumerate(words)]
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    places = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    return TaskInput(name, (" ".join(words),), places)


def align_words(encoding: Encoding, text: str, places: Places) -> tuple[IntArray, IntArray]:
    """(n,) the word of a list that each token belongs to, -1 for none; and the how manieth part of it, as the tokenizer
    parts words.
    """
    word = np.full(len(encoding), -1, dtype=np.int64)
    sub = np.zeros(len(encoding), dtype=np.int64)
    inside = np.flatnonzero((encoding.sequence_ids == 0) & (encoding.offsets[:, 1] > encoding.offsets[:, 0]))
    if not len(inside) or not places:
        return word, sub
    starts, ends = np.array(places, dtype=np.int64).T
    last = encoding.offsets[inside, 1] - 1  # some tokenizers count the space before a word to it
    found = np.searchsorted(starts, last, side="right") - 1
    ok = (found >= 0) & (last < ends[found])
    word[inside[ok]] = found[ok]
    group = np.cumsum(word_starts(encoding, inside, text))[ok]
    _, first, back = np.unique(found[ok], return_index=True, return_inverse=True)
    sub[inside[ok]] = group - group[first][back]
    return word, sub


_FIRST, _LAST = "BSU", "ESLU"  # BIO: Begin, Inside; BIOES adds End and Single; BILOU says Last and Unit


def split_tag(label: str, known: frozenset[str]) -> tuple[str, str]:
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
