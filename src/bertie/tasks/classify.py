"""Text classification and regression, of single texts and of pairs.

Scores are probabilities, calibrated with the temperature that `fit` found on the dev data, if there was any. Over
several windows, log-probabilities are averaged, weighted by the tokens that each window owns, and normalized again;
regression values and the logits of a multi-label model are averaged directly. So the label is that of the whole text: a
single sentence decides where the rest is neutral, and is outvoted where it is not. `window_size` and `window_pooling`
choose other windows, and other ways to combine them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.config import PAIR_LABELS, HeadInfo
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, check_pair, check_positive
from bertie.pipeline.language_warnings import no_warning
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.tasks.attribution import MAX_PIECES, Text, attribute_each
from bertie.tasks.decoding import WINDOW_POOLING, WindowPooling, average_windows, pool_windows, sigmoid, softmax
from bertie.tasks.results import AttributionResult, ClassificationResult, RegressionResult
from bertie.tasks.trainable import Trainable
from bertie.tasks.zero_shot import entailment_label
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text

WindowSize = int | Literal["sentence"]


class Classifier(Trainable[WindowPooling | None, FloatArray, ClassificationResult]):
    """Classifies texts or pairs of texts.

    >>> classifier = Classifier.load("path/to/a/sentiment/model")                  # doctest: +SKIP
    >>> classifier.classify(["A delight from start to finish."])[0].label          # doctest: +SKIP
    'positive'

    To train one, pass texts and labels; hyperparameters are those of `bertie.Recipe`:

    >>> classifier = Classifier("path/to/any/encoder", epochs=3, lr=3e-5)           # doctest: +SKIP
    >>> classifier.fit(texts, labels, dev=(dev_texts, dev_labels)).predict(texts)   # doctest: +SKIP
    array(['good', 'bad'], dtype='<U4')

    `method` selects what is trained: "full" all weights, "frozen" a linear head over the frozen encoder, "few-shot" the
    same after contrastive training of the encoder on the labelled texts. "auto" compares them on held-out rows if rows
    are few, unless a hyperparameter of full fine-tuning is given; `history_.method` has the scores.

    Pretraining heads for pairs of texts are classifiers too: `head="nsp"` (next-sentence prediction, with the labels
    is_next and not_next) and `head="sop"` (sentence-order prediction: in_order, swapped).
    """

    kind = "classify"
    needs = "a text-classification head"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind in ("classify", *PAIR_LABELS) and info.task is None

    @classmethod
    def _is_default(cls, info: HeadInfo) -> bool:
        # NLI heads, which are for ZeroShot, and pretraining heads have to be named.
        return entailment_label(info) is None and info.kind == "classify"

    @property
    def problem(self) -> Literal["regression", "single_label_classification", "multi_label_classification"]:
        """The problem type of the head, like `problem_type` in transformers."""
        problem, count = self.info.problem, len(self.info.labels)
        if problem == "regression":
            return "regression"
        multi_label = problem == "multi_label_classification" or count == 1
        return "multi_label_classification" if multi_label else "single_label_classification"

    @overload
    def classify(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        window_size: WindowSize | None = None,
        window_pooling: WindowPooling = "mean",
        progress: bool | None = None,
    ) -> ClassificationResult: ...
    @overload
    def classify(
        self,
        texts: Iterable[Text],
        *,
        window_size: WindowSize | None = None,
        window_pooling: WindowPooling = "mean",
        progress: bool | None = None,
    ) -> list[ClassificationResult]: ...
    @explain_arguments
    def classify(
        self,
        texts: Any,
        *,
        window_size: WindowSize | None = None,
        window_pooling: WindowPooling = "mean",
        progress: bool | None = None,
    ) -> Any:
        """Classify texts or pairs; a single text returns a single result. A tuple of texts is a list, not a pair.

        `window_size`: maximum number of tokens per window, even if more would fit, or "sentence" for one window per
        sentence (of single texts). `window_pooling` combines the windows: "mean" averages their log-probabilities,
        "confidence" gives more weight to confident windows, "max" takes the highest probability of each label.
        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """
        each = partial(self.classify_each, window_size=window_size, window_pooling=window_pooling)
        return self.collect(texts, each, "classify", progress)

    def classify_each(
        self,
        texts: Iterable[Text],
        *,
        window_size: WindowSize | None = None,
        window_pooling: WindowPooling = "mean",
    ) -> Iterator[ClassificationResult]:
        """Like `classify`, but yield results one by one."""
        if window_size != "sentence":
            check_positive(window_size=window_size)
        if window_pooling not in WINDOW_POOLING:
            raise InputError(f"window_pooling={window_pooling!r} must be one of {', '.join(WINDOW_POOLING)}")
        inputs = text_or_pair_inputs(texts, "classify", head=self.head if self.info.kind in PAIR_LABELS else None)
        if window_size is not None or window_pooling != "mean":
            inputs = (i._replace(options=window_pooling, window_size=window_size) for i in inputs)
        return self.run(inputs, texts)

    @overload
    def attribute(  # type: ignore[overload-overlap]
        self, texts: str, *, label: str | None = None, max_pieces: int = MAX_PIECES, progress: bool | None = None
    ) -> AttributionResult: ...
    @overload
    def attribute(
        self,
        texts: Iterable[Text],
        *,
        label: str | None = None,
        max_pieces: int = MAX_PIECES,
        progress: bool | None = None,
    ) -> list[AttributionResult]: ...
    @explain_arguments
    def attribute(
        self, texts: Any, *, label: str | None = None, max_pieces: int = MAX_PIECES, progress: bool | None = None
    ) -> Any:
        """Attribute predictions to words: the decrease of the label's probability without each word (leave-one-out).

        Texts with more than `max_pieces` words are split into groups of neighbouring words. `label`: the one to
        explain; by default each text's predicted one.

        >>> result = Classifier.load().attribute("A truly wonderful film.")
        >>> result.label, max(result.pieces, key=lambda piece: piece.weight).text.strip()
        ('positive', 'wonderful')
        """

        def each(items: Any) -> Iterator[AttributionResult]:
            for text in check_list(items, "attribute"):
                yield from attribute_each(self.classify, [text], [label], max_pieces)

        with no_warning():  # about each variant of a text; the results have the counts
            return self.collect(texts, each, "attribute", progress)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(labels,) logits of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))

    def decode(self, text: WindowedText[WindowPooling | None], outputs: Sequence[FloatArray]) -> ClassificationResult:
        """Pool the windows."""
        info, temperature = self.info, self.info.calibration.temperature
        pooling = text.input.options or "mean"
        if self.problem == "single_label_classification":
            logits = outputs[0] if len(outputs) == 1 else pool_windows(text.windows, outputs, pooling)
            scores = softmax(logits / temperature)
        else:
            scores = outputs[0]
            if len(outputs) > 1:
                scores = np.max(outputs, axis=0) if pooling == "max" else average_windows(text.windows, outputs)
            scores = sigmoid(scores / temperature) if self.problem == "multi_label_classification" else scores
        by_label = {label: float(scores[i]) for i, label in info.labels.items()}
        best = max(by_label, key=lambda label: by_label[label])
        threshold = info.calibration.abstain_below
        confident = None if threshold is None else by_label[best] >= threshold
        return ClassificationResult(best, by_label[best], by_label, confident, **text.counts())

    # --- scikit-learn ---

    @property
    def classes_(self) -> NDArray[Any]:
        """The labels, in the order of `predict_proba`'s columns."""
        return _restore_labels(list(self.info.labels.values()), self._original)

    @property
    def _original(self) -> Mapping[str, Any]:
        original: Mapping[str, Any] = self.__dict__.get("original_", {})
        return original

    @overload
    def predict(self, X: str, *, progress: bool | None = None) -> Any: ...
    @overload
    def predict(self, X: Iterable[Text], *, progress: bool | None = None) -> NDArray[Any]: ...
    @explain_arguments
    def predict(self, X: Any, *, progress: bool | None = None) -> Any:
        """Predict the most probable label of each text; if multi-label, a tuple of the labels above the threshold.

        Labels have the type passed to `fit`; a loaded model returns strings. A single text returns a single prediction.
        """
        if isinstance(X, str):
            return self.predict([X], progress=progress)[0]
        if self.problem == "multi_label_classification":
            chosen = [self.above_threshold(result.scores) for result in self._results(X, progress)]
            rows = np.empty(len(chosen), dtype=object)
            rows[:] = [tuple(self._original.get(label, label) for label in labels) for labels in chosen]
            return rows
        return _restore_labels([result.label for result in self._results(X, progress)], self._original)

    @explain_arguments
    def predict_proba(self, X: Iterable[Text], *, progress: bool | None = None) -> NDArray[np.float32]:
        """(n, labels) probabilities, in the order of `classes_`; for a single text, (labels,)."""
        if isinstance(X, str):
            table: NDArray[np.float32] = self.predict_proba([X], progress=progress)[0]
            return table
        return self._table(self._results(X, progress))

    def _results(self, X: Iterable[Text], progress: bool | None) -> list[ClassificationResult]:
        return self.classify(check_list(X, "predict"), progress=progress)

    def _table(self, results: Sequence[ClassificationResult]) -> NDArray[np.float32]:
        labels = list(self.info.labels.values())
        rows = [[result.scores[label] for label in labels] for result in results]
        return np.array(rows, dtype=np.float32).reshape(len(rows), len(labels))

    def above_threshold(self, scores: Mapping[str, float]) -> tuple[str, ...]:
        """The labels of a multi-label model whose probability reaches its threshold."""
        threshold = self.info.calibration.threshold
        threshold = 0.5 if threshold is None else threshold
        return tuple(label for label, score in scores.items() if score >= threshold)


class Regressor(Trainable[None, FloatArray, RegressionResult]):
    """Predicts a value for texts or pairs of texts.

    >>> regressor = Regressor("path/to/any/encoder").fit(pairs, scores)             # doctest: +SKIP
    >>> regressor.predict([("A cat sleeps.", "A cat is asleep.")])                  # doctest: +SKIP
    array([4.7], dtype=float32)
    """

    kind = "classify"
    needs = "a head with one value"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "regress")

    @overload
    def predict(self, X: str, *, progress: bool | None = None) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, X: Iterable[Text], *, progress: bool | None = None) -> NDArray[np.float32]: ...
    @explain_arguments
    def predict(self, X: Any, *, progress: bool | None = None) -> Any:
        """(n,) predicted values; for a single text, a float."""
        results = self.collect(X, self.predict_each, "predict", progress)
        if isinstance(results, RegressionResult):
            return results.value
        return np.array([result.value for result in results], dtype=np.float32)

    def predict_each(self, X: Iterable[Text]) -> Iterator[RegressionResult]:
        """Like `predict`, but yield results one by one, with how much of each text was read."""
        return self.run(text_or_pair_inputs(X, "predict"), X)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(1,) value of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> RegressionResult:
        """Average the windows."""
        values = outputs[0] if len(outputs) == 1 else average_windows(text.windows, outputs)
        return RegressionResult(float(values[0]), **text.counts())


def text_or_pair_inputs(texts: Iterable[Text], caller: str, *, head: str | None = None) -> Iterator[TaskInput[Any]]:
    """Create inputs from texts and pairs; `head`: the name of a head that takes pairs only."""
    named = ((text, f"text {i}") for i, text in enumerate(check_list(texts, caller)))
    what = "a pair of texts" if head is None else f"a pair of texts, which the head {head!r} takes"
    return (
        TaskInput(
            name,
            check_pair(text, name, what)
            if head is not None or isinstance(text, tuple | list)
            else (checked_text(text, name),),
            None,
        )
        for text, name in named
    )


def _restore_labels(labels: Sequence[str], original: Mapping[str, Any]) -> NDArray[Any]:
    """Restore labels to the types that were passed to `fit`."""
    restored = [original.get(label, label) for label in labels]
    try:
        return np.array(restored)
    except ValueError:  # of several types
        return np.array(restored, dtype=object)
