"""Ranking metrics against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics as sk

from bertie.evaluation.metrics import ranking
from tests.evaluation.metric_data import values


def test_rankings_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    queries = [f"q{i}" for i in rng.integers(0, 30, 400)]
    gold = rng.choice([0, 0, 0, 0.5, 1], 400)
    points = rng.permutation(400) / 400  # no ties: scikit-learn breaks them in other ways
    precision, gain, reciprocal = [], [], []
    for query in dict.fromkeys(queries):
        inside = np.array([one == query for one in queries])
        true, score = gold[inside], points[inside]
        if true.any():
            precision.append(sk.average_precision_score(true > 0, score))
            gain.append(sk.ndcg_score([true], [score], k=10))
            reciprocal.append(1 / (1 + np.flatnonzero(true[np.argsort(-score)] > 0)[0]))
    assert values(ranking(queries, gold, points, resamples=0)) == pytest.approx(
        {"map": np.mean(precision), "mrr": np.mean(reciprocal), "ndcg_10": np.mean(gain)}
    )


def test_ties_stay_in_order_and_queries_without_a_relevant_document_are_left_out() -> None:
    result = values(ranking(["a", "a", "b"], [0, 1, 0], [0.5, 0.5, 0.9]))
    assert result == pytest.approx({"map": 0.5, "mrr": 0.5, "ndcg_10": 1 / math.log2(3)})
