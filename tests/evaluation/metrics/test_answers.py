"""Question-answering metrics against SQuAD's script."""

from __future__ import annotations

import re
import string
from collections import Counter

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from bertie.errors import InputError
from bertie.evaluation.metrics import answerability, answering
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


def test_answerability_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    none = rng.random(120) < 0.4
    gold = [[] if missing else ["Emma Woodhouse"] for missing in none]
    predicted = [str(rng.choice(["", "Emma", "Emma Woodhouse"])) for _ in gold]
    probability = np.round(rng.random(120) + 0.3 * none, 1)  # with ties
    scores = answerability(gold, predicted, probability)
    assert scores["no_answer_auroc"].value == pytest.approx(roc_auc_score(none, probability))
    assert scores["no_answer_auroc"].low < scores["no_answer_auroc"].value < scores["no_answer_auroc"].high
    answerable = answering(
        [g for g, missing in zip(gold, none, strict=True) if not missing],
        [p for p, missing in zip(predicted, none, strict=True) if not missing],
    )
    assert scores["answerable_f1"] == answerable["f1"]
    right = [p == "" for p, missing in zip(predicted, none, strict=True) if missing]
    assert scores["unanswerable_accuracy"].value == pytest.approx(np.mean(right))
    with pytest.raises(InputError, match="answerable and unanswerable"):
        answerability([["a"]], ["a"], [0.5])
