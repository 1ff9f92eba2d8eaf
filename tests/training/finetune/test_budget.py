"""Training in a given time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bertie
from bertie.errors import ConfigError
from bertie.recipe import Recipe
from bertie.training.finetune.budget import Speed, TimePlan, plan_time
from bertie.training.finetune.fit import FineTuningRun
from tests.training.finetune.toys import MOODS, TEXTS

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget

SPEED = Speed(step=0.1, start=0.0, steps=1000)  # 110 s with evaluations
QUICK: dict[str, Any] = {"lr": 2e-3, "epochs": 4, "batch_size": 8}


@pytest.mark.parametrize(
    ("seconds", "parts", "refit", "expected"),
    [
        (600, 5, True, (10, 5, True)),
        (500, 5, True, (10, 1, True)),  # a part of a tenth is held out instead of folds
        (150, 5, True, (7.1, 1, True)),
        (90, 1, True, (9.0, 1, False)),
        (20, 1, True, (2.0, 1, False)),
        (0, 1, True, (0.01, 1, False)),  # one step
        (120, 0, False, (10, 0, True)),  # with dev data
        (56, 0, False, (5, 0, True)),
    ],
)
def test_what_fits(seconds: float, parts: int, refit: bool, expected: tuple[float, int, bool]) -> None:
    plan = plan_time(seconds, SPEED, 10.0, parts, refit=refit, fraction=0.1)
    assert (plan.epochs, plan.held_out, plan.refit) == expected
    assert plan.seconds <= seconds + 1


def test_spellings() -> None:
    assert [Recipe(budget=value).budget for value in ("90s", "5m", "1.5h", 20)] == [90, 300, 5400, 20]  # type: ignore[arg-type]
    for bad in ("5 minutes", "m", "-3s", "0s", "5ms", 0, ""):
        with pytest.raises(ConfigError, match="budget="):
            Recipe(budget=bad)  # type: ignore[arg-type]


def test_enough_time_changes_nothing(encoder: Path) -> None:
    free = bertie.Classifier(encoder, **QUICK, dev_fraction=0.2).fit(TEXTS, MOODS, progress=False)
    task = bertie.Classifier(encoder, **QUICK, dev_fraction=0.2, budget="1h").fit(TEXTS, MOODS, progress=False)
    assert (task.predict_proba(TEXTS) == free.predict_proba(TEXTS)).all()
    assert task.history_.shortened == ""


def test_little_time(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer epochs, no training on all rows, and still a score from rows that the model has not seen; resumed alike."""
    monkeypatch.setattr(FineTuningRun, "_speed", lambda self, deadline: Speed(step=10.0, start=1.0, steps=48))
    task = bertie.Classifier(encoder, **QUICK, budget=200).fit(TEXTS, MOODS, folder=tmp_path)
    epochs = task.recipe_.epochs
    assert epochs is not None
    assert 0.5 < epochs < 2
    assert task.history_.steps < 2 * 10  # of 77 rows
    plan = task.validation_.plan
    assert (len(plan.splits), plan.refit) == (1, False)
    assert "without time to refit on all 96 rows" in plan.description
    assert len(task.validation_.predictions.predicted) == len(plan.held_out[0])
    assert "budget 3:20: 10 s per step; a held-out part, " in capsys.readouterr().err
    assert json.loads((tmp_path / "budget.json").read_text())["epochs"] == epochs
    monkeypatch.setattr(FineTuningRun, "_speed", None)  # a resumed run has its plan
    again = bertie.Classifier(encoder, **QUICK, budget=200).fit(TEXTS, MOODS, folder=tmp_path, resume=True)
    assert (again.predict_proba(TEXTS) == task.predict_proba(TEXTS)).all()


def test_the_speed_is_measured(encoder: Path) -> None:
    """By steps of a model that is not kept."""
    seen: list[TimePlan | Speed] = []
    original = FineTuningRun._speed

    def speed(self: Any, deadline: Any) -> Speed:
        seen.append(original(self, deadline))
        return seen[0]  # type: ignore[return-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineTuningRun, "_speed", speed)
        task = bertie.Classifier(encoder, **QUICK, dev_fraction=0, budget="1h").fit(TEXTS, MOODS, progress=False)
    (measured,) = seen
    assert isinstance(measured, Speed)
    assert measured.steps == task.history_.steps == 48
    assert 0 < measured.step < 60
