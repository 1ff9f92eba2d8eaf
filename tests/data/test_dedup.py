"""Exact and near-duplicate detection."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bertie.data import dedup
from bertie.data.dedup import Deduplicator, minhash_signature
from bertie.data.normalize import normalize_words
from bertie.errors import InputError


def runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)


def edited(words: list[str], edits: int, draw: random.Random) -> list[str]:
    words = list(words)
    for i in draw.sample(range(len(words)), edits):
        words[i] = f"new{draw.random()}"
    return words


def test_signatures_estimate_jaccard() -> None:
    draw = random.Random(0)
    errors = []
    for edits in (0, 1, 2, 5, 10, 20, 40) * 20:
        a = [f"w{draw.randrange(5000)}" for _ in range(200)]
        b = edited(a, edits, draw)
        true = jaccard(runs(a), runs(b))
        estimate = float((minhash_signature(" ".join(a).encode()) == minhash_signature(" ".join(b).encode())).mean())
        errors.append((estimate - true) / max(np.sqrt(true * (1 - true) / dedup.HASHES), 1e-9))
        if edits == 0:
            assert estimate == 1.0
    spread = np.array(errors)
    assert np.abs(spread).max() < 5
    assert abs(spread.mean()) < 5 / np.sqrt(len(spread))
    assert 0.7 < spread[spread != 0].std() < 1.3


@pytest.mark.parametrize("block", [4, 4096])
def test_near_copies_are_found(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """By comparing each with each. The same are found when all lie in sorted arrays."""
    monkeypatch.setattr(dedup, "BLOCK", block)
    draw = random.Random(1)
    documents: list[list[str]] = []
    for _ in range(120):
        new = [f"w{draw.randrange(3000)}" for _ in range(draw.randint(100, 200))]
        documents += [new, edited(draw.choice(documents or [new]), draw.choice([1, 1, 7, 8, 30]), draw)]
    copies = Deduplicator("near")
    kept: list[int] = []
    sure = 0
    shingles = [runs(words) for words in documents]
    for i, words in enumerate(documents):
        near = {j: jaccard(shingles[i], shingles[j]) for j in kept}
        result = copies.check(" ".join(words), i)
        best = max(near.values(), default=0.0)
        if best > 0.9:
            sure += 1
            assert result is not None
        if best < 0.65:
            assert result is None
        if result is None:
            kept.append(i)
        else:
            assert result.kind == "near"
            assert result.of in kept
            assert result.similarity == pytest.approx(near[result.of], abs=0.15)
    assert sure > 20
    assert len(kept) > 80


def test_exact_copies() -> None:
    output = ["Ba da.", "ba DA", "ba  da!", "da ba", "…", "—", "कि", "का"]
    kinds = [Deduplicator("exact")] * len(output)
    result = [
        copies.check(normalize_words(text), i) for i, (copies, text) in enumerate(zip(kinds, output, strict=True))
    ]
    assert [one.of if one else None for one in result] == [None, 0, 0, None, None, None, None, None]
    none = Deduplicator("none")
    assert [none.check("ba", i) for i in range(2)] == [None, None]


def test_copies_take_no_more_memory_than_allowed() -> None:
    copies = Deduplicator("near", memory=10 * dedup.NEAR_BYTES)
    for i in range(10):
        assert copies.check(f"document {i}", i) is None
    assert copies.check("document 3", 10) is not None
    with pytest.raises(InputError, match="use exact deduplication"):
        copies.check("one more", 11)
