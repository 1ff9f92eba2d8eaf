"""Groups of duplicates, in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import bertie
from bertie.tasks import deduplicate as module
from bertie.tasks.deduplicate import deduplicate, group_duplicates, semantic_duplicates

SENTENCE = "the quick brown fox jumps over the lazy dog while the old cat sleeps in the warm sun all day long"


def reference(vectors: np.ndarray[Any, Any], threshold: float) -> list[tuple[int, float] | None]:
    """Each vector in turn against all that were kept."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    kept: list[int] = []
    found: list[tuple[int, float] | None] = []
    for i in range(len(unit)):
        scores = {j: float(unit[i] @ unit[j]) for j in kept}
        best = max(scores, key=lambda j: scores[j], default=-1)
        if best >= 0 and scores[best] >= threshold:
            found.append((best, scores[best]))
        else:
            found.append(None)
            kept.append(i)
    return found


def test_exact_and_near() -> None:
    texts = [SENTENCE, "Stocks fell.", SENTENCE.upper() + "!", SENTENCE + " again", "stocks rose"]
    exact = deduplicate(texts, "exact")
    assert exact.kept == [0, 1, 3, 4]
    near = deduplicate(texts, "near")
    assert near.kept == [0, 1, 4]
    (group,) = near.groups
    assert [(item.index, item.of, item.kind) for item in group.duplicates] == [(2, 0, "exact"), (3, 0, "near")]
    assert group.duplicates[1].similarity == pytest.approx(18 / 19, abs=0.1)
    assert deduplicate(iter(texts), "near") == near


def test_lower_thresholds_and_shorter_shingles_find_more() -> None:
    words = SENTENCE.split()
    words[5], words[15] = "climbs", "hot"
    texts = [SENTENCE, " ".join(words)]  # 12 of 24 shingles of three words in common, 16 of 20 words
    assert not deduplicate(texts).groups
    assert deduplicate(texts, shingle_words=1, threshold=0.6).groups
    assert not deduplicate(texts, shingle_words=1, threshold=0.95).groups


def test_the_longest_is_kept() -> None:
    texts = [SENTENCE, SENTENCE + " long", SENTENCE + " again and"]
    first, longest = deduplicate(texts), deduplicate(texts, keep="longest")
    assert first.kept == [0]
    assert longest.kept == [2]
    (group,) = longest.groups
    similarity = {item.index: item.similarity for item in first.groups[0].duplicates}
    assert [(item.index, item.of, item.similarity) for item in group.duplicates] == [
        (0, 2, similarity[2]),
        (1, 0, similarity[1]),
    ]
    assert deduplicate(["a b!", "a  b"], keep="longest").kept == [0]


@pytest.mark.parametrize(("block", "tile"), [(4, 3), (512, 16384)])
def test_semantic_is_the_same_as_one_by_one(monkeypatch: pytest.MonkeyPatch, block: int, tile: int) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(module, "TILE", tile)
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(12, 8))
    vectors = (centres[draw.integers(12, size=60)] + 0.3 * draw.normal(size=(60, 8))).astype(np.float32)
    found = list(semantic_duplicates([f"text {i}" for i in range(60)], vectors, 0.9))
    expected = reference(vectors, 0.9)
    assert [None if item is None else item.of for item in found] == [item and item[0] for item in expected]
    assert sum(item is not None for item in found) > 10
    for item, pair in zip(found, expected, strict=True):
        if item is not None and pair is not None:
            assert item.kind == "semantic"
            assert item.similarity == pytest.approx(pair[1], abs=1e-5)


def test_a_copy_of_a_semantic_duplicate_belongs_to_its_group() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [1, 0.1], [0, 1]], np.float32)
    texts = ["a cat", "one cat", "stocks", "One cat.", "stocks!"]
    result = group_duplicates(semantic_duplicates(texts, vectors, 0.9), texts, "first")
    assert result.kept == [0, 2]
    assert [(item.index, item.of, item.kind) for group in result.groups for item in group.duplicates] == [
        (1, 0, "semantic"),
        (3, 0, "semantic"),
        (4, 2, "exact"),
    ]


def test_invalid_arguments() -> None:
    for arguments, message in (
        ({"method": "fuzzy"}, "method='fuzzy' must be one of exact, near, semantic"),
        ({"method": "near", "threshold": 0.3}, "threshold=0.3 must lie between 0.5 and 1"),
        ({"method": "semantic", "threshold": 1.1}, "threshold=1.1 must lie between 0 and 1"),
        ({"method": "exact", "threshold": 0.9}, "exact duplicates need none"),
        ({"keep": "last"}, "keep='last' must be first or longest"),
        ({"shingle_words": 9}, "shingle_words=9 must lie between 1 and 5"),
    ):
        with pytest.raises(bertie.InputError, match=message):
            deduplicate(["a"], **arguments)
    with pytest.raises(bertie.InputError, match="takes a list of texts, not str"):
        deduplicate("a")
    assert deduplicate([]).kept == []
    assert deduplicate([], "semantic").kept == []
