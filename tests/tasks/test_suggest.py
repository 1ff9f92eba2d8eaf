"""Suggestions of texts to label, by a classifier, a tagger, or an encoder alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import bertie
from bertie import Classifier, Embedder, Reader, Tagger
from bertie.errors import InputError
from tests.tasks.tiny import LABELS, sentences

Made = Callable[..., Path]
TEXTS = sentences(30, seed=5)


def test_a_classifier_suggests_what_it_is_uncertain_of(made: Made) -> None:
    folder = made("wordpiece", "ForSequenceClassification", labels=["bad", "good", "mixed"])
    classifier = Classifier.load(folder)
    suggestions = bertie.suggest(TEXTS, 5, model=folder)
    assert suggestions == bertie.suggest(iter(TEXTS), 5, model=classifier)
    assert len({suggestion.index for suggestion in suggestions}) == 5
    for suggestion in suggestions:
        result = classifier.classify([TEXTS[suggestion.index]])[0]
        first, second = sorted(result.scores.values(), reverse=True)[:2]
        assert suggestion.text == TEXTS[suggestion.index]
        assert suggestion.score == pytest.approx(1 - (first - second), abs=1e-5)
        assert suggestion.reason.startswith(f"{result.label} {first:.2f} or ")


def test_a_tagger_ranks_by_its_tokens(made: Made) -> None:
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS))
    for suggestion in bertie.suggest(TEXTS, 3, model=tagger):
        (result,) = tagger.tag([suggestion.text], aggregation_strategy="none", ignore_labels=())
        product = 1.0
        for span in result.spans:
            product *= span.score
        assert suggestion.score == pytest.approx(1 - product ** (1 / len(result.spans)), abs=1e-4)


def test_an_encoder_suggests_typical_texts(made: Made) -> None:
    embedder = Embedder.load(made("wordpiece", ""))
    texts = [*TEXTS, TEXTS[3], f"  {TEXTS[4].upper()}", " "]
    suggestions = bertie.suggest(texts, 100, model=embedder, labelled=[TEXTS[0]])
    assert {suggestion.index for suggestion in suggestions} == set(range(1, 30))  # no copies, nothing labelled or empty
    assert sum(suggestion.score for suggestion in bertie.suggest(TEXTS, 4, model=embedder)) == pytest.approx(1)
    assert bertie.suggest([], 3, model=embedder) == bertie.suggest([" "], 3, model=embedder) == []


def test_wrong_arguments(made: Made) -> None:
    embedder = Embedder.load(made("wordpiece", ""))
    with pytest.raises(InputError, match="k=0 must be a whole number of at least 1"):
        bertie.suggest(TEXTS, 0, model=embedder)
    with pytest.raises(InputError, match="suggest takes a list of texts"):
        bertie.suggest("a text", 2, model=embedder)
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering"))
    with pytest.raises(InputError, match="model=Reader: texts are suggested for a Classifier, a Tagger or an Embedder"):
        bertie.suggest(TEXTS, 2, model=reader)
