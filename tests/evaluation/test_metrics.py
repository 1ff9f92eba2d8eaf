from __future__ import annotations

import math
import re
import string
import subprocess
import sys
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics as sk

from bertie.errors import InputError
from bertie.evaluation import intervals, metrics
from bertie.evaluation.intervals import bootstrap, from_sums, mcnemar, resample_counts, wilson_interval
from bertie.evaluation.metrics import answering, classification, multi_label, paired, ranking, regression, tagging

LABELS = ["a", "b", "c", "d"]


def classified(n: int, labels: list[str], seed: int = 0) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(len(labels), 0.5), n)
    return [labels[rng.choice(len(labels), p=row)] for row in table], table


def values(found: dict[str, Any]) -> dict[str, float]:
    return {name: score.value for name, score in found.items()}


# --- values against scikit-learn, seqeval, scipy and SQuAD's script ---


@pytest.mark.parametrize("labels", [LABELS, ["no", "yes"]])
def test_classification_is_scikit_learns(labels: list[str]) -> None:
    gold, table = classified(300, labels)
    said = [labels[i] for i in table.argmax(1)]
    expected = {
        "accuracy": sk.accuracy_score(gold, said),
        "macro_f1": sk.f1_score(gold, said, average="macro"),
        "matthews": sk.matthews_corrcoef(gold, said),
        "log_loss": sk.log_loss(gold, table, labels=labels),
    }
    if len(labels) == 2:
        expected |= {
            name: getattr(sk, f"{name}_score")(gold, said, pos_label="yes") for name in ("f1", "precision", "recall")
        }
    found = values(classification(gold, table, labels, resamples=0))
    assert found.pop("ece") == pytest.approx(plain_ece(table.max(1), np.array(gold) == np.array(said)))
    assert found == pytest.approx(expected)


def plain_ece(confidence: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return total


def test_labels_that_never_occur() -> None:
    """scikit-learn's macro-F1 is over the labels that are there; Matthews is 0 for a constant."""
    gold, table = ["a", "b", "a"], np.array([[0.9, 0.1, 0, 0], [0.8, 0.2, 0, 0], [1, 0, 0, 0]])
    found = values(classification(gold, table, LABELS))
    assert found["macro_f1"] == pytest.approx(sk.f1_score(gold, ["a"] * 3, average="macro"))
    assert found["matthews"] == 0
    assert found["log_loss"] == pytest.approx(sk.log_loss(gold, table, labels=LABELS))


def test_a_sure_error_costs_as_much_as_in_scikit_learn() -> None:
    table = np.array([[1, 0], [1, 0]], dtype=np.float32)
    expected = sk.log_loss(["a", "b"], table, labels=["a", "b"])
    assert values(classification(["a", "b"], table, ["a", "b"]))["log_loss"] == pytest.approx(expected, rel=1e-6)


def test_multi_label_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    table = rng.random((200, 5)) ** 2
    gold = rng.random((200, 5)) < table
    gold[:, 4] = False  # never occurs, and is never given: scikit-learn counts it as 0
    table[:, 4] = 0.01
    said = table >= 0.4
    found = values(multi_label(gold, table, 0.4, resamples=0))
    assert found.pop("ece") == pytest.approx(plain_ece(table.ravel(), gold.ravel()))
    assert found == pytest.approx(
        {
            "micro_f1": sk.f1_score(gold, said, average="micro"),
            "macro_f1": sk.f1_score(gold, said, average="macro", zero_division=0),
            "exact": sk.accuracy_score(gold, said),
        }
    )


def test_regression_is_scipys() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 150) + 1000.0  # ties, and far from 0
    said = gold + rng.normal(size=150).round(1)
    assert values(regression(gold, said, resamples=0)) == pytest.approx(
        {
            "pearson": stats.pearsonr(gold, said).statistic,
            "spearman": stats.spearmanr(gold, said).statistic,
            "mse": sk.mean_squared_error(gold, said),
            "mae": sk.mean_absolute_error(gold, said),
            "r2": sk.r2_score(gold, said),
        }
    )


def test_what_is_not_defined() -> None:
    found = regression([1.0, 2.0, 3.0], [5.0, 5.0, 5.0])
    assert math.isnan(found["pearson"].value)
    assert math.isnan(found["spearman"].value)
    assert found["pearson"].as_dict() == {"value": None, "low": None, "high": None}
    assert str(found["spearman"]) == "not defined"
    assert found["mae"].value == pytest.approx(3.0)
    assert math.isnan(regression([2.0, 2.0], [1.0, 3.0])["r2"].value)


def tagged(tags: list[str], n: int = 120, seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    rng = np.random.default_rng(seed)
    gold = [[tags[i] for i in rng.integers(0, len(tags), rng.integers(1, 12))] for _ in range(n)]
    return gold, [[tag if rng.random() < 0.8 else tags[rng.integers(len(tags))] for tag in one] for one in gold]


@pytest.mark.parametrize("scheme", ["BI", "BIES"])
def test_entities_are_seqevals(scheme: str) -> None:
    gold, said = tagged(["O", "O", *(f"{part}-{kind}" for part in scheme for kind in ("PER", "A-B"))])
    assert values(tagging(gold, said, resamples=0)) == pytest.approx(
        {
            "precision": seqeval.precision_score(gold, said),
            "recall": seqeval.recall_score(gold, said),
            "f1": seqeval.f1_score(gold, said),
            "accuracy": seqeval.accuracy_score(gold, said),
        }
    )


def test_bilou_is_read_as_bioes() -> None:
    gold, said = tagged(["O", "B-X", "I-X", "E-X", "S-X"])
    other = {"E-X": "L-X", "S-X": "U-X"}
    renamed = [[[other.get(tag, tag) for tag in one] for one in sentences] for sentences in (gold, said)]
    assert values(tagging(*renamed, resamples=0)) == values(tagging(gold, said, resamples=0))


def test_plain_tags() -> None:
    gold, said = tagged(["NOUN", "VERB", "X", "ADP"])
    flat, flat_said = list(chain(*gold)), list(chain(*said))
    assert values(tagging(gold, said, resamples=0)) == pytest.approx(
        {
            "accuracy": sk.accuracy_score(flat, flat_said),
            "macro_f1": sk.f1_score(flat, flat_said, average="macro"),
        }
    )
    assert metrics.main_metric("tag", tagging(gold, said, resamples=0)) == "accuracy"


def test_no_entities_at_all() -> None:
    assert values(tagging([["O", "O"]], [["O", "O"]])) == {"precision": 0, "recall": 0, "f1": 0, "accuracy": 1}


def squad(gold: list[str], said: str) -> tuple[int, float]:
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
    return max(int(normalize(one) == normalize(said)) for one in gold), max(f1(one, said) for one in gold)


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
    gold, said = [g for g, _ in ANSWERS], [s for _, s in ANSWERS]
    for one, other in ANSWERS:
        assert values(answering([one], [other], resamples=0)) == pytest.approx(
            dict(zip(("exact_match", "f1"), squad(one, other), strict=True))
        )
    rows = [squad(*one) for one in ANSWERS]
    assert values(answering(gold, said)) == pytest.approx(
        {"exact_match": np.mean([row[0] for row in rows]), "f1": np.mean([row[1] for row in rows])}
    )


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
    found = values(ranking(["a", "a", "b"], [0, 1, 0], [0.5, 0.5, 0.9]))
    assert found == pytest.approx({"map": 0.5, "mrr": 0.5, "ndcg_10": 1 / math.log2(3)})


# --- intervals ---


def drawn_rows(n: int, resamples: int, seed: int) -> list[np.ndarray]:
    """The resamples of the vectorized bootstrap, as rows that a plain one would have picked."""
    return [np.repeat(np.arange(n), row.astype(int)) for part in resample_counts(n, resamples, seed) for row in part]


def test_every_draw_is_a_sample_of_the_same_size() -> None:
    rows = drawn_rows(37, 50, 3)
    assert len(rows) == 50
    assert all(len(row) == 37 for row in rows)
    assert len({tuple(row) for row in rows}) == 50


def percentiles(values: list[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def test_intervals_of_classification_are_those_of_a_plain_loop() -> None:
    gold, table = classified(80, LABELS)
    true, said = np.array(gold), np.array([LABELS[i] for i in table.argmax(1)])
    found = classification(gold, table, LABELS, resamples=40, seed=5)
    rows = drawn_rows(80, 40, 5)
    plain = {
        "accuracy": [sk.accuracy_score(true[row], said[row]) for row in rows],
        "macro_f1": [sk.f1_score(true[row], said[row], average="macro") for row in rows],
        "matthews": [sk.matthews_corrcoef(true[row], said[row]) for row in rows],
        "log_loss": [sk.log_loss(true[row], table[row], labels=LABELS) for row in rows],
    }
    for name, loop in plain.items():
        assert (found[name].low, found[name].high) == pytest.approx(percentiles(loop)), name


def test_intervals_of_correlations_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    gold = rng.integers(0, 4, 50).astype(float)
    said = (gold + rng.normal(size=50)).round(1)
    found = regression(gold, said, resamples=150, seed=2)
    rows = drawn_rows(50, 150, 2)
    for name, one in (("spearman", stats.spearmanr), ("pearson", stats.pearsonr)):
        loop = percentiles([one(gold[row], said[row]).statistic for row in rows])
        assert (found[name].low, found[name].high) == pytest.approx(loop)
    assert (found["r2"].low, found["r2"].high) == pytest.approx(
        percentiles([sk.r2_score(gold[r], said[r]) for r in rows])
    )


def test_intervals_of_entities_are_those_of_a_plain_loop() -> None:
    gold, said = tagged(["O", "O", "B-X", "I-X"], n=40)
    found = tagging(gold, said, resamples=60, seed=1)["f1"]
    loop = [seqeval.f1_score([gold[i] for i in row], [said[i] for i in row]) for row in drawn_rows(40, 60, 1)]
    assert (found.low, found.high) == pytest.approx(percentiles(loop))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(150):
        right = (rng.random(150) < 0.8).astype(float)
        score = bootstrap(from_sums(right[:, None], lambda sums: {"accuracy": sums[:, 0] / 150}), 150, resamples=300)
        held += score["accuracy"].low <= 0.8 <= score["accuracy"].high
    assert 0.88 <= held / 150 <= 0.99


def test_the_calibration_error_lies_in_its_interval() -> None:
    """Draws have a higher error than what they are drawn from, which a plain interval would show as the truth."""
    rng = np.random.default_rng(0)
    held = 0
    for i in range(40):
        sure = 0.5 + 0.5 * rng.random(400)
        gold = ["a" if one else "b" for one in rng.random(400) < sure - 0.05]
        score = classification(gold, np.stack([sure, 1 - sure], axis=1), ["a", "b"], resamples=200, seed=i)["ece"]
        assert 0 <= score.low <= score.value <= score.high
        held += score.low <= 0.05 <= score.high
    assert held >= 34


def test_rare_labels_do_not_push_the_interval_below_the_value() -> None:
    gold = np.eye(12, dtype=bool)  # each label once, all of them right
    found = multi_label(gold, gold.astype(float), 0.5)["macro_f1"]
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_seeds() -> None:
    gold, table = classified(50, LABELS)
    assert classification(gold, table, LABELS, seed=1) == classification(gold, table, LABELS, seed=1)
    assert classification(gold, table, LABELS, seed=1) != classification(gold, table, LABELS, seed=2)


def test_no_draws_give_the_values_alone() -> None:
    gold, table = classified(50, LABELS)
    found = classification(gold, table, LABELS, resamples=0)
    assert values(found) == values(classification(gold, table, LABELS))
    assert all(math.isnan(score.low) and math.isnan(score.high) for score in found.values())
    assert re.fullmatch(r"0\.\d{4}", str(found["accuracy"]))


# --- comparisons ---


def test_a_better_model_is_better() -> None:
    gold, good = classified(400, LABELS)
    bad = np.full_like(good, 0.25)
    found = paired("classify", (gold, good, LABELS), (gold, bad, LABELS), resamples=300)["accuracy"]
    own, other = (classification(gold, table, LABELS, resamples=0)["accuracy"].value for table in (good, bad))
    assert found.value == pytest.approx(own - other)
    assert 0 < found.low < found.value < found.high
    assert found.p < 0.01
    back = paired("classify", (gold, bad, LABELS), (gold, good, LABELS), resamples=300)["accuracy"]
    assert (back.value, back.low, back.high, back.p) == pytest.approx((-found.value, -found.high, -found.low, found.p))


def test_the_same_predictions_do_not_differ() -> None:
    gold, said = tagged(["O", "B-X"], n=20)
    found = paired("tag", (gold, said), (gold, said), resamples=50)["f1"]
    assert (found.value, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_p_is_fair_where_nothing_differs() -> None:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        gold = rng.normal(size=60)
        one, other = (gold + rng.normal(size=60) for _ in range(2))
        found.append(paired("regress", (gold, one), (gold, other), resamples=200)["mse"].p)
    assert 0 <= np.mean(np.array(found) < 0.05) <= 0.13


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("multi", (np.eye(4, dtype=bool), np.eye(4) * 0.8, 0.5)),
        ("answer", ([["a b"], ["c"]], ["a", "c"])),
        ("rerank", (["q", "q"], [0, 1], [0.2, 0.4])),
    ],
)
def test_every_kind_can_be_compared(kind: str, first: tuple[Any, ...]) -> None:
    found = paired(kind, first, first, resamples=20)
    assert metrics.MAIN[kind] in found
    assert {one.value for one in found.values()} == {0}


def test_mcnemar_is_the_binomial_test() -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 40, 3000):
        a, b = rng.random(n) < 0.7, rng.random(n) < 0.6
        few, many = int((a & ~b).sum()), int((~a & b).sum())
        expected = stats.binomtest(few, few + many, 0.5).pvalue if few + many else 1.0
        assert mcnemar(a, b) == pytest.approx(expected)


def test_wilson_is_scipys() -> None:
    for right, of in ((0, 5), (5, 5), (70, 100)):
        expected = stats.binomtest(right, of).proportion_ci(method="wilson")
        assert wilson_interval(right, of) == pytest.approx((expected.low, expected.high), abs=1e-4)


# --- refusals ---

HALVES = [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: classification(["a"], HALVES, ["a", "b", "c"]), r"shape \(1, 2\); 1 texts and 3 labels"),
        (lambda: classification(["x"], HALVES, ["a", "b"]), "label 'x', which is not among"),
        (lambda: classification(["a"], [[0.5, 0.9]], ["a", "b"]), "text 0 add up to 1.4"),
        (lambda: classification(["a"], [[np.nan, 1]], ["a", "b"]), "text 0 are not between 0 and 1"),
        (lambda: classification(["a"], HALVES, ["a", "a"]), "must be different"),
        (lambda: classification([], np.zeros((0, 2)), ["a", "b"]), "nothing to score"),
        (lambda: multi_label([True, False], HALVES, 0.5), r"gold has shape \(2,\)"),
        (lambda: regression([1.0, 2.0], [1.0]), "gold has 2 values and predicted 1"),
        (lambda: regression([1.0, np.inf], [1.0, 2.0]), "gold must be a list of finite numbers"),
        (lambda: regression([], []), "nothing to score"),
        (lambda: tagging([["O"]], [["O", "O"]]), "sentence 0 has 1 gold tags and 2 predicted"),
        (lambda: tagging([[]], [[]]), "no sentence has words"),
        (lambda: answering(["text"], ["text"]), "gold of question 0 is a str"),  # type: ignore[list-item]
        (lambda: answering([], []), "nothing to score"),
        (lambda: ranking(["q"], [0], [1.0]), "no query has a relevant document"),
        (lambda: ranking(["q"], [-1], [1.0]), "gold has -1"),
        (lambda: ranking(["q", "r"], [1], [1.0]), "lengths 2, 1 and 1"),
        (lambda: paired("guess", (), ()), "kind='guess' must be one of classify"),
        (lambda: paired("regress", ([1.0], [1.0]), ([2.0], [1.0])), "the same gold"),
        (lambda: paired("regress", ([1.0], [1.0]), ([1.0], [1.0]), resamples=0), "resamples=0"),
        (lambda: mcnemar([1, 0], [1]), "two lists of one length"),
        (lambda: metrics.main_metric("guess", {}), "kind='guess'"),
    ],
)
def test_refusals(call: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        call()


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, bertie.evaluation.report, bertie.evaluation.card, bertie.evaluation.leaks\n"
        "print([name for name in ('torch', 'sklearn', 'seqeval', 'scipy', 'pandas') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
    assert intervals.RESAMPLES == 1000
