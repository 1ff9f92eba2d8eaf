"""Whether training stopped too early, by its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

Verdict = Literal["falling", "settled", "too few steps"]

FEWEST_ROWS = 8  # of the log, to tell a trend from noise
FALL = 0.1  # of the loss, over the second half of the training
NOISE = 2.5  # standard errors that the slope must exceed
LOW = 0.25  # of the loss at the beginning: below it, a falling loss is memorization rather than learning
GAIN = 0.005  # of the dev score by the last evaluation: below it, longer training would not help


def loss_trend(
    curve: Sequence[Mapping[str, float]], dev: Sequence[float] = (), *, stopped_early: bool = False
) -> Verdict:
    """Whether the training loss was still falling at the end: "falling", "settled" or "too few steps".

    It was falling if a straight line through the second half of the losses falls by more than 10%, its slope is more
    than 2.5 standard errors from 0, and the loss is not yet low. It still counts as settled if the last evaluation did
    not improve the score on dev data: longer training would not help. `curve` are rows with a loss, `dev` the score
    after each evaluation.

    >>> losses = [1.0, 0.9, 0.8, 0.72, 0.65, 0.58, 0.53, 0.48, 0.43, 0.39, 0.35, 0.31]
    >>> loss_trend([{"loss": loss} for loss in losses])
    'falling'
    >>> loss_trend([{"loss": loss} for loss in losses], dev=[0.5, 0.8, 0.8])
    'settled'
    """
    if stopped_early or (len(dev) > 1 and not dev[-1] - max(dev[:-1]) >= GAIN):
        return "settled"
    losses = np.array([row["loss"] for row in curve if "loss" in row], dtype=np.float64)
    losses = losses[np.isfinite(losses)]
    if len(losses) < FEWEST_ROWS:
        return "settled" if len(dev) > 2 else "too few steps"
    late = losses[len(losses) // 2 :]
    steps = np.arange(len(late)) - (len(late) - 1) / 2
    spread = float((steps**2).sum())
    slope = float(steps @ late) / spread
    residuals = late - late.mean() - slope * steps
    error = float(np.sqrt((residuals**2).sum() / (len(late) - 2) / spread))
    fall = -slope * (len(late) - 1)
    first, last = losses[: max(1, len(losses) // 8)].mean(), losses[-max(2, len(losses) // 4) :].mean()
    falling = fall > FALL * late.mean() and -slope > NOISE * error and last > LOW * first
    return "falling" if falling else "settled"
