"""Contrastive training brings texts of one label together, in the upper half of the encoder only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.recipe import Recipe
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.few_shot import ProbeTraining, contrastive_recipe
from bertie.training.finetune.linear_probe import head_features
from tests.training.finetune.toys import sentiment_texts

TEXTS, MOODS = sentiment_texts(24, seed=3)


def test_only_the_upper_half_is_trained_and_the_start_is_kept(encoder: Path) -> None:
    data = read_dataset("classify", TEXTS, MOODS)
    probe = ProbeTraining(bertie.Classifier(encoder, method="few-shot", lr=3e-3, epochs=10), data)
    before = {name: value.clone() for name, value in probe.checkpoint.model.encoder.state_dict().items()}
    fitted = probe.fit("few-shot", data)
    after, start = (checkpoint.model.encoder.state_dict() for checkpoint in (fitted.checkpoint, probe.checkpoint))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("blocks.1.") for name in changed)
    assert all(torch.equal(before[name], start[name]) for name in before)
    assert fitted.history.steps == 10
    margins = [_margin(checkpoint, data) for checkpoint in (probe.checkpoint, fitted.checkpoint)]
    assert margins[1] > margins[0] + 0.1
    assert not fitted.checkpoint.model.auxiliary


def _margin(checkpoint: Checkpoint, data: LabelledDataset) -> float:
    """The mean cosine of texts of one label, less that of others."""
    x = head_features(checkpoint, data.examples, "window").features
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    same = np.equal.outer(MOODS, MOODS)
    return float((x @ x.T)[same].mean() - (x @ x.T)[~same].mean())


def test_predictions_are_those_of_the_final_model(encoder: Path) -> None:
    data = read_dataset("classify", TEXTS, MOODS)
    task = bertie.Classifier(encoder)
    probe = ProbeTraining(task, data)
    fitted = probe.fit("frozen", data)
    predictions = probe.predict(fitted, data)
    probe.use(fitted)
    assert predictions.predicted == task.predict(TEXTS).tolist()
    assert predictions.probabilities is not None
    assert abs(predictions.probabilities - task.predict_proba(TEXTS)).max() < 1e-4


def test_more_rows_have_fewer_epochs(encoder: Path) -> None:
    data = read_dataset("classify", TEXTS, MOODS)
    checkpoint = ProbeTraining(bertie.Classifier(encoder), data).checkpoint
    recipes = [contrastive_recipe(Recipe(), checkpoint, rows) for rows in (16, 128, 1000)]
    assert [recipe.epochs for recipe in recipes] == [20, 10, 4]
    assert [recipe.batch_size for recipe in recipes] == [16, 64, 64]
