"""BPE merges: equal to the tokenizers library and to a plain loop."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import models, pre_tokenizers, trainers

from bertie.text.tokenizer_training import (
    BRACKETS,
    pre_tokenizing_backend,
    train,
)
from bertie.text.word_counts import count_words
from tests.text.training_texts import corpus


@pytest.mark.parametrize("min_frequency", [1, 2, 7])
def test_bpe_equals_the_tokenizers_library(min_frequency: int) -> None:
    texts = [*corpus(), "aaaa aaaaa aaa banana bananana"]
    backend = pre_tokenizing_backend("bpe", False)
    special = list(BRACKETS.values())
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    theirs = json.loads(backend.to_str())["model"]
    ours = json.loads(train(texts, "bpe", 500, min_frequency=min_frequency).files()["tokenizer.json"])["model"]
    assert ours["merges"] == theirs["merges"]
    assert ours["vocab"] == theirs["vocab"]


def test_wordpiece_equals_a_plain_loop() -> None:
    texts, size = corpus(texts=60), 230
    backend = pre_tokenizing_backend("wordpiece", True)
    counts = count_words(texts, backend)
    letters = sorted({c for word in counts for c in word if sum(w.count(c) * n for w, n in counts.items()) >= 2})
    counts = {word: n for word, n in counts.items() if set(word) <= set(letters)}
    inside = sorted({f"##{c}" for word in counts for c in word[1:]})
    tokens = [*BRACKETS.values(), *letters, *inside]
    words = {word: [word[0], *(f"##{c}" for c in word[1:])] for word in counts}
    while len(tokens) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        left, right = min(pairs, key=lambda pair: (-pairs[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        new = left + right[2:]
        if new not in tokens:
            tokens.append(new)
        for pieces in words.values():
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == (left, right):
                    pieces[i : i + 2] = [new]
                i += 1
    tokenizer = train(texts, vocab_size=size)
    assert [tokenizer.token(i) for i in range(tokenizer.vocab_size)] == tokens


def test_wordpiece_resembles_the_tokenizers_library() -> None:
    texts = corpus()
    backend = pre_tokenizing_backend("wordpiece", True)
    backend.model = models.WordPiece(unk_token="[UNK]")
    special = list(BRACKETS.values())
    trainer = trainers.WordPieceTrainer(vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    ours = train(texts, vocab_size=400)
    both = backend.get_vocab().keys() & {ours.token(i) for i in range(400)}
    assert len(both) >= 380  # its ties are broken at random
