"""Held-out parts and folds before the final training: what is predicted, chosen, reported and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.errors import ConfigError, ExistsError, InputError
from bertie.recipe import Recipe
from bertie.training.finetune.data import read_dataset
from bertie.training.finetune.validation import choose_evaluation, load_result, plan_validation
from bertie.training.state import StateFolder
from tests.training.finetune.toys import MOODS, TEXTS, questions, tagged_words

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget

QUICK: dict[str, Any] = {"lr": 2e-3, "epochs": 2, "batch_size": 8}


def numbered(rows: int) -> Any:
    return read_dataset("classify", [f"text {i}" for i in range(rows)], ["a", "b", "b", "b"] * (rows // 4))


@pytest.mark.parametrize(
    ("rows", "options", "parts", "held"),
    [
        (16, {}, 0, 0),
        (300, {}, 5, 60),
        (400, {}, 1, 40),
        (2000, {}, 1, 200),
        (20_400, {}, 0, 0),
        (20_400, {"refit": True}, 1, 1000),
        (300, {"refit": False}, 0, 0),
        (300, {"dev_fraction": 0.2}, 1, 60),
        (300, {"dev_fraction": 0.0}, 0, 0),
        (2000, {"folds": 4}, 4, 500),
        (300, {"folds": 0}, 1, 30),
    ],
)
def test_the_plan(rows: int, options: dict[str, Any], parts: int, held: int) -> None:
    plan = plan_validation(Recipe(method="full", **options), numbered(rows), seed=0)
    if plan is None:
        assert parts == 0
        return
    assert [len(part.examples) for _, part in plan.splits] == [held] * parts
    assert all(len(rest.examples) == rows - held for rest, _ in plan.splits)
    assert f"all {rows:,} rows" in plan.description


def test_folds_are_stratified_and_keep_equal_texts_together() -> None:
    data = read_dataset("classify", [f"text {i // 2}" for i in range(80)], ["a", "a", "b", "b"] * 20)
    plan = plan_validation(Recipe(method="full"), data, seed=0)
    assert plan is not None
    for rest, held in plan.splits:
        assert not {example.texts for example in rest.examples} & {example.texts for example in held.examples}
        assert [example.target for example in held.examples].count("a") == 8
    assert sorted(example.row for _, held in plan.splits for example in held.examples) == list(range(1, 81))


def test_too_few_different_texts() -> None:
    """By default nothing is held out."""
    data = read_dataset("classify", ["a", "b", "c", "d"] * 8, ["x", "y"] * 16)
    assert plan_validation(Recipe(method="full"), data, seed=0) is None
    with pytest.raises(InputError, match="too few different texts for 5 folds"):
        plan_validation(Recipe(folds=5), data, seed=0)


def test_contradictions() -> None:
    for options in ({"folds": 1}, {"folds": 5, "dev_fraction": 0.1}, {"folds": 5, "refit": False}, {"refit": "yes"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Recipe(**options)
    pairs = read_dataset("embed", [("a", "b"), ("c", "d")])
    with pytest.raises(ConfigError, match="refit=True is not for embed"):
        plan_validation(Recipe(refit=True), pairs, seed=0)


def test_fewer_epochs_only_after_a_clear_fall() -> None:
    assert choose_evaluation([0.5, 0.9, 0.86], rows=50) == 2
    assert choose_evaluation([0.5, 0.9, 0.86], rows=500) == 1
    assert choose_evaluation([float("nan"), 0.3], rows=10) == 1


def test_cross_validation_then_all_rows(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = bertie.Classifier(encoder, **QUICK).fit(TEXTS, MOODS)
    result = task.validation_
    assert [example.row for example in result.predictions.data.examples] == list(range(1, 97))
    assert result.predictions.probabilities.shape == (96, 2)
    assert len(result.histories) == 5
    assert result.plan.description == "5-fold cross-validation, then trained on all 96 rows"
    assert task.info.calibration == result.calibration
    assert task.history_.steps == 24  # two epochs of all rows
    assert [row["epoch"] for row in task.history_.evaluations] == [1, 2]
    accuracy = np.mean([a == b for a, b in zip(result.predictions.gold, result.predictions.predicted, strict=True)])
    assert result.value == pytest.approx(accuracy)
    err = capsys.readouterr().err
    assert "validation: 5-fold cross-validation, then trained on all 96 rows" in err
    assert f"all 96 rows: accuracy {result.value:.4f}" in err
    whole = bertie.Classifier(encoder, **QUICK, dev_fraction=0.0).fit(TEXTS, MOODS, progress=False)
    same = [item.checkpoint.model.state_dict() for item in (task, whole)]
    assert all((same[0][name] == same[1][name]).all() for name in same[0])


def test_other_tasks(encoder: Path) -> None:
    lists = [[mood] if i % 3 else [mood, "any"] for i, mood in enumerate(MOODS)]
    multi = bertie.Classifier(encoder, **QUICK, folds=2).fit(TEXTS, lists, progress=False)
    assert multi.info.calibration.threshold == multi.validation_.calibration.threshold
    assert all(isinstance(labels, tuple) for labels in multi.validation_.predictions.predicted)
    regressor = bertie.Regressor(encoder, **QUICK, folds=2).fit(TEXTS, [len(text) for text in TEXTS], progress=False)
    assert len(regressor.validation_.predictions.predicted) == 96
    tagger = bertie.Tagger(encoder, **QUICK, folds=2).fit(*tagged_words(), progress=False)
    assert len(tagger.validation_.predictions.predicted) == 64
    reader = bertie.Reader(encoder, **QUICK, dev_fraction=0.2).fit(*questions(), progress=False)
    assert reader.validation_.metric == "f1"
    assert reader.validation_.plan.description.startswith("held-out ")


def test_an_interrupted_validation_is_resumed(encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever checkpoint it is interrupted after: in a fold, between two, or in the final training."""
    whole = bertie.Classifier(encoder, **QUICK, folds=2).fit(TEXTS, MOODS, progress=False)
    saved = StateFolder.save
    for stop in (1, 2, 3, 5):  # two epochs each: in the first fold, at its end, in the second, in the final training
        count = 0

        def save(self: StateFolder, *args: Any, stop: int = stop) -> None:
            nonlocal count
            saved(self, *args)
            count += 1
            if count == stop:
                raise KeyboardInterrupt

        folder = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(StateFolder, "save", save)
            with pytest.raises(KeyboardInterrupt):
                bertie.Classifier(encoder, **QUICK, folds=2).fit(
                    TEXTS, MOODS, folder=folder, save_steps=8, progress=False
                )
        with pytest.raises(ExistsError, match="unfinished run"):
            bertie.Classifier(encoder, **QUICK, folds=2).fit(TEXTS, MOODS, folder=folder, progress=False)
        task = bertie.Classifier(encoder, **QUICK, folds=2).fit(
            TEXTS, MOODS, folder=folder, save_steps=8, resume=True, progress=False
        )
        assert (task.predict_proba(TEXTS) == whole.predict_proba(TEXTS)).all()
        assert task.validation_.evaluations == whole.validation_.evaluations
        assert not list(folder.glob("fold-*"))
    loaded = load_result(folder, read_dataset("classify", TEXTS, MOODS))
    assert loaded is not None
    assert loaded.predictions.gold == whole.validation_.predictions.gold
    assert (loaded.predictions.probabilities == whole.validation_.predictions.probabilities).all()
    assert loaded.plan.held_out == whole.validation_.plan.held_out


def test_folds_of_different_lengths_are_pooled_at_their_ends(encoder: Path) -> None:
    """A loss below `stop_loss` ends a run after one more epoch; the final one is planned for all epochs again."""
    options: dict[str, Any] = {**QUICK, "epochs": 30, "stop_loss": 0.05, "folds": 2}
    task = bertie.Classifier(encoder, **options).fit(TEXTS, MOODS, progress=False)
    histories = task.validation_.histories
    assert [history.shortened for history in (*histories, task.history_)] == ["converged"] * 3
    assert max(history.steps for history in histories) < 6 * 30
    assert task.recipe_.epochs == 30
    assert task.history_.curve[-1]["lr"] < 1e-3  # the rest of the schedule in one epoch
    assert len(task.validation_.predictions.predicted) == 96
