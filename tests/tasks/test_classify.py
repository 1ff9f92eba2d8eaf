"""Documents read in smaller windows or sentence by sentence, and the ways to combine them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bertie import Classifier
from bertie.cli import main
from bertie.errors import InputError
from bertie.tasks.decoding import pool_windows
from bertie.text.windows import Window

SENTENCES = ("The train leaves at nine.", "It is a wonderful film!", "The book is on the table.")
TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier.load("bertie-small", head="sentiment")


def log_probabilities(classifier: Classifier, texts: tuple[str, ...]) -> np.ndarray:
    """(texts, labels), without the temperature."""
    rows = [[result.scores[label] for label in classifier.classes_] for result in classifier.classify(list(texts))]
    logits = np.log(rows) * classifier.info.calibration.temperature
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


@pytest.mark.parametrize("pooling", ["mean", "confidence", "max"])
def test_sentence_by_sentence(classifier: Classifier, pooling: str) -> None:
    rows = log_probabilities(classifier, SENTENCES)
    tokens = np.array([len(classifier.tokenizer.encode(text)) - 2 for text in SENTENCES])
    entropy = -(np.exp(rows) * rows).sum(axis=1) / np.log(3)
    weights = {"mean": tokens, "confidence": tokens * (1 - entropy) ** 2}
    pooled = rows.max(axis=0) if pooling == "max" else np.average(rows, axis=0, weights=weights[pooling])
    scaled = np.exp(pooled / classifier.info.calibration.temperature)
    result = classifier.classify(TEXT, window_size="sentence", window_pooling=pooling)  # type: ignore[call-overload]
    assert (result.windows, result.tokens_read) == (3, result.tokens_total)
    assert [result.scores[label] for label in classifier.classes_] == pytest.approx(scaled / scaled.sum(), abs=1e-4)
    if pooling == "max":
        assert result.label == "positive"


def test_window_size(classifier: Classifier) -> None:
    whole = classifier.classify(TEXT * 20)
    assert whole.windows == 1
    small = classifier.classify(TEXT * 20, window_size=40)
    assert small.windows > 8
    assert small.tokens_read == small.tokens_total == whole.tokens_total
    assert classifier.classify(TEXT * 20, window_size=100_000) == whole
    assert classifier.classify([("A pair.", "Of texts. Two.")], window_size="sentence")[0].windows == 1
    assert classifier.classify(["", " "], window_size="sentence")[1].windows == 1
    with pytest.raises(InputError, match="window_size=0 must be at least 1"):
        classifier.classify(TEXT, window_size=0)
    with pytest.raises(InputError, match="window_pooling='median' must be one of mean, confidence, max"):
        classifier.classify(TEXT, window_pooling="median")  # type: ignore[call-overload]


def test_the_command(classifier: Classifier, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-m", "bertie-small", "--head", "sentiment", "--json"]
    assert main(["classify", TEXT, "--window-size", "sentence", "--window-pooling", "max", *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    result = classifier.classify(TEXT, window_size="sentence", window_pooling="max")
    assert record["scores"] == pytest.approx(result.scores)
    assert main(["classify", TEXT, "--labels", "a,b", "--window-pooling", "max"]) == 2


def test_the_mean_is_weighted_by_tokens() -> None:
    windows = [Window(None, np.arange(3), np.ones(3, bool), weight) for weight in (3.0, 1.0)]  # type: ignore[arg-type]
    rows = [np.log([0.8, 0.2]).astype(np.float32), np.log([0.2, 0.8]).astype(np.float32)]
    expected = 0.75 * rows[0] + 0.25 * rows[1]
    np.testing.assert_allclose(pool_windows(windows, rows, "mean"), expected, rtol=1e-6)
    np.testing.assert_allclose(pool_windows(windows, rows, "max"), np.log([0.8, 0.8]), rtol=1e-6)
