"""The first lines of a report: what did not go well, and what to try."""

from __future__ import annotations

import math
from typing import Any

from bertie.evaluation.intervals import Difference, Score
from bertie.evaluation.model_report import BaselineResult, BaselineTable, beaten_line
from bertie.recipe import Recipe
from bertie.training.callbacks import TrainingHistory
from bertie.training.finetune.findings import findings

FROZEN = "frozen embeddings + logistic regression"
FALLING = [{"step": 10.0 * i, "loss": 2.0 - i / 20} for i in range(1, 21)]


def result(name: str, score: Score, gap: Difference) -> BaselineResult:
    return BaselineResult(name=name, score=score, difference=gap, seconds=1.0)


def table(gap: float, p: float, *, rows: int = 500, name: str = FROZEN) -> BaselineTable:
    score = Score(0.8, 0.75, 0.85)
    results = [
        result("majority class", Score(0.5, 0.4, 0.6), Difference(0.3, 0.2, 0.4, 0.0)),
        result(name, score, Difference(gap, gap - 0.02, gap + 0.02, p)),
        result("mean", Score(*[math.nan] * 3), Difference(*[math.nan] * 4)),
    ]
    model = Score(0.8 + gap, 0.0, 1.0)
    return BaselineTable(
        split="test", metric="accuracy", rows=rows, rows_total=rows, training_rows=200, training_rows_total=200,
        model=model, results=results,
    )  # fmt: skip


def settled(**values: Any) -> TrainingHistory:
    curve = [{"step": 10.0 * i, "loss": 0.5} for i in range(1, 21)]
    return TrainingHistory(curve=curve, steps=200, **values)


def test_a_model_that_is_worse() -> None:
    (line,) = findings(table(-0.05, 0.0001), recipe=Recipe(lr=1e-4), history=settled(), usual_lr=1.5e-4)
    assert line.startswith(
        f"Training did not beat a cheap baseline: on test (500 rows) {FROZEN} has accuracy 0.8000, this model 0.7500 "
        "(difference -0.0500 [-0.0700, -0.0300], p < 0.001). Try --method frozen"
    )
    assert line.endswith("; or more labelled rows.")


def test_a_difference_that_may_be_chance() -> None:
    (line,) = findings(table(0.01, 0.4, rows=60), recipe=Recipe(lr=1e-4), history=settled())
    assert "did not significantly beat a cheap baseline" in line
    assert "Try more test rows: 60 cannot show a small difference" in line


def test_a_model_that_is_better() -> None:
    good = table(0.05, 0.001)
    assert findings(good, recipe=Recipe(lr=1e-4), history=settled()) == []
    assert beaten_line(good).startswith(f"Better than every baseline: {FROZEN} has accuracy 0.8000 (difference +0.05")
    assert beaten_line(table(0.05, 0.06)) == beaten_line(None) == ""


def test_a_rate_that_is_too_low() -> None:
    (line,) = findings(
        table(-0.05, 0.0, name="TF-IDF + logistic regression"),
        recipe=Recipe(lr=3e-5),
        history=settled(),
        usual_lr=1.5e-4,
    )
    assert "Try --lr 0.00015, the usual rate for this model (it was 0.00003); or more labelled rows" in line


def test_training_that_ended_too_early() -> None:
    history = TrainingHistory(curve=FALLING, steps=200, evaluations=[{"accuracy": 0.5}, {"accuracy": 0.7}])
    options: dict[str, Any] = {"recipe": Recipe(epochs=3), "history": history, "metric": "accuracy"}
    expected = "The training loss was still falling at the end: longer training may help."
    assert findings(None, **options) == [f"{expected} Set --epochs 6 (it was 3)."]
    first, second = findings(table(-0.1, 0.0), **options)
    assert "--epochs 6 (it was 3)" in first
    assert second == expected
    (few,) = findings(None, recipe=Recipe(epochs=3), history=TrainingHistory(curve=FALLING[:1], steps=6))
    assert few == "Training took only 6 steps, too few for the loss to settle. Set --epochs 6 (it was 3)."


def test_a_model_that_is_only_evaluated() -> None:
    (line,) = findings(table(-0.05, 0.0))
    assert line.startswith("The model does not beat a cheap baseline")
    assert "bertie train on the same rows with its defaults" in line
    assert findings(None) == []
