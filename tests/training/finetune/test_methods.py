"""Which methods are tried for which data."""

from __future__ import annotations

from typing import Any

import pytest

from bertie.errors import ConfigError, InputError
from bertie.recipe import Recipe
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.methods import best_method, plan_methods


def dataset(per_label: int, labels: int = 3, *, pairs: bool = False, multi: bool = False) -> LabelledDataset:
    rows = per_label * labels
    texts: list[Any] = [(f"text {i}", f"other {i}") if pairs else f"text {i}" for i in range(rows)]
    names: list[Any] = [f"label {i % labels}" for i in range(rows)]
    return read_dataset("classify", texts, [[name] for name in names] if multi else names)


@pytest.mark.parametrize(
    ("data", "methods"),
    [
        (dataset(8), ("frozen", "few-shot")),
        (dataset(40), ("frozen", "few-shot", "full")),
        (dataset(65), ("frozen", "full")),
        (dataset(3000), ("full",)),
        (dataset(8, multi=True), ("frozen",)),
        (dataset(8, pairs=True), ("full",)),
    ],
)
def test_auto(data: LabelledDataset, methods: tuple[str, ...]) -> None:
    assert plan_methods(Recipe(), data).methods == methods


def test_a_hyperparameter_of_full_fine_tuning_means_that() -> None:
    assert plan_methods(Recipe(lr=1e-4), dataset(8)).only_full
    assert not plan_methods(Recipe(seed=1, dev_fraction=0.2), dataset(8)).only_full
    assert plan_methods(Recipe(budget=60.0), dataset(40)).only_full
    assert not plan_methods(Recipe(budget=60.0), dataset(8)).only_full  # which takes seconds


def test_a_method_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(InputError, match="single texts"):
        plan_methods(Recipe(method="frozen"), dataset(8, pairs=True))
    with pytest.raises(InputError, match="one label per text"):
        plan_methods(Recipe(method="few-shot"), dataset(8, multi=True))
    with pytest.raises(ConfigError, match="method='frozen' is for classification"):
        plan_methods(Recipe(method="frozen"), read_dataset("regress", ["a", "b"], [1.0, 2.0]))
    with pytest.raises(ConfigError, match="method='probe' must be one of auto, full, few-shot, frozen"):
        Recipe(method="probe")  # type: ignore[arg-type]


def test_of_equal_scores_the_method_that_trains_more() -> None:
    assert best_method({"frozen": 0.5, "few-shot": 0.5}) == "few-shot"
    assert best_method({"frozen": 0.6, "few-shot": 0.5, "full": float("nan")}) == "frozen"
