"""Hyperparameters: the values that are refused, contradictions, warnings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from bertie.errors import ConfigError
from bertie.recipe import Recipe


def test_the_defaults_are_allowed_and_need_no_warning() -> None:
    recipe = Recipe()
    assert recipe.warnings() == []
    assert (recipe.epochs, recipe.lr, recipe.batch_size, recipe.micro_tokens) == (None, None, None, 16384)
    resolved = recipe.resolve()
    assert (resolved.epochs, resolved.lr, resolved.batch_size, resolved.dev_fraction) == (3.0, 3e-5, 32, 0.0)
    assert len(fields(Recipe)) == 38


@pytest.mark.parametrize(
    ("field", "bad", "allowed"),
    [
        ("epochs", (0, -1, float("nan"), float("inf"), "3", True), "a number above 0"),
        ("lr", (0, -1e-5, 1.5), "above 0 and at most 1"),
        ("head_lr", (0, -1e-5, 1.5), "above 0 and at most 1"),
        ("batch_size", (0, 1.5, 32.0), "a whole number of at least 1"),
        ("batch_tokens", (0, -5), "a whole number of at least 1"),
        ("micro_tokens", (0,), "a whole number of at least 1"),
        ("warmup", (-0.1, 1), "from 0 up to, but not including, 1"),
        ("schedule", ("Linear", "step", None, ["linear"]), "linear, cosine, wsd, constant"),
        ("weight_decay", (-0.01,), "at least 0"),
        ("beta2", (0, 1), "between 0 and 1"),
        ("max_grad_norm", (-1,), "at least 0"),
        ("layer_decay", (0, 1.1), "above 0 and at most 1"),
        ("freeze", (-1, 1.5, "all", None, True), "at least 0, or 'encoder'"),
        ("unfreeze", (-1, 0.5), "a whole number of at least 0"),
        ("lora", (-1, 8.0), "a whole number of at least 0"),
        ("lora_alpha", (0, -1), "above 0"),
        ("label_smoothing", (-0.1, 1), "from 0 up to"),
        ("dropout", (-0.1, 1), "from 0 up to"),
        ("patience", (-1, 1.5), "at least 0"),
        ("evals_per_epoch", (0, 0.5), "at least 1"),
        ("seed", (-1, 1 << 32, 0.5), "from 0 to 4294967295"),
        ("mixed_precision", ("bfloat16", 16), "auto, fp32, bf16, fp16"),
        ("gradient_checkpointing", (1, "yes"), "true or false"),
        ("max_length", (0,), "at least 1"),
        ("train_windows", (0,), "at least 1"),
        ("dev_fraction", (-0.1, 1), "from 0 up to"),
        ("metric", ("", 3), "the name of a metric"),
        ("abstain", (0, 1), "between 0 and 1"),
        ("class_weights", ("equal", {}, [1.0, 2.0], {1: 2.0}), "'balanced' or a mapping from labels to weights"),
    ],
)
def test_values_that_are_refused(field: str, bad: tuple[Any, ...], allowed: str) -> None:
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            Recipe(**{field: value})
        assert str(caught.value).startswith(f"{field}={value!r}")
        assert allowed in str(caught.value)


def test_a_class_weight_is_named_by_its_label() -> None:
    with pytest.raises(ConfigError, match=r"class_weights\['bad'\]=0 must be a number above 0"):
        Recipe(class_weights={"good": 1, "bad": 0})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unfreeze": 1}, "unfreeze=1 needs freeze"),
        ({"lora": 4, "freeze": 2}, "freeze=2 with lora=4"),
        ({"lora": 4, "freeze": "encoder", "unfreeze": 1}, "freeze='encoder' with lora=4"),
        ({"lora_alpha": 8}, "lora_alpha=8 needs lora"),
    ],
)
def test_contradictions(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe(**values)


def test_numbers_become_plain() -> None:
    recipe = Recipe(
        epochs=2,
        batch_size=np.int64(8),  # type: ignore[arg-type]
        lr=np.float32(0.5),  # type: ignore[arg-type]
        class_weights={"a": np.int64(2)},  # type: ignore[dict-item]
        freeze=np.int32(1),  # type: ignore[arg-type]
    )
    assert [type(value) for value in (recipe.epochs, recipe.batch_size, recipe.lr)] == [float, int, float]
    assert recipe.class_weights == {"a": 2.0}
    assert type(recipe.freeze) is int
    json.dumps(recipe.as_dict())


def test_a_recipe_keeps_its_own_weights() -> None:
    weights = {"a": 1.0}
    recipe = Recipe(class_weights=weights)
    weights["a"] = 9.0
    recipe.as_dict()["class_weights"]["a"] = 8.0
    assert recipe.class_weights == {"a": 1.0}


def test_as_dict_round_trip() -> None:
    recipe = Recipe(
        epochs=1.5, freeze="encoder", unfreeze=2, class_weights={"a": 1.0, "b": 2.0}, patience=3, metric="f1"
    )
    assert Recipe.from_mapping(json.loads(json.dumps(recipe.as_dict()))) == recipe
    changed = recipe.replace(freeze=0, unfreeze=0)
    assert (changed.freeze, changed.unfreeze, changed.metric) == (0, 0, "f1")
    assert recipe.freeze == "encoder"
    with pytest.raises(ConfigError, match="did you mean 'patience'"):
        recipe.replace(patienc=1)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"no field 'warm_up', 'batchsize'; did you mean 'warmup', 'batch_size'\?"):
        Recipe.from_mapping({"warm_up": 0.1, "lr": 1e-5, "batchsize": 8})
    with pytest.raises(ConfigError, match="no field 'xyz'; it has: method, epochs, lr"):
        Recipe.from_mapping({"xyz": 1})


@pytest.mark.parametrize(
    ("values", "starts"),
    [
        ({"lr": 5e-5}, []),
        ({"lr": 1e-3, "lora": 8}, []),
        ({"lr": 1e-3, "freeze": "encoder"}, []),
        ({"lr": 3e-5, "lora": 8}, ["lr=3e-05 is low for lora=8"]),
        ({"lr": 3e-5, "freeze": "encoder"}, ["lr=3e-05 is low for freeze='encoder'"]),
        ({"lora": 8}, []),
        ({"freeze": "encoder"}, []),
        ({"freeze": "encoder", "head_lr": 2e-5, "lr": 1e-3}, ["head_lr=2e-05 is low"]),
        ({"freeze": "encoder", "head_lr": 1e-3}, []),
        ({"freeze": "encoder", "unfreeze": 1}, []),
        ({"patience": 1, "epochs": 3}, []),  # evaluations after 1, 2 and 3 epochs: the second may be the last
        ({"patience": 2}, []),
        ({"patience": 0, "epochs": 3}, []),
        ({"patience": 2, "epochs": 3}, ["patience=2 never stops a run of 3 evaluations early"]),
        ({"patience": 2, "evals_per_epoch": 4}, []),
        ({"patience": 9, "epochs": 3, "lora": 2, "lr": 1e-5}, ["lr=1e-05 is low", "patience=9"]),
    ],
)
def test_warnings(values: dict[str, Any], starts: list[str]) -> None:
    found = Recipe(**values).warnings()
    assert len(found) == len(starts)
    for text, start in zip(found, starts, strict=True):
        assert text.startswith(start)


def test_no_torch_is_imported() -> None:
    code = "import sys, bertie.recipe, bertie.training.recipe_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
