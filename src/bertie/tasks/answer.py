"""Answers to questions, as spans of documents.

A document beyond reach is read in windows with the question in each. All windows are decoded together: the best spans
over all of them, none crossing into a question; the score against an answer is the lowest over the windows, since a
window that does not hold the answer rightly says that it has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import FloatArray, Task, reading
from bertie.text.batch import Batch
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of a document: `documents[document][start:end]`. No answer has an empty text and no place."""

    text: str
    start: int | None
    end: int | None
    score: float  # the start's and the end's logit, added
    document: int | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """The best answers to a question, best first."""

    answers: tuple[Answer, ...]
    no_answer: float  # the score of there being none, comparable to the answers' scores
    tokens_total: int
    tokens_read: int
    windows: int

    @property
    def best(self) -> Answer:
        """The best one."""
        return self.answers[0]


@dataclass(frozen=True, slots=True)
class Question:
    """A question to one or several documents."""

    question: str
    documents: tuple[str, ...]


class Reader(Task[tuple[str, str], Answers]):
    """Answers questions from documents.

    >>> reader = Reader.load("path/to/a/squad/model")                                                 # doctest: +SKIP
    >>> reader.answer([("Who wrote Emma?", "Emma is a novel by Jane Austen.")])[0].best.text           # doctest: +SKIP
    'Jane Austen'
    """

    head = "answer"
    _top_k = 1
    _longest = 30
    _threshold: float | None = None

    def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        longest: int = 30,
        threshold: float | None = None,
    ) -> list[Answers]:
        """The best answers to each question from its document or documents.

        `longest`: tokens that an answer may have. `threshold`: by how much the best span must beat the score of no
        answer; without one, a span is always given.
        """
        return list(self.answer_each(questions, top_k=top_k, longest=longest, threshold=threshold))

    def answer_each(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        longest: int = 30,
        threshold: float | None = None,
    ) -> Iterator[Answers]:
        """As `answer`, one by one."""
        for name, value in (("top_k", top_k), ("longest", longest)):
            if value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        self._top_k, self._longest, self._threshold = top_k, longest, threshold
        counts: list[int] = []

        def pairs() -> Iterator[tuple[str, str]]:
            for question, documents in questions:
                several = (documents,) if isinstance(documents, str) else tuple(documents)
                if not several:
                    raise InputError(f"the question {question[:60]!r} has no document to be answered from")
                counts.append(len(several))
                yield from ((question, document) for document in several)

        waiting: list[Answers] = []
        for one in self.run(pairs()):
            waiting.append(one)
            if len(waiting) == counts[0]:
                counts.pop(0)
                yield self._merge(waiting)
                waiting = []

    def _merge(self, documents: Sequence[Answers]) -> Answers:
        """Of several documents: the best spans of all, and no answer only if none has one."""
        spans = [
            Answer(one.text, one.start, one.end, one.score, number)
            for number, document in enumerate(documents)
            for one in document.answers
        ]
        spans.sort(key=lambda one: -one.score)
        none = min(document.no_answer for document in documents)
        if self._threshold is not None and (not spans or spans[0].score - none < self._threshold):
            spans.insert(0, Answer("", None, None, none))
        return Answers(
            tuple(spans[: self._top_k]) or (Answer("", None, None, none),),
            none,
            sum(d.tokens_total for d in documents),
            sum(d.tokens_read for d in documents),
            sum(d.windows for d in documents),
        )

    def texts(self, item: tuple[str, str]) -> tuple[str, ...]:
        """The question, then the document."""
        return item

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """(n, 2) logits of start and end, of each window."""
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(self, item: tuple[str, str], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Answers:
        """The best spans over all windows; a span that two windows see counts where it scores more."""
        best: dict[tuple[int, int], float] = {}
        for window, logits in zip(found, outputs, strict=True):
            inside = np.flatnonzero(window.encoding.sources == 1)
            for score, first, last in self._spans(logits[inside]):
                place = (
                    int(window.encoding.offsets[inside[first]][0]),
                    int(window.encoding.offsets[inside[last]][1]),
                )
                best[place] = max(score, best.get(place, -np.inf))
        ranked = sorted(best.items(), key=lambda one: (-one[1], one[0]))[: self._top_k]
        answers = tuple(Answer(item[1][start:end], start, end, score) for (start, end), score in ranked)
        none = min(float(logits[0].sum()) for logits in outputs)
        return Answers(answers, none, **reading(found))

    def _spans(self, logits: FloatArray) -> Iterator[tuple[float, int, int]]:
        """The best spans of one window: every start with every end up to `longest` tokens on."""
        n = len(logits)
        wide = min(self._longest, n)
        if not n:
            return
        ends = np.concatenate([logits[:, 1], np.full(wide, -np.inf, dtype=np.float32)])
        table = logits[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, wide)[:n]  # (n, wide)
        # Two windows may rank the same spans, so that each gives as many as are wanted in all.
        for flat in np.argsort(-table, axis=None, kind="stable")[: self._top_k]:
            first, ahead = divmod(int(flat), wide)
            if np.isfinite(table[first, ahead]):
                yield float(table[first, ahead]), first, first + ahead
