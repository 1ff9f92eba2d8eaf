"""Byte-pair merges, for training the vocabularies of byte-level BPE and WordPiece."""

from __future__ import annotations

import heapq
from collections import defaultdict

# A pair of token ids is packed into one integer, which sorts as the pair does.
_SHIFT, _LOW = 32, 0xFFFFFFFF


def merge_pairs(
    words: dict[str, int], tokens: list[str], prefix: str, vocab_size: int, min_frequency: int
) -> list[tuple[str, str]]:
    """Repeatedly merge the most frequent pair of adjacent tokens; return the merges.

    New tokens are appended to `tokens` until there are `vocab_size`. Of equally frequent pairs, the
    one with lower ids is merged first. `prefix` marks tokens inside a word ("##" of WordPiece).
    """
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = _Pairs(words, ids, prefix, min_frequency)
    merges = []
    while len(tokens) < vocab_size:
        pair = pairs.pop_most_frequent()
        if pair is None:
            break
        left, right = pair >> _SHIFT, pair & _LOW
        text = tokens[left] + tokens[right].removeprefix(prefix)
        new = ids.setdefault(text, len(tokens))  # two pairs may spell the same token
        if new == len(tokens):
            tokens.append(text)
        merges.append((tokens[left], tokens[right]))
        pairs.merge(pair, new)
    return merges


class _Pairs:
    """The words as token ids, with the frequency of every pair of adjacent tokens."""

    def __init__(self, words: dict[str, int], ids: dict[str, int], prefix: str, min_frequency: int) -> None:
        self._words = [[ids[(prefix if i else "") + c] for i, c in enumerate(word)] for word in words]
        self._word_counts = list(words.values())
        self._min_frequency = min_frequency
        self._counts: defaultdict[int, int] = defaultdict(int)
        # Words that have contained the pair; a word may be listed twice.
        self._occurrences: defaultdict[int, list[int]] = defaultdict(list)
        for w, word in enumerate(self._words):
            for i in range(len(word) - 1):
                pair = word[i] << _SHIFT | word[i + 1]
                self._counts[pair] += self._word_counts[w]
                self._occurrences[pair].append(w)
        self._heap = [(-count, pair) for pair, count in self._counts.items() if count >= min_frequency]
        heapq.heapify(self._heap)

    def pop_most_frequent(self) -> int | None:
        """Remove and return the most frequent pair; None: all others are too rare."""
        while self._heap:
            count, pair = heapq.heappop(self._heap)
            current = self._counts[pair]
            if -count == current:
                return pair
            if current >= self._min_frequency:  # merges have made it rarer since it was pushed
                heapq.heappush(self._heap, (-current, pair))
        return None

    def merge(self, pair: int, new: int) -> None:
        """Replace the pair by the token `new` in all words, and update the frequencies."""
        left, right = pair >> _SHIFT, pair & _LOW
        changes: defaultdict[int, int] = defaultdict(int)
        for w in self._occurrences.pop(pair):
            word, count = self._words[w], self._word_counts[w]
            at = 0
            while at < len(word) - 1:
                if word[at] == left and word[at + 1] == right:
                    if at:
                        changes[word[at - 1] << _SHIFT | left] -= count
                        changes[before := word[at - 1] << _SHIFT | new] += count
                        self._occurrences[before].append(w)
                    if at + 2 < len(word):
                        changes[right << _SHIFT | word[at + 2]] -= count
                        changes[after := new << _SHIFT | word[at + 2]] += count
                        self._occurrences[after].append(w)
                    word[at : at + 2] = [new]
                at += 1
        for other, change in changes.items():
            self._counts[other] += change
            if change > 0 and self._counts[other] >= self._min_frequency:
                heapq.heappush(self._heap, (-self._counts[other], other))
        self._counts[pair] = 0
