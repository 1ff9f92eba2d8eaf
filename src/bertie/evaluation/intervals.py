"""Bootstrap confidence intervals and significance tests for any metric.

A metric is written once, as a statistic: a function of how often each unit (a text, a sentence, a
question, a query) was drawn. With every count equal to 1 it gives the value on the test set; with
counts from sampling with replacement, 1000 times, it gives the bootstrap distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Statistic = Callable[[FloatArray], dict[str, FloatArray]]  # (resamples, units) counts -> (resamples,) per metric

RESAMPLES = 1000
_QUANTILES = (0.025, 0.975)
# A sum of absolute values is biased upward, more so on a resample than on the test set. For these metrics the lower
# end is the upper end mirrored at the value, and the upper end is corrected for the bias; a plain percentile interval
# would never cover the error of a well-calibrated model.
_BIASED_UPWARD = frozenset({"ece"})
_MAX_CELLS = 2**19  # counts held in memory at once


@dataclass(frozen=True, slots=True)
class Score:
    """A metric with its 95% confidence interval; NaN where undefined, such as the correlation with a constant.

    >>> print(Score(0.9, 0.85, 0.94))
    0.9000 [0.8500, 0.9400]
    """

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """Return a dictionary for JSON, with null for NaN."""
        return {name: finite_or_none(getattr(self, name)) for name in ("value", "low", "high")}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        interval = "" if math.isnan(self.low) else f" [{self.low:.4f}, {self.high:.4f}]"
        return f"{self.value:.4f}{interval}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a metric between two models on the same units, with a 95% interval and a two-sided p-value."""

    value: float
    low: float
    high: float
    p: float

    def as_dict(self) -> dict[str, float | None]:
        """Return a dictionary for JSON, with null for NaN."""
        return {name: finite_or_none(getattr(self, name)) for name in ("value", "low", "high", "p")}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def finite_or_none(value: float) -> float | None:
    """Return a float that JSON can hold: None for NaN and the infinities."""
    return float(value) if math.isfinite(value) else None


def bootstrap(statistic: Statistic, units: int, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Score]:
    """Compute each metric with its percentile interval; with `resamples=0`, the values alone.

    If every unit has the same outcome (all predictions correct), all resamples agree and the interval
    has zero width: it then says nothing about a larger test set.
    """
    (resampled,) = _resample([statistic], units, resamples, seed)
    scores = {}
    for name, values in statistic(np.ones((1, units))).items():
        value = float(values[0])
        low, high = _interval(resampled.get(name))
        if name in _BIASED_UPWARD and name in resampled:
            bias = float(np.mean(resampled[name])) - value
            low, high = max(0.0, min(value, 2 * value - high)), max(value, high - bias)
        scores[name] = Score(value, low, high)
    return scores


def paired_bootstrap(
    first: Statistic, second: Statistic, units: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """Compute the difference first - second of each metric, both on the same resamples."""
    if resamples < 1:
        raise InputError(f"resamples={resamples} must be at least 1")
    resampled_first, resampled_second = _resample([first, second], units, resamples, seed)
    ones = np.ones((1, units))
    first_values, second_values = first(ones), second(ones)
    differences = {}
    for name in first_values:
        if name not in second_values:
            continue
        gaps = resampled_first[name] - resampled_second[name]  # (resamples,)
        gaps = gaps[np.isfinite(gaps)]
        tail = min((gaps <= 0).sum(), (gaps >= 0).sum())
        p = min(1.0, 2 * (1 + int(tail)) / (1 + len(gaps))) if len(gaps) else math.nan
        value = float(first_values[name][0] - second_values[name][0])
        differences[name] = Difference(value, *_interval(gaps), p)
    return differences


def resample_counts(units: int, resamples: int, seed: int) -> Iterator[FloatArray]:
    """Yield how often each unit is drawn, a block of resamples at a time: (block, units)."""
    rng = np.random.default_rng(seed)
    block = max(1, _MAX_CELLS // units)
    for start in range(0, resamples, block):
        sizes = range(start, min(start + block, resamples))
        yield np.stack([np.bincount(rng.integers(0, units, units), minlength=units) for _ in sizes]).astype(np.float64)


def from_sums(columns: FloatArray, formula: Callable[[FloatArray], dict[str, FloatArray]]) -> Statistic:
    """Build a statistic that depends only on column sums over units: (units, m) -> (resamples, m) -> metrics."""
    return lambda counts: formula(counts @ columns)


def mcnemar(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """Exact two-sided p-value of McNemar's test: are two models correct equally often on the same texts?

    >>> mcnemar([1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1])
    0.03125
    """
    a, b = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if a.shape != b.shape or a.ndim != 1:
        raise InputError(f"correct_a has shape {a.shape} and correct_b {b.shape}; they must be two lists of one length")
    fewer, more = sorted((int((a & ~b).sum()), int((b & ~a).sum())))
    n = fewer + more
    tail, binomial = 0, 1  # Python integers: exact for any number of texts
    for k in range(fewer + 1):
        tail += binomial
        binomial = binomial * (n - k) // (k + 1)
    return float(min(1.0, 2 * tail / 2**n))


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion; unlike a bootstrap interval it has width even at 0% and 100%."""
    proportion, room = successes / trials, z * z / trials
    center = (proportion + room / 2) / (1 + room)
    margin = z * math.sqrt(proportion * (1 - proportion) / trials + room / (4 * trials)) / (1 + room)
    return max(0.0, center - margin), min(1.0, center + margin)


def _resample(statistics: Sequence[Statistic], units: int, resamples: int, seed: int) -> list[dict[str, FloatArray]]:
    if units < 1:
        raise InputError("there is nothing to score: no texts were given")
    blocks: list[dict[str, list[FloatArray]]] = [{} for _ in statistics]
    for counts in resample_counts(units, resamples, seed):
        for statistic, block in zip(statistics, blocks, strict=True):
            for name, values in statistic(counts).items():
                block.setdefault(name, []).append(values)
    return [{name: np.concatenate(values) for name, values in block.items()} for block in blocks]


def _interval(values: FloatArray | None) -> tuple[float, float]:
    """Percentile interval; resamples in which the metric is undefined are left out."""
    values = None if values is None else values[np.isfinite(values)]
    if values is None or not len(values):
        return math.nan, math.nan
    low, high = np.quantile(values, _QUANTILES)
    return float(low), float(high)
