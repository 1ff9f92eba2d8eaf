"""Counts of words: those of a normalizer and pre-tokenizer on whole texts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.text import word_counts
from bertie.text.tokenizer_training import (
    Kind,
    pre_tokenizing_backend,
)
from bertie.text.word_counts import count_words
from tests.text.training_texts import ALL, STRANGE, corpus


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("lowercase", [False, True])
def test_words_equal_those_of_whole_texts(kind: Kind, lowercase: bool) -> None:
    backend = pre_tokenizing_backend(kind, lowercase)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.text(st.sampled_from(STRANGE) | st.characters(exclude_categories=["Cs"]), max_size=20)))
    def check(texts: list[str]) -> None:
        texts = [*(f"{text}x" for text in texts), "x"]  # trailing spaces belong to no word
        expected: Counter[str] = Counter()
        for text in texts:
            expected.update(
                word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
            )
        assert count_words(texts, backend) == expected

    check()


def test_words_of_many_batches_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pre_tokenizing_backend("bpe", False)
    whole = count_words(corpus(), backend)
    monkeypatch.setattr(word_counts, "_MAX_PIECES", 10)
    assert count_words(corpus(), backend) == whole
