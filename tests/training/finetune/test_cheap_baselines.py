"""Cheap baselines beside a model: the same rows for both, of every kind of data, in bounded time."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bertie.evaluation import baselines, metrics
from bertie.tasks import Classifier, Embedder, registry
from bertie.training.finetune import cheap_baselines
from bertie.training.finetune.base import training_for
from bertie.training.finetune.cheap_baselines import BaselineSettings, evaluate_baselines
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.finetune.frozen_features import FrozenEncoder
from tests.checkpoints.tiny_sentence import save_bert
from tests.cli.toys import TASKS, write_toys

WORDS = "a the cat dog sat ran on mat find query".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "encoder")


def pets(count: int, seed: int) -> LabelledDataset:
    """Texts whose label is one of their words."""
    draw = random.Random(seed)
    names = [("cat", "dog", "mat")[i % 3] for i in range(count)]
    texts = [" ".join([*draw.choices(WORDS[4:7], k=4), name]) for name in names]
    return read_dataset("classify", texts, names)


@pytest.mark.parametrize("task", TASKS)
def test_every_task(folder: Path, tmp_path: Path, task: str) -> None:
    """An untrained model beats no baseline that can learn, and the differences are those of the scores."""
    kind = write_toys(tmp_path, task, train=60, test=40)[0]
    train, test = (read_dataset(kind, str(tmp_path / f"{split}.jsonl")) for split in ("train", "test"))  # type: ignore[arg-type]
    model = registry.get(kind).trainable_class(str(folder), epochs=0.01, batch_size=8, lr=1e-9, dev_fraction=0.0)
    model.fit(str(tmp_path / "train.jsonl"), progress=False)
    predictions = training_for(model).predict_labelled(test)
    table = evaluate_baselines(model, train, predictions, BaselineSettings(folder, "tiny"), resamples=100)
    own = training_for(model).scores(predictions, resamples=0)
    assert table.metric == metrics.main_metric(predictions.kind, own)
    assert table.model.value == pytest.approx(own[table.metric].value, nan_ok=True)
    for result in table.results:
        if np.isfinite(result.score.value) and np.isfinite(table.model.value):
            assert result.difference.value == pytest.approx(table.model.value - result.score.value)
    names = [result.name for result in table.results]
    assert any("frozen" in name for name in names) == (kind not in ("answer", "choose"))
    assert table.best is not None
    assert table.best.score.value > (0.2 if kind == "answer" else 0.6)
    if kind not in ("answer", "rerank"):
        assert not table.best.beaten


def test_accuracies_are_compared_by_mcnemars_test(folder: Path) -> None:
    train, test = pets(60, 0), pets(30, 1)
    model = Classifier(str(folder), epochs=0.1, lr=1e-9, dev_fraction=0.0).fit(
        [example.texts[0] for example in train.examples], [example.target for example in train.examples], progress=False
    )
    predictions = training_for(model).predict_labelled(test)
    table = evaluate_baselines(model, train, predictions, BaselineSettings(None), resamples=20)
    assert [result.name for result in table.results] == ["majority class", "TF-IDF + logistic regression"]
    best = table.results[1]
    assert best.score.value == 1.0
    correct = np.array(predictions.gold) == np.array(predictions.predicted)
    assert best.difference.p == metrics.mcnemar(correct, np.ones(30))
    assert best.difference.p < 0.001


def test_large_data_is_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheap_baselines, "TEST_ROWS", 20)
    monkeypatch.setattr(cheap_baselines, "EMBEDDED_ROWS", 30)
    monkeypatch.setattr(baselines, "MAX_ROWS", 40)
    train, test = pets(60, 0), pets(33, 1)
    seen: list[int] = []
    embed = FrozenEncoder.texts
    monkeypatch.setattr(FrozenEncoder, "texts", lambda self, rows: (seen.append(len(rows)), embed(self, rows))[1])
    model = Classifier(str(folder), epochs=0.1, dev_fraction=0.0).fit(
        [example.texts[0] for example in train.examples], [example.target for example in train.examples], progress=False
    )
    predictions = training_for(model).predict_labelled(test)
    table = evaluate_baselines(model, train, predictions, BaselineSettings(folder), resamples=20)
    assert (table.rows, table.rows_total, table.training_rows, table.training_rows_total) == (20, 33, 40, 60)
    assert seen == [30, 20]


def test_embeddings_are_compared_with_those_before_training(folder: Path) -> None:
    pairs = [("a cat sat", "the cat sat"), ("a dog ran", "on the mat"), ("find a cat", "find the dog")] * 4
    data = read_dataset(
        "embed", {"text_a": [a for a, _ in pairs], "text_b": [b for _, b in pairs], "score": [1.0, 0.1, 0.5] * 4}
    )
    model = Embedder.load(folder)
    predictions = training_for(model).predict_labelled(data)
    table = evaluate_baselines(model, data, predictions, BaselineSettings(folder), resamples=20)
    assert [result.name for result in table.results] == ["the model before training", "TF-IDF similarity"]
    assert table.results[0].difference.value == pytest.approx(0.0, abs=1e-6)
    assert not table.results[0].beaten


def test_features_of_words(folder: Path) -> None:
    """One row per word: the mean of the encoder's output over its tokens."""
    data = read_dataset("tag", [["the", "cat"], ["a", "dog", "ran"]], [["O", "B-X"], ["O", "B-X", "O"]])
    encoder = FrozenEncoder(folder, max_length=128)
    table = encoder.words(data.examples)
    assert table.shape == (5, encoder.checkpoint.model.config.width)
    alone = encoder.words(data.examples[1:])
    np.testing.assert_allclose(table[2:], alone, atol=1e-5)
    assert np.abs(table[0] - table[1]).max() > 1e-3
