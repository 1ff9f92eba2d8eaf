"""Labelled spans: names, parts of speech, anything that a model says of each token.

Each token is taken from the window where it has most context on both sides. Words speak with one voice (`words`), then
neighbours join into spans by the scheme that the labels show: BIO, BIOES, BILOU, or plain labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import FloatArray, Task, owned, reading, softmax
from bertie.text.batch import Batch
from bertie.text.windows import Window

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
class _Unit:
    """A token or a word, with its label."""

    label: str
    score: float
    start: int
    end: int


class Tagger(Task[str, Tagged]):
    """Finds labelled spans.

    >>> tagger = Tagger.load("path/to/a/ner/model")                                     # doctest: +SKIP
    >>> tagger.tag(["Ada Lovelace was born in London."])[0].spans[0].text               # doctest: +SKIP
    'Ada Lovelace'
    """

    head = "tag"
    _words: Words = "average"
    _outside: frozenset[str] = frozenset({"O"})

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
        if isinstance(texts, str):
            raise InputError("tag takes a list of texts; put a single text into a list")
        if words not in WORDS:
            raise InputError(f"words={words!r} must be one of {', '.join(WORDS)}")
        self._words, self._outside = words, frozenset(outside)
        return self.run(texts)

    def texts(self, item: str) -> tuple[str, ...]:
        """A text is read as it is."""
        return (item,)

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """(n, labels) logits of each window."""
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(self, item: str, found: Sequence[Window], outputs: Sequence[FloatArray]) -> Tagged:
        """Tokens to words to spans."""
        whole = found[0].whole
        logits = owned(found, outputs)
        read = (whole.sources >= 0) & ~np.isnan(logits[:, 0])
        scores, offsets, words = softmax(logits[read]), whole.offsets[read], whole.words[read]
        units = list(self._units(scores, offsets, words))
        groups = [[unit] for unit in units] if self._words == "none" else _join(units)
        spans = []
        for group in groups:
            label = group[0].label if self._words == "none" else _split(group[0].label)[1]
            if group[0].label in self._outside or label in self._outside:
                continue
            start, end = group[0].start, group[-1].end
            score = float(np.mean([unit.score for unit in group]))
            spans.append(Span(label, start, end, item[start:end], score))
        return Tagged(tuple(spans), **reading(found))

    def _units(self, scores: FloatArray, offsets: np.ndarray, words: np.ndarray) -> Iterator[_Unit]:
        labels = self.checkpoint.labels
        if self._words in ("none", "simple"):
            starts = np.arange(len(words))
        else:
            starts = np.flatnonzero(np.r_[True, words[1:] != words[:-1]]) if len(words) else np.arange(0)
        for low, high in zip(starts, [*starts[1:], len(words)], strict=True):
            pieces = scores[low:high]
            if self._words == "first":
                row = pieces[0]
            elif self._words == "max":
                row = pieces[int(pieces.max(axis=1).argmax())]
            else:
                row = pieces.mean(axis=0) if len(pieces) > 1 else pieces[0]
            best = int(row.argmax())
            yield _Unit(labels[best], float(row[best]), int(offsets[low][0]), int(offsets[high - 1][1]))


_FIRST, _LAST = "BSU", "ESLU"  # BIO: Begin, Inside; BIOES adds End and Single; BILOU says Last and Unit


def _split(label: str) -> tuple[str, str]:
    """The part of a span that a label stands for, and its kind; a plain label goes on with its like."""
    part, dash, kind = label.partition("-")
    return (part, kind) if dash and len(part) == 1 and part in "BIESLU" else ("I", label)


def _join(units: Sequence[_Unit]) -> list[list[_Unit]]:
    """Neighbours of one kind, until a label says that a span begins or has ended."""
    groups: list[list[_Unit]] = []
    for unit in units:
        part, kind = _split(unit.label)
        if groups:
            last_part, last_kind = _split(groups[-1][-1].label)
            if kind == last_kind and part not in _FIRST and last_part not in _LAST:
                groups[-1].append(unit)
                continue
        groups.append([unit])
    return groups
