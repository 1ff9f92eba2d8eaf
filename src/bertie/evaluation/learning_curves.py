"""Learning curves: scores by the number of training rows, and the expected gain from more rows.

The error 1 - score is taken to follow a power law with a floor, a + b · (n + m)^-c (Hestness et al., 2017). The offset
m is for the beginning, where errors fall faster and faster: fewer rows than it takes to see each label a few times.
All parameters that agree with the measured scores are kept, weighted by how well they do, on a grid; the spread of what
they predict is the interval. With few points and noisy scores that is wide, and the verdict is "cannot tell".

The noise of a score has three sources:

- the held-out rows, which are the same for all sizes: half of that variance moves the whole curve up or down, and the
  other half each point independently, as the errors of two models on the same rows are correlated by about 0.5;
- the training run and the choice of the rows: its standard deviation is assumed to be 0.03 √(e (1 - e)) for an error e,
  and corrected by what is measured if sizes are drawn several times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bertie.errors import InputError
from bertie.evaluation.intervals import FloatArray, Score, finite_or_none

_Z = 1.959964
_SHARED = 0.5  # of the variance of scores on the same rows
_RUN_NOISE = 0.03  # standard deviation of a training run, relative to √(e (1 - e))
_FLOORS, _EXPONENTS = np.linspace(0.0, 1.0, 26), np.geomspace(0.05, 3.0, 26)
_OFFSETS = np.array([0.0, 0.1, 0.3, 1.0])  # relative to the largest size
_DEVIATIONS = np.linspace(-1.0, 1.0, 31)  # of the error at the largest size, times 4 standard deviations
_CANNOT_TELL, _CANNOT_TELL_SHARE = 0.1, 0.25  # width of the interval of the gain: absolute, and relative to the error
_DRAWS = 4000


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The score after training on some of the rows; `draws` has one value per subset and seed."""

    rows: int
    score: Score  # the mean over the draws
    draws: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Extrapolation:
    """The expected score and gain of training on more rows."""

    rows: int
    score: Score
    gain: Score  # over the largest size that was measured
    can_tell: bool  # False: the interval of the gain is too wide to be of use


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Scores by the number of training rows, smallest first."""

    task: str
    metric: str
    split: str  # that was evaluated: dev or test
    held_out: int  # its rows
    points: tuple[CurvePoint, ...]
    band: tuple[Extrapolation, ...] = ()  # from the smallest size to four times the largest

    @property
    def twice(self) -> Extrapolation | None:
        """The extrapolation to twice as many rows; None with fewer than three sizes."""
        return next((point for point in self.band if point.rows == 2 * self.points[-1].rows), None)

    def summary(self) -> str:
        """One line for the console."""
        scores = ", ".join(f"{point.score.value:.3f} with {point.rows:,}" for point in self.points)
        line = f"learning curve, {self.metric} on {self.held_out:,} {self.split} rows: {scores} training rows"
        return f"{line}; {self.verdict()}"

    def verdict(self) -> str:
        """The expected gain from twice as many rows, in words."""
        twice = self.twice
        if twice is None:
            return "fewer than three sizes, so nothing can be said about more rows"
        gain = twice.gain
        interval = f"95% interval {gain.low:+.3f} to {gain.high:+.3f}"
        if not twice.can_tell:
            advice = "evaluate on more rows, or draw more subsets"
            return f"cannot tell the gain from twice as many rows ({interval}): {advice}"
        return f"expected gain from twice as many rows {gain.value:+.3f} ({interval}), to {twice.score.value:.3f}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        twice = self.twice

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, list | tuple):
                return [plain(item) for item in value]
            return finite_or_none(value) if isinstance(value, float) else value

        values: dict[str, Any] = plain(asdict(self))
        return values | {"twice": None if twice is None else plain(asdict(twice)), "verdict": self.verdict()}


def extrapolate(points: Sequence[CurvePoint], sizes: Sequence[int], *, seed: int = 0) -> tuple[Extrapolation, ...]:
    """Predict the score of one training run at each of these sizes, from at least three points.

    >>> scores = {n: 1 - 2 / n**0.5 for n in (100, 300, 1000)}
    >>> points = [CurvePoint(n, Score(score, score - 0.01, score + 0.01), ()) for n, score in scores.items()]
    >>> (twice,) = extrapolate(points, [2000])
    >>> round(twice.score.value, 2), twice.gain.low < 0.0185 < twice.gain.high, twice.can_tell
    (0.95, True, True)
    """
    if len(points) < 3:
        raise InputError(f"points: {len(points)} sizes; a power law needs at least 3")
    rows = np.array([point.rows for point in points], dtype=np.float64)
    errors = np.array([1 - point.score.value for point in points])
    sampling = np.array([_sampling_sd(point.score) for point in points])
    runs = _run_sd(points, errors)
    noise = np.sqrt((1 - _SHARED) * sampling**2 + runs**2 / [max(1, len(point.draws)) for point in points])
    curves, weights = _posterior(rows, errors, np.maximum(noise, 1e-4))
    draw = np.random.default_rng(seed)
    error, floor, exponent, offset = curves[draw.choice(len(weights), _DRAWS, p=weights)].T
    widest = max(_CANNOT_TELL, _CANNOT_TELL_SHARE * float(errors[-1]))
    last, relative = errors[-1], float(runs[-1] / _unit_sd(errors[-1:])[0])
    shift = draw.normal(0.0, math.sqrt(_SHARED) * sampling[-1], _DRAWS)
    luck = draw.normal(0.0, 1.0, _DRAWS)  # of the run on more rows
    bands = []
    for size in sizes:
        mean = floor + (error - floor) * ((size / rows[-1] + offset) / (1 + offset)) ** -exponent
        run = mean + luck * relative * _unit_sd(mean)
        gain = _interval(last - run)
        score = _interval(np.clip(1 - run + shift, None, 1.0))
        bands.append(Extrapolation(int(size), score, gain, gain.high - gain.low <= widest))
    return tuple(bands)


def band_sizes(rows: int, most: int) -> list[int]:
    """Sizes for a band from `rows` to four times `most`, with twice `most` among them.

    >>> band_sizes(100, 1000)
    [100, 178, 316, 562, 1000, 1414, 2000, 2828, 4000]
    """
    inside = np.geomspace(rows, most, 5)[:-1]
    return [*(round(float(size)) for size in inside), *(round(most * 2 ** (i / 2)) for i in range(5))]


def _sampling_sd(score: Score) -> float:
    width = score.high - score.low
    return float(width / (2 * _Z)) if math.isfinite(width) else 0.05


def _run_sd(points: Sequence[CurvePoint], errors: FloatArray) -> FloatArray:
    """The standard deviation of one training run at each size.

    The squared deviations of the draws are pooled with the assumed variance, which counts as much as two of them.
    """
    squares, degrees = 2 * _RUN_NOISE**2, 2.0
    for point, error in zip(points, errors, strict=True):
        if len(point.draws) > 1:
            deviations = np.array(point.draws) - np.mean(point.draws)
            squares += float(np.sum((deviations / _unit_sd(np.array([error]))) ** 2))
            degrees += len(point.draws) - 1
    return math.sqrt(squares / degrees) * _unit_sd(errors)


def _unit_sd(errors: FloatArray) -> FloatArray:
    bounded = np.clip(errors, 0.01, 0.99)
    deviation: FloatArray = np.sqrt(bounded * (1 - bounded))
    return deviation


def _posterior(rows: FloatArray, errors: FloatArray, noise: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(G, 4) error at the largest size, floor, exponent and offset of each curve of a grid, and its probability."""
    last = errors[-1] + _DEVIATIONS * 4 * noise[-1]
    grids = np.meshgrid(last[last > 0] if (last > 0).any() else np.array([1e-3]), _FLOORS, _EXPONENTS, _OFFSETS)
    error, share, exponent, offset = (grid.ravel() for grid in grids)
    floor = share * error
    sizes = (rows / rows[-1] + offset[:, None]) / (1 + offset[:, None])  # (G, sizes)
    expected = floor[:, None] + (error - floor)[:, None] * sizes ** -exponent[:, None]
    log = -0.5 * (((np.minimum(expected, 1.0) - errors) / noise) ** 2).sum(1)
    weights = np.exp(log - log.max())
    return np.stack([error, floor, exponent, offset], axis=1), weights / weights.sum()


def _interval(values: FloatArray) -> Score:
    low, middle, high = np.quantile(values, (0.025, 0.5, 0.975)).tolist()
    return Score(middle, low, high)
