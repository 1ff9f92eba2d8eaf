"""Intervals around metrics, by drawing the test set anew from itself.

A metric is written once, as a measure: a function of how often each unit (a text, a sentence, a question, a query) was
drawn. Drawn once each, they give the value; drawn at random with replacement, 1000 times over, they give the interval.
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
Measure = Callable[[FloatArray], dict[str, FloatArray]]  # (draws, units) counts -> (draws,) of each metric

DRAWS = 1000
_TAILS = (0.025, 0.975)
# Sums of absolute values come out higher the fewer units there are, in a draw once more than in the test set. So the
# low end is the high end mirrored at the value, and the high end is freed of that bias; a plain percentile interval
# would never hold the error of a well calibrated model.
_UPWARD = frozenset({"ece"})
_CELLS = 2**19  # of the counts that are held at a time


@dataclass(frozen=True, slots=True)
class Score:
    """A metric and its 95% interval; NaN where it is not defined, as the correlation with a constant.

    >>> print(Score(0.9, 0.85, 0.94))
    0.9000 [0.8500, 0.9400]
    """

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN: null instead."""
        return {name: number(getattr(self, name)) for name in ("value", "low", "high")}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        interval = "" if math.isnan(self.low) else f" [{self.low:.4f}, {self.high:.4f}]"
        return f"{self.value:.4f}{interval}"


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much one metric is above another on the same units, with a 95% interval and a two-sided p."""

    value: float
    low: float
    high: float
    p: float

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no NaN: null instead."""
        return {name: number(getattr(self, name)) for name in ("value", "low", "high", "p")}

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "not defined"
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def number(value: float) -> float | None:
    """A float that JSON can hold: None for NaN and the infinities."""
    return float(value) if math.isfinite(value) else None


def bootstrap(measure: Measure, units: int, *, draws: int = DRAWS, seed: int = 0) -> dict[str, Score]:
    """Each metric with its percentile interval; without draws the values alone, for where there is no time.

    Where every unit has the same outcome (all answers right), all draws agree and the interval has no width: it says
    nothing then of what a larger test set would show.
    """
    (drawn,) = _resampled([measure], units, draws, seed)
    found = {}
    for name, once in measure(np.ones((1, units))).items():
        value = float(once[0])
        low, high = _interval(drawn.get(name))
        if name in _UPWARD and name in drawn:
            bias = float(np.mean(drawn[name])) - value
            low, high = max(0.0, min(value, 2 * value - high)), max(value, high - bias)
        found[name] = Score(value, low, high)
    return found


def paired_bootstrap(
    first: Measure, second: Measure, units: int, *, draws: int = DRAWS, seed: int = 0
) -> dict[str, Difference]:
    """How much each metric of the first is above the second's, both on the same draws."""
    if draws < 1:
        raise InputError(f"draws={draws} must be at least 1")
    drawn, drawn_others = _resampled([first, second], units, draws, seed)
    once = np.ones((1, units))
    values, others = first(once), second(once)
    found = {}
    for name in values:
        if name not in others:
            continue
        gaps = drawn[name] - drawn_others[name]  # (draws,)
        gaps = gaps[np.isfinite(gaps)]
        tail = min((gaps <= 0).sum(), (gaps >= 0).sum())
        p = min(1.0, 2 * (1 + int(tail)) / (1 + len(gaps))) if len(gaps) else math.nan
        found[name] = Difference(float(values[name][0] - others[name][0]), *_interval(gaps), p)
    return found


def counts(units: int, draws: int, seed: int) -> Iterator[FloatArray]:
    """How often each unit is drawn, for some draws at a time: (some, units)."""
    rng = np.random.default_rng(seed)
    most = max(1, _CELLS // units)
    for low in range(0, draws, most):
        yield np.stack(
            [np.bincount(rng.integers(0, units, units), minlength=units) for _ in range(low, min(low + most, draws))]
        ).astype(np.float64)


def linear(columns: FloatArray, formula: Callable[[FloatArray], dict[str, FloatArray]]) -> Measure:
    """A measure that knows the units by the sums of their columns alone: (units, m) -> (draws, m) -> metrics."""
    return lambda drawn: formula(drawn @ columns)


def mcnemar(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """The exact two-sided p of McNemar's test: are two models right equally often, on the same texts?

    >>> mcnemar([1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1])
    0.03125
    """
    a, b = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if a.shape != b.shape or a.ndim != 1:
        raise InputError(f"correct_a has shape {a.shape} and correct_b {b.shape}; they must be two lists of one length")
    few, many = sorted((int((a & ~b).sum()), int((b & ~a).sum())))
    n = few + many
    ways, term = 0, 1  # whole numbers: no rounding however many texts there are
    for k in range(few + 1):
        ways += term
        term = term * (n - k) // (k + 1)
    return float(min(1.0, 2 * ways / 2**n))


def wilson(right: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share; unlike a bootstrap's it has width even if all are right."""
    share, room = right / of, z * z / of
    middle = (share + room / 2) / (1 + room)
    half = z * math.sqrt(share * (1 - share) / of + room / (4 * of)) / (1 + room)
    return max(0.0, middle - half), min(1.0, middle + half)


def _resampled(measures: Sequence[Measure], units: int, draws: int, seed: int) -> list[dict[str, FloatArray]]:
    if units < 1:
        raise InputError("there is nothing to score: no texts were given")
    parts: list[dict[str, list[FloatArray]]] = [{} for _ in measures]
    for drawn in counts(units, draws, seed):
        for measure, part in zip(measures, parts, strict=True):
            for name, values in measure(drawn).items():
                part.setdefault(name, []).append(values)
    return [{name: np.concatenate(values) for name, values in part.items()} for part in parts]


def _interval(drawn: FloatArray | None) -> tuple[float, float]:
    """Draws in which the metric is not defined are left out."""
    drawn = None if drawn is None else drawn[np.isfinite(drawn)]
    if drawn is None or not len(drawn):
        return math.nan, math.nan
    low, high = np.quantile(drawn, _TAILS)
    return float(low), float(high)
