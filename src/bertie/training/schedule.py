"""The learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bertie.errors import ConfigError
from bertie.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a fraction of its peak: linear warmup, then the recipe's schedule.

    "wsd" (warmup, stable, decay) stays at the peak and decays linearly over the last `decay` of the
    steps.

    The rates are those of transformers' schedules without their first step, whose rate is zero.

    >>> schedule = Schedule(Recipe(warmup=0.4), total_steps=5)
    >>> [round(schedule.factor(step), 2) for step in range(5)]
    [0.33, 0.67, 1.0, 0.67, 0.33]
    """

    recipe: Recipe
    total_steps: int

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ConfigError(f"total_steps={self.total_steps} must be at least 1")

    @property
    def warmup_steps(self) -> int:
        """Steps before the peak; at least one step is at the peak."""
        return min(round(self.recipe.warmup * self.total_steps), self.total_steps - 1)

    def factor(self, step: float) -> float:
        """The factor of a step, from 0; above zero for each step before `total_steps`.

        With a growing batch size the step is fractional: the position by tokens, in steps of equal
        size.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (self.total_steps - warmup))
        if self.recipe.schedule == "wsd":
            left = (self.total_steps - step) / max(1.0, self.recipe.decay * self.total_steps)
            return min(1.0, max(0.0, left))
        if self.recipe.schedule == "linear":
            return 1.0 - done
        if self.recipe.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
