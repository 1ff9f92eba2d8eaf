"""Leave-one-out attribution: the word that decides has the weight, and the rest has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bertie.tasks import Classifier
from bertie.training.finetune.attribution import MOST_PIECES, attribute, split_pieces


class ByWord:
    """Good with a probability of 0.9 if a text has the word good, else 0.2."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def classify(self, texts: list[Any]) -> list[Any]:
        self.texts += texts
        whole = [text if isinstance(text, str) else " ".join(text) for text in texts]
        return [SimpleNamespace(scores={"good": p, "bad": 1 - p}) for p in (0.9 if "good" in t else 0.2 for t in whole)]


def test_the_word_that_decides() -> None:
    classifier = ByWord()
    first, second = attribute(cast(Classifier, classifier), ["a good  film", ("a film", "so good")], ["good", "bad"])
    assert first == [("a ", 0.0), ("good  ", pytest.approx(0.7)), ("film", 0.0)]
    assert second == [("a ", 0.0), ("film", 0.0), ("\n", 0.0), ("so ", 0.0), ("good", pytest.approx(-0.7))]
    assert len(classifier.texts) == 4 + 5
    assert "a film" in classifier.texts


def test_long_texts_are_left_out_in_groups() -> None:
    text = " ".join(f"w{i}" for i in range(1000)) + "\n"
    pieces = split_pieces(text)
    assert len(pieces) == MOST_PIECES
    assert "".join(pieces) == text
    assert split_pieces("") == [""]
    classifier = ByWord()
    attribute(cast(Classifier, classifier), [text], ["good"])
    assert len(classifier.texts) == 1 + MOST_PIECES
    (single,) = attribute(cast(Classifier, classifier), ["good"], ["good"])
    assert single == [("good", pytest.approx(0.7))]
