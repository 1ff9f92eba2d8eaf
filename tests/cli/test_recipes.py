"""Recipes that come with the package: listed, printed, copied, and found by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bertie import recipes
from bertie.cli import main
from bertie.errors import NotFoundError
from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
from bertie.training.recipe_file import read_recipe


def test_every_recipe_is_listed_and_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == recipes.names()
    assert all(row["title"] for row in rows)
    for name in recipes.names(recipes.FINE_TUNING):
        assert read_recipe(recipes.find(name, recipes.FINE_TUNING)).train
    for name in recipes.names(recipes.PRETRAINING):
        assert PretrainRecipe.read(recipes.find(name, recipes.PRETRAINING)).steps
    assert main(["recipes"]) == 0
    text = capsys.readouterr().out
    assert "\n  sst2 " in text
    assert "\n  bertie-small/1-multitask " in text


def test_one_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "sst2"]) == 0
    assert capsys.readouterr().out == (recipes.FOLDER / "sst2.toml").read_text("utf-8")
    assert main(["recipes", "sst3"]) == 1
    assert "did you mean sst2?" in capsys.readouterr().err


def test_all_are_copied(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "-o", "mine"]) == 0
    assert (here / "mine" / "pretrain" / "tiny.toml").is_file()
    assert (here / "mine" / "bertie-small" / "prepare.py").is_file()
    assert (here / "mine" / "examples" / "book.txt").is_file()
    assert not list((here / "mine").rglob("__*__*"))
    assert main(["recipes", "-o", "mine"]) == 1
    assert "already exists; pass --overwrite" in capsys.readouterr().err
    assert main(["recipes", "sst2", "-o", "other"]) == 2


def test_names_and_files(here: Path) -> None:
    tiny = recipes.FOLDER / "pretrain" / "tiny.toml"
    for name in ("tiny", "tiny.toml", "pretrain/tiny", str(tiny)):
        if name == "pretrain/tiny":  # not the name that is listed
            continue
        assert recipes.find(name, recipes.PRETRAINING) == tiny
    assert recipes.find("bertie-small/1-multitask", recipes.PRETRAINING).name == "1-multitask.toml"
    (here / "tiny").write_text("mine")
    assert recipes.find("tiny", recipes.PRETRAINING) == Path("tiny")  # a file of the user comes first
    assert not recipes.is_packaged("tiny", recipes.PRETRAINING)
    with pytest.raises(NotFoundError, match="did you mean tiny"):
        recipes.find("tinny", recipes.PRETRAINING)
    with pytest.raises(NotFoundError, match="there is no recipe 'sst2', neither a file nor one that comes with Bertie"):
        recipes.find("sst2", recipes.PRETRAINING)  # of another kind


def test_train_by_name(here: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The example has its data; others look for theirs in the current folder, or where --data says."""
    argv = ["train", "-m", models["embed"], "-o", "out", "--recipe"]
    assert main([*argv, "sst2"]) == 1
    assert "sst2/train.jsonl.gz" in capsys.readouterr().err
    assert main([*argv, "sst2", "--data", "elsewhere"]) == 1
    assert "elsewhere/sst2/train.jsonl.gz" in capsys.readouterr().err
    assert main([*argv, "nothing"]) == 1
    assert "there is no recipe 'nothing'" in capsys.readouterr().err
    flags = ["--epochs", "1", "--dev-fraction", "0.2", "--resamples", "10", "-q"]
    assert main([*argv, "example", *flags]) == 0
    assert (here / "out" / "config.json").is_file()


def test_pretraining_with_a_tokenizer_of_another_length(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer is trained before the model is known: a longer model is no error."""
    Path("text.txt").write_text("".join(f"The cat {i} sat on the mat.\n\n" for i in range(200)))
    assert main(["tokenizer", "train", "text.txt", "--vocab-size", "100", "--max-length", "16", "-o", "tokenizer"]) == 0
    assert main(["corpus", "text.txt", "--tokenizer", "tokenizer", "-o", "corpus", "--held-out", "0.1"]) == 0
    data = ["--corpus", "corpus", "--tokenizer", "tokenizer", "-o", "model"]
    assert main(["pretrain", "tiny", *data, "--steps", "2", "--batch-tokens", "256", "--evals", "1", "-q"]) == 0
    assert json.loads(Path("model/tokenizer_config.json").read_text())["model_max_length"] == 512
    capsys.readouterr()
    assert main(["inspect", "model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_length"] == 512
