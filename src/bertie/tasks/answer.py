"""Extractive question answering: answers as spans of documents.

A document beyond the maximum length is read in windows with the question in each. All windows are decoded together: the
best spans over all of them. The score of "no answer" is the lowest over the windows, since a window without the answer
rightly predicts none. Several documents are merged in the same way.

Scores are probabilities: the softmax, at the temperature that `fit` found on the dev data, of the logits of the best
spans (20, as in SQuAD's n-best lists) and of "no answer". If there were unanswerable questions in the dev data, the
probability of "no answer" is a logistic function of its logit minus that of the best span (Platt scaling) and of the
logarithm of the number of tokens read instead, the spans share the rest, and the threshold with the best F1 on the dev
data is the default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.config import Calibration
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, check_positive
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.tasks.decoding import trim_span
from bertie.tasks.results import AnswerResult, AnswerSpan
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window

N_BEST = 20  # spans that probabilities are computed over


@dataclass(frozen=True, slots=True)
class _Options:
    top_k: int
    max_answer_length: int
    no_answer_threshold: float

    @property
    def spans(self) -> int:
        """The number of spans to find."""
        return max(self.top_k, N_BEST)


class Reader(Trainable[_Options, FloatArray, AnswerResult]):
    """Answers questions from documents.

    >>> reader = Reader.load("path/to/a/squad/model")                                                 # doctest: +SKIP
    >>> reader.answer([("Who wrote Emma?", "Emma is a novel by Jane Austen.")])[0].best.text           # doctest: +SKIP
    'Jane Austen'

    To train one, pass pairs of question and document with the offsets of the answers:

    >>> reader = Reader("path/to/any/encoder").fit("squad/train.jsonl")                               # doctest: +SKIP
    """

    kind = "answer"
    needs_offsets = True

    @overload
    def answer(
        self,
        questions: str,
        documents: str | Sequence[str],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
        progress: bool | None = None,
    ) -> AnswerResult: ...
    @overload
    def answer(  # type: ignore[overload-overlap]
        self,
        questions: tuple[str, str | Sequence[str]],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
        progress: bool | None = None,
    ) -> AnswerResult: ...
    @overload
    def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
        progress: bool | None = None,
    ) -> list[AnswerResult]: ...
    @explain_arguments
    def answer(
        self,
        questions: Any,
        documents: Any = None,
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Find the best answers to each question in its document or documents.

        Pass pairs of a question and its document or documents; or one question and its documents, for one result.

        `max_answer_length` is in tokens. `no_answer_threshold`: the result is "no answer" if that is more probable than
        this; by default the threshold that `fit` found, if any, otherwise 1: a span is always returned. `progress`:
        whether to show a progress bar; None: on a terminal or in a notebook.
        """
        options: dict[str, Any] = {
            "top_k": top_k,
            "max_answer_length": max_answer_length,
            "no_answer_threshold": no_answer_threshold,
        }
        if isinstance(questions, tuple) and len(questions) == 2 and isinstance(questions[0], str):
            questions, documents = questions
        if isinstance(questions, str):
            if documents is None:
                raise InputError('answer takes a question and its document: answer("question", "document")')
            return self.answer([(questions, documents)], progress=progress, **options)[0]
        if documents is not None:
            pairs = "[(question, document) for question in questions]"
            pairs = pairs if isinstance(documents, str) else "list(zip(questions, documents))"
            raise InputError(f"pass pairs of a question and its document: answer({pairs})")
        return self.collect(questions, partial(self.answer_each, **options), "answer", progress, unit="documents")

    def answer_each(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
    ) -> Iterator[AnswerResult]:
        """Like `answer`, but yield results one by one."""
        check_positive(top_k=top_k, max_answer_length=max_answer_length)
        threshold = self.info.calibration.no_answer_threshold if no_answer_threshold is None else no_answer_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise InputError(f"no_answer_threshold={threshold} must be a probability, from 0 to 1, or None")
        check_list(questions, "answer", "pairs of a question and its documents")
        return self._answer_each(questions, _Options(top_k, max_answer_length, 1.0 if threshold is None else threshold))

    def _answer_each(
        self, questions: Iterable[tuple[str, str | Sequence[str]]], options: _Options
    ) -> Iterator[AnswerResult]:
        counts: deque[int] = deque()  # documents of each question in progress

        def inputs() -> Iterator[TaskInput[_Options]]:
            for i, item in enumerate(questions):
                question, documents = _checked(item, f"question {i}")
                counts.append(len(documents))
                for d, document in enumerate(documents):
                    name = f"question {i}" if len(documents) == 1 else f"question {i}, document {d}"
                    yield TaskInput(name, (question, document), options)

        group: list[AnswerResult] = []
        for result in self.run(inputs(), questions):
            group.append(result)
            if len(group) == counts[0]:
                counts.popleft()
                yield _merge_documents(group, options, self.info.calibration)
                group = []

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(n, 2) start and end logits of each window."""
        return PendingCopy.per_token(self.head_outputs(model, hidden, batch), batch)

    def decode(self, text: WindowedText[_Options], outputs: Sequence[FloatArray]) -> AnswerResult:
        """The best spans over all windows; a span in two windows has the higher of its scores."""
        best: dict[tuple[int, int], float] = {}
        document = text.input.texts[1]
        for window, logits in zip(text.windows, outputs, strict=True):
            self.pipeline.check()
            for span, score in _best_spans(window, logits, text.input).items():
                best[span] = max(score, best.get(span, score))
        ranked = sorted(best.items(), key=lambda pair: (-pair[1], pair[0]))[: text.input.options.spans]
        # Probabilities follow when the documents of a question are merged.
        answers = tuple(AnswerSpan(document[start:end], start, end, 0.0, logit) for (start, end), logit in ranked)
        return AnswerResult(answers, 0.0, min(float(logits[0].sum()) for logits in outputs), **text.counts())

    def predict(self, X: Iterable[tuple[str, str]]) -> list[str]:
        """The text of the best answer to each question."""
        return [result.best.text for result in self.answer_each(X)]


def _checked(item: object, name: str) -> tuple[str, Sequence[str]]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"{len(item)} items" if isinstance(item, tuple | list) else type(item).__name__
        raise InputError(f"{name} must be a pair of a question and its document or documents, not {kind}")
    question = checked_text(item[0], name)
    if isinstance(item[1], bytes | Mapping) or not isinstance(item[1], Iterable):
        raise InputError(f"{name}: its document must be a str or a list of them, not {type(item[1]).__name__}")
    documents = (item[1],) if isinstance(item[1], str) else tuple(item[1])
    if not documents:
        raise InputError(f"{name} has no document to find an answer in: {question[:60]!r}")
    return question, [checked_text(text, f"{name}, document {d}") for d, text in enumerate(documents)]


def _best_spans(window: Window, logits: FloatArray, task_input: TaskInput[_Options]) -> dict[tuple[int, int], float]:
    """The best spans of one window by character offsets, over all spans of up to `max_answer_length` tokens."""
    options, text = task_input.options, task_input.texts[1]
    inside = np.flatnonzero(window.encoding.sequence_ids == 1)
    offsets, logits = window.encoding.offsets[inside], logits[inside]
    n, width = len(inside), min(options.max_answer_length, len(inside))
    best: dict[tuple[int, int], float] = {}
    if not n:
        return best
    ends = np.concatenate([logits[:, 1], np.full(width, -np.inf, dtype=np.float32)])
    table = logits[:, :1] + np.lib.stride_tricks.sliding_window_view(ends, width)[:n]  # (n, width)
    # As many from each window: all of the best may be in this one.
    for flat in np.argsort(-table, axis=None, kind="stable"):
        first, length = divmod(int(flat), width)
        score = float(table[first, length])
        if len(best) == options.spans or not np.isfinite(score):
            break
        start, end = trim_span(text, int(offsets[first][0]), int(offsets[first + length][1]))
        if text[start:end].strip():  # some tokenizers have tokens of whitespace only
            best.setdefault((start, end), score)
    return best


def _merge_documents(documents: Sequence[AnswerResult], options: _Options, calibration: Calibration) -> AnswerResult:
    """The best spans of several documents; "no answer" only if none of them has one."""
    spans = [replace(span, document=number) for number, result in enumerate(documents) for span in result.answers]
    spans.sort(key=lambda span: -span.logit)
    none = min(result.no_answer_logit for result in documents)
    counts = {name: sum(getattr(result, name) for result in documents) for name in READ_COUNTS}
    logits = [span.logit for span in spans[: options.spans]]
    none_score, scores = probabilities(logits, none, counts["tokens_read"], calibration)
    spans = [replace(span, score=score) for span, score in zip(spans, scores, strict=False)]
    if not spans or none_score > options.no_answer_threshold:
        spans.insert(0, AnswerSpan("", None, None, none_score, none))
    return AnswerResult(
        tuple(spans[: options.top_k]),
        none_score,
        none,
        **counts,
    )


def probabilities(
    spans: Sequence[float], none: float, tokens: int, calibration: Calibration
) -> tuple[float, list[float]]:
    """The probabilities of "no answer" and of each span, from their logits (best first) and the tokens read.

    They add up to 1 over "no answer" and the `N_BEST` best spans.
    """
    if not spans:
        return 1.0, []
    scale, bias = calibration.no_answer_scale, calibration.no_answer_bias
    if scale is None or bias is None:
        logits = np.array([none, *spans], dtype=np.float64) / calibration.temperature
        weights = np.exp(logits - logits.max())
        none_score, *scores = (weights / weights[: N_BEST + 1].sum()).tolist()
        return none_score, scores
    # The more tokens are read, the higher is the best logit by chance.
    none_logit = scale * (none - spans[0]) + calibration.no_answer_length * np.log(max(tokens, 1)) + bias
    answered = float(np.exp(-np.logaddexp(0.0, none_logit)))
    weights = np.exp((np.array(spans, dtype=np.float64) - spans[0]) / calibration.temperature)
    return 1.0 - answered, (answered * weights / weights[:N_BEST].sum()).tolist()
