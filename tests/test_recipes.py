"""The recipes of this repository, and the comparison that is printed beside them."""

from pathlib import Path

import pytest

from benchmarks import finetune
from bertie import recipes
from bertie.training.recipe_file import read_recipe

FILES = sorted(recipes.FOLDER.glob("*.toml"))
SETS = [file for file in FILES if "seeds" in file.read_text("utf-8")]  # those that train on labels


def test_there_are_recipes() -> None:
    assert len(SETS) >= 15


@pytest.mark.parametrize("file", SETS, ids=lambda file: file.stem)
def test_recipes_choose_and_report_on_different_data(file: Path) -> None:
    recipe = read_recipe(file, "data")
    assert len(recipe.seeds) == 3
    assert recipe.test is not None
    assert (recipe.dev is None) == bool(recipe.training.dev_fraction)  # something chooses, and only one thing
    assert len({*recipe.train, recipe.dev, recipe.test}) == len(recipe.train) + 2


def test_the_comparison_takes_medians() -> None:
    def run(seconds: float, score: object) -> dict[str, object]:
        return {"seconds": seconds, "steps": 7, "scores": {"f1": score}}

    scored = {"value": 0.5, "low": 0.4, "high": 0.6}
    ours, theirs = [run(s, scored) for s in (9.0, 1.0, 2.0)], [run(s, 0.25) for s in (4.0, 90.0, 8.0)]
    found = finetune.row("mrpc", ours, theirs, [])
    assert (found["bertie_seconds"], found["peer_seconds"], found["compiled_seconds"]) == (2.0, 8.0, None)
    assert found["ratio"] == 4.0
    assert finetune.line(found).startswith("| mrpc | 7 / 7 | 2.0 | 8.0 |  | 4.0× | f1: 0.5000 [0.4000, 0.6000],")
