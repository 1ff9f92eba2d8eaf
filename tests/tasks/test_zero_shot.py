"""Zero-shot classification by entailment, by embeddings and by both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertie import Embedder, ZeroShot
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import InputError, NotFoundError
from tests.tasks.tiny import sentences

NLI = ["contradiction", "neutral", "entailment"]
LABELS = ["London", "history", "a river"]
TEXTS = sentences(5, seed=3)


@pytest.fixture(scope="module")
def checkpoint(made: Callable[..., Path]) -> Checkpoint:
    """An NLI head and sentence embeddings over one encoder."""
    loaded = Checkpoint.load(made("wordpiece", "ForSequenceClassification", labels=NLI))
    return replace(loaded, sentence=SentenceModules.create(loaded.model.config.width, normalize=True))


def test_by_embedding_the_nearest_label_wins(checkpoint: Checkpoint) -> None:
    results = ZeroShot(checkpoint).classify(TEXTS, LABELS, template="about {}", method="embedding")
    similarities = Embedder(checkpoint).similarity(TEXTS, [f"about {label}" for label in LABELS])
    assert [result.label for result in results] == [LABELS[i] for i in similarities.argmax(1)]
    for result, row in zip(results, similarities, strict=True):
        expected = np.exp(20 * row) / np.exp(20 * row).sum()
        assert result.scores == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-4)
    independent = ZeroShot(checkpoint).classify(
        TEXTS, LABELS, template="about {}", multi_label=True, method="embedding"
    )[0]
    expected = 1 / (1 + np.exp(-10 * (similarities[0] - 0.15)))
    assert independent.scores == pytest.approx(dict(zip(LABELS, expected, strict=True)), abs=1e-4)


def test_combined_adds_the_logits_of_both(checkpoint: Checkpoint) -> None:
    zero_shot = ZeroShot(checkpoint)
    near, entailed, both = (
        zero_shot.classify(TEXTS, LABELS, method=method) for method in ("embedding", "entailment", "combined")
    )
    for a, b, result in zip(near, entailed, both, strict=True):
        odds = [result.scores[label] / (a.scores[label] * b.scores[label] ** 0.5) for label in LABELS]
        assert odds == pytest.approx([odds[0]] * 3, rel=1e-3)  # proportional to the product
        assert sum(result.scores.values()) == pytest.approx(1, abs=1e-5)
    a, b, result = (
        zero_shot.classify(TEXTS[:1], LABELS, method=method, multi_label=True)[0].scores[LABELS[0]]
        for method in ("embedding", "entailment", "combined")
    )
    assert np.log(result / (1 - result)) == pytest.approx((np.log(a / (1 - a)) + np.log(b / (1 - b))) / 2, abs=1e-4)


def test_auto_follows_from_the_model(checkpoint: Checkpoint) -> None:
    only_nli = replace(checkpoint, sentence=None)
    assert ZeroShot(checkpoint).resolve_method("auto") == "embedding"
    assert ZeroShot(checkpoint, head=next(iter(checkpoint.heads))).resolve_method("auto") == "entailment"
    assert ZeroShot(only_nli).resolve_method("auto") == "entailment"
    assert ZeroShot(only_nli).classify(TEXTS, LABELS) == ZeroShot(checkpoint).classify(
        TEXTS, LABELS, method="entailment"
    )


def test_a_model_without_nli_head_embeds(made: Callable[..., Path], checkpoint: Checkpoint) -> None:
    encoder = Checkpoint.load(made("wordpiece", ""))
    with pytest.raises(NotFoundError, match=r"'entailment'.*no sentence-embedding modules"):
        ZeroShot(encoder)
    zero_shot = ZeroShot(replace(encoder, sentence=checkpoint.sentence))
    result = zero_shot.classify(iter(TEXTS), ["London"])[0]  # a single label is true or not
    assert (zero_shot.head, result.label, result.windows) == (None, "London", 1)
    assert 0 < result.score < 1
    expected = zero_shot.classify(TEXTS, LABELS)
    for labels in (iter(LABELS), np.array(LABELS)):
        assert zero_shot.classify(TEXTS, labels) == expected  # type: ignore[call-overload]
    assert type(zero_shot.classify(TEXTS[0], np.array(LABELS)).label) is str  # type: ignore[call-overload]
    with pytest.raises(InputError, match="labels= takes a list of labels, not int"):
        zero_shot.classify(TEXTS, 5)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="method='combined' needs a head with a label 'entailment'"):
        zero_shot.classify(TEXTS, LABELS, method="combined")
    with pytest.raises(InputError, match="method='nearest' must be one of auto, entailment, embedding, combined"):
        zero_shot.classify(TEXTS, LABELS, method="nearest")  # type: ignore[call-overload]
