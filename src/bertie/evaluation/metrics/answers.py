"""Metrics of extractive question answering: SQuAD's exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, BoolArray, FloatArray, Score, Statistic, bootstrap, from_sums
from bertie.evaluation.metrics.shared import check_same_length

_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


def answering(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute `exact_match` and token-level `f1` as SQuAD's script defines them, between 0 and 1.

    Answers are lower-cased and stripped of punctuation, articles and extra whitespace; the best match
    among several gold answers counts. A question without gold answers expects the empty answer.

    >>> answering([["The Tower", "a tower of London"], []], ["tower!", ""])["exact_match"].value
    1.0
    """
    return bootstrap(*answer_statistic(gold, predicted), resamples=resamples, seed=seed)


def answerability(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[str],
    no_answer: ArrayLike,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Score]:
    """Compute SQuAD 2's scores by answerability, and the AUROC of the probability of "no answer".

    `answerable_exact_match` and `answerable_f1` (SQuAD's HasAns), `unanswerable_accuracy` (NoAns) and
    `no_answer_auroc`, with unanswerable questions as positives. Questions without gold
    answers are unanswerable; there must be some of both kinds.

    >>> scores = answerability([["Emma"], []], ["Emma", ""], [0.2, 0.9])
    >>> {name: score.value for name, score in scores.items()}["no_answer_auroc"]
    1.0
    """
    none = np.array([not any(map(normalize_answer, answers)) for answers in gold])
    if not 0 < none.sum() < len(none):
        raise InputError("gold must have answerable and unanswerable questions")
    scores: dict[str, Score] = {}
    for kind, inside in (("answerable", ~none), ("unanswerable", none)):
        rows = np.flatnonzero(inside).tolist()
        part = answering([gold[i] for i in rows], [predicted[i] for i in rows], resamples=resamples, seed=seed)
        scores |= {f"{kind}_{name}": score for name, score in part.items()}
    scores["unanswerable_accuracy"] = scores.pop("unanswerable_exact_match")
    del scores["unanswerable_f1"]  # the same
    return scores | bootstrap(
        _auroc_statistic(none, np.asarray(no_answer, dtype=np.float64)), len(none), resamples=resamples, seed=seed
    )


def _auroc_statistic(positive: BoolArray, values: FloatArray) -> Statistic:
    """The area under the ROC curve, by ranks: ties count as one half."""
    order = np.argsort(values, kind="stable")
    positive, values = positive[order], values[order]
    starts = np.flatnonzero(np.concatenate([[True], values[1:] > values[:-1]]))  # of groups of equal values

    def statistic(counts: FloatArray) -> dict[str, FloatArray]:
        counts = counts[:, order]
        above = np.add.reduceat(counts * positive, starts, axis=1)  # (resamples, groups)
        below = np.add.reduceat(counts * ~positive, starts, axis=1)
        wins = (above * (np.cumsum(below, axis=1) - below / 2)).sum(axis=1)
        with np.errstate(invalid="ignore"):  # a resample of one kind only
            return {"no_answer_auroc": wins / (above.sum(axis=1) * below.sum(axis=1))}

    return statistic


def answer_statistic(gold: Sequence[Sequence[str]], predicted: Sequence[str]) -> tuple[Statistic, int]:
    """Return the statistic of `answering` and the number of questions."""
    n = check_same_length(gold, predicted)
    rows = []
    for i, (answers, prediction) in enumerate(zip(gold, predicted, strict=True)):
        if isinstance(answers, str):
            raise InputError(f"gold of question {i} is a str; it must be a list of all right answers")
        words = normalize_answer(prediction)
        references = [reference for reference in map(normalize_answer, answers) if reference] or [[]]
        rows.append((float(words in references), max(_token_f1(reference, words) for reference in references)))
    return from_sums(
        np.array(rows, dtype=np.float64).reshape(n, 2),
        lambda sums: {"exact_match": sums[:, 0] / n, "f1": sums[:, 1] / n},
    ), n


def normalize_answer(text: str) -> list[str]:
    """Return the words that SQuAD's script compares."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _token_f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    return 2 * sum((Counter(gold) & Counter(predicted)).values()) / (len(gold) + len(predicted))
