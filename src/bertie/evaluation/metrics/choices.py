"""Metrics of multiple choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertie.errors import InputError
from bertie.evaluation.intervals import RESAMPLES, Score, Statistic, bootstrap, from_sums


def choices(
    gold: Sequence[int], predicted: Sequence[int], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Compute the `accuracy` of chosen indices.

    >>> choices([0, 1, 2, 1], [0, 1, 0, 1])["accuracy"].value
    0.75
    """
    statistic, n = choice_statistic(gold, predicted)
    return bootstrap(statistic, n, trials={"accuracy": float(n)}, resamples=resamples, seed=seed)


def choice_statistic(gold: Sequence[int], predicted: Sequence[int]) -> tuple[Statistic, int]:
    """Return the statistic of `choices` and the number of contexts."""
    if len(gold) != len(predicted) or not len(gold):
        raise InputError(f"gold has {len(gold)} choices and predicted {len(predicted)}; give as many, at least one")
    right = (np.asarray(gold) == np.asarray(predicted)).astype(np.float64)
    columns = np.stack([right, np.ones_like(right)], axis=1)
    return from_sums(columns, lambda sums: {"accuracy": sums[:, 0] / sums[:, 1]}), len(right)
