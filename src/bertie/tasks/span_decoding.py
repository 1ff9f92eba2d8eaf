"""Select spans of words by score: flat or nested, with one label or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from bertie.pipeline.outputs import FloatArray
from bertie.text.encoding import IntArray
from bertie.text.windows import BoolArray


class ScoredSpan(NamedTuple):
    """A span of words, both ends included, with a label's index."""

    start: int
    end: int
    label: int
    score: float


def is_best_window(spans: IntArray, windows: Sequence[tuple[int, int]], number: int) -> BoolArray:
    """(N,) whether each span has more context in this window than in those that overlap it.

    `spans` (N, 2) are the first and last token of each, `windows` the first token of each window and the one after its
    last, in the order of the text. The ends of the text do not count as a lack of context; the first of equals wins.

    >>> windows = [(0, 8), (5, 12)]
    >>> is_best_window(np.array([[1, 2], [6, 7]]), windows, 0).tolist(), is_best_window(np.array([[6, 7]]), windows, 1)
    ([True, False], array([ True]))
    """
    best = _context(spans, windows, number)
    own = best >= 0
    for other in range(number - 1, -1, -1):
        if windows[other][1] <= windows[number][0]:
            break
        own &= _context(spans, windows, other) < best
    for other in range(number + 1, len(windows)):
        if windows[other][0] >= windows[number][1]:
            break
        own &= _context(spans, windows, other) <= best
    return own


def _context(spans: IntArray, windows: Sequence[tuple[int, int]], number: int) -> IntArray:
    """(N,) tokens of context on the side where a window has fewer; -1 for spans that are not in it."""
    (start, end), most = windows[number], windows[-1][1]
    first, last = spans[:, 0], spans[:, 1]
    before = first - start if start > windows[0][0] else np.full(len(spans), most)
    after = end - 1 - last if end < most else np.full(len(spans), most)
    context: IntArray = np.where((first >= start) & (last < end), np.minimum(before, after), -1)
    return context


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
    """Select spans greedily by score, skipping those that conflict with a selected one; sorted by start.

    `flat`: spans do not overlap; otherwise they may be nested. `multi_label`: a span may have several labels.
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
