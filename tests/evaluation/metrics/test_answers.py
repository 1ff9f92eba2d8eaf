"""Question-answering metrics against SQuAD's script."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest

from bertie.evaluation.metrics import answering
from tests.evaluation.metric_data import values


def squad(gold: list[str], output: str) -> tuple[int, float]:
    """As the official script for SQuAD 2.0 has it."""

    def normalize(text: str) -> str:
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    def f1(a: str, b: str) -> float:
        one, other = normalize(a).split(), normalize(b).split()
        same = sum((Counter(one) & Counter(other)).values())
        if not one or not other:
            return float(one == other)
        if not same:
            return 0.0
        precision, recall = same / len(other), same / len(one)
        return 2 * precision * recall / (precision + recall)

    gold = [one for one in gold if normalize(one)] or [""]
    return max(int(normalize(one) == normalize(output)) for one in gold), max(f1(one, output) for one in gold)


ANSWERS: list[tuple[list[str], str]] = [
    (["The Normans", "Normans"], "the normans!"),
    (["in the 10th century"], "10th century"),
    (["a b b c"], "b b b"),
    ([], ""),
    ([], "something"),
    (["The", "an apple"], "apple"),
    (["the"], ""),
    (["x"], ""),
    (["Beyoncé's"], "beyoncés"),
    (["then the theatre"], "then theatre"),
]


def test_answers_are_squads() -> None:
    gold, output = [g for g, _ in ANSWERS], [s for _, s in ANSWERS]
    for one, other in ANSWERS:
        assert values(answering([one], [other], resamples=0)) == pytest.approx(
            dict(zip(("exact_match", "f1"), squad(one, other), strict=True))
        )
    rows = [squad(*one) for one in ANSWERS]
    assert values(answering(gold, output)) == pytest.approx(
        {"exact_match": np.mean([row[0] for row in rows]), "f1": np.mean([row[1] for row in rows])}
    )
