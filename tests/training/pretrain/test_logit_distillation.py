"""Soft labels from a fine-tuned teacher, against a computation text by text and token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import (
    Objective,
    SingleLabelObjective,
    TokenClassificationObjective,
    TrainingExample,
    TrainingWindow,
)
from bertie.training.pretrain.logit_distillation import LogitDistillation, TokenLogitDistillation
from bertie.training.sampling import TrainingTask
from tests.training import tiny
from tests.training.pretrain.distillation_models import (
    assert_same,
    kl,
)


def labelled(
    objective: LogitDistillation, teacher: Model, head: str, items: list[TrainingExample]
) -> list[TrainingExample]:
    asked = objective.add_soft_labels(teacher, head, items, budget=30)
    assert [[p.ids.tolist() for p in one.windows] for one in asked] == [
        [p.ids.tolist() for p in one.windows] for one in items
    ]
    return asked


@pytest.mark.parametrize(("temperature", "hard"), [(1.0, 0.0), (3.0, 0.25), (2.0, 1.0)])
def test_soft_labels_of_texts(temperature: float, hard: float) -> None:
    teacher, student = tiny.model(seed=1), tiny.model(seed=2)
    items = tiny.items(7, windows=3)
    items[2] = replace(items[2], value=None)
    objective = LogitDistillation(temperature, hard)
    mini = objective.collate(labelled(objective, teacher, "classify", items))
    found = objective.loss(student(mini.batch, "classify"), mini.batch, mini.targets)
    assert mini.weight == pytest.approx(sum(item.weight for item in items))

    wanted = torch.zeros(())
    for item in items:
        s, t = (
            sum(
                piece.share * torch.log_softmax(model(Batch.from_ids([piece.ids]), "classify")[0], -1)
                for piece in item.windows
            )
            for model in (student, teacher)
        )
        loss = (1 - hard) * temperature**2 * kl(s, t.detach(), temperature)  # type: ignore[arg-type]
        if item.value is not None:
            loss = loss - hard * torch.log_softmax(s, -1)[int(item.value)]  # type: ignore[arg-type]
        wanted = wanted + item.weight * loss
    assert_same(student, found, wanted)


def test_hard_labels_only_equals_standard_training() -> None:
    """With hard=1 the loss is `SingleLabelObjective`'s or `TokenClassificationObjective`'s."""
    for objective, plain, head, items in (
        (LogitDistillation(hard=1.0), SingleLabelObjective(), "classify", tiny.items(5, windows=3)),
        (TokenLogitDistillation(hard=1.0), TokenClassificationObjective(), "tag", tiny.tagged(5)),
    ):
        assert isinstance(plain, Objective)
        student = tiny.model(seed=2)
        asked, given = objective.collate(labelled(objective, tiny.model(seed=1), head, items)), plain.collate(items)
        found = objective.loss(student(asked.batch, head), asked.batch, asked.targets)
        assert_same(student, found, plain.loss(student(given.batch, head), given.batch, given.targets))


def test_soft_labels_of_tokens() -> None:
    teacher, student = tiny.model(seed=1), tiny.model(seed=2)
    rng = np.random.default_rng(0)
    items = tiny.tagged(4)
    items.append(TrainingExample((tiny.piece(rng, 0), tiny.piece(rng, 1))))  # no labels: every token has weight 1
    objective = TokenLogitDistillation(2.0, 0.5)
    mini = objective.collate(labelled(objective, teacher, "tag", items))
    found = objective.loss(student(mini.batch, "tag"), mini.batch, mini.targets)
    wanted = torch.zeros(())
    for item in items:
        for piece in item.windows:
            s, t = (model(Batch.from_ids([piece.ids]), "tag") for model in (student, teacher))
            for i in range(len(piece)):
                weight = 1.0 if piece.weights is None else float(piece.weights[i])
                loss = 0.5 * 4 * kl(s[i], t[i].detach(), 2.0)
                if piece.values is not None:
                    loss = loss - 0.5 * torch.log_softmax(s[i], -1)[int(piece.values[i])]
                wanted = wanted + weight * loss
    assert_same(student, found, wanted)


def test_tokens_without_weight_are_ignored() -> None:
    objective = TokenLogitDistillation(hard=0.5)
    values = np.array([[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    piece = TrainingWindow(np.array([1, 2]), np.array([0, 0]), 1.0, values, np.array([1.0, 0.0]))
    mini = objective.collate([TrainingExample((piece,))])
    outputs = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]], requires_grad=True)
    loss = objective.loss(outputs, mini.batch, mini.targets)
    loss.backward()
    assert torch.isfinite(loss)
    assert outputs.grad is not None
    assert outputs.grad[1].tolist() == [0.0, 0.0]
    assert outputs.grad[0].abs().min() > 0


def test_teachers_that_do_not_fit_are_refused() -> None:
    teacher, items = tiny.model(), tiny.items(3)
    with pytest.raises(
        ConfigError, match=r"head 'tag' of the teacher gives .* LogitDistillation needs one row per window"
    ):
        LogitDistillation().add_soft_labels(teacher, "tag", items)
    with pytest.raises(
        ConfigError, match=r"head 'classify' of the teacher gives .* TokenLogitDistillation needs one row per token"
    ):
        TokenLogitDistillation().add_soft_labels(teacher, "classify", items)
    mini = LogitDistillation().collate(LogitDistillation().add_soft_labels(teacher, "classify", items))
    with pytest.raises(ConfigError, match="the teacher has 3 classes, the student 2"):
        LogitDistillation().loss(torch.zeros(3, 2), mini.batch, mini.targets)
    for wrong in ({"temperature": -1.0}, {"hard": 1.5}, {"hard": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            LogitDistillation(**wrong)


def test_a_student_learns_its_teachers_classes_from_texts_without_labels() -> None:
    """With the unchanged trainer: the teacher's logits are part of the examples."""
    teacher, held = tiny.model(seed=1), tiny.items(64, seed=5)
    tiny.trainer(teacher, tiny.source(96), tiny.recipe(epochs=6)).run()
    assert tiny.accuracy(teacher, held) > 0.9
    objective, student = LogitDistillation(), tiny.model(seed=2)
    unlabelled = [replace(item, value=None) for item in tiny.items(96, seed=3)]
    asked = objective.add_soft_labels(teacher, "classify", unlabelled)
    tiny.trainer(student, TrainingTask("classify", objective, asked), tiny.recipe(epochs=6)).run()
    assert tiny.accuracy(student, held) > 0.9


def test_the_teacher_is_fixed() -> None:
    """It runs without dropout, whatever its mode."""
    dropped, plain = (
        LogitDistillation().add_soft_labels(tiny.model(dropout=p).train(), "classify", tiny.items(3))
        for p in (0.5, 0.0)
    )
    for example, other in zip(dropped, plain, strict=True):
        assert example.value is not None
        assert example.value.tolist() == other.value.tolist()
