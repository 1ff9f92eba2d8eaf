"""All that is known of a training run and its model, gathered for the report and the model card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.calibration import Abstention, Bin, kept
from bertie.evaluation.intervals import BoolArray, Difference, IntArray, Score
from bertie.evaluation.leaks import Leak
from bertie.evaluation.noise import Suspect
from bertie.evaluation.scores import (
    MAIN,
    answering,
    classification,
    finding,
    main_metric,
    multi_label,
    regression,
    tagging,
)
from bertie.evaluation.slices import LabelSlice, LengthSlice, by_label, by_labels, by_length, by_tag

Kind = Literal["classify", "multi", "regress", "tag", "answer", "rerank", "alike", "find"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model says of one split, beside what is true: one entry a text in each sequence.

    `gold` and `predicted` are labels (classify), tuples of labels (multi), values (regress, rerank), a tag a word
    (tag), all right answers and the answer (answer), how alike two texts are (alike), or ranks (find). `confidences`
    are those of the finished model, after its temperature.
    """

    scores: Mapping[str, Score]
    gold: Sequence[Any]
    predicted: Sequence[Any]
    labels: Sequence[str] = ()  # of classify and multi, in the model's order
    confidences: ArrayLike | None = None
    probabilities: ArrayLike | None = None
    lengths: ArrayLike | None = None  # in tokens
    texts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("predicted", "confidences", "probabilities", "lengths", "texts"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.gold):
                raise InputError(f"{name} has {len(given)} entries; gold has {len(self.gold)}")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A split: the files it comes from, by their names without folders."""

    split: str
    files: Sequence[str]
    rows: int
    labels: Mapping[str, int] | None = None  # how often each occurs

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(re.split(r"[/\\]", name)[-1] for name in self.files))


@dataclass(frozen=True, kw_only=True)
class LeakCheck:
    """Test texts that are in the training data as well, and the scores without them."""

    rows: int  # of the test split
    found: Sequence[Leak]
    texts: Sequence[tuple[str, str]] = ()  # the test text and the training text of the first of them
    without: Mapping[str, Score] | None = None


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """How far probabilities can be trusted before and after they were given a temperature."""

    temperature: float
    fitted_on: str
    measured_on: str
    before: Score  # the expected calibration error
    after: Score
    bins_before: Sequence[Bin] = ()
    bins_after: Sequence[Bin] = ()
    threshold: float | None = None  # multi: the probability from which a label is given


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same test split, by another model."""

    name: str
    split: str
    scores: Mapping[str, Score]
    differences: Mapping[str, Difference]  # this model's less the other's
    mcnemar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How much of a split's texts was read."""

    texts: int
    several: int  # texts that were read in more than one window
    tokens_read: int
    tokens_total: int


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model and how it came about. What is None is left out of the report.

    >>> scores = {"accuracy": Score(0.9, 0.8, 1.0)}
    >>> study = Study(
    ...     title="Reviews",
    ...     kind="classify",
    ...     model="my-encoder",
    ...     evaluations={"test": Evaluation(scores=scores, gold=["a", "b"], predicted=["a", "b"], labels=["a", "b"])},
    ... )
    >>> study.main
    'accuracy'
    """

    title: str
    kind: Kind
    model: str  # what was fine-tuned
    evaluations: Mapping[str, Evaluation]  # by split, the last one the most telling
    base: str | None = None  # its id on the hub, for the card
    language: str | Sequence[str] | None = None
    data: Sequence[DataFile] = ()
    recipe: Mapping[str, Any] | None = None
    curve: Sequence[Mapping[str, float]] | None = None  # rows of step, epoch, loss, lr
    dev: Sequence[Mapping[str, Any]] | None = None  # rows of step, epoch, metric, value
    seeds: Sequence[Mapping[str, float]] | None = None  # the metrics of each seed's model
    leaks: Mapping[str, LeakCheck] | None = None  # by split
    suspects: Mapping[str, Sequence[Suspect]] | None = None  # by split
    calibration: Calibrated | None = None
    abstention: Abstention | None = None
    comparison: Comparison | None = None
    reading: Mapping[str, Reading] | None = None  # by split
    timings: Mapping[str, float] | None = None
    versions: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in MAIN:
            raise InputError(f"kind={self.kind!r} must be one of {', '.join(MAIN)}")
        if not self.evaluations:
            raise InputError("evaluations must hold at least one split")
        named = {*(self.leaks or {}), *(self.suspects or {})} - set(self.evaluations)
        if named:
            raise InputError(f"leaks and suspects name {sorted(named)}; the splits are {sorted(self.evaluations)}")

    @property
    def main(self) -> str:
        """The metric that stands for the task."""
        return main_metric(self.kind, next(iter(self.evaluations.values())).scores)

    @property
    def final(self) -> str:
        """The split that the model is to be predictions by: the last."""
        return list(self.evaluations)[-1]


# --- what follows from an evaluation ---


def right(evaluation: Evaluation) -> BoolArray:
    """(n,) which single labels are right."""
    return np.array([a == b for a, b in zip(evaluation.gold, evaluation.predicted, strict=True)], dtype=bool)


def label_slices(kind: str, evaluation: Evaluation) -> list[LabelSlice]:
    """By label, by type of entity or by tag; empty where there are none."""
    if kind == "classify":
        return by_label(evaluation.gold, evaluation.predicted, evaluation.labels)
    if kind == "multi":
        return by_labels(evaluation.gold, evaluation.predicted, evaluation.labels)
    return by_tag(evaluation.gold, evaluation.predicted) if kind == "tag" else []


def length_slices(kind: str, evaluation: Evaluation, main: str) -> list[LengthSlice]:
    """The main metric by length; empty where lengths are not known, or a text alone has no score (ranking)."""
    if evaluation.lengths is None or kind == "rerank":
        return []

    def score(inside: IntArray) -> Score:
        gold, predicted = ([one[i] for i in inside] for one in (evaluation.gold, evaluation.predicted))
        if kind == "classify":
            return classification(gold, _table([(one,) for one in predicted], evaluation.labels), evaluation.labels)[
                main
            ]
        if kind == "multi":
            return multi_label(_table(gold, evaluation.labels), _table(predicted, evaluation.labels), 0.5)[main]
        if kind in ("regress", "alike"):
            return regression(gold, predicted)[main]
        if kind == "find":
            return finding(gold, predicted)[main]
        return (tagging if kind == "tag" else answering)(gold, predicted)[main]

    return by_length(evaluation.lengths, score)


def _table(chosen: Sequence[Sequence[str]], labels: Sequence[str]) -> IntArray:
    place = {label: i for i, label in enumerate(labels)}
    table = np.zeros((len(chosen), len(labels)), dtype=np.int64)
    for i, some in enumerate(chosen):
        table[i, [place[label] for label in some]] = 1
    return table


@dataclass(frozen=True, slots=True)
class Confusion:
    """How often a gold label (row) got a predicted one (column); labels beyond the most confused are one, the last."""

    labels: list[str]
    table: list[list[int]]
    pairs: list[tuple[str, str, int]]  # gold, predicted, how often: of all labels, the most frequent errors


def confusion(evaluation: Evaluation, most: int = 20, pairs: int = 15) -> Confusion:
    """Of single labels."""
    labels, place = list(evaluation.labels), {label: i for i, label in enumerate(evaluation.labels)}
    k = len(labels)
    gold, said = (np.array([place[label] for label in one]) for one in (evaluation.gold, evaluation.predicted))
    table = np.bincount(gold * k + said, minlength=k * k).reshape(k, k)
    errors = table - np.diag(np.diag(table))
    worst = np.argsort(-errors, axis=None, kind="stable")[:pairs]
    listed = [(labels[i // k], labels[i % k], int(errors.flat[i])) for i in worst.tolist() if errors.flat[i]]
    if k > most:
        chosen = np.sort(np.argsort(-(errors.sum(axis=0) + errors.sum(axis=1)), kind="stable")[:most])
        group = np.full(k, most)
        group[chosen] = np.arange(most)
        smaller = np.zeros((most + 1, most + 1), dtype=np.int64)
        np.add.at(smaller, (group[:, None], group[None, :]), table)
        labels, table = [*(labels[i] for i in chosen), f"{k - most} others"], smaller
    return Confusion(labels, table.tolist(), listed)


@dataclass(frozen=True, slots=True)
class Held:
    """What a threshold of confidence keeps on one split."""

    precision: Score
    coverage: float


def abstentions(study: Study) -> dict[str, Held]:
    """The precision and coverage on each split, of the threshold that was fitted on one."""
    if study.abstention is None or study.kind != "classify":
        return {}
    found = {}
    for split, one in study.evaluations.items():
        if one.confidences is not None:
            sure, threshold = np.asarray(one.confidences, dtype=np.float64), study.abstention.threshold
            found[split] = Held(kept(sure, right(one), threshold), float((sure >= threshold).mean()))
    return found
