"""Leave-one-out attribution: the word that decides has the weight, and the rest has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bertie.errors import InputError
from bertie.tasks.attribution import MAX_PIECES, attribute_each, leave_one_out, split_pieces


class ByWord:
    """Good with a probability of 0.9 if a text has the word good, else 0.2."""

    def __init__(self) -> None:
        self.texts: list[Any] = []

    def __call__(self, texts: list[Any]) -> list[Any]:
        self.texts += texts
        whole = [text if isinstance(text, str) else " ".join(text) for text in texts]
        counts = {"tokens_total": 3, "tokens_read": 3, "windows": 1, "tokens_unknown": 0, "tokens_non_english": 0}
        return [
            SimpleNamespace(label="good" if p > 0.5 else "bad", scores={"good": p, "bad": 1 - p}, **counts)
            for p in (0.9 if "good" in text else 0.2 for text in whole)
        ]


def test_the_word_that_decides() -> None:
    classify = ByWord()
    first, second = attribute_each(classify, ["a good  film", ("a film", "so good")], [None, "bad"])
    assert (first.label, first.score) == ("good", 0.9)
    assert [(piece.text, piece.weight) for piece in first.pieces] == [
        ("a ", 0.0),
        ("good  ", pytest.approx(0.7)),
        ("film", 0.0),
    ]
    assert [(piece.text, piece.sequence, piece.weight) for piece in second.pieces] == [
        ("a ", 0, 0.0),
        ("film", 0, 0.0),
        ("so ", 1, 0.0),
        ("good", 1, pytest.approx(-0.7)),
    ]
    assert len(classify.texts) == 4 + 5
    assert "a film" in classify.texts


def test_pieces_are_where_the_text_has_them() -> None:
    text = "\n a  rather good film "
    _, pieces = leave_one_out(text, 3)
    assert [text[start:end] for _, start, end, _ in pieces] == [content for *_, content in pieces]
    assert "".join(content for *_, content in pieces) == text


def test_long_texts_are_left_out_in_groups() -> None:
    text = " ".join(f"w{i}" for i in range(1000)) + "\n"
    pieces = split_pieces(text)
    assert len(pieces) == MAX_PIECES
    assert "".join(pieces) == text
    assert split_pieces("") == [""]
    classify = ByWord()
    list(attribute_each(classify, [text], ["good"]))
    assert len(classify.texts) == 1 + MAX_PIECES
    (single,) = attribute_each(classify, ["good"], ["good"])
    assert [piece.weight for piece in single.pieces] == [pytest.approx(0.7)]


def test_unknown_labels_are_refused() -> None:
    with pytest.raises(InputError, match="label='fine' must be one of 'good', 'bad'"):
        list(attribute_each(ByWord(), ["a good film"], ["fine"]))
