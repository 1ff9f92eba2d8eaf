"""Comparison of two models on the same labelled data, whose label names may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES
from bertie.evaluation.metrics import mcnemar, paired
from bertie.evaluation.report import Comparison
from bertie.tasks.classify import Classifier
from bertie.training.finetune.base import AnyTrainable, Predictions, training_for
from bertie.training.finetune.classification import multi_label_tables
from bertie.training.finetune.data import LabelledDataset, warn_of_unseen


@dataclass(frozen=True, slots=True)
class Baseline:
    """Another model, and its predictions on the same data."""

    name: str
    task: AnyTrainable
    predictions: Predictions


def compare(
    task: AnyTrainable,
    predictions: Predictions,
    baseline: Baseline,
    *,
    split: str = "test",
    resamples: int = RESAMPLES,
) -> Comparison:
    """Compare a model with a baseline by paired bootstrap, and classifiers also by McNemar's test."""
    other = baseline.predictions
    names = _label_mapping(predictions, other, baseline.name)
    first, second = metric_arguments(task, predictions), metric_arguments(baseline.task, other)
    correct = None
    if predictions.kind == "classify":
        second = (first[0], second[1], [names.get(label, label) for label in second[2]])
        correct = [[a == b for a, b in zip(p.gold, p.predicted, strict=True)] for p in (predictions, other)]
    elif predictions.kind == "multi_label":
        column = {names.get(label, label): i for i, label in enumerate(labels_of(baseline.task))}
        probabilities = np.zeros_like(first[1])  # unseen labels come last, and nobody predicts them
        for i, label in enumerate(labels_of(task)):
            if label in column:
                probabilities[:, i] = second[1][:, column[label]]
        second = (first[0], probabilities, second[2])
    elif predictions.kind == "tag":
        second = (first[0], [[names.get(tag, tag) for tag in tags] for tags in other.predicted])
    return Comparison(
        name=baseline.name,
        split=split,
        scores=training_for(baseline.task).scores(other, resamples=resamples),
        differences=paired(predictions.kind, first, second, resamples=resamples),
        mcnemar=None if correct is None else mcnemar(*correct),
    )


def metric_arguments(task: AnyTrainable, predictions: Predictions) -> tuple[Any, ...]:
    """The arguments of the function in `bertie.evaluation.metrics` for this kind of predictions."""
    if predictions.kind == "classify":
        return predictions.gold, predictions.probabilities, labels_of(task)
    if predictions.kind == "multi_label":
        threshold = task.info.calibration.threshold
        assert predictions.probabilities is not None
        gold, probabilities = multi_label_tables(predictions.gold, predictions.probabilities, labels_of(task))
        return gold, probabilities, 0.5 if threshold is None else threshold
    if predictions.kind == "rerank":
        queries = [example.texts[0] for example in predictions.data.examples]
        return queries, predictions.gold, predictions.predicted
    return predictions.gold, predictions.predicted


def select_rows(predictions: Predictions, rows: Sequence[int]) -> Predictions:
    """Select the predictions on some of the rows."""

    def select(values: Any) -> Any:
        return None if values is None else values[rows] if isinstance(values, np.ndarray) else [values[i] for i in rows]

    names = ("gold", "predicted", "probabilities", "confidence", "lengths", "read", "windows", "no_answer")
    data = replace(predictions.data, examples=select(predictions.data.examples))
    return replace(predictions, data=data, **{name: select(getattr(predictions, name)) for name in names})


def _label_mapping(predictions: Predictions, other: Predictions, name: str) -> dict[str, str]:
    """From the baseline's labels to the model's, by row; its other labels must not be taken for one of these."""
    if predictions.kind not in ("classify", "multi_label", "tag"):
        return {}
    rows = zip(predictions.gold, other.gold, strict=True)
    names = {b: a for row, other_row in rows for a, b in zip(as_tuple(row), as_tuple(other_row), strict=True)}
    return names | {label: f"{label} of {name}" for label in names.values() if label not in names}


def with_labels_of(task: AnyTrainable, data: LabelledDataset) -> LabelledDataset:
    """The data with the labels of a model, and those that it does not have, with a warning.

    Whole numbers index its labels where those are names.
    """
    if data.kind not in ("classify", "tag") or not labels_of(task):  # a span head takes any labels
        return data
    source, known = task.checkpoint.source, labels_of(task)
    if data.multi_label and isinstance(task, Classifier) and task.problem == "single_label_classification":
        raise InputError(f"{data.name} has lists of labels, and {source} predicts one label per text")
    labels = {label for example in data.examples for label in as_tuple(example.target)}
    by_index = all(map(_is_integer, labels)) and not any(map(_is_integer, known))
    names = dict(zip(map(str, range(len(known))) if by_index else known, known, strict=True))
    warn_of_unseen(data.name, list(names), data.examples)
    examples = [
        replace(
            example,
            target=names.get(example.target, example.target)
            if isinstance(example.target, str)
            else tuple(names.get(label, label) for label in example.target),
        )
        for example in data.examples
    ]
    return replace(data, examples=examples, labels=(*known, *sorted(labels - set(names))))


def labels_of(task: AnyTrainable) -> list[str]:
    """The labels of a task's head, in the order of its outputs."""
    return list(task.info.labels.values())


def as_tuple(target: Any) -> Sequence[str]:
    """The labels of a target that is one label or several."""
    return (target,) if isinstance(target, str) else target


def _is_integer(label: str) -> bool:
    return label.removeprefix("-").isdigit()
