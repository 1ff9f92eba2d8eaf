"""Unigram vocabularies by SentencePiece's algorithm (Kudo, 2018).

Training starts from the frequent substrings. Each round fits the pieces' probabilities by two steps
of EM, then prunes the pieces whose removal reduces the likelihood of the texts least.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from bertie.text.legacy import METASPACE

MAX_PIECE_LENGTH = 16  # in characters, as in SentencePiece
_MAX_WORDS = 200_000  # only the most frequent words are used
_MAX_SPAN = 24  # maximum characters of a span, so that no product of probabilities underflows
_NATS_PER_CHARACTER = 2.5  # typical negative log-likelihood per character; scaling by it keeps products near 1
_PRUNING = 0.75  # share of the pieces that each round keeps, as in SentencePiece

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def train_unigram(
    words: dict[str, int], characters: set[str], reserved: Sequence[str], size: int, min_frequency: int
) -> list[tuple[str, float]]:
    """Train `size` pieces with their log-probabilities. Single `characters` are always kept.

    No piece is one of the `reserved` texts.
    """
    spans = _split_spans(words, characters)
    pieces, scores = _initial_pieces(spans, characters, reserved, 10 * size, min_frequency)
    counts = np.array(list(spans.values()), np.float64)
    ids = {piece: i for i, piece in enumerate(pieces)}
    forward = _Lattice.build(list(spans), ids)
    backward = forward.reverse()
    alternatives = _Lattice.build(list(pieces), ids, whole=False)  # segmentations of each piece into others
    step = 0
    while True:
        lengths = np.array([len(piece) for piece in pieces])
        expected = _expected_counts(forward, backward, counts, np.exp(scores + _NATS_PER_CHARACTER * lengths))
        scores = _log_probabilities(np.maximum(expected, 0.5))
        single = lengths == 1
        keep = (expected >= 0.5) | single
        step += 1
        if step % 2 == 0:
            if keep.sum() <= 1.1 * size:
                break
            best = alternatives.reduce_paths(scores, np.maximum, np.add, 0.0, -np.inf)[alternatives.last]
            loss = np.where(keep, expected, 0) * (scores - np.where(single, 0, best))
            loss[single] = np.inf
            remaining = max(int(1.1 * size), int(_PRUNING * keep.sum()))
            keep[np.argsort(-loss, kind="stable")[remaining:]] = False
        pieces, scores = pieces[keep], scores[keep]
        forward, backward = forward.select(keep), backward.select(keep)
        alternatives = alternatives.select(keep, strings=keep)
    order = sorted(np.flatnonzero(keep), key=lambda i: (len(pieces[i]) > 1, -scores[i], pieces[i]))[:size]
    # Sorted by score as SentencePiece does. Rounded, since the last digits depend on the processor.
    rounded = [(pieces[i], round(float(scores[i]), 6)) for i in order]
    return sorted(rounded, key=lambda item: (-item[1], item[0]))


def _initial_pieces(
    spans: dict[str, int], characters: set[str], reserved: Sequence[str], limit: int, min_frequency: int
) -> tuple[NDArray[np.object_], Floats]:
    """The characters and the substrings that cover most of the texts, with their first scores."""
    counts: Counter[str] = Counter()
    for span, count in spans.items():
        for i in range(len(span)):
            for j in range(i + 1, min(i + MAX_PIECE_LENGTH, len(span)) + 1):
                counts[span[i:j]] += count
    frequent = [piece for piece, n in counts.items() if n >= min_frequency and len(piece) > 1 and piece not in reserved]
    frequent.sort(key=lambda piece: (-counts[piece] * len(piece), piece))
    pieces = np.array([*sorted(characters), *frequent[:limit]], dtype=object)
    # 0: the character occurs only in words beyond _MAX_WORDS
    return pieces, _log_probabilities(np.array([counts[piece] or 0.5 for piece in pieces], np.float64))


def _split_spans(words: dict[str, int], characters: set[str]) -> dict[str, int]:
    """Split the most frequent words into spans of letters, digits or symbols, of limited length.

    No piece mixes these, as "end." would, and none has a character that is not in `characters`.
    """
    categories = {c: unicodedata.category(c)[0].replace("M", "L") for c in characters}  # marks go with their letters
    categories = {c: category if category in "LN" else "S" for c, category in categories.items()}
    spans: Counter[str] = Counter()
    for word in sorted(words, key=lambda word: (-words[word], word))[:_MAX_WORDS]:
        head = METASPACE if word[0] == METASPACE and METASPACE in characters else ""
        runs = groupby(word.removeprefix(head), categories.get)
        parts = ["".join(run) if category else "" for category, run in runs] or [""]
        parts[0] = head + parts[0]
        for part in parts:
            for i in range(0, len(part), _MAX_SPAN):
                spans[part[i : i + _MAX_SPAN]] += words[word]
    return spans


@dataclass(frozen=True, slots=True)
class _Lattice:
    """All segmentations of some strings. Nodes are the positions between characters, edges are pieces.

    The depth of an edge is the distance of its end from the start of its string. Edges are sorted
    by depth.
    """

    starts: Ints  # (E,)
    ends: Ints  # (E,)
    pieces: Ints  # (E,)
    depths: Ints  # (E,)
    first: Ints  # (N,) first node of each string
    last: Ints  # (N,)

    @classmethod
    def build(cls, strings: Sequence[str], ids: dict[str, int], *, whole: bool = True) -> _Lattice:
        """The lattice of strings; without `whole`, no edge spans a whole string."""
        first = np.cumsum([0, *(len(string) + 1 for string in strings)], dtype=np.int32)
        starts, pieces, lengths = array("i"), array("i"), array("b")
        for base, string in zip(first[:-1].tolist(), strings, strict=True):
            size = len(string)
            for i in range(size):
                for j in range(i + 1, min(i + MAX_PIECE_LENGTH, size) + 1):
                    piece = ids.get(string[i:j])
                    if piece is not None and (whole or j - i < size):
                        starts.append(base + i)
                        pieces.append(piece)
                        lengths.append(j - i)
        begins = np.array(starts, np.int32)
        ends = begins + np.array(lengths, np.int32)
        owner = np.searchsorted(first, begins, side="right") - 1
        return cls._sorted(begins, ends, np.array(pieces, np.int32), ends - first[owner], first[:-1], first[1:] - 1)

    @classmethod
    def _sorted(cls, starts: Ints, ends: Ints, pieces: Ints, depths: Ints, first: Ints, last: Ints) -> _Lattice:
        order = np.lexsort((ends, depths))
        return cls(starts[order], ends[order], pieces[order], depths[order], first, last)

    def reverse(self) -> _Lattice:
        """The same lattice, traversed from the end."""
        owner = np.searchsorted(self.first, self.starts, side="right") - 1
        return self._sorted(self.ends, self.starts, self.pieces, self.last[owner] - self.starts, self.last, self.first)

    def select(self, keep: NDArray[np.bool_], strings: NDArray[np.bool_] | None = None) -> _Lattice:
        """Keep some of the pieces, which are renumbered, and some of the strings."""
        edges = keep[self.pieces]
        first, last = self.first, self.last
        if strings is not None:
            edges &= strings[np.searchsorted(first, self.starts, side="right") - 1]
            first, last = first[strings], last[strings]
        renumbered = np.cumsum(keep, dtype=np.int32) - 1
        pieces = renumbered[self.pieces[edges]]
        return _Lattice(self.starts[edges], self.ends[edges], pieces, self.depths[edges], first, last)

    def reduce_paths(
        self, scores: Floats, reduce: np.ufunc, join: np.ufunc, start: float, unreachable: float
    ) -> Floats:
        """(nodes,) the reduced scores of all paths to each node: a sum (forward algorithm) or maximum (Viterbi)."""
        totals = np.full(max(self.first.max(), self.last.max()) + 1, unreachable)
        totals[self.first] = start
        if not len(self.ends):
            return totals
        # (E,) -> one group of edges per node, one run of groups per depth
        groups = np.flatnonzero(np.r_[True, np.diff(self.ends) != 0])
        runs = np.flatnonzero(np.r_[True, np.diff(self.depths[groups]) != 0]).tolist()
        for a, b in pairwise([*runs, len(groups)]):
            low, high = groups[a], groups[b] if b < len(groups) else len(self.ends)
            paths = join(totals[self.starts[low:high]], scores[self.pieces[low:high]])
            totals[self.ends[groups[a:b]]] = reduce.reduceat(paths, groups[a:b] - low)
        return totals


def _expected_counts(forward: _Lattice, backward: _Lattice, counts: Floats, probabilities: Floats) -> Floats:
    """(P,) the expected count of each piece over all segmentations of the texts: the E-step of EM."""
    before = forward.reduce_paths(probabilities, np.add, np.multiply, 1.0, 0.0)
    after = backward.reduce_paths(probabilities, np.add, np.multiply, 1.0, 0.0)
    weights = np.repeat(counts / before[forward.last], forward.last - forward.first + 1)  # (nodes,)
    posterior = before[forward.starts] * after[forward.ends] * weights[forward.starts] * probabilities[forward.pieces]
    return np.bincount(forward.pieces, posterior, len(probabilities)).astype(np.float64)


def _log_probabilities(counts: Floats) -> Floats:
    """Log-probabilities, slightly lower for rare pieces: SentencePiece's sparse Dirichlet prior."""
    return _digamma(counts) - float(_digamma(counts.sum(keepdims=True))[0])


def _digamma(x: Floats) -> Floats:
    shift = sum(1 / (x + i) for i in range(7))  # the asymptotic series needs x >= 7
    x = x + 7
    return np.asarray(np.log(x) - 1 / (2 * x) - x**-2 / 12 + x**-4 / 120 - x**-6 / 252 - shift)
