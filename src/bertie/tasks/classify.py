"""Classes of texts and of pairs, and values (regression).

Over several windows, log-probabilities are averaged with the tokens that each window answers for as weights, and made
to add up to 1 again; values and the independent classes of a multi-label model are averaged before their last function.
So a label is one for the whole text: a lone sentence decides it where the rest says nothing, and is outvoted where the
rest speaks for another.

Zero-shot classification averages the logits of each hypothesis in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from bertie.errors import InputError, NotFoundError
from bertie.hub import Checkpoint
from bertie.tasks.base import (
    Ask,
    FloatArray,
    Long,
    Task,
    listed,
    log_softmax,
    pair,
    pooled,
    reading,
    sigmoid,
    single,
    softmax,
)
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
    tokens_total: int
    tokens_read: int
    windows: int


class Classifier(Task[None, FloatArray, Classification]):
    """Classifies texts or pairs of texts.

    >>> classifier = Classifier.load("path/to/a/sentiment/model")                  # doctest: +SKIP
    >>> classifier.classify(["A delight from start to finish."])[0].label          # doctest: +SKIP
    'positive'
    """

    head = "classify"

    @property
    def kind(self) -> Literal["single", "multi", "value"]:
        """One class of several, any number of classes, or a value."""
        problem, count = self.checkpoint.blueprint.problem, len(self.checkpoint.labels)
        if problem == "regression":
            return "value"
        return "multi" if problem == "multi_label_classification" or count == 1 else "single"

    def classify(self, texts: Iterable[Text]) -> list[Classification]:
        """One classification a text or pair, in order."""
        return list(self.classify_each(texts))

    def classify_each(self, texts: Iterable[Text]) -> Iterator[Classification]:
        """As `classify`, one by one."""
        named = ((text, f"text {i}") for i, text in enumerate(listed(texts, "classify")))
        return self.run(
            Ask(name, pair(text, name) if isinstance(text, tuple | list) else single(text, name), None)
            for text, name in named
        )

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[Ask[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(labels,) logits of each window."""
        return self.by_text(self.rows(hidden, batch))

    def decode(self, ask: Ask[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Classification:
        """Pool the windows."""
        if self.kind == "single":
            scores = softmax(outputs[0] if len(outputs) == 1 else pooled(found, [log_softmax(o) for o in outputs]))
        else:
            scores = pooled(found, outputs)
            scores = sigmoid(scores) if self.kind == "multi" else scores
        named = {label: float(scores[i]) for i, label in self.checkpoint.labels.items()}
        best = max(named, key=lambda label: named[label])
        return Classification(best, named[best], named, **reading(found))


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

    def __init__(self, checkpoint: Checkpoint, *, long: Long = "window") -> None:
        self._logits = _Logits(checkpoint, long=long)
        self.checkpoint = checkpoint
        labels = {name.lower(): i for i, name in checkpoint.labels.items()}
        entails = next((i for name, i in labels.items() if name.startswith("entail")), None)
        if entails is None:
            known = ", ".join(checkpoint.labels.values())
            raise NotFoundError(f"zero-shot classification needs a model with a label 'entailment'; this has {known}")
        # Without such a label: the first one, or the last if the first entails.
        usual = 0 if entails != 0 else len(labels) - 1
        self._entails = entails
        self._contradicts = next((i for name, i in labels.items() if name.startswith("contra")), usual)

    @classmethod
    def load(cls, name: str | Path, *, long: Long = "window", **options: Any) -> Self:
        """Load an NLI checkpoint; `options` are those of `Checkpoint.load`."""
        return cls(Checkpoint.load(name, **options), long=long)

    def classify(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str = "This example is {}.",
        multi: bool = False,
    ) -> list[ZeroShotClassification]:
        """The labels' scores for each text. With `multi` each label is judged by itself."""
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
        asks = (Ask(name, (text, hypothesis), None) for text, name in checked for hypothesis in hypotheses)
        return self._each(asks, labels, multi)

    def _each(self, asks: Iterable[Ask[None]], labels: Sequence[str], multi: bool) -> Iterator[ZeroShotClassification]:
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

    head = "classify"

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[Ask[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        return self.by_text(self.rows(hidden, batch))

    def decode(
        self, ask: Ask[None], found: Sequence[Window], outputs: Sequence[FloatArray]
    ) -> tuple[FloatArray, dict[str, int]]:
        return pooled(found, outputs), reading(found)
