"""Recipe files of fine-tuning."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertie.errors import ConfigError, NotFoundError
from bertie.recipe import Recipe
from bertie.training.recipe_file import read_recipe

WHOLE = """
title = "SST-2"
task = "classify"
model = "some/model"
seeds = [1, 2, 3]
[data]
train = ["sst2/train.jsonl.gz", "more.csv"]
dev = "sst2/dev.jsonl.gz"
test = "/elsewhere/test.csv"
columns = { text = "sentence" }
[training]
epochs = 2
lr = 5e-5
class_weights = { neg = 1, pos = 2.5 }
freeze = "encoder"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "sst2.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, WHOLE))
    assert (recipe.title, recipe.task, recipe.model, recipe.seeds) == ("SST-2", "classify", "some/model", [1, 2, 3])
    assert recipe.train == [str(tmp_path / "sst2" / "train.jsonl.gz"), str(tmp_path / "more.csv")]
    assert (recipe.dev, recipe.test) == (str(tmp_path / "sst2" / "dev.jsonl.gz"), "/elsewhere/test.csv")
    assert recipe.columns == {"text": "sentence"}
    assert recipe.training == Recipe(epochs=2.0, lr=5e-5, class_weights={"neg": 1.0, "pos": 2.5}, freeze="encoder")


def test_paths_below_a_given_folder(tmp_path: Path) -> None:
    recipe = read_recipe(str(write(tmp_path, WHOLE)), data_root="some/data")
    assert recipe.train[0] == str(Path("some/data/sst2/train.jsonl.gz"))
    assert recipe.test == "/elsewhere/test.csv"


def test_the_least_file(tmp_path: Path) -> None:
    recipe = read_recipe(
        write(tmp_path, 'task = "tag"\ndata.train = "train.jsonl"\ntraining.seed = 7'), data_root=tmp_path
    )
    assert (recipe.title, recipe.task, recipe.model, recipe.dev, recipe.test) == ("sst2", "tag", None, None, None)
    assert (recipe.train, recipe.columns, recipe.seeds) == ([str(tmp_path / "train.jsonl")], {}, [7])
    assert recipe.training == Recipe(seed=7)


GOOD = 'task = "tag"\ndata.train = "a.csv"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "titel = 'x'\ntask2 = 1", "the file has no field 'titel', 'task2'; did you mean 'title', 'task'"),
        (GOOD + "data.validation = 'x'", "\\[data\\] has no field 'validation'; it has: train, dev, test, columns"),
        (GOOD + "[model]\nbase = 'x'", "model={'base': 'x'} must be a string"),
        (GOOD + "training.epoch = 1", "a recipe has no field 'epoch'; did you mean 'epochs'"),
        (GOOD + "training.lr = nan", "lr=nan must be"),
        (GOOD + "training = 3", "training=3 must be a table"),
        (GOOD + "model = 3", "model=3 must be a string"),
        (GOOD + "data.columns = ['text']", "columns=\\['text'\\] must be a table"),
        (GOOD + "data.columns = { text = 1 }", "text=1 must be a string"),
        (GOOD + "data.dev = ''", "dev='' must be a string"),
        (GOOD + "seeds = []", "seeds=\\[\\] must be"),
        (GOOD + "seeds = [1, 1]", "different whole numbers"),
        (GOOD + "seeds = [1, -2]", "seeds\\[1\\]=-2 must be a whole number from 0"),
        (GOOD + "seeds = 3", "seeds=3 must be"),
        (GOOD + "seeds = [1]\ntraining.seed = 1", "not both"),
        ("data.train = 'a.csv'", "task=None must be one of classify, regress"),
        ("task = 'ner'\ndata.train = 'a.csv'", "task='ner' must be one of classify, regress"),
        ("task = 'tag'", "train=None must be a path"),
        ("task = 'tag'\ndata.train = []", "train=\\[\\] must be"),
        ("task = 'tag'\ndata.train = ['a', 1]", "train=\\['a', 1\\] must be"),
        ("task = tag\n", "is not TOML: .*line 1"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe(write(tmp_path, text))
    assert "sst2.toml" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"none\.toml cannot be read"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(NotFoundError, match="cannot be read"):
        read_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'title = "caf\xe9"')
    with pytest.raises(ConfigError, match="is not TOML"):
        read_recipe(tmp_path / "latin.toml")
