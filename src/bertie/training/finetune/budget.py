"""Training within a time budget: which parts are held out, and how many epochs the models are trained for.

The first plan that fits the budget is used:

1. the plan without a budget: folds or a held-out part, then training on all rows, with all epochs
2. a held-out part instead of folds
3. the same with fewer epochs, but at least half of them
4. a held-out part without training on all rows after it: fewer epochs if need be

Steps are timed during training as well, and the run is shortened if they turn out slower.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

RESERVE, RESERVE_SECONDS = 0.06, 2.0  # of the budget, and in addition: for loading, prediction and the report
PROBE, PROBE_STEPS = 0.04, 25  # at most, to measure the speed
LEAST_EPOCHS = 0.5  # of those planned, to train twice instead of once
EVALUATION = 1.1  # time of training with its evaluations, relative to training
PREDICTION = 0.4  # time to predict a row, relative to training on it


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the budget, a time of `time.monotonic`; some rows must be predicted before it, too."""

    at: float
    rows: int = 0

    @classmethod
    def after(cls, budget: float) -> Deadline:
        """The deadline of a budget that starts now."""
        return cls(time.monotonic() + available_seconds(budget))

    def without_prediction(self, row_seconds: float) -> float:
        """The deadline less the time for prediction, which gets at most half of the time left."""
        left = self.at - time.monotonic()
        return self.at - min(self.rows * row_seconds, left / 2)


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of training."""

    step: float  # seconds per step
    start: float  # seconds to load a model and its data
    steps: int  # of a model that is trained on all rows, for all epochs


@dataclass(frozen=True, slots=True)
class TimePlan:
    """What is held out, and for how many epochs the models are trained."""

    epochs: float
    held_out: int  # parts that are held out, one after another
    refit: bool  # whether a model is trained on all rows after that
    seconds: float  # that this should take


def available_seconds(budget: float) -> float:
    """What is left of a budget for training.

    >>> available_seconds(100.0), available_seconds(2.0)
    (92.0, 1.0)
    """
    return max(budget * (1 - RESERVE) - RESERVE_SECONDS, budget / 2)


def plan_time(seconds: float, speed: Speed, epochs: float, parts: int, *, refit: bool, fraction: float) -> TimePlan:
    """Choose what to train within `seconds`.

    `parts` is the number of folds, 1 for a single held-out `fraction` of the rows, 0 if there is dev data or nothing
    is held out; `refit`: whether a model is trained on all rows after that.

    >>> speed = Speed(step=0.1, start=1.0, steps=300)
    >>> [plan_time(s, speed, 5.0, 5, refit=True, fraction=0.1).held_out for s in (200, 80)]
    [5, 1]
    >>> plan_time(40, speed, 5.0, 5, refit=True, fraction=0.1)
    TimePlan(epochs=3.0, held_out=1, refit=True, seconds=39.62)
    >>> plan_time(10, speed, 5.0, 5, refit=True, fraction=0.1)
    TimePlan(epochs=1.5, held_out=1, refit=False, seconds=9.91)
    """

    def cost(share: float, held_out: int, again: bool) -> float:
        rows = held_out - 1 if held_out > 1 else 1 - fraction if held_out else 0.0
        models = held_out + (again or not held_out)
        return models * speed.start + share * whole * (rows + (again or not held_out))

    def epochs_for(held_out: int, again: bool) -> float:
        free = cost(0.0, held_out, again)
        share = (seconds - free) / (cost(1.0, held_out, again) - free)
        least = epochs / speed.steps
        return max(least, min(epochs, int(share * epochs * 10) / 10))

    whole = speed.step * speed.steps * EVALUATION
    options = [(parts, refit or not parts)]
    if parts > 1:
        options.append((1, True))
    for held_out, again in options:
        if cost(1.0, held_out, again) <= seconds:
            return TimePlan(epochs, held_out, again, round(cost(1.0, held_out, again), 2))
    held_out, again = options[-1]
    if held_out and again and epochs_for(held_out, again) < LEAST_EPOCHS * epochs:
        again = False
    fitting = epochs_for(held_out, again)
    return TimePlan(fitting, held_out, again, round(cost(fitting / epochs, held_out, again), 2))
