"""Choose spans of words by their scores: none may overlap, or only nested ones, with one label each or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bertie.pipeline.outputs import FloatArray
from bertie.text.encoding import IntArray


class ScoredSpan(NamedTuple):
    """A span of words, both ends included, with a label's index."""

    start: int
    end: int
    label: int
    score: float


def best_windows(first: IntArray, last: IntArray, bounds: Sequence[tuple[int, int]], total: int) -> IntArray:
    """(N,) the window in which each span of tokens has the most context on both sides.

    `first` and `last` are tokens of the text, `bounds` the first token of each window and the one after its last;
    `total` is the number of the text's tokens. The ends of a text do not count as a lack of context.

    >>> best_windows(np.array([1, 6, 9]), np.array([2, 7, 9]), [(0, 8), (5, 12)], 12).tolist()
    [0, 1, 1]
    """
    context = np.full((len(bounds), len(first)), -1, np.int64)
    for number, (start, end) in enumerate(bounds):
        before = np.full(len(first), total) if start == 0 else first - start
        after = np.full(len(last), total) if end == total else end - 1 - last
        context[number] = np.where((first >= start) & (last < end), np.minimum(before, after), -1)
    best: IntArray = context.argmax(0)
    return best


def candidates(scores: FloatArray, bounds: IntArray, threshold: float) -> list[ScoredSpan]:
    """All spans and labels whose score is above the threshold; `scores` are (S, C), `bounds` (S, 2) in words."""
    spans, labels = np.nonzero(scores > threshold)
    values = scores[spans, labels].tolist()
    starts, ends = bounds[spans].T.tolist()
    return [ScoredSpan(*row) for row in zip(starts, ends, labels.tolist(), values, strict=True)]


def select_spans(
    spans: Sequence[ScoredSpan],
    max_width: int,
    *,
    flat: bool,
    multi_label: bool,
    check: Callable[[int], None] = lambda number: None,
) -> list[ScoredSpan]:
    """Take spans from the highest score down, as far as they agree with those taken before; sorted by start.

    `flat`: no two spans overlap; else one may lie inside another. `multi_label`: a span may have several labels.
    `check` is called with the number of each span. Spans have at most `max_width` words.

    >>> spans = [ScoredSpan(0, 1, 0, 0.9), ScoredSpan(1, 1, 1, 0.8), ScoredSpan(1, 2, 0, 0.7)]
    >>> [len(select_spans(spans, 12, flat=flat, multi_label=False)) for flat in (True, False)]
    [1, 2]
    """
    # Of equal scores, the first in the text, the shorter one, and the first label.
    order = sorted(sorted(spans), key=lambda span: -span.score)
    chosen: list[ScoredSpan] = []
    ends: dict[int, set[int]] = {}  # of the spans taken, by start
    for number, span in enumerate(order):
        check(number)
        near = (
            (start, end) for start in range(span.start - max_width + 1, span.end + 1) for end in ends.get(start, ())
        )
        if not any(_conflict((span.start, span.end), other, flat, multi_label) for other in near):
            chosen.append(span)
            ends.setdefault(span.start, set()).add(span.end)
    return sorted(chosen, key=lambda span: span.start)


def _conflict(span: tuple[int, int], other: tuple[int, int], flat: bool, multi_label: bool) -> bool:
    if span == other:
        return not multi_label
    if span[0] > other[1] or other[0] > span[1]:
        return False
    nested = (span[0] <= other[0] and other[1] <= span[1]) or (other[0] <= span[0] and span[1] <= other[1])
    return flat or not nested
