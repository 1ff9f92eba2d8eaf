"""Training and evaluation of token classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bertie.config import HeadInfo
from bertie.evaluation import metrics
from bertie.evaluation.metrics import Score
from bertie.tasks.tag import Tagger, align_words, split_tag
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining, class_weights, pieces
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import Objective, TokenClassificationObjective, TrainingExample


class TaggingTraining(TaskTraining[Tagger]):
    """Token classification: one tag per word."""

    data_kind = "tag"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """One output per tag."""
        return HeadInfo("tag", dict(enumerate(data.labels)))

    def objective(self, data: LabelledDataset) -> Objective:
        """Cross-entropy of each word's tag."""
        counts = Counter(tag for example in data.examples for tag in example.target)
        self._weights = class_weights(self.recipe, data, counts)
        self._index = {label: i for i, label in self.task.info.labels.items()}
        return TokenClassificationObjective(self.recipe.label_smoothing)

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """All tokens of a word are trained on its tag and together have the weight of one word.

        What the tokenizer takes for later words inside it continues its span.
        """
        whole = windows[0].whole
        word, part = align_words(whole, example.texts[0], example.words)
        values, weights = np.zeros(len(whole), dtype=np.int64), np.zeros(len(whole), dtype=np.float32)
        known = frozenset(self._index)
        counts = np.bincount(word[word >= 0], minlength=len(example.words))
        for t in np.flatnonzero(word >= 0):
            tag = example.target[word[t]]
            target = tag if part[t] == 0 else _continuation(tag, known)
            if target is not None:
                values[t], weights[t] = self._index[target], self._weights[tag] / counts[word[t]]
        return TrainingExample(
            tuple(
                replace(piece, values=values[window.indices], weights=weights[window.indices] * window.owned)
                for piece, window in zip(pieces(windows), windows, strict=True)
            )
        )

    def main_metric(self, data: LabelledDataset) -> str:
        """Accuracy for plain tags, which form no spans."""
        return super().main_metric(data) if metrics.is_span_scheme([data.labels]) else "accuracy"

    def check_metrics(self, data: LabelledDataset) -> None:
        """Entities are counted by seqeval."""
        if metrics.is_span_scheme([example.target for example in data.examples]):
            metrics.entities([])

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Tag the words of labelled data."""
        words = [[example.texts[0][a:b] for a, b in example.words] for example in data.examples]
        results = list(self.task.tag_words(words))
        gold = [list(example.target) for example in data.examples]
        counts = [np.array([c[name] for _, c in results]) for name in ("tokens_total", "tokens_read", "windows")]
        return Predictions("tag", data, gold, [list(tags) for tags, _ in results], None, None, *counts)

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Precision, recall and F1 of spans."""
        return metrics.tagging(predictions.gold, predictions.predicted, resamples=resamples)


def _continuation(tag: str, known: frozenset[str]) -> str | None:
    """The tag of a word's later parts: I after B. None, and so not trained on, where the scheme has no such tag."""
    part, kind = split_tag(tag, known)
    if part == "I":
        return tag
    inside = f"I-{kind}"
    return inside if part == "B" and inside in known else None
