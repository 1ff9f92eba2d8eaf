from __future__ import annotations

import sys

import numpy as np
import pytest

from bertie.errors import InputError, MissingPackageError
from bertie.evaluation.metrics import ranking
from bertie.evaluation.retrieval import (
    mean_scores,
    paired_mean_differences,
    paired_retrieval,
    per_query_metrics,
    retrieval,
)

pytest.importorskip("ir_measures")


def made(seed: int, queries: int = 12, documents: int = 200) -> tuple[dict, dict]:
    """Graded judgements, and a run that finds a part of the documents, no two of one score."""
    rng = np.random.default_rng(seed)
    qrels = {
        f"q{q}": {f"d{d}": int(rng.integers(0, 5)) for d in rng.permutation(documents)[:15]} for q in range(queries)
    }
    run = {
        query: {f"d{d}": float(s) for s, d in enumerate(rng.permutation(documents)[:150])}
        # or nothing would be found
        | {d: rng.integers(120, 150) + 0.1 * (i + 1) for i, (d, grade) in enumerate(list(one.items())[:5]) if grade}
        for query, one in qrels.items()
    }
    return qrels, run


def by_hand(qrels: dict[str, int], run: dict[str, float]) -> dict[str, float]:
    ranked = sorted(run, key=lambda d: -run[d])
    relevant = {d for d, grade in qrels.items() if grade > 0}
    gains = [qrels.get(d, 0) / np.log2(i + 2) for i, d in enumerate(ranked[:10])]
    best = [grade / np.log2(i + 2) for i, grade in enumerate(sorted(qrels.values(), reverse=True)[:10])]
    places = [i + 1 for i, d in enumerate(ranked) if d in relevant]
    return {
        "ndcg_10": sum(gains) / sum(best),
        "map": sum((n + 1) / place for n, place in enumerate(places)) / len(relevant),
        "recall_100": len(relevant & set(ranked[:100])) / len(relevant),
        "mrr": 1 / places[0] if places else 0.0,
    }


@pytest.mark.parametrize("seed", range(5))
def test_the_values_are_those_worked_out_by_hand(seed: int) -> None:
    qrels, run = made(seed)
    result = per_query_metrics(qrels, run)
    for i, query in enumerate(qrels):
        for name, value in by_hand(qrels[query], run[query]).items():
            assert result[name][i] == pytest.approx(value, abs=1e-9), (query, name)
    scores = retrieval(qrels, run, resamples=50)
    for name, values in result.items():
        assert scores[name].value == pytest.approx(values.mean())
        assert scores[name].low < scores[name].value < scores[name].high


def test_a_fully_judged_list_has_the_scores_of_ranking() -> None:
    qrels, _ = made(7)
    rng = np.random.default_rng(0)
    run = {query: {d: float(rng.random()) for d in one} for query, one in qrels.items()}
    rows = [(query, grade, run[query][d]) for query, one in qrels.items() for d, grade in one.items()]
    other = ranking(*zip(*rows, strict=True), resamples=0)
    scores = retrieval(qrels, run, resamples=0)
    for name in ("map", "mrr", "ndcg_10"):
        assert scores[name].value == pytest.approx(other[name].value), name


def test_what_is_not_found_counts_and_what_is_not_judged_does_not() -> None:
    qrels = {"result": {"a": 1}, "missing": {"a": 1}, "empty": {"a": 1}, "unjudged": {"a": 0}}
    run = {"result": {"a": 1.0}, "empty": {}, "unjudged": {"a": 1.0}, "unasked": {"a": 1.0}}
    assert per_query_metrics(qrels, run)["map"].tolist() == [1.0, 0.0, 0.0]
    assert per_query_metrics(qrels, {})["ndcg_10"].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(InputError, match="no query has a relevant"):
        retrieval({"q": {"a": 0}}, {"q": {"a": 1.0}})


def test_a_difference_is_that_of_the_same_queries() -> None:
    qrels, run = made(1, queries=40)
    backwards = {query: {d: -score for d, score in one.items()} for query, one in run.items()}
    gaps = paired_retrieval(qrels, run, backwards)
    first, second = per_query_metrics(qrels, run), per_query_metrics(qrels, backwards)
    for name, gap in gaps.items():
        assert gap.value == pytest.approx(float((first[name] - second[name]).mean()))
    assert gaps["ndcg_10"].low > 0
    assert gaps["ndcg_10"].p < 0.01
    same = paired_mean_differences(first, first)["map"]
    assert (same.value, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(InputError, match="40 queries and the second 39"):
        paired_mean_differences(first, {name: one[:-1] for name, one in first.items()})


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        score = mean_scores({"map": rng.beta(2, 3, 60)}, resamples=300, seed=trial)["map"]
        inside += score.low <= 0.4 <= score.high
    assert 178 <= inside <= 199  # of 200, at 95%


def test_the_package_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(MissingPackageError, match=r"ir-measures: pip install 'bertie\[train\]'"):
        retrieval({"q": {"a": 1}}, {"q": {"a": 1.0}})
