"""Deduplicate texts: exact, near and semantic duplicates.

A text is a duplicate of the most similar earlier text that is not a duplicate itself, if it is similar enough. So every
text of a group is similar to the first text of the group: groups do not grow by chains of texts that each differ a
little from the one before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Literal

import numpy as np

from bertie.arguments import explain_arguments
from bertie.data.dedup import LOWEST_SIMILARITY, MIN_SIMILARITY, Deduplicator, Duplicate
from bertie.data.normalize import normalize_words
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder
from bertie.tasks.neighbours import to_unit

Method = Literal["exact", "near", "semantic"]
Keep = Literal["first", "longest"]
METHODS, KEEP = ("exact", "near", "semantic"), ("first", "longest")
MIN_COSINE = 0.95
SHINGLE = 3  # words; texts are often shorter than the documents of a corpus
MEMORY = 4 << 30
BLOCK, TILE = 512, 16384  # rows and columns of a block of similarities


@dataclass(frozen=True, slots=True)
class DuplicateText:
    """A text to remove, the text of its group that it was compared with, and their similarity."""

    index: int
    of: int
    kind: Method
    similarity: float  # 1 (exact), estimated Jaccard similarity of shingles (near), cosine (semantic)


@dataclass(frozen=True, slots=True)
class DuplicateGroup:
    """A group of duplicates, of which one text is kept."""

    kept: int
    duplicates: tuple[DuplicateText, ...]


@dataclass(frozen=True, slots=True)
class Deduplication:
    """Groups of duplicates among `count` texts, which are numbered from 0."""

    count: int
    groups: tuple[DuplicateGroup, ...]

    @property
    def removed(self) -> set[int]:
        """Indices of the texts to remove."""
        return {duplicate.index for group in self.groups for duplicate in group.duplicates}

    @property
    def kept(self) -> list[int]:
        """Indices of the texts to keep, in order."""
        removed = self.removed
        return [index for index in range(self.count) if index not in removed]


@explain_arguments
def deduplicate(
    texts: Iterable[str],
    method: Method = "near",
    *,
    keep: Keep = "first",
    threshold: float | None = None,
    shingle_words: int = SHINGLE,
    embedder: Embedder | None = None,
) -> Deduplication:
    """Find groups of duplicates, and which text of each to keep.

    Args:
        method: "exact" (the same words, ignoring case and punctuation), "near" (also nearly the same words:
            Jaccard similarity of their shingles by MinHash) or "semantic" (also the same meaning: cosine similarity
            of embeddings).
        keep: which text of a group to keep: the "first" or the "longest".
        threshold: the minimum similarity of duplicates (default: 0.8 for near, 0.95 for semantic).
        shingle_words: words per shingle, 1 to 5.
        embedder: for semantic duplicates; by default the built-in model.

    >>> result = deduplicate(["A cat sat.", "Stocks fell.", "a CAT sat"], "exact")
    >>> result.kept
    [0, 1]
    >>> result.groups
    (DuplicateGroup(kept=0, duplicates=(DuplicateText(index=2, of=0, kind='exact', similarity=1.0),)),)
    """
    check_options(method, threshold, shingle_words)
    if keep not in KEEP:
        raise InputError(f"keep={keep!r} must be {' or '.join(KEEP)}")
    first, second = tee(check_list(texts, "deduplicate"))
    if method == "semantic":
        texts = list(first)
        vectors = (embedder or Embedder()).embed(texts) if texts else np.zeros((0, 1), np.float32)
        return group_duplicates(semantic_duplicates(texts, vectors, threshold), texts, keep)
    return group_duplicates(word_duplicates(first, method, threshold, shingle_words=shingle_words), second, keep)


def check_options(method: str, threshold: float | None, shingle_words: int) -> None:
    """Refuse unknown methods, and thresholds outside of their range."""
    if method not in METHODS:
        raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")
    if threshold is not None and method == "exact":
        raise InputError(f"threshold={threshold} is for method='near' or 'semantic': exact duplicates need none")
    lowest = LOWEST_SIMILARITY if method == "near" else 0
    if threshold is not None and not lowest <= threshold <= 1:
        raise InputError(f"threshold={threshold} must lie between {lowest} and 1")
    if not 1 <= shingle_words <= 5:
        raise InputError(f"shingle_words={shingle_words} must lie between 1 and 5")


def word_duplicates(
    texts: Iterable[str],
    method: Literal["exact", "near"],
    threshold: float | None = None,
    *,
    shingle_words: int = SHINGLE,
    memory: int = MEMORY,
) -> Iterator[Duplicate | None]:
    """Find each text's duplicate among earlier texts, by its words. Holds hashes of the unique texts only."""
    similarity = MIN_SIMILARITY if threshold is None else threshold
    known = Deduplicator(method, memory, min_similarity=similarity, shingle_words=shingle_words)
    return (known.check(normalize_words(text), number) for number, text in enumerate(texts))


def semantic_duplicates(
    texts: Iterable[str], vectors: FloatArray, threshold: float | None = None
) -> Iterator[Duplicate | None]:
    """Find each text's duplicate among earlier texts, by its embedding. Holds the embeddings of unique texts."""
    threshold = MIN_COSINE if threshold is None else threshold
    exact = Deduplicator("exact", 1 << 60)
    removed: dict[int, Duplicate] = {}
    unique, rows = np.empty_like(vectors, dtype=np.float32), np.empty(len(vectors), np.int64)
    count = 0  # of unique texts
    for number, text in enumerate(texts):
        if number % BLOCK == 0:
            block = to_unit(vectors[number : number + BLOCK])
            before = count
            best, nearest = _nearest(block, unique[:before])
        i = number % BLOCK
        duplicate = exact.check(normalize_words(text), number)
        if duplicate is not None:  # of a text that may itself be a duplicate
            duplicate = removed.get(duplicate.of, duplicate)
        else:
            score, of = float(best[i]), int(nearest[i])
            if count > before:
                inside = unique[before:count] @ block[i]
                if (top := int(inside.argmax())) >= 0 and inside[top] > score:
                    score, of = float(inside[top]), before + top
            if score >= threshold:
                duplicate = Duplicate("semantic", int(rows[of]), min(1.0, score))
        if duplicate is None:
            unique[count], rows[count] = block[i], number
            count += 1
        else:
            removed[number] = duplicate
        yield duplicate


def _nearest(block: FloatArray, known: FloatArray) -> tuple[FloatArray, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The highest cosine similarity of each row with the known ones, and which one has it."""
    best, nearest = np.full(len(block), -np.inf, np.float32), np.zeros(len(block), np.int64)
    for start in range(0, len(known), TILE):
        scores = block @ known[start : start + TILE].T
        top = scores.argmax(1)
        highest = np.take_along_axis(scores, top[:, None], 1)[:, 0]
        better = highest > best
        best[better], nearest[better] = highest[better], start + top[better]
    return best, nearest


def group_duplicates(duplicates: Iterable[Duplicate | None], texts: Iterable[str], keep: Keep) -> Deduplication:
    """Collect groups, and choose the text of each that is kept."""
    members: dict[int, list[DuplicateText]] = {}
    lengths = array("q")
    count = 0
    for text, duplicate in zip(texts, duplicates, strict=True):
        if keep == "longest":
            lengths.append(len(text))
        if duplicate is not None:
            member = DuplicateText(count, duplicate.of, duplicate.kind, duplicate.similarity)
            members.setdefault(duplicate.of, []).append(member)
        count += 1
    choose = partial(_longest, lengths=lengths) if keep == "longest" else DuplicateGroup
    return Deduplication(count, tuple(choose(first, tuple(members[first])) for first in sorted(members)))


def _longest(first: int, duplicates: tuple[DuplicateText, ...], lengths: array[int]) -> DuplicateGroup:
    """The group with its longest text kept; the first one of equally long ones."""
    longest = max(duplicates, key=lambda duplicate: lengths[duplicate.index])
    if lengths[longest.index] <= lengths[first]:
        return DuplicateGroup(first, duplicates)
    others = tuple(duplicate for duplicate in duplicates if duplicate is not longest)
    return DuplicateGroup(longest.index, (replace(longest, index=first, of=longest.index), *others))
