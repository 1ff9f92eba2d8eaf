"""Gold labels that may be wrong, found by what a model says of texts that it was not trained on.

After confident learning (Northcutt, Jiang and Chuang, 2021): a label is suspect where the model is less sure of it than
it usually is of that label, and as sure of another one as it usually is of that other.

It ranks what a person should look at first. It cannot tell a wrong label from a hard text on which the model errs, it
cannot see errors that the model makes as well, and it says nothing on the texts that the model was trained on. So
suspects are neither to be relabelled nor to be left out without being read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bertie.errors import InputError


@dataclass(frozen=True, slots=True)
class Suspect:
    """A text whose gold label the model doubts."""

    index: int  # of the text
    given: int  # its gold label
    likely: int  # the label that the model holds for true
    given_probability: float
    likely_probability: float

    @property
    def margin(self) -> float:
        """How much likelier the other label is."""
        return self.likely_probability - self.given_probability


def suspects(gold_index: ArrayLike, probabilities: ArrayLike, most: int = 50) -> list[Suspect]:
    """Suspects by their margin, greatest first.

    `gold_index` is (n,), `probabilities` (n, k) of held-out texts. The usual confidence in a label is its mean
    probability over the texts that have it.

    >>> [one.index for one in suspects([0, 0, 1, 1, 1], [[0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.1, 0.9], [0.1, 0.9]])]
    [1]
    """
    gold, table = np.asarray(gold_index, dtype=np.int64), np.asarray(probabilities, dtype=np.float64)
    if table.ndim != 2 or gold.shape != table.shape[:1]:
        raise InputError(f"probabilities has shape {table.shape}; {gold.size} gold labels need ({gold.size}, labels)")
    n, k = table.shape
    if n and (gold.min() < 0 or gold.max() >= k):
        raise InputError(f"gold_index must hold indices from 0 to {k - 1}")
    own = table[np.arange(n), gold]
    times = np.bincount(gold, minlength=k)
    # A label that no text has is nobody's likely one.
    usual = np.where(times > 0, np.bincount(gold, weights=own, minlength=k) / np.maximum(times, 1), np.inf)
    others = np.where(table >= usual - 1e-9, table, -np.inf)  # (n, k); a mean of equals may be rounded up
    others[np.arange(n), gold] = -np.inf
    likely = others.argmax(axis=1)
    margin = others[np.arange(n), likely] - own
    odd = np.flatnonzero((own < usual[gold]) & (margin > 0))
    odd = odd[np.argsort(-margin[odd], kind="stable")][:most]
    return [Suspect(int(i), int(gold[i]), int(likely[i]), float(own[i]), float(table[i, likely[i]])) for i in odd]
