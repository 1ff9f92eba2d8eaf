"""Whether training stopped too early, by its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

Verdict = Literal["falling", "settled", "too few steps"]

FEWEST_ROWS = 8  # of the log, to tell a trend from noise
FALL = 0.05  # of the loss, from the last quarter but one to the last
NOISE = 2.5  # standard errors that a fall must exceed
LOW = 0.25  # of the loss at the beginning: below it, a falling loss is memorization rather than learning


def loss_trend(
    curve: Sequence[Mapping[str, float]], dev: Sequence[float] = (), *, stopped_early: bool = False
) -> Verdict:
    """Whether the training loss was still falling at the end: "falling", "settled" or "too few steps".

    It was falling if the mean loss of the last quarter is lower than that of the quarter before by more than 5%, and
    by more than 2.5 standard errors, and is not yet low. It counts as settled all the same if the score on dev data
    had peaked before: longer training would not help. `curve` are rows with a loss, `dev` the score after each
    evaluation.

    >>> rates = [1.0, 0.9, 0.8, 0.72, 0.65, 0.58, 0.53, 0.48, 0.43, 0.39, 0.35, 0.31]
    >>> loss_trend([{"loss": loss} for loss in rates])
    'falling'
    >>> loss_trend([{"loss": loss} for loss in rates], dev=[0.5, 0.8, 0.7])
    'settled'
    """
    if stopped_early or (len(dev) > 1 and int(np.argmax(dev)) < len(dev) - 1):
        return "settled"
    losses = np.array([row["loss"] for row in curve if "loss" in row], dtype=np.float64)
    losses = losses[np.isfinite(losses)]
    if len(losses) < FEWEST_ROWS:
        return "settled" if len(dev) > 2 else "too few steps"
    first, _, before, last = np.array_split(losses, 4)
    # The noise of a row, from the differences of neighbours, which a trend changes little.
    noise = float(np.median(np.abs(np.diff(losses[len(losses) // 2 :])))) / 0.954
    error = noise * np.sqrt(1 / len(before) + 1 / len(last))
    fall = float(before.mean() - last.mean())
    start = float(first[: max(1, len(first) // 2)].mean())
    falling = fall > FALL * before.mean() and fall > NOISE * error and last.mean() > LOW * start
    return "falling" if falling else "settled"
