"""Extrapolation of learning curves: its intervals cover what is measured later, and it says when it cannot tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.evaluation.curve_plot import plot_learning_curve
from bertie.evaluation.intervals import Score, wilson_interval
from bertie.evaluation.learning_curves import CurvePoint, LearningCurve, band_sizes, extrapolate

SIZES = (100, 300, 1000)


def point(rows: int, score: float, held_out: int, draws: tuple[float, ...] = ()) -> CurvePoint:
    return CurvePoint(rows, Score(score, *wilson_interval(score * held_out, held_out)), draws)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("offset", [0, 300])
def test_coverage(floor: float, offset: int) -> None:
    """Runs on the same 500 held-out rows, with noise of their own: 95% intervals of score and gain hold for most."""
    draw = np.random.default_rng(0)
    rows, hits = np.array([*SIZES, 2000]), []
    errors = floor + 0.25 * ((rows + offset) / (1000 + offset)) ** -0.5
    for _ in range(40):
        noise = draw.normal(0, 0.01, 4) + draw.normal(0, 0.012)
        *scores, later = np.clip(1 - errors + noise, 0, 1).tolist()
        (twice,) = extrapolate([point(n, score, 500) for n, score in zip(SIZES, scores, strict=True)], [2000])
        hits += [twice.gain.low <= later - scores[-1] <= twice.gain.high, twice.score.low <= 1 - errors[-1]]
    assert np.mean(hits) > 0.9


def test_a_flat_curve_gains_little_and_a_steep_one_much() -> None:
    (flat,) = extrapolate([point(n, 0.9, 20_000) for n in SIZES], [2000])
    assert flat.can_tell
    assert abs(flat.gain.value) < 0.01
    steep = [point(n, 1 - 3 / n**0.5, 20_000, (1 - 3 / n**0.5,) * 4) for n in SIZES]  # draws that agree
    (later,) = extrapolate(steep, [2000])
    assert later.gain.value == pytest.approx(3 / 1000**0.5 - 3 / 2000**0.5, abs=0.01)
    assert later.gain.low > 0


def test_more_draws_correct_the_assumed_noise() -> None:
    quiet, loud = (
        extrapolate([point(n, 0.8, 20_000, (0.8 - s, 0.8, 0.8, 0.8 + s)) for n in SIZES], [2000])[0]
        for s in (0.001, 0.05)
    )
    assert quiet.gain.high - quiet.gain.low < 0.5 * (loud.gain.high - loud.gain.low)


def test_few_held_out_rows_cannot_tell() -> None:
    points = tuple(point(n, score, 30) for n, score in zip((8, 24, 80), (0.5, 0.6, 0.7), strict=True))
    curve = LearningCurve("classify", "accuracy", "held-out", 30, points, extrapolate(points, band_sizes(8, 80)))
    assert curve.twice is not None
    assert not curve.twice.can_tell
    assert "cannot tell the gain from twice as many rows" in curve.summary()
    assert json.loads(json.dumps(curve.as_dict()))["twice"]["rows"] == 160
    assert plot_learning_curve(curve).count("<circle") == 3


def test_two_sizes_are_not_extrapolated() -> None:
    points = tuple(point(n, 0.8, 100) for n in (100, 300))
    with pytest.raises(InputError, match="2 sizes; a power law needs at least 3"):
        extrapolate(points, [600])
    curve = LearningCurve("classify", "accuracy", "test", 100, points)
    assert curve.twice is None
    assert "nothing can be said" in curve.summary()
    assert "expected" not in plot_learning_curve(curve)
