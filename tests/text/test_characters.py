"""Splitting into words, and the ids of characters. tests/parity/test_elmo.py compares the ids with AllenNLP's."""

from __future__ import annotations

import pytest

from bertie.text.characters import BEGIN_WORD, END_WORD, PADDING, character_ids, is_cut, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \n\t", []),
        ("Don't go to the U.S. now.", ["Don't", "go", "to", "the", "U.S", ".", "now", "."]),
        ("1,000 or 3.5%, a,b", ["1,000", "or", "3.5", "%", ",", "a", ",", "b"]),
        ("(well-known) -- “yes”…", ["(", "well-known", ")", "-", "-", "“", "yes", "”", "…"]),
        ("हिन्दी में है।", ["हिन्दी", "में", "है", "।"]),  # vowel signs are no letters in Python's \w
        ("cafe\u0301s ❤\ufe0f", ["cafe\u0301s", "❤\ufe0f"]),
        ("東京 Zürich", ["東京", "Zürich"]),
    ],
)
def test_split_words(text: str, words: list[str]) -> None:
    spans = split_words(text)
    assert [text[start:end] for start, end in spans] == words


def test_no_character_is_lost() -> None:
    text = "A b—c\u0301 🙂🏽 x_y [z]\u200d!? 100.000,5 'tis ’’ -- a.b. \u00ad"
    covered = "".join(text[start:end] for start, end in split_words(text))
    assert covered == "".join(text.split())


def test_character_ids() -> None:
    ids = character_ids(["ab", "", "é", "x" * 60], 6) - 1
    assert ids.tolist() == [
        [BEGIN_WORD, 97, 98, END_WORD, PADDING, PADDING],
        [BEGIN_WORD, END_WORD, PADDING, PADDING, PADDING, PADDING],
        [BEGIN_WORD, 0xC3, 0xA9, END_WORD, PADDING, PADDING],
        [BEGIN_WORD, 120, 120, 120, 120, END_WORD],
    ]
    assert character_ids([]).shape == (0, 50)


def test_bytes_are_counted_and_not_characters() -> None:
    assert [is_cut(word) for word in ("é" * 24, "é" * 25, "<S>")] == [False, True, False]
