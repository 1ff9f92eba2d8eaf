from __future__ import annotations

import random

import numpy as np
import pytest

from bertie.tasks.span_decoding import ScoredSpan, candidates, is_best_window, select_spans


def random_spans(seed: int, words: int = 30, width: int = 5) -> list[ScoredSpan]:
    draw = random.Random(seed)
    spans = []
    for _ in range(80):
        start = draw.randrange(words)
        end = min(words - 1, start + draw.randrange(width))
        spans.append(ScoredSpan(start, end, draw.randrange(3), draw.random()))
    return list({span[:3]: span for span in spans}.values())


def brute_force(spans: list[ScoredSpan], flat: bool, multi_label: bool) -> list[ScoredSpan]:
    """By sets of words."""
    chosen: list[ScoredSpan] = []
    for span in sorted(spans, key=lambda span: -span.score):
        own = set(range(span.start, span.end + 1))
        allowed = True
        for other in chosen:
            words = set(range(other.start, other.end + 1))
            if words == own:
                allowed &= multi_label
            elif words & own:
                allowed &= not flat and (words <= own or own <= words)
        if allowed:
            chosen.append(span)
    return sorted(chosen, key=lambda span: span.start)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("multi_label", [True, False])
def test_choosing_equals_brute_force(flat: bool, multi_label: bool) -> None:
    for seed in range(20):
        spans = random_spans(seed)
        ours = select_spans(spans, 5, flat=flat, multi_label=multi_label)
        assert ours == brute_force(spans, flat, multi_label)


def test_equal_scores_are_decided_by_place() -> None:
    spans = [ScoredSpan(1, 2, 0, 0.9), ScoredSpan(0, 1, 1, 0.9), ScoredSpan(0, 1, 0, 0.9)]
    for order in (spans, spans[::-1]):
        assert select_spans(order, 4, flat=True, multi_label=False) == [ScoredSpan(0, 1, 0, 0.9)]


def test_candidates_are_above_the_threshold() -> None:
    scores = np.array([[0.5, 0.6], [0.4, 0.5]], np.float32)
    bounds = np.array([[3, 3], [3, 4]])
    assert candidates(scores, bounds, 0.5) == [ScoredSpan(3, 3, 1, float(np.float32(0.6)))]
    assert candidates(scores[:0], bounds[:0], 0.5) == []


def test_each_span_belongs_to_the_window_with_most_context() -> None:
    windows = [(2, 12), (8, 20), (16, 22)]  # of a text from token 2 to 21
    spans = np.array([(first, first + width) for first in range(2, 21) for width in range(min(3, 22 - first))])
    owned = [is_best_window(spans, windows, number) for number in range(3)]
    for i, (first, last) in enumerate(spans.tolist()):
        context = {
            n: min(first - start if start > 2 else 99, end - 1 - last if end < 22 else 99)
            for n, (start, end) in enumerate(windows)
            if start <= first and last < end
        }
        assert [bool(own[i]) for own in owned].index(True) == max(context, key=lambda n: context[n])
        assert sum(own[i] for own in owned) == 1
