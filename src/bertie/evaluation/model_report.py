"""The contents of a model's report and model card: evaluations, data, recipe, calibration, leaks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.calibration import Abstention, Bin, selective_precision
from bertie.evaluation.intervals import BoolArray, Difference, IntArray, Score
from bertie.evaluation.label_noise import LabelIssue
from bertie.evaluation.leaks import Leak
from bertie.evaluation.metrics import (
    MAIN,
    answering,
    choices,
    classification,
    main_metric,
    multi_label,
    regression,
    retrieval_from_ranks,
    tagging,
)
from bertie.evaluation.slices import LabelSlice, LengthSlice, by_label, by_labels, by_length, by_tag

SIGNIFICANT = 0.05  # p-values below count as significant
Kind = Literal["classify", "multi_label", "regress", "tag", "answer", "rerank", "choose", "similarity", "retrieval"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Predictions and gold of one split, with one entry per text in each sequence.

    `gold` and `predicted` are labels (classify), tuples of labels (multi_label), values (regress, rerank), one
    tag per word (tag), the list of correct answers and the answer (answer), similarities (similarity), or
    ranks (retrieval). `confidences` are those of the final model, after temperature scaling.
    """

    scores: Mapping[str, Score]
    gold: Sequence[Any]
    predicted: Sequence[Any]
    labels: Sequence[str] = ()  # of classify and multi_label, in the model's order
    confidences: ArrayLike | None = None
    probabilities: ArrayLike | None = None
    lengths: ArrayLike | None = None  # in tokens
    texts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("predicted", "confidences", "probabilities", "lengths", "texts"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.gold):
                raise InputError(f"{name} has {len(values)} entries; gold has {len(self.gold)}")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A split and its files, by name without folders."""

    split: str
    files: Sequence[str]
    rows: int
    labels: Mapping[str, int] | None = None  # count of each label

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(re.split(r"[/\\]", name)[-1] for name in self.files))


@dataclass(frozen=True, kw_only=True)
class LeakCheck:
    """Test texts that also occur in the training data, and the scores without them."""

    rows: int  # of the test split
    leaks: Sequence[Leak]
    texts: Sequence[tuple[str, str]] = ()  # test text and training text of the first of them
    scores_without: Mapping[str, Score] | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Expected calibration error before and after temperature scaling."""

    temperature: float
    fitted_on: str
    measured_on: str
    before: Score
    after: Score
    bins_before: Sequence[Bin] = ()
    bins_after: Sequence[Bin] = ()
    threshold: float | None = None  # multi-label: probability from which a label is predicted


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Another model on the same test split."""

    name: str
    split: str
    scores: Mapping[str, Score]
    differences: Mapping[str, Difference]  # this model - the other
    mcnemar: float | None = None


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A cheap baseline on the rows that the model is evaluated on."""

    name: str
    score: Score
    difference: Difference  # the model - the baseline; its p-value is McNemar's for accuracies
    seconds: float

    @property
    def beaten(self) -> bool:
        """Whether the model is significantly better, at the 5% level; True if the baseline has no score."""
        return math.isnan(self.score.value) or (self.difference.value > 0 and self.difference.p < SIGNIFICANT)


@dataclass(frozen=True, kw_only=True)
class BaselineTable:
    """All cheap baselines of a kind of data, trained and tested on the rows that the model was."""

    split: str
    metric: str
    rows: int  # of the split that they were tested on
    rows_total: int
    training_rows: int  # that they were trained on
    training_rows_total: int
    model: Score  # of the model on these rows
    results: Sequence[BaselineResult]
    encoder: str | None = None  # of the frozen embeddings

    @property
    def best(self) -> BaselineResult | None:
        """The baseline with the highest score; None if none has any."""
        return max(
            (result for result in self.results if math.isfinite(result.score.value)),
            key=lambda result: result.score.value,
            default=None,
        )


@dataclass(frozen=True, kw_only=True)
class TokenCoverage:
    """How much of a split's texts the model read."""

    texts: int
    several: int  # texts that were split into more than one window
    tokens_read: int
    tokens_total: int


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A model and how it was trained. Fields that are None are left out of the report.

    >>> scores = {"accuracy": Score(0.9, 0.8, 1.0)}
    >>> report = ModelReport(
    ...     title="Reviews",
    ...     kind="classify",
    ...     model="my-encoder",
    ...     evaluations={"test": Evaluation(scores=scores, gold=["a", "b"], predicted=["a", "b"], labels=["a", "b"])},
    ... )
    >>> report.main
    'accuracy'
    """

    title: str
    kind: Kind
    model: str  # the base model that was fine-tuned
    evaluations: Mapping[str, Evaluation]  # by split; the last one is the headline
    base: str | None = None  # hub id of the base model, for the model card
    task_class: str | None = None  # Bertie's class, where the kind does not tell: SparseEmbedder, ZeroShotTagger, …
    language: str | Sequence[str] | None = None
    data: Sequence[DataFile] = ()
    recipe: Mapping[str, Any] | None = None
    default_settings: Sequence[str] = ()  # names in the recipe whose values are the defaults
    curve: Sequence[Mapping[str, float]] | None = None  # rows of step, epoch, loss, lr
    dev: Sequence[Mapping[str, Any]] | None = None  # rows of step, epoch, metric, value
    dev_source: str | None = None  # where "dev" is held out of the training data: how, and what was trained after that
    seeds: Sequence[Mapping[str, float]] | None = None  # metrics of each seed's model
    leaks: Mapping[str, LeakCheck] | None = None  # by split
    label_issues: Mapping[str, Sequence[LabelIssue]] | None = None  # by split
    attributions: Mapping[int, Sequence[tuple[str, float]]] | None = None  # of rows of the last split: see `errors`
    calibration: CalibrationReport | None = None
    abstention: Abstention | None = None
    comparison: Comparison | None = None
    baselines: BaselineTable | None = None
    findings: Sequence[str] = ()  # shown first: a baseline was not beaten, training was too short
    token_coverage: Mapping[str, TokenCoverage] | None = None  # by split
    timings: Mapping[str, float] | None = None
    versions: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.kind not in MAIN:
            raise InputError(f"kind={self.kind!r} must be one of {', '.join(MAIN)}")
        if not self.evaluations:
            raise InputError("evaluations must hold at least one split")
        unknown = {*(self.leaks or {}), *(self.label_issues or {})} - set(self.evaluations)
        if unknown:
            raise InputError(
                f"leaks and label_issues name {sorted(unknown)}; the splits are {sorted(self.evaluations)}"
            )

    @property
    def main(self) -> str:
        """The task's headline metric."""
        return main_metric(self.kind, next(iter(self.evaluations.values())).scores)

    @property
    def final(self) -> str:
        """The split of the headline score: the last."""
        return list(self.evaluations)[-1]


# --- derived from baselines ---


def beaten_line(table: BaselineTable | None) -> str:
    """One sentence about the best baseline that the model beats; empty if it does not."""
    best = None if table is None else table.best
    if table is None or best is None or not best.beaten:
        return ""
    return (
        f"Better than every baseline: {best.name} has {table.metric} {best.score.value:.4f} "
        f"(difference {difference_text(best.difference)})."
    )


def difference_text(gap: Difference) -> str:
    """A difference with its p-value.

    >>> difference_text(Difference(0.05, 0.01, 0.09, 0.0004))
    '+0.0500 [+0.0100, +0.0900], p < 0.001'
    """
    return f"{gap}, p {'' if gap.p < 0.001 else '= '}{p_value(gap.p)}"


def p_value(p: float) -> str:
    """A p-value with three digits.

    >>> p_value(0.0004), p_value(0.0241)
    ('< 0.001', '0.024')
    """
    return "–" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


# --- derived from an evaluation ---


def correct_predictions(evaluation: Evaluation) -> BoolArray:
    """(n,) whether each predicted label equals the gold label."""
    return np.array([a == b for a, b in zip(evaluation.gold, evaluation.predicted, strict=True)], dtype=bool)


def label_slices(kind: str, evaluation: Evaluation) -> list[LabelSlice]:
    """Scores by label, entity type or tag; empty for other tasks."""
    if kind == "classify":
        return by_label(evaluation.gold, evaluation.predicted, evaluation.labels)
    if kind == "multi_label":
        return by_labels(evaluation.gold, evaluation.predicted, evaluation.labels)
    return by_tag(evaluation.gold, evaluation.predicted) if kind == "tag" else []


def length_slices(kind: str, evaluation: Evaluation, main: str) -> list[LengthSlice]:
    """The main metric by text length; empty where lengths are unknown or a single text has no score (ranking)."""
    if evaluation.lengths is None or kind == "rerank":
        return []

    def score(rows: IntArray) -> Score:
        gold, predicted = ([values[i] for i in rows] for values in (evaluation.gold, evaluation.predicted))
        labels = evaluation.labels
        if kind == "classify":
            return classification(gold, _indicators([(label,) for label in predicted], labels), labels)[main]
        if kind == "multi_label":
            return multi_label(_indicators(gold, labels), _indicators(predicted, labels), 0.5)[main]
        if kind in ("regress", "similarity"):
            return regression(gold, predicted)[main]
        if kind == "choose":
            return choices(gold, predicted)[main]
        if kind == "retrieval":
            return retrieval_from_ranks(gold, predicted)[main]
        return (tagging if kind == "tag" else answering)(gold, predicted)[main]

    return by_length(evaluation.lengths, score)


def _indicators(chosen: Sequence[Sequence[str]], labels: Sequence[str]) -> IntArray:
    """(n, k) 1 for each chosen label."""
    index = {label: i for i, label in enumerate(labels)}
    table = np.zeros((len(chosen), len(labels)), dtype=np.int64)
    for i, names in enumerate(chosen):
        table[i, [index[label] for label in names]] = 1
    return table


@dataclass(frozen=True, slots=True)
class Confusion:
    """A confusion matrix (rows: gold, columns: predicted); beyond the most confused labels, the last is the rest."""

    labels: list[str]
    table: list[list[int]]
    pairs: list[tuple[str, str, int]]  # gold, predicted, count: the most frequent errors over all labels


def confusion(evaluation: Evaluation, most: int = 20, pairs: int = 15) -> Confusion:
    """Compute the confusion matrix of single-label predictions, of at most `most` labels."""
    labels, index = list(evaluation.labels), {label: i for i, label in enumerate(evaluation.labels)}
    k = len(labels)
    gold, predicted = (np.array([index[label] for label in x]) for x in (evaluation.gold, evaluation.predicted))
    table = np.bincount(gold * k + predicted, minlength=k * k).reshape(k, k)
    errors = table - np.diag(np.diag(table))
    worst = np.argsort(-errors, axis=None, kind="stable")[:pairs]
    worst_pairs = [(labels[i // k], labels[i % k], int(errors.flat[i])) for i in worst.tolist() if errors.flat[i]]
    if k > most:
        chosen = np.sort(np.argsort(-(errors.sum(axis=0) + errors.sum(axis=1)), kind="stable")[:most])
        group = np.full(k, most)
        group[chosen] = np.arange(most)
        smaller = np.zeros((most + 1, most + 1), dtype=np.int64)
        np.add.at(smaller, (group[:, None], group[None, :]), table)
        labels, table = [*(labels[i] for i in chosen), f"{k - most} others"], smaller
    return Confusion(labels, table.tolist(), worst_pairs)


def confusion_cells(evaluation: Evaluation) -> tuple[list[str], list[tuple[int, int, int]]]:
    """All labels, with those that are confused side by side, and the cells of their confusion matrix that are not 0.

    Cells are (gold, predicted, count). The order is greedy: each label follows the one it is confused with most.
    """
    counts: dict[tuple[str, str], int] = {}
    for pair in zip(evaluation.gold, evaluation.predicted, strict=True):
        counts[pair] = counts.get(pair, 0) + 1
    index = {label: i for i, label in enumerate(evaluation.labels)}
    k = len(index)
    between = np.zeros((k, k), dtype=np.int64)
    for (gold, predicted), count in counts.items():
        if gold != predicted:
            between[index[gold], index[predicted]] += count
            between[index[predicted], index[gold]] += count
    order: list[int] = []
    left = set(range(k))
    while left:
        best = max(left, key=lambda i: (between[order[-1], i] if order else 0, between[i].sum(), -i))
        order.append(best)
        left.discard(best)
    place = {evaluation.labels[i]: n for n, i in enumerate(order)}
    cells = sorted((place[gold], place[predicted], count) for (gold, predicted), count in counts.items())
    return [evaluation.labels[i] for i in order], cells


@dataclass(frozen=True, slots=True)
class SelectivePrediction:
    """Precision and coverage of the predictions above the abstention threshold, on one split."""

    precision: Score
    coverage: float


def selective_predictions(report: ModelReport) -> dict[str, SelectivePrediction]:
    """Precision and coverage of the fitted abstention threshold on each split."""
    if report.abstention is None or report.kind != "classify":
        return {}
    results = {}
    for split, evaluation in report.evaluations.items():
        if evaluation.confidences is not None:
            confidences, threshold = np.asarray(evaluation.confidences, dtype=np.float64), report.abstention.threshold
            precision = selective_precision(confidences, correct_predictions(evaluation), threshold)
            results[split] = SelectivePrediction(precision, float((confidences >= threshold).mean()))
    return results
