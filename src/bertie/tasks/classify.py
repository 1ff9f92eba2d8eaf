"""Classes of texts and of pairs, and values (regression).

Scores are probabilities, divided by the temperature that `fit` found on the dev data where there was one.
Over several windows, log-probabilities are averaged with the tokens that each window answers for as weights, and made
to add up to 1 again; values and the independent classes of a multi-label model are averaged before their last function.
So a label is one for the whole text: a lone sentence decides it where the rest says nothing, and is outvoted where the
rest speaks for another.

Zero-shot classification averages the logits of each hypothesis in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import InputError, NotFoundError
from bertie.tasks.base import (
    FloatArray,
    Overflow,
    Task,
    TaskInput,
    listed,
    log_softmax,
    pair,
    pooled,
    reading,
    sigmoid,
    single,
    softmax,
)
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window

Text = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Classification:
    """What a text is. `scores` are probabilities, or the bare value of a regression."""

    label: str  # the likeliest
    score: float  # its probability
    scores: dict[str, float]
    sure: bool  # False: had better be left to a person, by the precision that `fit` was asked for
    tokens_total: int
    tokens_read: int
    windows: int


class Classifier(Trainable[None, FloatArray, Classification]):
    """Classifies texts or pairs of texts.

    >>> classifier = Classifier.load("path/to/a/sentiment/model")                  # doctest: +SKIP
    >>> classifier.classify(["A delight from start to finish."])[0].label          # doctest: +SKIP
    'positive'

    Or trains one, with the hyperparameters of `bertie.Recipe`:

    >>> classifier = Classifier("path/to/any/encoder", epochs=3, lr=3e-5)           # doctest: +SKIP
    >>> classifier.fit(texts, labels, dev=(dev_texts, dev_labels)).predict(texts)   # doctest: +SKIP
    array(['good', 'bad'], dtype='<U4')
    """

    kind = "classify"
    needs = "a head for classes"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and info.task is None

    @classmethod
    def _plain(cls, info: HeadInfo) -> bool:
        return entailing(info) is None  # one who asks about a pair names such a head, or uses ZeroShot

    @property
    def problem(self) -> Literal["single", "multi", "value"]:
        """One class of several, any number of classes, or a value."""
        problem, count = self.info.problem, len(self.info.labels)
        if problem == "regression":
            return "value"
        return "multi" if problem == "multi_label_classification" or count == 1 else "single"

    def classify(self, texts: Iterable[Text]) -> list[Classification]:
        """One classification a text or pair, in order."""
        return list(self.classify_each(texts))

    def classify_each(self, texts: Iterable[Text]) -> Iterator[Classification]:
        """As `classify`, one by one."""
        return self.run(_asks(texts, "classify"))

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(labels,) logits of each window."""
        return self.by_text(self.rows(hidden, batch))

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Classification:
        """Pool the windows."""
        info = self.info
        if self.problem == "single":
            logits = outputs[0] if len(outputs) == 1 else pooled(found, [log_softmax(o) for o in outputs])
            scores = softmax(logits / info.calibration.temperature)
        else:
            scores = pooled(found, outputs)
            scores = sigmoid(scores / info.calibration.temperature) if self.problem == "multi" else scores
        named = {label: float(scores[i]) for i, label in info.labels.items()}
        best = max(named, key=lambda label: named[label])
        sure = named[best] >= (info.calibration.abstain_below or -np.inf)
        return Classification(best, named[best], named, sure, **reading(found))

    # --- scikit-learn ---

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels, in the order of `predict_proba`'s columns."""
        return _restore_labels(list(self.info.labels.values()), self._original)

    @property
    def _original(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.__dict__.get("original_", {})
        return found

    def predict(self, X: Iterable[Text]) -> NDArray[Any]:
        """The likeliest label of each text; of a multi-label model, a tuple of those that max_length its threshold.

        Labels are given back as `fit` was given them, and as texts by a model that was loaded.
        """
        if self.problem == "multi":
            found = [self.above_threshold(one.scores) for one in self.classify_each(X)]
            rows = np.empty(len(found), dtype=object)
            rows[:] = [tuple(self._original.get(label, label) for label in one) for one in found]
            return rows
        return _restore_labels([one.label for one in self.classify_each(X)], self._original)

    def predict_proba(self, X: Iterable[Text]) -> NDArray[np.float32]:
        """(n, labels) probabilities, in the order of `classes_`."""
        return self._table(list(self.classify_each(X)))

    def _table(self, found: Sequence[Classification]) -> NDArray[np.float32]:
        labels = list(self.info.labels.values())
        rows = [[one.scores[label] for label in labels] for one in found]
        return np.array(rows, dtype=np.float32).reshape(len(rows), len(labels))

    def above_threshold(self, scores: Mapping[str, float]) -> tuple[str, ...]:
        """The labels of a multi-label model whose probability reaches its threshold."""
        threshold = self.info.calibration.threshold
        threshold = 0.5 if threshold is None else threshold
        return tuple(label for label, score in scores.items() if score >= threshold)


@dataclass(frozen=True, slots=True)
class RegressionResult:
    """The value of a text."""

    value: float
    tokens_total: int
    tokens_read: int
    windows: int


class Regressor(Trainable[None, FloatArray, RegressionResult]):
    """Gives texts or pairs of texts a value.

    >>> regressor = Regressor("path/to/any/encoder").fit(pairs, scores)             # doctest: +SKIP
    >>> regressor.predict([("A cat sleeps.", "A cat is asleep.")])                  # doctest: +SKIP
    array([4.7], dtype=float32)
    """

    kind = "classify"
    needs = "a head with one value"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "regress")

    def predict(self, X: Iterable[Text]) -> NDArray[np.float32]:
        """(n,) values."""
        return np.array([one.value for one in self.predict_each(X)], dtype=np.float32)

    def predict_each(self, X: Iterable[Text]) -> Iterator[RegressionResult]:
        """As `predict`, one by one, each with how much of its text was read."""
        return self.run(_asks(X, "predict"))

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(1,) value of each window."""
        return self.by_text(self.rows(hidden, batch))

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> RegressionResult:
        """The mean over windows."""
        return RegressionResult(float(pooled(found, outputs)[0]), **reading(found))


def _asks(texts: Iterable[Text], verb: str) -> Iterator[TaskInput[None]]:
    """Texts and pairs with their numbers."""
    named = ((text, f"text {i}") for i, text in enumerate(listed(texts, verb)))
    return (
        TaskInput(name, pair(text, name) if isinstance(text, tuple | list) else single(text, name), None)
        for text, name in named
    )


def _restore_labels(labels: Sequence[str], original: Mapping[str, Any]) -> NDArray[Any]:
    """Labels as `fit` got them: numbers for numbers."""
    restored = [original.get(label, label) for label in labels]
    try:
        return np.array(restored)
    except ValueError:  # of several types
        return np.array(restored, dtype=object)


@dataclass(frozen=True, slots=True)
class ZeroShotClassification:
    """Labels of a text that the model was never trained on, likeliest first."""

    label: str
    score: float
    scores: dict[str, float]
    tokens_total: int
    tokens_read: int
    windows: int


class ZeroShot:
    """Classifies into any labels, by asking a model of natural language inference whether the text entails them.

    >>> model = ZeroShot.load("path/to/an/nli/model")                                            # doctest: +SKIP
    >>> model.classify(["The match ended in a draw."], ["sports", "politics"])[0].label          # doctest: +SKIP
    'sports'
    """

    def __init__(self, checkpoint: Checkpoint, *, overflow: Overflow = "window", head: str | None = None) -> None:
        able = [name for name, info in checkpoint.heads.items() if _Logits._fits(info)]
        if not able or (head is not None and head not in able):
            raise NotFoundError(
                "zero-shot classification needs a head with a label 'entailment'; of the heads of "
                f"{checkpoint.source} ({', '.join(checkpoint.heads) or 'none'}) {', '.join(able) or 'none'} has one"
            )
        self._logits = _Logits(checkpoint, overflow=overflow, head=head)
        self.checkpoint = checkpoint
        labels, entails = self._logits.info.labels, entailing(self._logits.info)
        assert entails is not None
        # Without such a label: the first one, or the last if the first entails.
        usual = 0 if entails != 0 else len(labels) - 1
        self._entails = entails
        self._contradicts = next((i for i, name in labels.items() if name.lower().startswith("contra")), usual)

    @classmethod
    def load(
        cls, name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
    ) -> Self:
        """Load an NLI checkpoint, the built-in model if none is named; `options` are those of `Checkpoint.load`."""
        checkpoint, head = Task._loaded(name, head, options)
        return cls(checkpoint, overflow=overflow, head=head)

    def classify(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str = "This example is {}.",
        multi: bool = False,
    ) -> list[ZeroShotClassification]:
        """The labels' scores for each text. With `multi` each label is predictions by itself."""
        return list(self.classify_each(texts, labels, template=template, multi=multi))

    def classify_each(
        self, texts: Iterable[str], labels: Sequence[str], *, template: str = "This example is {}.", multi: bool = False
    ) -> Iterator[ZeroShotClassification]:
        """As `classify`, one by one."""
        labels = [checked_text(label, f"label {i}") for i, label in enumerate(listed(labels, "labels=", "words"))]
        if not labels or len(set(labels)) < len(labels):
            raise InputError(f"labels={labels!r:.80} must be at least one, and different")
        hypotheses = [_filled_in(template, label) for label in labels]
        named = ((text, f"text {i}") for i, text in enumerate(listed(texts, "classify")))
        checked = ((single(text, name)[0], name) for text, name in named)
        asks = (TaskInput(name, (text, hypothesis), None) for text, name in checked for hypothesis in hypotheses)
        return self._each(asks, labels, multi)

    def _each(
        self, asks: Iterable[TaskInput[None]], labels: Sequence[str], multi: bool
    ) -> Iterator[ZeroShotClassification]:
        answers = self._logits.run(asks)
        while rows := list(islice(answers, len(labels))):
            yield self._decode(labels, rows, multi)

    def _decode(
        self, labels: Sequence[str], rows: Sequence[tuple[FloatArray, dict[str, int]]], multi: bool
    ) -> ZeroShotClassification:
        logits = np.stack([row for row, _ in rows])
        if multi or len(labels) == 1:
            scores = softmax(logits[:, [self._contradicts, self._entails]])[:, 1]
        else:
            scores = softmax(logits[:, self._entails])
        named = {label: float(score) for label, score in sorted(zip(labels, scores, strict=True), key=lambda p: -p[1])}
        best = next(iter(named))
        read = [one for _, one in rows]
        # The text is the same in all; its hypotheses differ by a few tokens.
        return ZeroShotClassification(best, named[best], named, **max(read, key=lambda one: one["windows"]))


def entailing(info: HeadInfo) -> int | None:
    """The class of pairs whose first text entails the second; None: the head is not for natural language inference."""
    return next((i for i, name in info.labels.items() if name.lower().startswith("entail")), None)


def _filled_in(template: str, label: str) -> str:
    try:
        hypothesis = template.format(label)
    except (IndexError, KeyError, ValueError):
        hypothesis = template
    if hypothesis == template:
        raise InputError(f"template={template!r} must hold {{}} where the label goes")
    return hypothesis


class _Logits(Task[None, FloatArray, tuple[FloatArray, dict[str, int]]]):
    """The bare logits of pairs, averaged over windows."""

    kind = "classify"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and entailing(info) is not None

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        return self.by_text(self.rows(hidden, batch))

    def decode(
        self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]
    ) -> tuple[FloatArray, dict[str, int]]:
        return pooled(found, outputs), reading(found)
