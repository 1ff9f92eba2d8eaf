"""Answers to questions, as spans of documents.

A document beyond max_length is read in windows with the question in each. All windows are decoded together: the best spans
over all of them, none crossing into a question; the score against an answer is the lowest over the windows, since a
window that does not hold the answer rightly says that it has none. Several documents are decoded together likewise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import FloatArray, TaskInput, at_least_one, listed, reading, trimmed
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
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
class _Options:
    top_k: int
    longest: int
    threshold: float | None


class Reader(Trainable[_Options, FloatArray, Answers]):
    """Answers questions from documents.

    >>> reader = Reader.load("path/to/a/squad/model")                                                 # doctest: +SKIP
    >>> reader.answer([("Who wrote Emma?", "Emma is a novel by Jane Austen.")])[0].best.text           # doctest: +SKIP
    'Jane Austen'

    Or trains one, on pairs of question and document with the answers' places:

    >>> reader = Reader("path/to/any/encoder").fit("squad/train.jsonl")                               # doctest: +SKIP
    """

    kind = "answer"

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
        at_least_one(top_k=top_k, longest=longest)
        several = listed(questions, "answer", "pairs of a question and its documents")
        return self._each(several, _Options(top_k, longest, threshold))

    def _each(self, questions: Iterable[tuple[str, str | Sequence[str]]], options: _Options) -> Iterator[Answers]:
        counts: deque[int] = deque()  # documents of the questions that are under way

        def asks() -> Iterator[TaskInput[_Options]]:
            for i, item in enumerate(questions):
                question, documents = _checked(item, f"question {i}")
                counts.append(len(documents))
                for d, document in enumerate(documents):
                    name = f"question {i}" if len(documents) == 1 else f"question {i}, document {d}"
                    yield TaskInput(name, (question, document), options)

        waiting: list[Answers] = []
        for one in self.run(asks()):
            waiting.append(one)
            if len(waiting) == counts[0]:
                counts.popleft()
                yield _merged(waiting, options)
                waiting = []

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[_Options]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(n, 2) logits of start and end, of each window."""
        return self.by_token(self.rows(hidden, batch), batch)

    def decode(self, ask: TaskInput[_Options], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Answers:
        """The best spans over all windows; a span that two windows see counts where it scores more."""
        best: dict[tuple[int, int], float] = {}
        for window, logits in zip(found, outputs, strict=True):
            for place, score in _spans(window, logits, ask).items():
                best[place] = max(score, best.get(place, score))
        ranked = sorted(best.items(), key=lambda one: (-one[1], one[0]))[: ask.options.top_k]
        answers = tuple(Answer(ask.texts[1][start:end], start, end, score) for (start, end), score in ranked)
        none = min(float(logits[0].sum()) for logits in outputs)
        return Answers(answers, none, **reading(found))

    def predict(self, X: Iterable[tuple[str, str]]) -> list[str]:
        """The text of the best answer to each question."""
        return [one.best.text for one in self.answer_each(X)]


def _checked(item: object, name: str) -> tuple[str, Sequence[str]]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"{name} must be a pair of a question and its document or documents")
    question = checked_text(item[0], name)
    if isinstance(item[1], bytes | Mapping) or not isinstance(item[1], Iterable):
        raise InputError(f"{name}: its document must be a str or a list of them, not {type(item[1]).__name__}")
    documents = (item[1],) if isinstance(item[1], str) else tuple(item[1])
    if not documents:
        raise InputError(f"{name} has no document to be answered from: {question[:60]!r}")
    return question, [checked_text(text, f"{name}, document {d}") for d, text in enumerate(documents)]


def _spans(window: Window, logits: FloatArray, ask: TaskInput[_Options]) -> dict[tuple[int, int], float]:
    """The best spans of one window, by their characters: every start with every end up to `longest` tokens on."""
    options, text = ask.options, ask.texts[1]
    inside = np.flatnonzero(window.encoding.sequence_ids == 1)
    offsets, logits = window.encoding.offsets[inside], logits[inside]
    n, wide = len(inside), min(options.longest, len(inside))
    best: dict[tuple[int, int], float] = {}
    if not n:
        return best
    ends = np.concatenate([logits[:, 1], np.full(wide, -np.inf, dtype=np.float32)])
    table = logits[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, wide)[:n]  # (n, wide)
    # As many as are wanted in all: another window may hold none of the best.
    for flat in np.argsort(-table, axis=None, kind="stable"):
        first, ahead = divmod(int(flat), wide)
        score = float(table[first, ahead])
        if len(best) == options.top_k or not np.isfinite(score):
            break
        start, end = trimmed(text, int(offsets[first][0]), int(offsets[first + ahead][1]))
        if text[start:end].strip():  # some tokenizers have tokens for spaces alone
            best.setdefault((start, end), score)
    return best


def _merged(documents: Sequence[Answers], options: _Options) -> Answers:
    """Of several documents: the best spans of all, and no answer only if none has one."""
    spans = [replace(one, document=number) for number, said in enumerate(documents) for one in said.answers]
    spans.sort(key=lambda one: -one.score)
    none = min(said.no_answer for said in documents)
    if not spans or (options.threshold is not None and spans[0].score - none < options.threshold):
        spans.insert(0, Answer("", None, None, none))
    return Answers(
        tuple(spans[: options.top_k]),
        none,
        sum(said.tokens_total for said in documents),
        sum(said.tokens_read for said in documents),
        sum(said.windows for said in documents),
    )
