"""What all tasks share in `fit`: starting checkpoint, hyperparameters, scikit-learn."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import ConfigError, NotFoundError
from tests.training.finetune.toys import (
    FAST,
    MOODS,
    TEXTS,
    assert_same_logits_in_transformers,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_fit_starts_again(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, seed=5, dev_fraction=0)
    first = task.fit(TEXTS, MOODS, progress=False).predict_proba(TEXTS[:5])
    again = task.fit(TEXTS, MOODS, progress=False).predict_proba(TEXTS[:5])
    assert (first == again).all()
    given = Checkpoint.load(encoder)
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    held = bertie.Classifier(given, epochs=1, seed=5, dev_fraction=0).fit(TEXTS, MOODS, progress=False)
    assert (held.predict_proba(TEXTS[:5]) == first).all()
    assert all((before[name] == tensor).all() for name, tensor in given.model.state_dict().items())
    other = bertie.Classifier(encoder, epochs=1, seed=6, dev_fraction=0).fit(TEXTS, MOODS, progress=False)
    assert (other.predict_proba(TEXTS[:5]) != first).any()


def test_a_head_with_the_same_labels_is_trained_further(encoder: Path, tmp_path: Path) -> None:
    bertie.Classifier(encoder, **FAST).fit(TEXTS, MOODS, progress=False).save(tmp_path / "one")
    more = bertie.Classifier(tmp_path / "one", epochs=1, lr=1e-9, dev_fraction=0).fit(TEXTS, MOODS, progress=False)
    assert more.score(TEXTS, MOODS) > 0.9
    loud = [mood.upper() for mood in MOODS]
    fresh = bertie.Classifier(tmp_path / "one", epochs=1, lr=1e-9, dev_fraction=0).fit(TEXTS, loud, progress=False)
    out = [item.checkpoint.model.head("classify").out.weight for item in (more, fresh)]
    assert (out[0] - out[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"lora": 2, "lr": 1e-3},
        {"freeze": "encoder", "lr": 2e-2},
        {"freeze": 1, "unfreeze": 1},
        {"layer_decay": 0.8, "schedule": "cosine"},
        {"gradient_checkpointing": True, "batch_tokens": 200},
        {"class_weights": "balanced", "label_smoothing": 0.1},
        {"dev_fraction": 0.2, "patience": 2},
    ],
    ids=str,
)
def test_hyperparameters(encoder: Path, options: dict[str, Any], tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, **FAST | options).fit(TEXTS, MOODS, progress=False)
    assert task.history_.curve[-1]["loss"] < task.history_.curve[0]["loss"]
    task.save(tmp_path / "out")
    assert_same_logits_in_transformers(
        bertie.Classifier.load(tmp_path / "out").checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0]
    )


def test_max_length_is_saved(encoder: Path, tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, max_length=16, dev_fraction=0).fit(TEXTS, MOODS, progress=False)
    task.save(tmp_path / "out")
    assert bertie.load(tmp_path / "out").checkpoint.max_length == 16
    with pytest.raises(ConfigError, match="max_length=1000"):
        bertie.Classifier(encoder, max_length=1000).fit(TEXTS, MOODS, progress=False)


def test_not_fitted(encoder: Path) -> None:
    for task in (bertie.Classifier(encoder), bertie.Classifier(Checkpoint.load(encoder))):
        with pytest.raises(NotFoundError, match="no head 'classify'"):
            task.predict(TEXTS)
    with pytest.raises(TypeError, match="has no argument 'epoch'"):
        bertie.Classifier(encoder, epoch=3)  # type: ignore[call-arg]


def test_scikit_learn(encoder: Path) -> None:
    from sklearn.base import clone, is_classifier, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer

    task = bertie.Classifier(encoder, **FAST)
    twin = clone(task)
    assert twin.get_params() == task.get_params()
    assert is_classifier(task)
    assert is_regressor(bertie.Regressor(encoder))
    scores = cross_val_score(task, TEXTS, MOODS, cv=2)
    assert scores.min() > 0.7
    steps = [("lower", FunctionTransformer(lambda texts: [text.lower() for text in texts])), ("model", task)]
    pipeline = Pipeline(steps).fit(TEXTS, MOODS)
    assert pipeline.score(TEXTS, MOODS) > 0.9
    assert pipeline.predict_proba(TEXTS[:2]).shape == (2, 2)
    search = GridSearchCV(bertie.Classifier(encoder, **FAST), {"epochs": [1, 6]}, cv=2).fit(TEXTS[:60], MOODS[:60])
    assert set(search.best_params_) == {"epochs"}
    assert task.set_params(lr=1e-5).recipe.lr == 1e-5


def test_copies(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, dev_fraction=0).fit(TEXTS, MOODS, progress=False)
    expected = task.predict_proba(TEXTS[:3])
    assert (copy.deepcopy(task).predict_proba(TEXTS[:3]) == expected).all()
    assert (
        bertie.Classifier(encoder).get_params() == pickle.loads(pickle.dumps(bertie.Classifier(encoder))).get_params()
    )
