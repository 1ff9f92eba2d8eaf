"""Metrics of extractive question answering: SQuAD's exact match and F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, Score, Statistic, bootstrap, from_sums
from bertie.evaluation.metrics.shared import check_same_length

_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


def answering(
    gold: Sequence[Sequence[str]], predicted: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Exact_match and token-level f1 as SQuAD's script defines them, between 0 and 1.

    Answers are lower-cased and stripped of punctuation, articles and extra whitespace; the best match
    among several gold answers counts. A question without gold answers expects the empty answer.

    >>> answering([["The Tower", "a tower of London"], []], ["tower!", ""])["exact_match"].value
    1.0
    """
    return bootstrap(*answer_statistic(gold, predicted), resamples=resamples, seed=seed)


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
