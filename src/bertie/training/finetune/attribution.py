"""Which words decided a classification: leave-one-out attribution.

A text is classified once more without each of its words (without groups of neighbouring words, if it has many). The
weight of a word is by how much the probability of the predicted label falls without it: positive weights spoke for
the prediction, negative ones against it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bertie.tasks.classify import Classifier, Text

MOST_PIECES = 24  # that a text is split into
_WORD = re.compile(r"\s*\S+\s*")

Attribution = list[tuple[str, float]]  # the pieces of the text, with their weights


def split_pieces(text: str, most: int = MOST_PIECES) -> list[str]:
    """Split a text into words or, if there are too many, into groups of neighbouring words of equal size.

    >>> split_pieces("a rather good film"), split_pieces("a rather good film", most=2)
    (['a ', 'rather ', 'good ', 'film'], ['a rather ', 'good film'])
    """
    words = _WORD.findall(text) or [text]
    ends = np.linspace(0, len(words), min(most, len(words)) + 1).round().astype(int)
    return ["".join(words[a:b]) for a, b in pairwise(ends.tolist())]


def attribute(classifier: Classifier, texts: Sequence[Text], labels: Sequence[str]) -> list[Attribution]:
    """The weight of each piece of each text (or pair) for the label of the same index."""
    sides = [(text,) if isinstance(text, str) else text for text in texts]
    pieces = [[split_pieces(side, MOST_PIECES // len(text)) for side in text] for text in sides]
    variants: list[Text] = []
    for text, parts in zip(texts, pieces, strict=True):
        variants.append(text)
        for side, words in enumerate(parts):
            for i in range(len(words)):
                shorter = "".join([*words[:i], *words[i + 1 :]])
                whole = ["".join(other) for other in parts]
                whole[side] = shorter if shorter.strip() else " "
                variants.append(whole[0] if len(whole) == 1 else (whole[0], whole[1]))
    results = iter(classifier.classify(variants))
    attributions = []
    for label, parts in zip(labels, pieces, strict=True):
        whole_score = next(results).scores[label]
        weighted: Attribution = []
        for side, words in enumerate(parts):
            weighted += [("\n", 0.0)] if side else []
            weighted += [(word, whole_score - next(results).scores[label]) for word in words]
        attributions.append(weighted)
    return attributions
