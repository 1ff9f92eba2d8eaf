"""Metrics of each task with confidence intervals, equal to scikit-learn's, seqeval's and SQuAD's.

Resampled units: texts (classification, regression), sentences (tagging), questions (answering),
queries (ranking). Where the reference implementations differ on something undefined, the docstring
says which one is followed.

    classification, multi_label    labels.py
    regression, sts                values.py
    tagging                        tags.py
    answering, answerability       answers.py
    ranking, retrieval_from_ranks  rankings.py
    choices                        choices.py
    paired                         two models on the same units, for any of these
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, Difference, Score, Statistic, mcnemar, paired_bootstrap
from bertie.evaluation.metrics.answers import answer_statistic, answerability, answering, normalize_answer
from bertie.evaluation.metrics.choices import choice_statistic, choices
from bertie.evaluation.metrics.labels import (
    classification,
    classification_statistic,
    multi_label,
    multi_label_statistic,
)
from bertie.evaluation.metrics.rankings import (
    ranking,
    ranking_statistic,
    ranks_statistic,
    retrieval_from_ranks,
)
from bertie.evaluation.metrics.tags import entities, is_span_scheme, tag_statistic, tagging
from bertie.evaluation.metrics.values import regression, regression_statistic, sts, sts_statistic

__all__ = [
    "MAIN",
    "Difference",
    "Score",
    "answerability",
    "answering",
    "choices",
    "classification",
    "entities",
    "is_span_scheme",
    "main_metric",
    "mcnemar",
    "multi_label",
    "normalize_answer",
    "paired",
    "ranking",
    "regression",
    "retrieval_from_ranks",
    "sts",
    "tagging",
]

MAIN = {
    "classify": "accuracy",
    "multi_label": "macro_f1",
    "regress": "spearman",
    "tag": "f1",
    "answer": "f1",
    "rerank": "map",
    "choose": "accuracy",
    "similarity": "spearman",
    "retrieval": "recall_1",
}
_STATISTICS: dict[str, Callable[..., tuple[Statistic, int]]] = {
    "classify": classification_statistic,
    "multi_label": multi_label_statistic,
    "regress": regression_statistic,
    "tag": tag_statistic,
    "answer": answer_statistic,
    "rerank": ranking_statistic,
    "choose": choice_statistic,
    "similarity": sts_statistic,
    "retrieval": ranks_statistic,
}


def main_metric(kind: str, names: Mapping[str, Any]) -> str:
    """Return the headline metric of a task: `MAIN[kind]`, or accuracy for tags that form no entities."""
    if kind not in MAIN:
        raise InputError(f"kind={kind!r} must be one of {', '.join(MAIN)}")
    return MAIN[kind] if MAIN[kind] in names else "accuracy"


def paired(
    kind: str, first: Sequence[Any], second: Sequence[Any], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """Compare two sets of predictions on the same units: the difference first - second of each metric.

    `first` and `second` hold the arguments of that kind's function: for "classify" the gold labels, the
    probabilities and the labels. The interval and the p-value come from a paired bootstrap.

    >>> gold, labels = ["no", "yes"] * 50, ["no", "yes"]
    >>> good, bad = [[0.9, 0.1], [0.1, 0.9]] * 50, [[0.9, 0.1], [0.9, 0.1]] * 50
    >>> paired("classify", (gold, good, labels), (gold, bad, labels))["accuracy"].value
    0.5
    """
    if kind not in _STATISTICS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(_STATISTICS)}")
    shared = 2 if kind == "rerank" else 1  # queries and gold; otherwise gold alone
    for ours, theirs in zip(first[:shared], second[:shared], strict=True):
        if len(ours) != len(theirs) or not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            raise InputError("the two to be compared must have the same gold, in the same order")
    (statistic, units), (other_statistic, other_units) = _STATISTICS[kind](*first), _STATISTICS[kind](*second)
    assert units == other_units
    return paired_bootstrap(statistic, other_statistic, units, resamples=resamples, seed=seed)
