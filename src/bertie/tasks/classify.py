"""Classes of texts and of pairs, and values (regression).

Over several windows, log-probabilities are averaged with the tokens that each window answers for as weights, and made
to add up to 1 again; values and the independent classes of a multi-label model are averaged before their last function.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from bertie.errors import InputError, NotFoundError
from bertie.hub import Checkpoint
from bertie.tasks.base import FloatArray, Long, Task, log_softmax, pooled, reading, sigmoid, softmax
from bertie.text.batch import Batch
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


class Classifier(Task[Text, Classification]):
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
        if isinstance(texts, str):
            raise InputError("classify takes a list of texts; put a single text into a list")
        return self.run(texts)

    def texts(self, item: Text) -> tuple[str, ...]:
        """A text, or both of a pair."""
        return (item,) if isinstance(item, str) else tuple(item)

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """(labels,) logits of each window."""
        return self.by_text(self.rows(hidden, batch))

    def decode(self, item: Text, found: Sequence[Window], outputs: Sequence[FloatArray]) -> Classification:
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
    def load(cls, name: str, *, long: Long = "window", **options: object) -> ZeroShot:
        """Load an NLI checkpoint; `options` are those of `Checkpoint.load`."""
        return cls(Checkpoint.load(name, **options), long=long)  # type: ignore[arg-type]

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
        if isinstance(texts, str) or isinstance(labels, str):
            raise InputError("texts and labels must each be a list")
        if not labels or len(set(labels)) < len(labels):
            raise InputError(f"labels={list(labels)!r:.80} must be at least one, and different")
        if template.format("x") == template:
            raise InputError(f"template={template!r} must hold {{}} where the label goes")
        hypotheses = [template.format(label) for label in labels]
        answers = self._logits.run((text, hypothesis) for text in texts for hypothesis in hypotheses)
        while rows := [answer for answer, _ in zip(answers, labels, strict=False)]:
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


class _Logits(Task[tuple[str, str], tuple[FloatArray, dict[str, int]]]):
    """The bare logits of pairs, averaged over windows."""

    head = "classify"

    def texts(self, item: tuple[str, str]) -> tuple[str, ...]:
        return item

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        return self.by_text(self.rows(hidden, batch))

    def decode(
        self, item: tuple[str, str], found: Sequence[Window], outputs: Sequence[FloatArray]
    ) -> tuple[FloatArray, dict[str, int]]:
        return pooled(found, outputs), reading(found)
