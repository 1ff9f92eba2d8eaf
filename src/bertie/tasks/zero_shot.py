"""Zero-shot classification with a model for natural language inference (NLI).

Each label is turned into a hypothesis, and the model predicts whether the text entails it. Over several windows, the
logits of each hypothesis are averaged, weighted by the tokens that each window owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, text_inputs
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.base import Task
from bertie.tasks.decoding import average_windows, softmax
from bertie.tasks.results import ZeroShotResult
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text


class _Hypothesis(NamedTuple):
    """The NLI logits of a text and one hypothesis, and how much of the text was read."""

    logits: FloatArray
    counts: dict[str, int]


class ZeroShot(Task[None, FloatArray, _Hypothesis]):
    """Classifies texts into labels that the model was not trained on.

    >>> model = ZeroShot.load("path/to/an/nli/model")                                            # doctest: +SKIP
    >>> model.classify(["The match ended in a draw."], ["sports", "politics"])[0].label          # doctest: +SKIP
    'sports'
    """

    kind = "classify"
    needs = "a head with a label 'entailment'"

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        able = [name for name, info in checkpoint.heads.items() if self._fits(info)]
        if not able or (head is not None and head not in able):
            raise NotFoundError(
                "zero-shot classification needs a head with a label 'entailment'; of the heads of "
                f"{checkpoint.source} ({', '.join(checkpoint.heads) or 'none'}) {', '.join(able) or 'none'} has one"
            )
        super()._use(checkpoint, head)
        labels, entailment = self.info.labels, entailment_label(self.info)
        assert entailment is not None
        # Without a label 'contradiction': the first one, or the last if the first is 'entailment'.
        default = 0 if entailment != 0 else len(labels) - 1
        self._entailment = entailment
        self._contradiction = next((i for i, name in labels.items() if name.lower().startswith("contra")), default)

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and entailment_label(info) is not None

    def classify(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str = "This example is {}.",
        multi_label: bool = False,
    ) -> list[ZeroShotResult]:
        """Score the labels for each text. With `multi_label`, labels are scored independently and may all be true."""
        return list(self.classify_each(texts, labels, template=template, multi_label=multi_label))

    def classify_each(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str = "This example is {}.",
        multi_label: bool = False,
    ) -> Iterator[ZeroShotResult]:
        """As `classify`, one by one."""
        labels = [checked_text(label, f"label {i}") for i, label in enumerate(check_list(labels, "labels=", "words"))]
        if not labels or len(set(labels)) < len(labels):
            raise InputError(f"labels={labels!r:.80} must be at least one, and different")
        hypotheses = [_fill_template(template, label) for label in labels]
        inputs = (
            text._replace(texts=(text.texts[0], hypothesis))
            for text in text_inputs(texts, "classify", None)
            for hypothesis in hypotheses
        )
        return self._classify_each(inputs, texts, labels, multi_label)

    def _classify_each(
        self, inputs: Iterable[TaskInput[None]], texts: Iterable[str], labels: Sequence[str], multi_label: bool
    ) -> Iterator[ZeroShotResult]:
        hypotheses = self.run(inputs, texts)
        while group := list(islice(hypotheses, len(labels))):
            yield self._combine(labels, group, multi_label)

    def _combine(self, labels: Sequence[str], hypotheses: Sequence[_Hypothesis], multi_label: bool) -> ZeroShotResult:
        logits = np.stack([hypothesis.logits for hypothesis in hypotheses])
        if multi_label or len(labels) == 1:
            scores = softmax(logits[:, [self._contradiction, self._entailment]])[:, 1]
        else:
            scores = softmax(logits[:, self._entailment])
        ranked = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
        by_label = {label: float(score) for label, score in ranked}
        best = ranked[0][0]
        # The text is the same in all; the hypotheses differ by a few tokens.
        counts = max((hypothesis.counts for hypothesis in hypotheses), key=lambda counts: counts["windows"])
        return ZeroShotResult(best, by_label[best], by_label, **counts)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(labels,) NLI logits of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> _Hypothesis:
        """Average the windows."""
        logits = outputs[0] if len(outputs) == 1 else average_windows(text.windows, outputs)
        return _Hypothesis(logits, text.counts())


def entailment_label(info: HeadInfo) -> int | None:
    """The index of the label "entailment"; None: the head is not for natural language inference."""
    return next((i for i, name in info.labels.items() if name.lower().startswith("entail")), None)


def _fill_template(template: str, label: str) -> str:
    if "{}" not in template:
        raise InputError(f"template={template!r:.200} must hold {{}} where the label goes")
    return template.replace("{}", label)  # not `format`: "{:>999999999}" would be a gigabyte
