"""`bertie train`: every task, every flag, stopped and gone on with, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bertie.cli import main
from bertie.cli.main import build_parser
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.training.finetune import runs
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from bertie.training.finetune.fit import fit_labelled
from bertie.training.state import StateFolder
from tests.cli.toys import MAIN, TASKS, write, write_toys

QUICK = ["--epochs", "1", "--batch-size", "8", "--lr", "5e-5", "--resamples", "50", "--no-baselines"]
MODEL_FILES = {"checksums.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
REPORT = {"README.md", "predictions.jsonl", "report.html", "report.json", "report.md"}


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def train(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["train", *argv, *QUICK, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.parametrize("task", TASKS)
def test_every_task(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], task: str) -> None:
    """The scores that are printed are those of the model that is saved."""
    argv = write_toys(here, task)
    output = train(capsys, *argv, "-m", models["embed"], "--output", "out")
    assert "cheap_baselines" not in output
    assert output["findings"] == [
        "Training took only 3 steps, too few for the loss to settle. Set --epochs 2 (it was 1)."
    ]
    names = {file.name for file in Path("out").iterdir()}
    assert names >= MODEL_FILES | REPORT
    assert not list(here.glob("*.training")) + list(here.glob(".*"))
    kind: Any = argv[0]
    learner = registry.get(kind).trainable_class.load("out")
    for split in ("dev", "test"):
        data = read_dataset(kind, f"{split}.jsonl", known=tuple(learner.info.labels.values()) or None, training=False)
        quick = training_for(learner).metrics(data)
        assert {name: score["value"] for name, score in output[split].items()} == pytest.approx(quick, nan_ok=True)
        assert MAIN[task] in quick
    for score in output["test"].values():
        assert score["value"] is None or score["low"] <= score["high"]
    assert output["best_seed"] == 0
    assert [item["seed"] for item in output["seeds"]] == [0]
    assert output["seeds"][0]["steps"] == 3
    report = json.loads(Path("out/report.json").read_text())
    assert report
    assert "bertie" in Path("out/README.md").read_text()


def test_the_printed_table(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "classify")
    assert main(["train", *argv, "-m", models["embed"], "--output", "out", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split() == ["metric", "dev", "95%", "test", "95%"]
    assert any(line.startswith("accuracy") for line in out.splitlines())
    assert "24 training rows, 10 dev, 12 test; 2 labels: cat 12, dog 12" in err
    assert "3 steps in 1 epoch, seed 0, on " in err


def test_baselines_come_first(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that beats no baseline says so in the first line, of the console and of the report."""
    argv = [*write_toys(here, "classify"), "-m", models["embed"], *QUICK[:-1], "--output", "out"]
    assert main(["train", *argv]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Training did not beat a cheap baseline: on test (12 rows) ")
    assert "--epochs 2 (it was 1)" in out[0]
    assert any(line.split()[:5] == ["TF-IDF", "+", "logistic", "regression", "1.0000"] for line in out)
    report = json.loads(Path("out/report.json").read_text())
    assert report["findings"][0] == out[0]
    assert [item["name"] for item in report["baselines"]["results"]] == [
        "majority class",
        "TF-IDF + logistic regression",
        "frozen embeddings + logistic regression",
    ]
    first = Path("out/report.md").read_text().split("\n\n")[1]  # after the title
    assert first.startswith(f"> **{out[0].split(':')[0]}")


# --- seeds ---


def test_the_best_of_several_seeds(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*write_toys(here, "rerank"), "-m", models["embed"]]
    output = train(capsys, *argv, "--seeds", "3,1,2", "--output", "several")
    assert [item["seed"] for item in output["seeds"]] == [3, 1, 2]
    best = max(output["seeds"], key=lambda item: item["dev"]["map"])
    assert output["best_seed"] == best["seed"]
    alone = train(capsys, *argv, "--seed", str(best["seed"]), "--output", "alone")
    assert weights("several") == weights("alone")
    assert alone["test"] == output["test"]


def test_a_number_of_seeds(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without dev data the first one is kept."""
    argv = [*write_toys(here, "classify")[:2], "-m", models["embed"], "--test", "test.jsonl"]
    output = train(capsys, *argv, "--seeds", "2", "--seed", "5", "--dev-fraction", "0", "--output", "out")
    assert [item["seed"] for item in output["seeds"]] == [5, 6]
    assert output["best_seed"] == 5
    assert "dev" not in output


# --- interrupted and resumed ---

# Kills itself after a number of saved states; fails if slow, optional packages were imported.
KILLED = """
import os, signal, sys
from bertie.cli import main
from bertie.training.state import StateFolder
saved, count, most = StateFolder.save, 0, int(sys.argv[1])
def save(*args, **options):
    global count
    saved(*args, **options)
    count += 1
    if count == most:
        assert not {"pandas", "sklearn", "seqeval", "transformers"} & set(sys.modules)
        os.kill(os.getpid(), signal.SIGKILL)
StateFolder.save = save
main(sys.argv[2:])
"""


def killed(times: int, *argv: str) -> int:
    command = [sys.executable, "-c", KILLED, str(times), "train", *argv, *QUICK]
    return subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def test_a_killed_run_is_resumed(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*write_toys(here, "classify"), "-m", models["embed"], "--seeds", "1,2", "--save-steps", "1"]
    whole = train(capsys, *argv, "--output", "whole")
    argv += ["--output", "out"]
    assert killed(5, *argv) == -signal.SIGKILL  # three steps per seed: in the middle of the second seed
    assert not Path("out").exists()
    assert {item.name for item in Path("out.training").iterdir()} == {"job.json", "seed-1", "seed-2"}
    for more, output in (
        ([], "out.training holds an interrupted run; pass --resume to resume it, or --overwrite"),
        (["--resume", "--warmup", "0"], "was started with warmup=0.1, and now it is 0.0"),
        (["--resume", "--test", "dev.jsonl"], "was started with other test data"),
        (["--resume", "--seeds", "1,3"], "was started with seeds=[1, 2], and now it is [1, 3]"),
    ):
        assert main(["train", *argv, *QUICK, *more]) == 1
        assert output in capsys.readouterr().err
    trained = []
    monkeypatch.setattr(
        runs,
        "fit_labelled",
        lambda task, *args, **options: trained.append(task.recipe.seed) or fit_labelled(task, *args, **options),
    )
    output = train(capsys, *argv, "--resume")
    assert trained == [2]  # the first seed is done
    assert weights("out") == weights("whole")
    assert output["test"] == whole["test"]  # type: ignore[index]
    assert output["dev"] == whole["dev"]  # type: ignore[index]
    assert not Path("out.training").exists()
    assert main(["train", *argv, "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_an_interrupted_cross_validation_is_resumed(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step of either fold."""
    argv = [*write_toys(here, "classify")[:2], "-m", models["embed"], "--folds", "2", "--no-baselines"]
    whole = train(capsys, *argv, "--output", "whole")
    argv += ["--output", "out"]
    saved, count = StateFolder.save, 0

    def save(*args: Any) -> None:
        nonlocal count
        saved(*args)
        count += 1
        if count in (2, 4):
            raise KeyboardInterrupt

    monkeypatch.setattr(StateFolder, "save", save)
    assert run(["train", *argv, *QUICK, "--save-steps", "1"]) == 130
    assert {path.name for path in Path("out.training/seed-0").iterdir()} >= {"fold-1"}
    assert run(["train", *argv, *QUICK, "--save-steps", "1", "--resume"]) == 130
    capsys.readouterr()
    output = train(capsys, *argv, "--save-steps", "1", "--resume")
    assert output["dev"] == whole["dev"]
    assert weights("out") == weights("whole")
    assert not Path("out.training").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Only the first writes and speaks."""
    argv = [*write_toys(here, "classify"), "-m", models["embed"], "--seeds", "2", *QUICK, "--json"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "bertie", "train"]
    done = subprocess.run([*torchrun, *argv, "--output", "two", "--strategy", strategy], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert main(["train", *argv, "--output", "one"]) == 0
    two, item = json.loads(done.stdout), json.loads(capsys.readouterr().out)
    assert two["best_seed"] == item["best_seed"]
    assert two["test"]["log_loss"]["value"] == pytest.approx(item["test"]["log_loss"]["value"], abs=1e-4)
    assert {file.name for file in Path("two").iterdir()} == {file.name for file in Path("one").iterdir()}
    assert done.stderr.count("rows to train on") == 1


def test_existing_output_is_kept(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*write_toys(here, "classify"), "-m", models["embed"], "--output", "out"]
    Path("out").mkdir()
    train(capsys, *argv)  # an empty folder is none
    before = weights("out")
    assert main(["train", *argv]) == 1
    assert "out holds a model already; pass --overwrite" in capsys.readouterr().err
    train(capsys, *argv, "--overwrite", "--seed", "1")
    assert weights("out") != before
    Path("other").mkdir()
    Path("other/letter.txt").write_text("dear")
    assert main(["train", *argv[:-1], "other", "--overwrite"]) == 1
    assert "other is not empty and holds no model" in capsys.readouterr().err
    assert main(["train", *argv[:-1], "other/letter.txt", "--overwrite"]) == 1
    assert "other/letter.txt is a file" in capsys.readouterr().err
    assert main(["train", *argv[:-1], "train.jsonl", "--overwrite"]) == 2
    assert "train.jsonl is the input" in capsys.readouterr().err


def test_a_kill_while_removing_the_state(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model and its state both exist: only the state is left to remove."""
    argv = [*write_toys(here, "classify"), "-m", models["embed"], "--output", "out"]
    with monkeypatch.context() as patch:
        patch.setattr("bertie.training.output_folder.remove_state", lambda state: None)
        train(capsys, *argv)
    before = weights("out")
    assert Path("out.training").is_dir()
    assert main(["train", *argv, *QUICK, "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err
    assert weights("out") == before
    assert sorted(item.name for item in here.iterdir()) == ["dev.jsonl", "out", "test.jsonl", "train.jsonl"]


# --- recipes and flags ---

RECIPE = """
title = "toys"
task = "classify"
seeds = [1, 2]

[data]
train = ["train.jsonl"]
test = "test.jsonl"
columns = { text = "sentence" }

[training]
epochs = 2
batch_size = 8
patience = 1
dev_fraction = 0.25
refit = false
gradient_checkpointing = true
"""


def test_a_recipe(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths are relative to --data, and flags override the recipe."""
    Path("data").mkdir()
    write_toys(here / "data", "classify")
    for file in Path("data").iterdir():
        file.write_text(file.read_text().replace('"text"', '"sentence"'))
    Path("toys.toml").write_text(RECIPE)
    argv = ["--recipe", "toys.toml", "--data", "data", "-m", models["embed"], "--json"]
    assert main(["train", *argv, "--output", "a", "--resamples", "20"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(item["seed"], item["steps"]) for item in output["seeds"]] == [(1, 6), (2, 6)]
    flags = ["--epochs", "1", "--patience", "none", "--no-gradient-checkpointing", "--seed", "3"]
    assert main(["train", *argv, *flags, "--output", "b", "--resamples", "20"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [(item["seed"], item["steps"]) for item in output["seeds"]] == [(3, 3)]
    recipe = json.loads(Path("b/report.json").read_text())["recipe"]
    requested = {"epochs": 1.0, "patience": None, "gradient_checkpointing": False, "dev_fraction": 0.25, "seed": 3}
    assert {name: recipe[name] for name in requested} == requested
    assert main(["train", "classify", "x.jsonl", *argv, "--output", "c"]) == 2
    assert "leave one of them out" in json.loads(capsys.readouterr().out)["message"]


FLAGS = {
    "method": "few-shot",
    "epochs": "2.5", "lr": "1e-4", "head_lr": "0.001", "batch_size": "4", "batch_tokens": "99", "micro_tokens": "100",
    "warmup": "0.2", "schedule": "cosine", "decay": "0.3", "weight_decay": "0.1", "beta2": "0.98", "max_grad_norm": "0",
    "layer_decay": "0.9", "freeze": "encoder", "unfreeze": "1", "lora": "4", "lora_alpha": "8",
    "class_weights": "cat=2,dog=0.5", "label_smoothing": "0.1", "dropout": "0", "patience": "2",
    "evals_per_epoch": "3", "seed": "7",
    "mixed_precision": "fp32", "gradient_checkpointing": None, "max_length": "20", "train_windows": "2",
    "dev_fraction": "0.2", "folds": "3", "refit": None, "stop_loss": "0.02", "budget": "90",
    "metric": "f1", "abstain": "0.9",
    "loss": "triplet:margin=0.2", "matryoshka": "64,32", "pooling": "cls",
}  # fmt: skip


def test_every_field_of_a_recipe_is_a_flag() -> None:
    assert list(FLAGS) == [item.name for item in fields(Recipe)]
    for name, text in FLAGS.items():
        flag = "--" + name.replace("_", "-")
        args = build_parser().parse_args(
            ["train", "classify", "x", "--output", "o", flag, *([] if text is None else [text])]
        )
        value = getattr(args, f"recipe.{name}")
        if name == "class_weights":
            assert value == {"cat": 2.0, "dog": 0.5}
        elif name == "matryoshka":
            assert value == (64, 32)
        else:
            assert str(value) in (text, "True") or float(text or 0) == value
        others = {item.name for item in fields(Recipe)} - {name}
        assert all(getattr(args, f"recipe.{other}") is None for other in others)


def test_columns_by_other_names(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "classify")
    for file in here.glob("*.jsonl"):
        file.write_text(file.read_text().replace('"text"', '"review"').replace('"label"', '"stars"'))
    ways = (["text=review", "label=stars"], ["text=review,label=stars"])
    found = [
        train(capsys, *argv, "--columns", *way, "-m", models["embed"], "--output", f"out{i}")
        for i, way in enumerate(ways)
    ]
    assert found[0]["test"] == found[1]["test"]


def test_warnings_are_one_line_each(models: dict[str, str], here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "classify")
    assert (
        main(["train", *argv, "-m", models["embed"], "--output", "out", *QUICK, "--lr", "0.01", "--patience", "5"]) == 0
    )
    err = capfd.readouterr().err
    assert err.count("lr=0.01 is more than 5 times the usual") == 1
    assert err.count("patience=5 never stops") == 1
    assert "UserWarning" not in err


def test_abstention(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any answer is right in more than one of a hundred cases: all are given."""
    argv = write_toys(here, "classify", dev=40)
    output = train(capsys, *argv, "-m", models["embed"], "--output", "out", "--abstain", "0.01")
    assert output["abstention"]["target"] == 0.01
    assert output["abstention"]["coverage"] > 0.5
    assert json.loads(Path("out/config.json").read_text())["bertie"]["calibration"]["classify"]["precision"] == 0.01


def test_without_anything_to_report_on(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*write_toys(here, "classify")[:2], "-m", models["embed"], "--output", "out"]
    assert main(["train", *argv, *QUICK, "--dev-fraction", "0"]) == 0
    assert "saved out; without --dev, --test or held-out rows there is no score" in capsys.readouterr().err
    assert {file.name for file in Path("out").iterdir()} >= MODEL_FILES
    assert not Path("out/report.md").exists()
    argv += ["--overwrite"]
    assert set(train(capsys, *argv, "--dev-fraction", "0")) == {"output", "task", "seeds", "best_seed"}
    output = train(capsys, *argv)
    assert output["dev_source"] == "5-fold cross-validation, then trained on all 24 rows"
    assert output["dev"]["accuracy"]["value"] == output["seeds"][0]["dev"]["accuracy"]
    assert output["dev_source"] in Path("out/report.md").read_text()


def test_a_baseline_and_leaks(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model compared with itself is no better; texts of the training data in the test data are found."""
    argv = [*write_toys(here, "classify"), "-m", models["embed"]]
    leaked = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()[:4]]
    fresh = [{"text": f"query : find {who} " * 3, "label": who} for who in ("cat", "dog") * 3]
    write(Path("test.jsonl"), leaked + fresh)
    first = train(capsys, *argv, "--output", "first")
    assert first["leaks"]["rows"] == 4
    assert set(first["leaks"]["scores"]) == set(first["test"])
    output = train(capsys, *argv, "--output", "second", "--baseline", "first")
    assert output["baseline"]["difference"]["accuracy"]["value"] == 0
    assert output["baseline"]["difference"]["accuracy"]["p"] == 1
    assert output["baseline"]["mcnemar"] == 1


# --- errors ---

BAD: list[tuple[str, list[str], int, str]] = [
    ("no task", [], 2, "name a task, or a recipe with --recipe; the tasks are classify, "),
    ("another task", ["sing", "train.jsonl"], 2, "'sing' is not a task"),
    ("no data", ["classify"], 2, "name the training file: bertie train classify FILE"),
    ("no such file", ["classify", "none.jsonl"], 1, "no such file: none.jsonl"),
    ("no such dev file", ["classify", "train.jsonl", "--dev", "none.jsonl"], 1, "no such file: none.jsonl"),
    ("no column", ["classify", "train.jsonl", "--columns", "text=none"], 1, "train.jsonl has no column 'none'"),
    ("no such role", ["classify", "train.jsonl", "--columns", "words=text"], 1, "--columns names 'words'"),
    ("columns that are none", ["classify", "train.jsonl", "--columns", "text"], 2, "--columns takes NAME=COLUMN"),
    ("empty texts", ["classify", "holes.jsonl"], 1, "holes.jsonl, row 2: "),
    ("one label", ["classify", "same.jsonl"], 1, "training needs two labels"),
    ("unknown dev label", ["classify", "train.jsonl", "--dev", "odd.jsonl"], 1, "odd.jsonl has the labels 'bird'"),
    ("unknown test label", ["classify", "train.jsonl", "--test", "odd.jsonl"], 1, "'bird'"),
    ("lists for one", ["classify", "train.jsonl", "--dev", "lists.jsonl"], 1, "use lists in both"),
    ("unknown flag", ["classify", "train.jsonl", "--nonsense"], 2, "--nonsense"),
    ("no number", ["classify", "train.jsonl", "--epochs", "many"], 2, "--epochs: invalid NUMBER|none value: 'many'"),
    ("no schedule", ["classify", "train.jsonl", "--schedule", "x"], 2, "linear|cosine|wsd|constant"),
    ("out of range", ["classify", "train.jsonl", "--lr", "7"], 1, "lr=7.0 must be"),
    ("contradiction", ["classify", "train.jsonl", "--lora", "4", "--freeze", "2"], 1, "set one of them"),
    ("seeds twice", ["classify", "train.jsonl", "--seeds", "1,1"], 2, "different whole numbers"),
    ("seed and seeds", ["classify", "train.jsonl", "--seeds", "1,2", "--seed", "3"], 2, "use one of them"),
    ("no seeds", ["classify", "train.jsonl", "--seeds", "0"], 2, "--seeds"),
    ("data without recipe", ["classify", "train.jsonl", "--data", "."], 2, "pass one with --recipe"),
    ("no such recipe", ["--recipe", "none.toml"], 1, "there is no recipe 'none.toml'"),
    ("unknown key", ["--recipe", "odd.toml"], 1, "did you mean 'epochs'?"),
    ("baseline without test", ["classify", "train.jsonl", "--baseline", "x"], 2, "pass it with --test"),
    ("no device", ["classify", "train.jsonl", "--device", "nonsense"], 1, "--device nonsense cannot be used"),
    ("weights of none", ["classify", "train.jsonl", "--class-weights", "bird=2"], 1, "has unknown labels: bird"),
    ("bad weights", ["classify", "train.jsonl", "--class-weights", "bird="], 2, "--class-weights takes LABEL=WEIGHT"),
    ("no such metric", ["classify", "train.jsonl", "--dev", "dev.jsonl", "--metric", "x"], 1, "metric='x' must be"),
]


def test_bad_input(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toys(here, "classify")
    write(Path("holes.jsonl"), [{"text": "a cat", "label": "cat"}, {"text": " ", "label": "dog"}])
    write(Path("same.jsonl"), [{"text": "a cat", "label": "cat"}] * 3)
    write(Path("odd.jsonl"), [{"text": "a cat", "label": "bird"}])
    write(Path("lists.jsonl"), [{"text": "a cat", "label": ["cat"]}])
    Path("odd.toml").write_text('task = "classify"\n[data]\ntrain = "train.jsonl"\n[training]\nepoch = 1\n')
    for what, argv, status, output in BAD:
        argv = ["train", *argv, "-m", models["embed"], "--output", "out"]
        assert run(argv) == status, what
        out, err = capsys.readouterr()
        line = err.splitlines()[-1]
        assert out == "", what
        assert line.startswith("bertie: "), what
        assert output in line, (what, err)
        assert run([*argv, "--json"]) == status, what
        assert output in json.loads(capsys.readouterr().out)["message"], what
        assert not list(here.glob("out*")), what


def test_nothing_is_left_behind_by_bad_data(models: dict[str, str], here: Path) -> None:
    """Data is read before anything is written and before any model is loaded."""
    Path("bad.jsonl").write_text("{")
    assert main(["train", "classify", "bad.jsonl", "-m", "no/such/model", "--output", "out"]) == 1
    assert [item.name for item in here.iterdir()] == ["bad.jsonl"]


def test_a_missing_package(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error before training."""
    monkeypatch.setitem(sys.modules, "seqeval.metrics.sequence_labeling", None)
    assert main(["train", *write_toys(here, "tag"), "-m", models["embed"], "--output", "out"]) == 1
    assert capsys.readouterr().err.endswith("pip install 'bertie[train]'\n")
    assert not list(here.glob("out*"))


def test_plain_tags(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = write_toys(here, "tag")
    for file in here.glob("*.jsonl"):
        file.write_text(file.read_text().replace("B-PER", "NOUN").replace('"O"', '"X"'))
    output = train(capsys, *argv, "-m", models["embed"], "--output", "out")
    assert set(output["test"]) == {"accuracy", "macro_f1"}


def test_no_model_was_named(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.checkpoints.hub.built_in", list)
    assert main(["train", *write_toys(here, "classify"), "--output", "out"]) == 2
    assert "pass a folder or a hub id with -m" in capsys.readouterr().err
    assert run(["train", *write_toys(here, "classify"), "-m", "x"]) == 2
    assert "--output" in capsys.readouterr().err
