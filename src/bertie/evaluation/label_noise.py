"""Likely label errors, found by confident learning (Northcutt, Jiang and Chuang, 2021).

A gold label is flagged where the model's probability of it is below the average for that label, and
the probability of another label is at least the average for that other label.

The result ranks what to review first. It cannot tell a wrong label from a hard text on which the model
errs, it misses errors that the model makes as well, and it is only valid for texts that the model was
not trained on. Do not relabel or drop flagged texts without reading them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError


@dataclass(frozen=True, slots=True)
class LabelIssue:
    """A text whose gold label is likely to be wrong."""

    index: int  # of the text
    given: int  # its gold label
    likely: int  # the label suggested by the model
    given_probability: float
    likely_probability: float

    @property
    def margin(self) -> float:
        """Probability of the suggested label minus that of the gold label."""
        return self.likely_probability - self.given_probability


def find_label_issues(gold_index: ArrayLike, probabilities: ArrayLike, most: int = 50) -> list[LabelIssue]:
    """Find at most `most` likely label errors, by descending margin.

    `gold_index` is (n,), `probabilities` (n, k) of held-out texts. The threshold of a label is its mean
    probability over the texts that have it.

    >>> probabilities = [[0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.1, 0.9], [0.1, 0.9]]
    >>> [issue.index for issue in find_label_issues([0, 0, 1, 1, 1], probabilities)]
    [1]
    """
    gold, table = np.asarray(gold_index, dtype=np.int64), np.asarray(probabilities, dtype=np.float64)
    if table.ndim != 2 or gold.shape != table.shape[:1]:
        raise InputError(f"probabilities has shape {table.shape}; {gold.size} gold labels need ({gold.size}, labels)")
    n, k = table.shape
    if n and (gold.min() < 0 or gold.max() >= k):
        raise InputError(f"gold_index must hold indices from 0 to {k - 1}")
    own = table[np.arange(n), gold]
    support = np.bincount(gold, minlength=k)
    # A label that no text has is never suggested.
    thresholds = np.where(support > 0, np.bincount(gold, weights=own, minlength=k) / np.maximum(support, 1), np.inf)
    others = np.where(table >= thresholds - 1e-9, table, -np.inf)  # (n, k); the mean of equal values may be rounded up
    others[np.arange(n), gold] = -np.inf
    likely = others.argmax(axis=1)
    margin = others[np.arange(n), likely] - own
    flagged = np.flatnonzero((own < thresholds[gold]) & (margin > 0))
    flagged = flagged[np.argsort(-margin[flagged], kind="stable")][:most]
    return [
        LabelIssue(int(i), int(gold[i]), int(likely[i]), float(own[i]), float(table[i, likely[i]])) for i in flagged
    ]
