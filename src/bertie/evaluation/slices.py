"""Scores of parts of a test set: by the length of texts, and by label."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import DRAWS, FloatArray, IntArray, Score, bootstrap, linear
from bertie.evaluation.scores import entities, spans_in, tag_counts


@dataclass(frozen=True, slots=True)
class LengthSlice:
    """Texts of `low` to `high` tokens."""

    low: int
    high: int
    count: int
    score: Score


def by_length(lengths: ArrayLike, score: Callable[[IntArray], Score], parts: int = 5) -> list[LengthSlice]:
    """The score of about equally many texts each, from the shortest to the longest.

    `score` is given the indices of the texts of a part. Texts of one length are never parted, so there are fewer parts
    where many are of one length.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.ndim != 1 or not len(tokens):
        raise InputError(f"lengths has shape {tokens.shape}; it must have one entry a text")
    ends = np.unique(
        np.quantile(tokens, np.arange(1, parts + 1) / parts, method="higher")
    )  # each the longest of a part
    place = np.searchsorted(ends, tokens)
    found = []
    for i in range(len(ends)):
        inside = np.flatnonzero(place == i)
        its = tokens[inside]
        found.append(LengthSlice(int(its.min()), int(its.max()), len(inside), score(inside)))
    return found


@dataclass(frozen=True, slots=True)
class LabelSlice:
    """How well one label is predicted. Precision is not defined if it never is, recall if it never occurs."""

    label: str
    support: int  # how often it occurs
    predicted: int
    precision: Score
    recall: Score
    f1: Score


def by_label(gold: Sequence[str], predicted: Sequence[str], labels: Sequence[str]) -> list[LabelSlice]:
    """Of one label a text.

    >>> [(one.label, one.f1.value) for one in by_label(["a", "a", "b"], ["a", "a", "a"], ["a", "b"])]
    [('a', 0.8), ('b', 0.0)]
    """
    return by_labels([(label,) for label in gold], [(label,) for label in predicted], labels)


def by_labels(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> list[LabelSlice]:
    """Of any number of labels a text."""
    place = {label: i for i, label in enumerate(labels)}
    true, said = np.zeros((2, len(gold), len(labels)), dtype=bool)
    for table, given in ((true, gold), (said, predicted)):
        for i, some in enumerate(given):
            table[i, [place[label] for label in some]] = True
    return _slices(true & said, true, said, labels)


def by_tag(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> list[LabelSlice]:
    """Of each type of entity, or of each plain tag; a draw draws sentences."""
    if not spans_in(gold, predicted):
        return _slices(*tag_counts(gold, predicted))
    found = [entities(gold), entities(predicted)]
    kinds = sorted({kind for sentences in found for sentence in sentences for kind, _, _ in sentence})
    place = {kind: i for i, kind in enumerate(kinds)}
    tables = np.zeros((3, len(gold), len(kinds)))
    for i, (true, said) in enumerate(zip(*found, strict=True)):
        for table, some in zip(tables, (true & said, true, said), strict=True):
            for kind, _, _ in some:
                table[i, place[kind]] += 1
    return _slices(tables[0], tables[1], tables[2], kinds)


def _slices(hits: ArrayLike, occur: ArrayLike, said: ArrayLike, labels: Sequence[str]) -> list[LabelSlice]:
    """Of (n, k) counts: how often each label is right, occurs and is predicted in each unit."""
    columns = np.concatenate([np.asarray(table, dtype=np.float64) for table in (hits, occur, said)], axis=1)
    k = len(labels)

    def formula(sums: FloatArray) -> dict[str, FloatArray]:
        right, there, given = sums[:, :k], sums[:, k : 2 * k], sums[:, 2 * k :]
        with np.errstate(invalid="ignore"):  # 0 by 0 is not defined
            tables = {"precision": right / given, "recall": right / there, "f1": 2 * right / (there + given)}
        return {f"{name} {i}": table[:, i] for name, table in tables.items() for i in range(k)}

    scores = bootstrap(linear(columns, formula), len(columns), draws=DRAWS)
    totals = columns.sum(axis=0)
    return [
        LabelSlice(
            label,
            int(totals[k + i]),
            int(totals[2 * k + i]),
            *(scores[f"{name} {i}"] for name in ("precision", "recall", "f1")),
        )
        for i, label in enumerate(labels)
    ]
