"""Leave-one-out attribution: which words a classification depends on.

A text is classified again without each of its words (without groups of neighbouring words, if it has many). The weight
of a word is the decrease of the label's probability without it: positive weights support the label, negative ones
oppose it. Redundant words have low weights, because any one of them can be left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from bertie.errors import InputError
from bertie.pipeline.inputs import check_positive
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.tasks.results import AttributedPiece, AttributionResult

MAX_PIECES = 24  # maximum number of pieces of a text
_WORD = re.compile(r"\s*\S+\s*")

Text = str | tuple[str, str]


def split_pieces(text: str, most: int = MAX_PIECES) -> list[str]:
    """Split a text into words or, if there are too many, into groups of neighbouring words of equal size.

    >>> split_pieces("a rather good film"), split_pieces("a rather good film", most=2)
    (['a ', 'rather ', 'good ', 'film'], ['a rather ', 'good film'])
    """
    words = _WORD.findall(text) or [text]
    ends = np.linspace(0, len(words), min(most, len(words)) + 1).round().astype(int)
    return ["".join(words[a:b]) for a, b in pairwise(ends.tolist())]


def leave_one_out(text: Text, max_pieces: int = MAX_PIECES) -> tuple[list[Text], list[tuple[int, int, int, str]]]:
    """The text without each of its pieces, and the pieces: the text of a pair, start, end and content of each.

    >>> leave_one_out("a good film")
    (['good film', 'a film', 'a good '], [(0, 0, 2, 'a '), (0, 2, 7, 'good '), (0, 7, 11, 'film')])
    """
    sides = (text,) if isinstance(text, str) else text
    variants: list[Text] = []
    pieces = []
    for side, content in enumerate(sides):
        start = 0
        for words in split_pieces(content, max(1, max_pieces // len(sides))):
            end = start + len(words)
            shorter = content[:start] + content[end:]
            whole = [*sides]
            whole[side] = shorter if shorter.strip() else " "
            variants.append(whole[0] if len(whole) == 1 else (whole[0], whole[1]))
            pieces.append((side, start, end, words))
            start = end
    return variants, pieces


def attribute_each(
    classify: Callable[[list[Text]], Sequence[Any]],
    texts: Sequence[Text],
    labels: Sequence[str | None],
    max_pieces: int = MAX_PIECES,
) -> Iterator[AttributionResult]:
    """The weight of each piece of each text (or pair), for the label of the same index; None: the predicted one.

    `classify` returns a result with `label` and `scores` for each text.
    """
    check_positive(max_pieces=max_pieces)
    split = [leave_one_out(text, max_pieces) for text in texts]
    variants = [variant for text, (others, _) in zip(texts, split, strict=True) for variant in (text, *others)]
    results = iter(classify(variants))
    for label, (_, pieces) in zip(labels, split, strict=True):
        whole = next(results)
        label = whole.label if label is None else label
        if label not in whole.scores:
            raise InputError(f"label={label!r} must be one of {', '.join(map(repr, whole.scores))}")
        weighted = []
        for side, start, end, content in pieces:
            weight = whole.scores[label] - next(results).scores[label]
            weighted.append(AttributedPiece(content, start, end, weight, side))
        counts = {name: getattr(whole, name) for name in READ_COUNTS}
        yield AttributionResult(label, whole.scores[label], tuple(weighted), **counts)
