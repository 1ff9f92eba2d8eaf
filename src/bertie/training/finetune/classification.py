"""Training and evaluation of text classification and regression."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.config import Calibration, HeadInfo
from bertie.evaluation import calibration, metrics
from bertie.evaluation.metrics import Score
from bertie.tasks.attribution import Text
from bertie.tasks.classify import Classifier, Regressor
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining, class_weights, pieces, token_counts
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import (
    MultiLabelObjective,
    Objective,
    RegressionObjective,
    SingleLabelObjective,
    TrainingExample,
)


class ClassificationTraining(TaskTraining[Classifier]):
    """Single-label and multi-label classification."""

    data_kind = "classify"

    @property
    def multi_label(self) -> bool:
        """Whether a text may have any number of labels."""
        return self.task.problem == "multi_label_classification"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """One output per label."""
        problem = "multi_label_classification" if data.multi_label else "single_label_classification"
        return HeadInfo("classify", dict(enumerate(data.labels)), problem)

    def objective(self, data: LabelledDataset) -> Objective:
        """Cross-entropy over the labels, or binary cross-entropy per label."""
        counts = Counter(label for example in data.examples for label in _labels_of(example))
        self._weights = class_weights(self.recipe, data, counts)
        self._index = {label: i for i, label in self.task.info.labels.items()}
        smoothing = self.recipe.label_smoothing
        return MultiLabelObjective(smoothing) if self.multi_label else SingleLabelObjective(smoothing)

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """The label belongs to the whole text."""
        if not self.multi_label:
            label = example.target
            return TrainingExample(pieces(windows), np.array(self._index[label], dtype=np.int64), self._weights[label])
        target = np.zeros(len(self._index), dtype=np.float32)
        target[[self._index[label] for label in example.target]] = 1.0
        weight = float(np.mean([self._weights[label] for label in example.target])) if example.target else 1.0
        return TrainingExample(pieces(windows), target, weight)

    def main_metric(self, data: LabelledDataset) -> str:
        """Macro-F1 for multi-label data."""
        return "macro_f1" if data.multi_label else super().main_metric(data)

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Classify labelled data."""
        results = self.task.classify([as_text(example) for example in data.examples])
        labels = self.labels
        rows = [[result.scores[label] for label in labels] for result in results]
        probabilities = np.array(rows, dtype=np.float32).reshape(len(rows), len(labels))
        if self.multi_label:
            gold: Sequence[Any] = [_labels_of(example) for example in data.examples]
            predicted: Sequence[Any] = [self.task.above_threshold(result.scores) for result in results]
        else:
            gold = [example.target for example in data.examples]
            predicted = [labels[i] for i in probabilities.argmax(1)]
        kind = "multi_label" if self.multi_label else "classify"
        confidence = probabilities.max(1)
        return Predictions(kind, data, gold, predicted, probabilities, confidence, *token_counts(results))

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Accuracy, F1 and calibration error, or F1 over labels."""
        assert predictions.probabilities is not None
        if predictions.kind == "classify":
            return metrics.classification(predictions.gold, predictions.probabilities, self.labels, resamples=resamples)
        threshold = self.task.info.calibration.threshold
        table, probabilities = multi_label_tables(predictions.gold, predictions.probabilities, self.labels)
        return metrics.multi_label(table, probabilities, 0.5 if threshold is None else threshold, resamples=resamples)

    def calibrate(self, dev: LabelledDataset) -> None:
        """Fit the temperature, the threshold of a multi-label model, and the abstention threshold of the recipe."""
        self.use_calibration(Calibration())
        self.use_calibration(self.fit_calibration(self.predict_labelled(dev)))

    def fit_calibration(self, predictions: Predictions) -> Calibration:
        """Fit temperature and thresholds to uncalibrated predictions."""
        assert predictions.probabilities is not None
        if self.multi_label:
            table = label_table(predictions.gold, self.labels)
            temperature = calibration.temperature_multi(_logits(predictions.probabilities), table)
            scaled = self.calibrated(predictions, Calibration(temperature)).probabilities
            assert scaled is not None
            return Calibration(temperature, calibration.best_threshold(table, scaled))
        known, gold = known_rows(predictions.gold, self.labels)
        logits = np.log(np.maximum(predictions.probabilities[known], np.float32(1e-30)))
        temperature = calibration.temperature(logits, gold)
        if self.recipe.abstain is None:
            return Calibration(temperature)
        scaled = self.calibrated(predictions, Calibration(temperature)).confidence
        assert scaled is not None
        correct = np.array([a == b for a, b in zip(predictions.gold, predictions.predicted, strict=True)])
        abstention = calibration.abstention(scaled, correct, self.recipe.abstain)
        if abstention is None:
            return Calibration(temperature)
        below = float(min(1.0, abstention.threshold))
        return Calibration(temperature, abstain_below=below, precision=self.recipe.abstain)

    def calibrated(self, predictions: Predictions, values: Calibration) -> Predictions:
        """Apply a calibration to uncalibrated predictions."""
        p = predictions.probabilities
        assert p is not None
        if self.multi_label:
            p = _sigmoid(_logits(p) / np.float32(values.temperature))
            threshold = 0.5 if values.threshold is None else values.threshold
            names = np.array(self.labels, dtype=object)
            predicted: Sequence[Any] = [tuple(names[row >= threshold]) for row in p]
            return replace(predictions, predicted=predicted, probabilities=p, confidence=p.max(1))
        p = calibration.softmax(np.log(np.maximum(p, np.float32(1e-30))), values.temperature).astype(np.float32)
        return replace(predictions, probabilities=p, confidence=p.max(1))

    def use_calibration(self, values: Calibration) -> None:
        """Set the calibration of the head."""
        assert self.task.head is not None
        self.task.checkpoint.set_calibration(self.task.head, values)


class RegressionTraining(TaskTraining[Regressor]):
    """Regression: one value per text or pair."""

    data_kind = "regress"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """One output."""
        return HeadInfo("classify", {0: "LABEL_0"}, "regression", task="regress")

    def objective(self, data: LabelledDataset) -> Objective:
        """Squared error in units of the variance. A fresh head starts at the mean."""
        values = np.array([example.target for example in data.examples], dtype=np.float64)
        assert self.task.head is not None
        out = self.task.model.head(self.task.head).out
        if out is not None and out.bias is not None and not out.bias.any():
            with torch.no_grad():
                out.bias.fill_(float(values.mean()))
        return RegressionObjective(float(values.var()) or 1.0)

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """The value belongs to the whole text."""
        return TrainingExample(pieces(windows), np.array(example.target, dtype=np.float32))

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Predict the values of labelled data."""
        results = list(self.task.predict_each([as_text(example) for example in data.examples]))
        gold = [float(example.target) for example in data.examples]
        predicted = [result.value for result in results]
        return Predictions("regress", data, gold, predicted, None, None, *token_counts(results))

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Correlations and errors."""
        return metrics.regression(predictions.gold, predictions.predicted, resamples=resamples)


def as_text(example: Example) -> Text:
    """The text or the pair of an example."""
    return (example.texts[0], example.texts[1]) if len(example.texts) == 2 else example.texts[0]


def _logits(probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    tiny = np.float32(1e-7)
    p = np.clip(probabilities, tiny, 1 - tiny)
    return np.asarray(np.log(p / (1 - p)))


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-logits)), dtype=np.float32)


def label_table(gold: Sequence[Sequence[str]], labels: Sequence[str]) -> NDArray[np.bool_]:
    """(n, labels) which labels each text has."""
    return np.array([[label in names for label in labels] for names in map(set, gold)], dtype=bool)


def multi_label_tables(
    gold: Sequence[Sequence[str]], probabilities: NDArray[np.float32], labels: Sequence[str]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """(n, labels) gold labels and probabilities; labels that the model does not have come last, with probability 0."""
    unseen = sorted({label for names in gold for label in names} - set(labels))
    return label_table(gold, [*labels, *unseen]), np.pad(probabilities, ((0, 0), (0, len(unseen))))


def known_rows(gold: Sequence[str], labels: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows whose gold label the model has, and the indices of their labels."""
    index = {label: i for i, label in enumerate(labels)}
    rows = np.array([i for i, label in enumerate(gold) if label in index], dtype=np.int64)
    return rows, np.array([index[gold[i]] for i in rows], dtype=np.int64)


def _labels_of(example: Example) -> tuple[str, ...]:
    return example.target if isinstance(example.target, tuple) else (example.target,)
