"""Sentences, words, samples and lexical search."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Generic, TypeVar

from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import BM25Index

T = TypeVar("T")

# A full stop does not end a sentence after a title, an initial or a similar abbreviation.
SHORT = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Col|Lt|Capt|Sgt|Rev|Gov|Sen|No|vs|ca|cf|Inc|Ltd|Co|Vol)\.$"
)
END = re.compile(r"(?<=[.!?])([\"'”’)]*)\s+(?=[\"'“‘(]?[A-Z0-9])")


class Sample(Generic[T]):
    """Uniform sample of a stream (reservoir sampling)."""

    def __init__(self, size: int, draw: random.Random) -> None:
        self.size, self.draw, self.count, self.kept = size, draw, 0, list[T]()

    def take(self, item: T) -> None:
        """Add the next element of the stream."""
        self.count += 1
        if len(self.kept) < self.size:
            self.kept.append(item)
        elif (place := int(self.draw.random() * self.count)) < self.size:
            self.kept[place] = item


def split(line: str) -> Iterator[str]:
    """Split a paragraph into sentences by simple rules.

    >>> list(split('Dr. Smith came. "Why?" he said. J. Doe left.'))
    ['Dr. Smith came.', '"Why?" he said.', 'J. Doe left.']
    """
    start = 0
    for end in END.finditer(line):
        if not end[1] and SHORT.search(line, start, end.start()):
            continue
        yield line[start : end.end(1)]
        start = end.end()
    if start < len(line):
        yield line[start:]


def shorten(text: str, words: int) -> str:
    """The first sentences of a text, up to a number of words; one sentence at least.

    >>> shorten("One two three. Four five. Six.", 5)
    'One two three. Four five.'
    """
    kept: list[str] = []
    for sentence in split(text):
        if kept and len(" ".join([*kept, sentence]).split()) > words:
            break
        kept.append(sentence)
    return " ".join(kept)


def detokenize(tokens: Sequence[str]) -> str:
    """Detokenize: join tokens approximately as they are written.

    >>> detokenize(["Hello", ",", "(", "he", "said", ")", "it", "'s", "me", "."])
    "Hello, (he said) it's me."
    """
    text = re.sub(r"\s*(?:''|``|''')\s*", " ", " ".join(tokens))
    text = re.sub(r" (?=[,.;:!?)\]%])|(?<=[(\[]) ", "", text)
    return re.sub(r" (n't|'(?:s|re|ve|m|ll|d)\b)", r"\1", text)


@cache
def analyzer() -> Analyzer:
    """The analyzer of `bertie search`."""
    return Analyzer()


class KeywordQueries:
    """Queries of 2 to 6 words as users type them: words of a passage that are neither unique nor common."""

    def __init__(self, passages: Iterable[str], draw: random.Random) -> None:
        self.draw, self.counts = draw, Counter[str]()
        number = 0
        for passage in passages:
            self.counts.update(set(analyzer().terms(passage)))
            number += 1
        self.limit = max(2, number // 30)  # a word of more passages is common

    def of(self, passage: str) -> str:
        """A query for a passage, "" if it has too few words: half are words next to each other, half rare ones."""
        words = re.findall(r"[^\W\d_](?:[\w'’-]*\w)?|\d{4}", passage)
        terms = [analyzer().term(word) for word in words]
        content = [place for place, term in enumerate(terms) if term and 2 <= self.counts[term] <= self.limit]
        if len(content) < 6:
            return ""
        if self.draw.random() < 0.5:
            start = self.draw.randrange(len(content) - 3)
            near = [place for place in content[start : start + 4] if place < content[start] + 6]
            if len(near) > 1:
                return " ".join(words[near[0] : near[-1] + 1]).lower()
        rarest = sorted(
            {terms[place]: place for place in content}.values(), key=lambda place: self.counts[terms[place]]
        )
        chosen = self.draw.sample(rarest[:10], min(self.draw.randint(2, 5), len(rarest)))
        return " ".join(words[place] for place in sorted(chosen)).lower()


class Pool:
    """Passages that BM25 searches."""

    def __init__(self, passages: Iterable[str]) -> None:
        self.passages = list(dict.fromkeys(passages))
        self._places = {passage: place for place, passage in enumerate(self.passages)}
        self._index = BM25Index.build(enumerate(self.passages), analyzer())

    def candidates(self, query: str, own: str, count: int, below: float = 1.0) -> list[str]:
        """The best passages for a query besides its own; those above a fraction of its score may be right too."""
        keys, scores = self._index.search(query, count + 10)
        found = dict(zip(keys.tolist(), scores.tolist(), strict=True))
        limit = below * found.get(self._places.get(own, -1), float("inf"))
        return [
            self.passages[place] for place, score in found.items() if score <= limit and self.passages[place] != own
        ][:count]
