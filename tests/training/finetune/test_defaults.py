"""The hyperparameters that fine-tuning chooses from the model and the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bertie
from bertie.recipe import Recipe
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.defaults import choose, default_lr, dev_fraction
from tests.training.finetune.toys import MOODS, TEXTS

SMALL: Any = SimpleNamespace(width=384, depth=6)
BASE: Any = SimpleNamespace(width=768, depth=12)


def dataset(rows: int, labels: int = 2, kind: str = "classify", multi_label: bool = False) -> LabelledDataset:
    """Data of a given size; only its facts are used."""
    data = read_dataset("classify", ["a", "b"], ["x", "y"])
    names = tuple(f"label {i}" for i in range(labels))
    return replace(data, kind=kind, examples=[data.examples[0]] * rows, labels=names, multi_label=multi_label)  # type: ignore[arg-type]


def test_small_models_learn_faster_and_are_told_why() -> None:
    chosen = choose(Recipe(), SMALL, dataset(1688, 6), has_dev=True)
    recipe = chosen.recipe
    assert (recipe.lr, recipe.head_lr, recipe.batch_size, recipe.epochs, recipe.patience) == (1.5e-4, 1.8e-4, 16, 5, 3)
    assert chosen.reasons[0] == "lr 1.5e-4: hidden size 384, 6 layers"
    assert "epochs 5: 1,688 rows" in chosen.reasons
    assert choose(Recipe(), BASE, dataset(1688), has_dev=True).recipe.lr == 3.7e-5
    assert default_lr(SimpleNamespace(width=64, depth=2)) == 3e-4  # type: ignore[arg-type]
    assert default_lr(SimpleNamespace(width=4096, depth=48)) == 1e-5  # type: ignore[arg-type]


def test_few_rows_take_more_epochs() -> None:
    epochs = [choose(Recipe(), SMALL, dataset(rows), has_dev=False).recipe.epochs for rows in (10, 100, 1000, 20_000)]
    assert epochs == [50, 50, 7, 3]


def test_what_is_given_is_kept() -> None:
    given = Recipe(lr=1e-5, head_lr=1e-4, epochs=2, batch_size=8, patience=0)
    chosen = choose(given, SMALL, dataset(500, 77), has_dev=True)
    assert chosen.recipe == given
    assert chosen.reasons == ()


def test_many_labels_need_a_faster_head() -> None:
    rates = [
        choose(Recipe(lr=1e-4), SMALL, dataset(500, n), has_dev=False).recipe.head_lr for n in (2, 5, 10, 77, 150, 1000)
    ]
    assert rates == [None, None, 2e-4, 1e-3, 1e-3, 1e-3]
    assert choose(Recipe(lr=1e-4), SMALL, dataset(500, 8, multi_label=True), has_dev=False).recipe.head_lr == 1e-3
    assert choose(Recipe(lr=1e-4), SMALL, dataset(500, 30, kind="tag"), has_dev=False).recipe.head_lr is None


def test_a_warning_only_where_the_rate_is_too_high_for_the_model() -> None:
    assert choose(Recipe(lr=4e-4), SMALL, dataset(500), has_dev=False).warnings == ()
    (warning,) = choose(Recipe(lr=4e-4), BASE, dataset(500), has_dev=False).warnings
    assert warning.startswith("lr=0.0004 is more than 5 times the usual 3.7e-05 for this model (hidden size 768")
    assert choose(Recipe(lr=4e-4, lora=8), BASE, dataset(500), has_dev=False).warnings == ()
    assert choose(Recipe(lr=1e-3, freeze="encoder"), BASE, dataset(500), has_dev=False).warnings == ()


def test_embeddings_have_rates_and_batches_of_their_own() -> None:
    pairs = [
        choose(Recipe(), SMALL, replace(dataset(n, kind="embed"), inputs="pairs"), has_dev=False) for n in (300, 5000)
    ]
    recipes = [chosen.recipe for chosen in pairs]
    assert [(r.lr, r.batch_size, r.epochs) for r in recipes] == [(7.5e-5, 32, 10), (7.5e-5, 64, 6)]
    assert "batch_size 64: 5,000 pairs, with the others as negatives" in pairs[1].reasons
    scores = choose(Recipe(), BASE, replace(dataset(50_000, kind="embed"), inputs="scores"), has_dev=False).recipe
    assert (scores.batch_size, scores.epochs, scores.stop_loss) == (32, 1, None)


def test_partial_training_has_rates_of_its_own() -> None:
    assert choose(Recipe(lora=8), BASE, dataset(500), has_dev=False).recipe.lr == 5e-4
    assert choose(Recipe(freeze="encoder"), BASE, dataset(500), has_dev=False).recipe.lr == 1e-3


@pytest.mark.parametrize(("rows", "held"), [(40, 0), (60, 12), (200, 30), (5000, 500), (100_000, 1000)])
def test_the_share_that_is_held_out(rows: int, held: int) -> None:
    assert round(rows * dev_fraction(Recipe(), dataset(rows))) == held
    assert dev_fraction(Recipe(dev_fraction=0.0), dataset(rows)) == 0
    assert dev_fraction(Recipe(), dataset(rows, kind="embed")) == 0


def test_fit_chooses_holds_out_and_keeps_the_best_epoch(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = bertie.Classifier(encoder, epochs=3, folds=2).fit(TEXTS[:80], MOODS[:80])
    assert task.recipe_.lr is not None
    assert task.recipe.lr is None
    assert len(task.history_.evaluations) == 3
    assert "chosen: lr " in capsys.readouterr().err
    assert task.get_params()["lr"] is None
    plain = bertie.Classifier(encoder, epochs=1, dev_fraction=0).fit(TEXTS[:80], MOODS[:80], progress=False)
    assert plain.history_.evaluations == []
