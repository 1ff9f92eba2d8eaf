"""Confidence intervals and significance tests for any metric.

A metric is written once, as a statistic: a function of how often each unit (a text, a sentence, a
question, a query) was drawn. With every count equal to 1 it gives the value on the test set; with
counts from sampling with replacement, 1000 times, it gives the bootstrap distribution.

The percentiles of that distribution are a poor interval for small test sets: with 60 rows and an
accuracy of 0.98 they cover the truth 69% of the time, and have zero width if all rows are correct. So
the interval depends on the range of the metric:

    0 to 1 (accuracy, F1, MRR)     Wilson's score interval. For a proportion of the units its sample size
                                   is their number, otherwise the one with the same variance as the
                                   bootstrap distribution. Matthews' correlation is rescaled to 0 to 1.
    Pearson's, Spearman's          Fisher's z, with the standard error of the bootstrap distribution, or
                                   that of the normal distribution (Bonett and Wright, 2000) if larger
    unbounded (loss, MSE, R²)      bias-corrected and accelerated bootstrap (BCa; Efron, 1987)
    calibration error              `calibration_interval`, which corrects its bias by test inversion
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bertie.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Statistic = Callable[[FloatArray], dict[str, FloatArray]]  # (resamples, units) counts -> (resamples,) per metric

RESAMPLES = 1000
_QUANTILES = (0.025, 0.975)
_Z = 1.959964  # the 97.5% quantile of the normal distribution
_UNBOUNDED = frozenset({"log_loss", "loss", "mae", "mse", "perplexity", "r2"})
_RANK_CORRELATIONS, _CORRELATIONS = frozenset({"spearman"}), frozenset({"pearson", "spearman"})
_FROM_MINUS_1 = frozenset({"matthews"})  # between -1 and 1; all other metrics are between 0 and 1
_MAX_CELLS = 2**19  # counts held in memory at once
_JACKKNIFE_GROUPS = 200  # of units that are left out together


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


def bootstrap(
    statistic: Statistic,
    units: int,
    *,
    trials: Mapping[str, float] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> dict[str, Score]:
    """Compute each metric with its 95% interval; with `resamples=0`, the values alone.

    The interval has a width even if all resamples agree, as they do if all predictions are correct. Its
    sample size then is `units`, or `trials[name]` for a metric that depends on fewer of them: the recall of
    a label depends on the texts with that label.
    """
    (resampled,) = resample([statistic], units, resamples, seed)
    left_out: dict[str, FloatArray] | None = None
    scores = {}
    for name, values in statistic(np.ones((1, units))).items():
        value, draws = float(values[0]), _finite(resampled.get(name))
        if not len(draws) or not math.isfinite(value):
            scores[name] = Score(value, math.nan, math.nan)
        elif name in _CORRELATIONS:
            scores[name] = Score(value, *_fisher_interval(value, draws, units, ranks=name in _RANK_CORRELATIONS))
        elif name in _UNBOUNDED:
            left_out = _jackknife(statistic, units) if left_out is None else left_out
            scores[name] = Score(value, *_bca_interval(value, draws, _finite(left_out[name])))
        else:
            low = -1.0 if name in _FROM_MINUS_1 else 0.0
            most = max(1.0, min(units, (trials or {}).get(name, units)))
            scores[name] = Score(value, *_bounded_interval(value, draws, units, most, low))
    return scores


def paired_bootstrap(
    first: Statistic, second: Statistic, units: int, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Difference]:
    """Compute the difference first - second of each metric, both on the same resamples."""
    if resamples < 1:
        raise InputError(f"resamples={resamples} must be at least 1")
    resampled_first, resampled_second = resample([first, second], units, resamples, seed)
    ones = np.ones((1, units))
    first_values, second_values = first(ones), second(ones)
    differences = {}
    for name in first_values:
        if name not in second_values:
            continue
        gaps = _finite(resampled_first[name] - resampled_second[name])
        tail = min((gaps <= 0).sum(), (gaps >= 0).sum())
        p = min(1.0, 2 * (1 + int(tail)) / (1 + len(gaps))) if len(gaps) else math.nan
        value = float(first_values[name][0] - second_values[name][0])
        low, high = np.quantile(gaps, _QUANTILES).tolist() if len(gaps) else (math.nan, math.nan)
        differences[name] = Difference(value, low, high, p)
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


def wilson_interval(successes: float, trials: float, z: float = _Z) -> tuple[float, float]:
    """Wilson score interval of a proportion; unlike a bootstrap interval it has width even at 0% and 100%."""
    proportion, room = successes / trials, z * z / trials
    center = (proportion + room / 2) / (1 + room)
    margin = z * math.sqrt(max(0.0, proportion * (1 - proportion)) / trials + room / (4 * trials)) / (1 + room)
    # Rounding must not put an end beyond a proportion of exactly 0 or 1.
    return max(0.0, min(proportion, center - margin)), min(1.0, max(proportion, center + margin))


def calibration_interval(
    value: float, confidence: FloatArray, correct: BoolArray, bins: IntArray, *, seed: int = 0
) -> tuple[float, float]:
    """Interval of the expected calibration error `value`, from (n,) or (n, k) predictions and the bin of each.

    The error of a sample is a sum of absolute values: it is too high, the more so the smaller the sample,
    and a resample's is higher still. So the interval holds the errors that explain the observed one: it
    lies between the 2.5% and 97.5% quantiles of the errors observed in samples of this size if every bin
    has the true error, with normal noise. The noise of a bin comes from its number of predictions and
    their accuracy, with Laplace's correction; with several predictions per text, also from the variance
    between texts.
    """
    n, total = len(confidence), confidence.size
    flat, count = bins.ravel(), int(bins.max()) + 1
    size = np.bincount(flat, minlength=count)
    accuracy = (np.bincount(flat, correct.ravel(), count) + 1) / (size + 2)
    noise = size * accuracy * (1 - accuracy)  # variance of the sum of gaps
    if total > n:
        rows = np.repeat(np.arange(n), total // n)
        gaps = np.bincount(rows * count + flat, (confidence - correct).ravel(), n * count).reshape(n, count)
        noise = np.maximum(noise, n * gaps.var(axis=0))
    draws = np.random.default_rng(seed).normal(size=(RESAMPLES, count)) * np.sqrt(noise) / total

    def end(quantile: float) -> float:
        """The true error whose samples have an error of at most `value` this often, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(14):
            middle = (low + high) / 2
            errors = np.abs(middle * size / total + draws).sum(axis=1)
            low, high = (middle, high) if np.quantile(errors, quantile) < value else (low, middle)
        return low  # 0 if samples of a calibrated model have such errors

    return min(value, end(0.975)), max(value, end(0.025))


def resample(statistics: Sequence[Statistic], units: int, resamples: int, seed: int) -> list[dict[str, FloatArray]]:
    """(resamples,) values of each metric of each statistic, on the same resamples."""
    if units < 1:
        raise InputError("there is nothing to score: no texts were given")
    blocks: list[dict[str, list[FloatArray]]] = [{} for _ in statistics]
    for counts in resample_counts(units, resamples, seed):
        for statistic, block in zip(statistics, blocks, strict=True):
            for name, values in statistic(counts).items():
                block.setdefault(name, []).append(values)
    return [{name: np.concatenate(values) for name, values in block.items()} for block in blocks]


def _bounded_interval(value: float, draws: FloatArray, units: int, most: float, lowest: float) -> tuple[float, float]:
    """Wilson's interval of a metric between `lowest` and 1, for its effective sample size, or `most` if unknown."""
    width = 1.0 - lowest
    proportion, draws = (value - lowest) / width, (draws - lowest) / width
    variance, size = float(draws.var()), most
    is_proportion = bool((np.abs(draws * units - np.rint(draws * units)) < 1e-6).all())
    if not is_proportion and variance > 0 and 0 < proportion < 1:
        size = proportion * (1 - proportion) / variance
    low, high = wilson_interval(min(1.0, max(0.0, proportion)) * size, size)
    return lowest + width * low, lowest + width * high


def _fisher_interval(value: float, draws: FloatArray, units: int, *, ranks: bool) -> tuple[float, float]:
    """Interval of a correlation on the scale of its inverse hyperbolic tangent."""
    limit = 1 - 1 / (units + 1) ** 2  # a correlation of exactly 1 has no finite inverse
    bounded = max(-limit, min(limit, value))
    error = math.sqrt((1 + bounded**2 / 2 if ranks else 1.0) / max(1, units - 3))
    error = max(error, float(np.arctanh(np.clip(draws, -limit, limit)).std()))
    center = math.atanh(bounded)
    low, high = math.tanh(center - _Z * error), math.tanh(center + _Z * error)
    return min(value, low), max(value, high)


def _bca_interval(value: float, draws: FloatArray, left_out: FloatArray) -> tuple[float, float]:
    """Percentiles of the bootstrap distribution, shifted for its bias and skewness."""
    if draws.min() == draws.max():
        return float(draws.min()), float(draws.max())
    normal, n = NormalDist(), len(draws)
    below = (float((draws < value).sum()) + float((draws == value).sum()) / 2) / n
    bias = normal.inv_cdf(min(max(below, 1 / (n + 1)), n / (n + 1)))
    influence = left_out.mean() - left_out if len(left_out) else np.zeros(1)
    spread = float((influence**2).sum()) ** 1.5
    skew = float((influence**3).sum()) / (6 * spread) if spread > 0 else 0.0
    levels = [normal.cdf(bias + (bias + z) / (1 - skew * (bias + z))) for z in (-_Z, _Z)]
    low, high = np.quantile(draws, levels).tolist()
    return low, high


def _jackknife(statistic: Statistic, units: int) -> dict[str, FloatArray]:
    """(groups,) values of each metric without one unit, or one group of units; counts still sum up to `units`."""
    groups = min(units, _JACKKNIFE_GROUPS)
    if groups < 2:
        return {name: np.zeros(0) for name in statistic(np.ones((1, units)))}
    of = np.random.default_rng(0).permutation(units) % groups
    blocks: list[dict[str, FloatArray]] = []
    step = max(1, _MAX_CELLS // units)
    for start in range(0, groups, step):
        kept = (of[None, :] != np.arange(start, min(start + step, groups))[:, None]).astype(np.float64)
        blocks.append(statistic(kept * (units / kept.sum(axis=1, keepdims=True))))
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _finite(values: FloatArray | None) -> FloatArray:
    """Resamples in which the metric is defined."""
    return np.zeros(0) if values is None else values[np.isfinite(values)]
