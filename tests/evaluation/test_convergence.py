"""Whether a training loss was still falling: curves of every shape, with and without noise."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.evaluation.convergence import FEWEST_ROWS, loss_trend


def curve(losses: object, noise: float = 0.0, seed: int = 0) -> list[dict[str, float]]:
    values = np.asarray(losses, dtype=np.float64)
    values = values * (1 + noise * np.random.default_rng(seed).normal(size=len(values)))
    return [{"step": 10.0 * i, "loss": float(value)} for i, value in enumerate(values, 1)]


STEPS = np.linspace(0, 1, 60)
FALLING = {
    "straight": 1.6 - 0.8 * STEPS,
    "exponential": 1.6 * np.exp(-1.0 * STEPS),
    "late": np.where(STEPS < 0.5, 1.6, 1.6 - 1.2 * (STEPS - 0.5)),
}
SETTLED = {
    "constant": np.full(60, 1.1),
    "flat after a fall": 0.6 + np.exp(-12 * STEPS),
    "rising": 0.5 + 0.5 * STEPS,
    "memorized": 1.6 * np.exp(-5 * STEPS),  # falls on, from 10% of its first value to 1%
}


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("name", FALLING)
def test_falling(name: str, noise: float) -> None:
    verdicts = [loss_trend(curve(FALLING[name], noise, seed)) for seed in range(20)]
    assert verdicts.count("falling") >= 19 if noise < 0.1 else verdicts.count("falling") >= 15


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("name", SETTLED)
def test_settled(name: str, noise: float) -> None:
    """Noise alone is taken for a fall in at most one run of twenty."""
    verdicts = [loss_trend(curve(SETTLED[name], noise, seed)) for seed in range(40)]
    assert verdicts.count("settled") >= 38


def test_the_dev_score_decides() -> None:
    rows = curve(FALLING["straight"])
    assert loss_trend(rows, dev=[0.5, 0.6, 0.7]) == "falling"
    assert loss_trend(rows, dev=[0.5, 0.7, 0.6]) == "settled"
    assert loss_trend(rows, dev=[0.5, 0.6, 0.7], stopped_early=True) == "settled"


def test_too_few_steps() -> None:
    assert loss_trend(curve([1.6])) == "too few steps"
    assert loss_trend([]) == "too few steps"
    assert loss_trend(curve(FALLING["straight"][: FEWEST_ROWS - 1])) == "too few steps"
    assert loss_trend(curve([1.6, float("nan")] * 6)) == "too few steps"


def test_real_runs() -> None:
    """Losses of fine-tuning runs: one epoch at a tenth of the usual rate, and one that has learned its data."""
    short = [1.497, 1.241, 1.054, 0.918, 0.804, 0.813, 0.779, 0.714, 0.751, 0.653]
    assert loss_trend(curve(short), dev=[0.713]) == "falling"
    learned = [2.229, 0.277, 0.075, 0.041, 0.022, 0.084, 0.031, 0.022, 0.018, 0.020]
    assert loss_trend(curve(learned), dev=[0.99]) == "settled"
    assert loss_trend(curve(short), dev=[0.70, 0.713]) == "falling"
    assert loss_trend(curve(short), dev=[0.711, 0.713]) == "settled"  # no gain worth an epoch
