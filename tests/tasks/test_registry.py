"""The table of tasks: every row is right, and a row and a file are all that a new task needs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import bertie
from bertie.cli import main
from bertie.config import HeadInfo
from bertie.errors import ConfigError
from bertie.evaluation.metrics import MAIN
from bertie.recipe import EMBEDDING_FIELDS, Recipe
from bertie.tasks import registry
from bertie.tasks.base import Task
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.training.finetune.base import TaskTraining, training_for
from bertie.training.finetune.data import read_dataset
from tests.tasks import toy_task
from tests.training.finetune import toys


@pytest.mark.parametrize("row", registry.TASKS.values(), ids=lambda row: row.name)
def test_rows(row: registry.TaskRow) -> None:
    task = row.task_class
    assert issubclass(task, Task)
    assert task.kind == row.head_kind or row.name == "sparse"  # which has no head of its own
    assert getattr(bertie, task.__name__) is task
    assert (row.training is None) == (row.data_kind is None) == (row.metric is None)
    if row.training is None:
        assert not issubclass(task, Trainable)
        return
    adapter = registry.resolve(row.training)
    assert issubclass(adapter, TaskTraining)
    assert adapter.data_kind == row.data_kind
    metric = "similarity" if row.data_kind == "embed" else "tag" if row.name == "zero-shot-tag" else row.name
    assert row.metric == MAIN[metric]
    assert isinstance(training_for(row.trainable_class()), adapter)


def test_reading_the_table_costs_no_torch() -> None:
    code = "import sys, bertie.tasks.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_tasks() -> None:
    with pytest.raises(ConfigError, match="task='sort' must be one of classify, regress, tag, answer, rerank, embed"):
        registry.get("sort")
    with pytest.raises(ConfigError, match="task='fill' must be one of"):
        registry.get("fill")
    with pytest.raises(ConfigError, match="a task with this name already exists"):
        registry.register(registry.TASKS["tag"])
    assert registry.row_for_head(HeadInfo("mlm")) is None
    assert registry.row_for_head(HeadInfo("classify", task="sort")) is None


def test_constructors_have_the_hyperparameters_of_recipe() -> None:
    """The names and defaults are written out for readers and IDEs; they must not drift apart."""
    defaults = {field.name: field.default for field in fields(Recipe) if field.name not in EMBEDDING_FIELDS}
    parameters = inspect.signature(Trainable.__init__).parameters
    assert {name: parameters[name].default for name in defaults} == defaults
    assert set(Hyperparameters.__annotations__) == set(defaults)
    assert {"self", "model", "overflow", "head", "device"} <= set(parameters) - set(defaults)


# --- a new task ---


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> registry.TaskRow:
    monkeypatch.setitem(registry.TASKS, toy_task.ROW.name, toy_task.ROW)
    return toy_task.ROW


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.mark.filterwarnings("ignore:lr=")
def test_a_toy_task(toy: registry.TaskRow, encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Training, `load`, the command line and the server find it by its row alone."""
    stars = [{"bad": 1.0, "good": 5.0}[mood] for mood in toys.MOODS]
    options = {**toys.FAST, "epochs": 15}
    model = bertie.MultiTask(encoder, {"stars": "rate"}, **options)
    model.fit({"stars": (toys.TEXTS, stars)}, dev={"stars": (toys.TEXTS, stars)}, progress=False).save(tmp_path / "m")
    assert {"stars", "mean"} < set(model.history_.evaluations[-1])
    rater = bertie.load(tmp_path / "m", head="stars")
    assert isinstance(rater, toy_task.Rater)
    agreement = [a == b for a, b in zip(rater.rate(toys.TEXTS), stars, strict=True)]
    assert sum(agreement) > 0.8 * len(agreement)
    data_set = read_dataset("regress", toys.TEXTS, stars)
    assert rater.score(toys.TEXTS, stars) == training_for(rater).metrics(data_set)["pearson"]

    rows = [{"text": text, "score": score} for text, score in zip(toys.TEXTS, stars, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = str(tmp_path / "rows.jsonl")
    assert main(["eval", data, "-m", str(tmp_path / "m"), "--head", "stars", "--resamples", "20", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["pearson"]["value"] == pytest.approx(rater.score(toys.TEXTS, stars))
    argv = ["train", "rate", data, "--dev", data, "-m", str(encoder), "-o", str(tmp_path / "out"), "--epochs", "1"]
    assert main([*argv, "--resamples", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "rate"

    assert main(["rate", *toys.TEXTS[:3], "-m", str(tmp_path / "m"), "--head", "stars", "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["value"] for record in records] == pytest.approx(rater.predict(toys.TEXTS[:3]).tolist())
    assert {record["windows"] for record in records} == {1}

    from bertie.serve.routes import all_routes

    assert "/rate" in {route.path for route in all_routes()}


def test_without_the_row_it_is_unknown(encoder: Path) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        bertie.MultiTask(encoder, {"stars": "rate"})
