"""Scores on slices of a test set: by text length and by label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, IntArray, Score, bootstrap, from_sums
from bertie.evaluation.metrics.tags import entities, is_span_scheme, tag_counts


@dataclass(frozen=True, slots=True)
class LengthSlice:
    """Texts of `low` to `high` tokens."""

    low: int
    high: int
    count: int
    score: Score


def by_length(lengths: ArrayLike, score: Callable[[IntArray], Score], parts: int = 5) -> list[LengthSlice]:
    """Score about equally large slices from the shortest to the longest texts.

    `score` gets the indices of a slice's texts. Texts of equal length stay together, so there may be fewer
    than `parts` slices.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.ndim != 1 or not len(tokens):
        raise InputError(f"lengths has shape {tokens.shape}; it must have one entry per text")
    # The longest text of each slice.
    ends = np.unique(np.quantile(tokens, np.arange(1, parts + 1) / parts, method="higher"))
    slice_of = np.searchsorted(ends, tokens)
    slices = []
    for i in range(len(ends)):
        rows = np.flatnonzero(slice_of == i)
        inside = tokens[rows]
        slices.append(LengthSlice(int(inside.min()), int(inside.max()), len(rows), score(rows)))
    return slices


@dataclass(frozen=True, slots=True)
class LabelSlice:
    """Scores of one label. Precision is undefined if it is never predicted, recall if it never occurs."""

    label: str
    support: int  # number of gold occurrences
    predicted: int
    precision: Score
    recall: Score
    f1: Score


def by_label(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[LabelSlice]:
    """Score each label of single-label predictions.

    >>> [(row.label, row.f1.value) for row in by_label(["a", "a", "b"], ["a", "a", "a"], ["a", "b"])]
    [('a', 0.8), ('b', 0.0)]
    """
    return by_labels([(label,) for label in gold], [(label,) for label in predicted], labels)


def by_labels(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> list[LabelSlice]:
    """Score each label of multi-label predictions."""
    index = {label: i for i, label in enumerate(labels)}
    true, guess = np.zeros((2, len(gold), len(labels)), dtype=bool)
    for table, label_sets in ((true, gold), (guess, predicted)):
        for i, names in enumerate(label_sets):
            table[i, [index[label] for label in names]] = True
    return _label_slices(true & guess, true, guess, labels)


def by_tag(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> list[LabelSlice]:
    """Score each entity type, or each plain tag; sentences are resampled."""
    if not is_span_scheme(gold, predicted):
        return _label_slices(*tag_counts(gold, predicted))
    spans = [entities(gold), entities(predicted)]
    kinds = sorted({kind for sentences in spans for sentence in sentences for kind, _, _ in sentence})
    index = {kind: i for i, kind in enumerate(kinds)}
    tables = np.zeros((3, len(gold), len(kinds)))
    for i, (true, guess) in enumerate(zip(*spans, strict=True)):
        for table, sentence in zip(tables, (true & guess, true, guess), strict=True):
            for kind, _, _ in sentence:
                table[i, index[kind]] += 1
    return _label_slices(tables[0], tables[1], tables[2], kinds)


def _label_slices(hits: ArrayLike, support: ArrayLike, predicted: ArrayLike, labels: Sequence[str]) -> list[LabelSlice]:
    """From (n, k) counts of correct, gold and predicted occurrences of each label in each unit."""
    columns = np.concatenate([np.asarray(table, dtype=np.float64) for table in (hits, support, predicted)], axis=1)
    k = len(labels)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        correct, true, guess = sums[:, :k], sums[:, k : 2 * k], sums[:, 2 * k :]
        with np.errstate(invalid="ignore"):  # 0 / 0 is undefined
            tables = {"precision": correct / guess, "recall": correct / true, "f1": 2 * correct / (true + guess)}
        return {f"{name} {i}": table[:, i] for name, table in tables.items() for i in range(k)}

    totals = columns.sum(axis=0)
    support, guesses = totals[k : 2 * k], totals[2 * k :]
    sizes = {"precision": guesses, "recall": support, "f1": (support + guesses) / 2}
    trials = {f"{name} {i}": float(size[i]) for name, size in sizes.items() for i in range(k)}
    scores = bootstrap(from_sums(columns, formula), len(columns), trials=trials, resamples=RESAMPLES)
    return [
        LabelSlice(
            label,
            int(totals[k + i]),
            int(totals[2 * k + i]),
            *(scores[f"{name} {i}"] for name in ("precision", "recall", "f1")),
        )
        for i, label in enumerate(labels)
    ]
