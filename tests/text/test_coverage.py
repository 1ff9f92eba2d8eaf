"""Which tokens a vocabulary does not cover."""

from __future__ import annotations

import numpy as np
import pytest

from bertie import Embedder
from bertie.text.coverage import LETTERS, WORDS, count_flagged, uncovered_tokens
from bertie.text.scripts import OTHER_SCRIPT
from bertie.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Embedder.load("bertie-small").tokenizer


def test_a_script_with_words_is_covered() -> None:
    vocabulary = {"[UNK]": 0, "д": 1, "##а": 2, "α": 3, "é": 4}
    for i in range(WORDS):
        vocabulary[f"##д{chr(0x430 + i // 10)}{chr(0x430 + i % 10)}"] = len(vocabulary)
    flags = uncovered_tokens(vocabulary, 0)
    assert np.flatnonzero(flags).tolist() == [0, 3]  # Cyrillic has words; é is Latin
    assert not uncovered_tokens(vocabulary, None)[0]


@pytest.mark.parametrize(("letters", "covered"), [(LETTERS - 1, False), (LETTERS, True)])
def test_han_is_covered_by_many_characters(letters: int, covered: bool) -> None:
    vocabulary = {chr(0x4E00 + i): i for i in range(letters)}
    assert uncovered_tokens(vocabulary, None).all() != covered


def test_counts_are_per_text_and_empty_texts_have_none() -> None:
    flags = np.array([True, False, True, True, False])
    assert count_flagged(flags, np.array([2, 0, 2, 1])).tolist() == [1, 0, 2, 0]
    assert count_flagged(~flags[:1], np.array([1])) is None


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("The cat sat on the mat, naïvely: ½ café.", 0.0, 0.0),
        ("def f(x): return x ** 2", 0.0, 0.0),
        ("今天天气很好，我们去公园散步吧。", 0.8, 0.9),  # the punctuation is known
        ("Привет, как дела? Сегодня хорошая погода.", 0.9, 1.0),
        ("こんにちは世界、元気ですか", 0.8, 1.0),
        ("안녕하세요 세계", 1.0, 1.0),
        ("مرحبا بالعالم كيف حالك اليوم", 1.0, 1.0),
        ("The angle α is small in this figure.", 0.1, 0.2),
        ("Die Katze sitzt auf der Matte.", 0.0, 0.0),  # see test_english.py
    ],
)
def test_the_built_in_vocabulary(tokenizer: Tokenizer, text: str, least: float, most: float) -> None:
    encodings = tokenizer.encode_flat([text])
    counts = tokenizer.coverage.count_unknown(encodings)
    share = 0.0 if counts is None else counts[0] / (encodings.lengths[0] - tokenizer.special_count)
    assert least <= share <= most


def test_symbols_and_latin_letters_are_no_other_script() -> None:
    assert not OTHER_SCRIPT.search("abc é ß Ω µ ª ½ → ≤ 😀 👍 ✓ ﬁ Ａ ẞ ạ ⅷ “…”".replace("Ω", ""))
    for text in ("д", "α", "我", "カ", "한", "ع", "ש", "ก", "ᄋ", "አ"):
        assert OTHER_SCRIPT.search(text), text
