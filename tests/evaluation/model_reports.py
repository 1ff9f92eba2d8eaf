"""Small studies of every kind, with texts that are as awkward as texts can be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bertie.evaluation import calibration, metrics
from bertie.evaluation.label_noise import find_label_issues
from bertie.evaluation.leaks import Leak
from bertie.evaluation.metrics import Score
from bertie.evaluation.model_report import BaselineResult, BaselineTable
from bertie.evaluation.report import (
    CalibrationReport,
    Comparison,
    DataFile,
    Evaluation,
    LeakCheck,
    ModelReport,
    TokenCoverage,
)

EVIL = "<script>alert('x')</script> | **b** [l](http://e.vil) & \x00\x85\u2028\ud800 ```"


def classified(n: int = 120, k: int = 3, seed: int = 0) -> Evaluation:
    rng = np.random.default_rng(seed)
    labels = [EVIL, *(f"label_{i}" for i in range(1, k))]
    true = rng.integers(0, k, n)
    logits = rng.normal(size=(n, k))
    logits[np.arange(n), true] += 3
    true[:5] = (true[:5] + 1) % k  # labels that are wrong
    table = calibration.softmax(2 * logits)
    gold, output = ([labels[i] for i in one] for one in (true, table.argmax(1)))
    return Evaluation(
        scores=metrics.classification(gold, table, labels, resamples=50),
        gold=gold,
        predicted=output,
        labels=labels,
        confidences=table.max(1),
        probabilities=table,
        lengths=rng.integers(1, 200, n),
        texts=[f"{EVIL} {i}" for i in range(n)],
    )


def full(k: int = 3) -> ModelReport:
    """A study with everything in it."""
    dev, test = classified(k=k, seed=1), classified(k=k, seed=2)
    right = np.array(test.gold) == np.array(test.predicted)
    index = [test.labels.index(label) for label in test.gold]
    bins = calibration.reliability(np.asarray(test.confidences), right)
    table = np.asarray(test.probabilities)
    other = table[::-1]
    return ModelReport(
        title=f"Reviews {EVIL}",
        kind="classify",
        model="some/encoder",
        base="some/encoder",
        language=["en", "de"],
        evaluations={"dev": dev, "test": test},
        data=[
            DataFile(split="train", files=["/home/someone/secret/train.csv", "C:\\data\\more.csv"], rows=900),
            DataFile(split="test", files=["test.csv"], rows=120, labels=dict.fromkeys(test.labels, 40)),
        ],
        recipe={"lr": 3e-5, "epochs": 3.0, "patience": None, "note": EVIL},
        default_settings=["patience"],
        attributions={i: [(f"{EVIL} ", 0.5), ("word", -0.5), (" other", 0.0)] for i in range(120)},
        baselines=BaselineTable(
            split="test",
            metric="accuracy",
            rows=100,
            rows_total=120,
            training_rows=900,
            training_rows_total=900,
            model=test.scores["accuracy"],
            results=[
                BaselineResult(
                    name="majority class",
                    score=Score(0.4, 0.3, 0.5),
                    difference=metrics.Difference(0.5, 0.4, 0.6, 0.0001),
                    seconds=0.1,
                ),
                BaselineResult(
                    name=f"TF-IDF {EVIL}",
                    score=Score(math.nan, math.nan, math.nan),
                    difference=metrics.Difference(math.nan, math.nan, math.nan, math.nan),
                    seconds=0.1,
                ),
            ],
        ),
        findings=[f"Training did not beat {EVIL}."],
        curve=[{"step": i, "epoch": i / 100, "loss": 1 / i, "lr": 1e-5} for i in range(1, 701)],
        dev=[{"step": 300 * i, "epoch": i, "metric": "accuracy", "value": 0.7 + 0.1 * i} for i in (1, 2)],
        seeds=[{"accuracy": 0.9, "macro_f1": 0.8}, {"accuracy": 0.8, "macro_f1": 0.7}],
        leaks={
            "test": LeakCheck(
                rows=120,
                leaks=[Leak(3, 7, "near", 0.9), Leak(5, 1, "exact", 1.0)],
                texts=[(EVIL, EVIL), ("same", "Same")],
                scores_without={"accuracy": Score(0.5, 0.4, math.nan)},
            )
        },
        label_issues={"test": find_label_issues(index, table)},
        calibration=CalibrationReport(
            temperature=1.5,
            fitted_on="dev",
            measured_on="test",
            before=Score(0.1, 0.05, 0.2),
            after=Score(0.02, 0.0, 0.05),
            bins_before=bins,
            bins_after=bins,
        ),
        abstention=calibration.abstention(np.asarray(test.confidences), right, 0.8),
        comparison=Comparison(
            name="TF-IDF <i>",
            split="test",
            scores=metrics.classification(test.gold, other, test.labels, resamples=20),
            differences=metrics.paired(
                "classify", (test.gold, table, test.labels), (test.gold, other, test.labels), resamples=20
            ),
            mcnemar=0.5,
        ),
        token_coverage={"test": TokenCoverage(texts=120, several=12, tokens_read=900, tokens_total=1000)},
        timings={"seconds of training": 12.5, "steps": 700, "best step": 600},
        versions={"bertie": "0.1"},
    )


def bare() -> ModelReport:
    """A study with as little as can be."""
    test = replace(classified(), confidences=None, probabilities=None, lengths=None, texts=None)
    return ModelReport(title="Bare", kind="classify", model="x", evaluations={"test": test})


def of_kind(kind: Any) -> ModelReport:
    """A study of a kind other than classification."""
    lengths = [3, 4, 5, 6, 7, 8]
    gold: Any
    if kind == "multi_label":
        labels = ["a", "b", "c"]
        gold = [("a",), (), ("a", "b"), ("b",), ("a",), ("b",)]
        output: Any = [("a",), ("b",), ("a",), ("b",), ("a",), ()]
        table = np.array([[label in one for label in labels] for one in gold])
        result = metrics.multi_label(
            table, np.array([[float(label in one) for label in labels] for one in output]), 0.5
        )
        one = Evaluation(scores=result, gold=gold, predicted=output, labels=labels, lengths=lengths)
    elif kind == "tag":
        gold = [["B-X", "I-X", "O"], ["O", "B-Y"]] * 3
        output = [["B-X", "I-X", "O"], ["O", "O"]] * 3
        one = Evaluation(scores=metrics.tagging(gold, output), gold=gold, predicted=output, lengths=lengths)
    elif kind == "answer":
        gold, output = [["a cat"], [], ["b"]] * 2, ["cat", "", "c"] * 2
        one = Evaluation(scores=metrics.answering(gold, output), gold=gold, predicted=output, lengths=lengths)
    else:
        gold, output = [0.0, 1.0, 0.0, 1.0, 0.5, 0.0], [0.1, 0.9, 0.3, 0.2, 0.5, 0.0]
        result = (
            metrics.regression(gold, output) if kind == "regress" else metrics.ranking([1, 1, 1, 2, 2, 2], gold, output)
        )
        one = Evaluation(scores=result, gold=gold, predicted=output, lengths=lengths)
    return ModelReport(title=kind, kind=kind, model="x", evaluations={"test": one})
