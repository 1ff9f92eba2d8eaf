"""Zero-shot classification: by natural language inference (NLI), by embedding similarity, or by both.

- "entailment": each label is turned into a hypothesis, and the model predicts whether the text entails it: one forward
  pass per text and label. Over several windows, the logits of each hypothesis are averaged, weighted by the tokens that
  each window owns.
- "embedding": the label whose embedding is nearest to that of the text, by cosine similarity: one pass per text.
- "combined": a weighted sum of the logits of both.

"auto" is "embedding", or "entailment" for a model without sentence embeddings. On datasets whose labels the built-in
model has not been trained on, "embedding" is the best of the three and the fastest (docs/labelling.md). The templates
and the temperatures were fitted on five labelled datasets (benchmarks/zero_shot.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args, overload

import numpy as np
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.nn.sentence_layers import normalize_array
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import check_list, text_inputs
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.pipeline.reporting import length
from bertie.tasks.base import Task
from bertie.tasks.decoding import average_windows, sigmoid, softmax
from bertie.tasks.embed import Embedder
from bertie.tasks.results import EmbeddingResult, ZeroShotResult
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text

Method = Literal["auto", "entailment", "embedding", "combined"]
METHODS: tuple[Method, ...] = get_args(Method)
TEMPLATES: dict[Method, str] = {
    "entailment": "This example is {}.",  # as in transformers
    "embedding": "This text is about {}.",
}
_SCALE = 20.0  # of cosine similarities as logits: a temperature of 0.05
_ENTAILMENT_WEIGHT = 0.5  # of entailment logits beside scaled similarities
_SEVERAL_SCALE, _NEUTRAL = 10.0, 0.15  # if several labels may be true, one of this similarity is as likely as not
_COMBINED_TEXTS = 64  # texts per group, which both methods read


class _Hypothesis(NamedTuple):
    """The NLI logits of a text and one hypothesis, and how much of the text was read."""

    logits: FloatArray
    counts: dict[str, int]


class _LabelLogits(NamedTuple):
    """The logits of a text's labels, of which one is true or, independently of each other, several may be."""

    one: FloatArray  # (labels,), for a softmax
    several: FloatArray  # (labels,), for a sigmoid
    counts: dict[str, int]


class ZeroShot(Task[None, FloatArray, _Hypothesis]):
    """Classifies texts into labels that the model was not trained on.

    >>> model = ZeroShot.load("bertie-small")
    >>> model.classify(["The match ended in a draw."], ["sports", "politics"])[0].label
    'sports'

    `classify` takes a `method`: "entailment" needs a head for natural language inference, "embedding" compares
    embeddings and needs sentence-embedding modules, and "combined" does both. "auto" is "embedding" if the model
    supports it, and "entailment" if not, or if `head` is given.
    """

    kind = "classify"
    needs = "a head with a label 'entailment'"

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        able = [name for name, info in checkpoint.heads.items() if self._fits(info)]
        if (head is not None and head not in able) or (not able and checkpoint.sentence is None):
            raise NotFoundError(
                "zero-shot classification needs a head with a label 'entailment'; of the heads of "
                f"{checkpoint.source} ({', '.join(checkpoint.heads) or 'none'}) {', '.join(able) or 'none'} has one"
                + ("" if checkpoint.sentence is not None else ", and it has no sentence-embedding modules")
            )
        self._head_is_named = head is not None
        self._embedder = Embedder(checkpoint, overflow=self.overflow, deterministic=self.deterministic)
        if not able:
            self._set_checkpoint(checkpoint, None)
            return
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

    def resolve_method(self, method: Method) -> Method:
        """Resolve "auto"; other methods are returned if the model supports them."""
        if method not in METHODS:
            raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")
        if method == "auto":
            return "entailment" if self.checkpoint.sentence is None or self._head_is_named else "embedding"
        if method != "embedding" and self.head is None:
            raise InputError(
                f"method={method!r} needs a head with a label 'entailment', which {self.checkpoint.source} lacks; "
                "use method='embedding'"
            )
        return method

    @overload
    def classify(  # type: ignore[overload-overlap]
        self,
        texts: str,
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi_label: bool = False,
        method: Method = "auto",
        progress: bool | None = None,
    ) -> ZeroShotResult: ...
    @overload
    def classify(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi_label: bool = False,
        method: Method = "auto",
        progress: bool | None = None,
    ) -> list[ZeroShotResult]: ...
    @explain_arguments
    def classify(
        self,
        texts: Any,
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi_label: bool = False,
        method: Method = "auto",
        progress: bool | None = None,
    ) -> Any:
        """Score the labels for each text. With `multi_label`, labels are scored independently and may all be true.

        `template` is the sentence that a label is inserted into, at {}. By default that is "This example is {}." for
        entailment, and "This text is about {}." for embeddings. A single text returns a single result.
        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """
        labels = list(check_list(labels, "labels=", "labels"))
        each = partial(self.classify_each, labels=labels, template=template, multi_label=multi_label, method=method)
        # An entailment head reads each text once per label.
        method = self.resolve_method(method)
        passes = {"embedding": 1, "entailment": len(labels), "combined": len(labels) + 1}[method]
        count = 1 if isinstance(texts, str) else length(texts)
        total = None if count is None else count * passes
        return self.collect(texts, each, "classify", progress, total=total, unit="passes" if passes > 1 else "texts")

    def classify_each(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi_label: bool = False,
        method: Method = "auto",
    ) -> Iterator[ZeroShotResult]:
        """Like `classify`, but yield results one by one."""
        checked = enumerate(check_list(labels, "labels=", "labels"))
        labels = [str(checked_text(label, f"label {i}")) for i, label in checked]
        if not labels or len(set(labels)) < len(labels):
            raise InputError(f"labels={labels!r:.80} must be one or more distinct labels")
        method = self.resolve_method(method)
        sentences = {
            name: [_fill_template(default if template is None else template, label) for label in labels]
            for name, default in TEMPLATES.items()
        }
        check_list(texts, "classify")
        # Texts are counted once: by the head, if it reads them.
        self._embedder.pipeline.counts_languages = method == "embedding"
        if method == "entailment":
            logits = self._by_entailment(texts, sentences["entailment"])
        elif method == "embedding":
            logits = self._by_embedding(texts, self._embed(sentences["embedding"]))
        else:
            logits = self._by_both(texts, sentences["entailment"], self._embed(sentences["embedding"]))
        return (_result(labels, row, multi_label or len(labels) == 1) for row in logits)

    def _by_entailment(self, texts: Iterable[str], hypotheses: Sequence[str]) -> Iterator[_LabelLogits]:
        inputs = (
            text._replace(texts=(text.texts[0], hypothesis), repeated=number > 0)
            for text in text_inputs(texts, "classify", None)
            for number, hypothesis in enumerate(hypotheses)
        )
        outputs = self.run(inputs, texts)
        while group := list(islice(outputs, len(hypotheses))):
            logits = np.stack([hypothesis.logits for hypothesis in group])
            entailment = logits[:, self._entailment]
            # The text is the same in all; the hypotheses differ by a few tokens.
            counts = max((hypothesis.counts for hypothesis in group), key=lambda counts: counts["windows"])
            yield _LabelLogits(entailment, entailment - logits[:, self._contradiction], counts)

    def _embed(self, texts: Iterable[str]) -> FloatArray:
        self._embedder.pipeline.executor = self.pipeline.executor  # the server's engine, if there is one
        return normalize_array(self._embedder.embed(texts))

    def _by_embedding(self, texts: Iterable[str], labels: FloatArray) -> Iterator[_LabelLogits]:
        for result in self._embedder.embed_each(texts):
            similarities = (labels @ normalize_array(result.vector[None])[0]).astype(np.float32)
            several = _SEVERAL_SCALE * (similarities - _NEUTRAL)
            yield _LabelLogits(_SCALE * similarities, several, _counts(result))

    def _by_both(self, texts: Iterable[str], hypotheses: Sequence[str], labels: FloatArray) -> Iterator[_LabelLogits]:
        remaining = iter(texts)
        while group := list(islice(remaining, _COMBINED_TEXTS)):
            each = zip(self._by_embedding(group, labels), self._by_entailment(group, hypotheses), strict=True)
            for near, entailed in each:
                several = 0.5 * near.several + 0.5 * entailed.several
                yield _LabelLogits(near.one + _ENTAILMENT_WEIGHT * entailed.one, several, entailed.counts)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(labels,) NLI logits of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> _Hypothesis:
        """Average the windows."""
        logits = outputs[0] if len(outputs) == 1 else average_windows(text.windows, outputs)
        return _Hypothesis(logits, text.counts())


def _result(labels: Sequence[str], logits: _LabelLogits, multi_label: bool) -> ZeroShotResult:
    scores = sigmoid(logits.several) if multi_label else softmax(logits.one)
    ranked = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
    by_label = {label: float(score) for label, score in ranked}
    best = ranked[0][0]
    return ZeroShotResult(best, by_label[best], by_label, **logits.counts)


def _counts(result: EmbeddingResult) -> dict[str, int]:
    return {name: getattr(result, name) for name in READ_COUNTS}


def entailment_label(info: HeadInfo) -> int | None:
    """The index of the label "entailment"; None: the head is not for natural language inference."""
    return next((i for i, name in info.labels.items() if name.lower().startswith("entail")), None)


def _fill_template(template: str, label: str) -> str:
    if "{}" not in template:
        raise InputError(f"template={template!r:.200} must contain {{}} as the placeholder for the label")
    return template.replace("{}", label)  # not `format`: "{:>999999999}" would be a gigabyte
