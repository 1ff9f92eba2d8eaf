"""Unigram training: EM by enumeration of all segmentations, and the quality of the vocabulary."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import trainers

from bertie.text import unigram_training
from bertie.text.tokenizer_training import (
    BRACKETS,
    pre_tokenizing_backend,
    train,
)
from tests.text.training_texts import corpus


def segmentations(text: str, ids: dict[str, int]) -> list[list[int]]:
    if not text:
        return [[]]
    return [
        [ids[text[:n]], *rest]
        for n in range(1, len(text) + 1)
        if text[:n] in ids
        for rest in segmentations(text[n:], ids)
    ]


def test_expected_counts_by_enumeration() -> None:
    rng = np.random.default_rng(0)
    ids = {piece: i for i, piece in enumerate(["a", "b", "c", "ab", "ba", "aba", "bc", "abc", "cab", "zz"])}
    probabilities = rng.random(len(ids))
    strings, counts = ["abcab", "a", "bababa", "ccc", "abc"], np.array([3.0, 1.0, 2.0, 5.0, 0.5])

    def check(
        keep: Any, ids: dict[str, int], probabilities: Any, forth: Any, back: Any, others: Any, names: list[str]
    ) -> None:
        expected = np.zeros(len(ids))
        for string, count in zip(strings, counts, strict=True):
            ways = segmentations(string, ids)
            weights = np.array([math.prod(probabilities[way]) for way in ways])
            for way, weight in zip(ways, weights / weights.sum(), strict=True):
                for piece in way:
                    expected[piece] += count * weight
        np.testing.assert_allclose(
            unigram_training._expected_counts(forth, back, counts, probabilities), expected, rtol=1e-12
        )
        best = others.reduce_paths(np.log(probabilities), np.maximum, np.add, 0.0, -np.inf)[others.last]
        for name, value in zip(names, best, strict=True):
            ways = [way for way in segmentations(name, ids) if len(way) > 1]
            assert value == pytest.approx(max((sum(np.log(probabilities[way])) for way in ways), default=-np.inf))

    forth = unigram_training._Lattice.build(strings, ids)
    back, others = forth.reverse(), unigram_training._Lattice.build(list(ids), ids, whole=False)
    check(None, ids, probabilities, forth, back, others, list(ids))
    keep = np.array([name not in ("ba", "abc") for name in ids])
    fewer = [name for name, kept in zip(ids, keep, strict=True) if kept]
    selected = (forth.select(keep), back.select(keep), others.select(keep, strings=keep))
    check(keep, {name: i for i, name in enumerate(fewer)}, probabilities[keep], *selected, fewer)


def test_digamma() -> None:
    assert unigram_training._digamma(np.array([0.5, 1.0, 100.0])) == pytest.approx(
        [-np.euler_gamma - 2 * math.log(2), -np.euler_gamma, sum(1 / n for n in range(1, 100)) - np.euler_gamma]
    )


def test_unigram_is_as_good_as_the_tokenizers_library() -> None:
    texts = [re.sub(r"[^\w\s]|\d", "", text) for text in corpus(texts=300)]
    backend = pre_tokenizing_backend("unigram", False)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(BRACKETS.values()), unk_token="[UNK]", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    theirs = sum(len(one) for one in backend.encode_batch(texts))
    ours = train(texts, "unigram", 300)
    assert ours.vocab_size == 300
    assert sum(len(one) for one in ours.encode_batch(texts, special=False)) < 1.03 * theirs


def test_pieces_do_not_mix_character_classes() -> None:
    texts = ["end. end, don't 2nd (end) e\u0323\u0323nd 12:30 ..."] * 5
    tokenizer = train(texts, "unigram", 100)
    pieces = [tokenizer.token(i).removeprefix("▁") for i in range(5, tokenizer.vocab_size)]
    assert {"end", "don", "12", "..."} <= set(pieces)
    assert all(re.fullmatch(r"[a-z\u0323ẹ]*|[0-9]*|[^a-z0-9]*", piece) for piece in pieces)
    assert tokenizer.unk_id not in tokenizer.encode(texts[0]).ids


def test_unigram_of_long_words_and_rare_letters() -> None:
    tokenizer = train(["a" * 5000, "zyx" * 40, "ab" * 30, "▁", "\0\0 \0"] * 2, "unigram", 40)
    assert tokenizer.unk_id not in tokenizer.encode("a" * 5000 + " zyx ab", special=False).ids
