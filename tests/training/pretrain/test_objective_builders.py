"""Objectives built from recipes: every kind has a builder, and a task learns from a teacher's soft labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie.errors import ConfigError
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.tasks.classify import Classifier
from bertie.text.tokenizer_training import train
from bertie.training.objectives import SingleLabelObjective
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.logit_distillation import LogitDistillation, TokenLogitDistillation
from bertie.training.pretrain.objective_builders import CORPUS_OBJECTIVES, RunContext, build_sampler
from bertie.training.pretrain.pretrain_recipe import PretrainRecipe, objective_keys
from bertie.training.pretrain.run import pretrain

WORDS = {"good": ["fine", "great", "nice", "lovely"], "bad": ["awful", "poor", "nasty", "sad"]}
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def rows(count: int, seed: int, noise: float = 0.0) -> list[dict[str, str]]:
    """Texts of words of one class; `noise`: the share of labels that are wrong."""
    rng = np.random.default_rng(seed)
    labels = list(WORDS)
    out = []
    for number in range(count):
        label = labels[number % 2]
        text = " ".join(rng.choice(WORDS[label], 5))
        out.append({"text": text, "label": labels[1 - number % 2] if rng.random() < noise else label})
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with wrong labels, and a teacher that was trained on correct ones."""
    folder = tmp_path_factory.mktemp("builders")
    tokenizer = train([row["text"] for row in rows(60, 0)], vocab_size=120, max_length=64, min_frequency=1)
    tokenizer.save(folder / "tokenizer")
    for name, data in (("wrong", rows(64, 1, noise=1.0)), ("clean", rows(64, 2)), ("dev", rows(40, 3))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    new_model({"model_type": "bert", **SHAPE, "max_position_embeddings": 64}, tokenizer).save(folder / "encoder")
    teacher = Classifier(folder / "encoder", epochs=12, lr=3e-3, batch_size=8, refit=False)
    teacher.fit(str(folder / "clean.jsonl"), progress=False).save(folder / "teacher")
    return folder


def recipe(**objective: Any) -> PretrainRecipe:
    task = {"kind": "classify", "name": "mood", "train": "wrong.jsonl", "dev": "dev.jsonl", "batch_size": 8}
    return PretrainRecipe(
        model="encoder",
        recipe=Recipe(lr=3e-3, batch_tokens=512, max_length=64, seed=1),
        steps=120,
        evals=1,
        objectives=[task | objective],
    )


def test_every_kind_has_a_builder() -> None:
    assert set(objective_keys()) == {*CORPUS_OBJECTIVES, *registry.trainable(with_head=True)}


def context(folder: Path, **objective: Any) -> RunContext:
    from bertie.checkpoints.checkpoint import Checkpoint

    return RunContext(recipe(**objective), folder, torch.device("cpu"), Checkpoint.load(folder / "encoder"))


def test_one_labelled_task_has_the_steps_of_the_recipe(folder: Path) -> None:
    assert build_sampler(context(folder)).total_steps == 120  # 15 epochs of 8 steps; 17 are prepared


def test_a_teacher_replaces_hard_labels(folder: Path) -> None:
    hard, _ = build_sampler(context(folder)).read(0)
    assert isinstance(hard.objective, SingleLabelObjective)
    soft, examples = build_sampler(context(folder, teacher="teacher", temperature=3.0, hard=0.25)).read(0)
    assert isinstance(soft.objective, LogitDistillation)
    assert not isinstance(soft.objective, TokenLogitDistillation)
    assert (soft.objective.temperature, soft.objective.hard) == (3.0, 0.25)
    assert all(example.value is not None and example.value.shape == (3,) for example in examples)  # 2 logits, 1 label


def test_a_student_learns_its_teachers_labels_in_spite_of_wrong_ones(folder: Path, tmp_path: Path) -> None:
    summary = pretrain(recipe(teacher="teacher"), tmp_path / "model", data=folder, progress=False)
    assert summary["evaluation"]["mood"] > 0.95
    assert Classifier.load(tmp_path / "model").classify(["great nice lovely"])[0].label == "good"


def test_teachers_that_do_not_fit_are_refused(folder: Path) -> None:
    other = train(["other words", "of another tokenizer"] * 5, vocab_size=60, max_length=64, min_frequency=1)
    new_model({"model_type": "bert", **SHAPE, "max_position_embeddings": 64}, other).save(folder / "other")
    with pytest.raises(ConfigError, match="teacher='other' must have the model's tokenizer"):
        build_sampler(context(folder, teacher="other"))
    (folder / "three.jsonl").write_text(
        "".join(json.dumps({"text": word, "label": word}) + "\n" for word in ("fine", "poor", "sad"))
    )
    with pytest.raises(ConfigError, match=r"the teacher's labels \['bad', 'good'\] must be those of the data"):
        build_sampler(context(folder, teacher="teacher", train="three.jsonl", dev="three.jsonl"))
