"""The learning-rate schedules, against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from bertie.errors import ConfigError
from bertie.recipe import Recipe
from bertie.training.schedule import Schedule


def theirs(kind: str, warmup: int, total: int) -> list[float]:
    """transformers' factors: its schedule has one step more, the first, whose rate is zero."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    make: dict[str, Callable[..., Any]] = {
        "linear": transformers.get_linear_schedule_with_warmup,
        "cosine": transformers.get_cosine_schedule_with_warmup,
        "constant": transformers.get_constant_schedule_with_warmup,
    }
    steps = {} if kind == "constant" else {"num_training_steps": total + 1}
    scheduler = make[kind](optimizer, num_warmup_steps=warmup + 1, **steps)
    found = []
    for _ in range(total):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("share", "total", "warmup"), [(0.1, 40, 4), (0.0, 7, 0), (0.5, 9, 4), (0.29, 100, 29)])
def test_schedules_equal_those_of_transformers(kind: Any, share: float, total: int, warmup: int) -> None:
    schedule = Schedule(Recipe(warmup=share, schedule=kind), total)
    assert schedule.warmup_steps == warmup
    ours = [schedule.factor(step) for step in range(total)]
    assert ours == pytest.approx(theirs(kind, warmup, total), abs=1e-12)
    assert max(ours) == ours[warmup] == 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, math.nextafter(1, 0)])
def test_short_runs(kind: Any, share: float) -> None:
    recipe = Recipe(warmup=share, schedule=kind)
    assert Schedule(recipe, 1).factor(0) == 1.0
    for total in (1, 2, 3, 10):
        factors = [Schedule(recipe, total).factor(step) for step in range(total)]
        assert all(0 < factor <= 1 for factor in factors)
        assert max(factors) == 1.0
    assert Schedule(recipe, 5).factor(5) == (1.0 if kind == "constant" else 0.0)
    assert Schedule(recipe, 5).factor(50) == (1.0 if kind == "constant" else 0.0)
    with pytest.raises(ConfigError, match="total_steps=0"):
        Schedule(recipe, 0)


def test_warmup_stable_decay() -> None:
    schedule = Schedule(Recipe(schedule="wsd", warmup=0.1, decay=0.2), 100)
    factors = [schedule.factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert factors[10:80] == [1.0] * 70
    assert factors[80:] == pytest.approx([(100 - step) / 20 for step in range(80, 100)])
    assert min(factors) > 0
    assert Schedule(Recipe(schedule="wsd", decay=1.0, warmup=0.0), 4).factor(3) == 0.25
    assert Schedule(Recipe(schedule="wsd", decay=0.01, warmup=0.0), 3).factor(2) == 1.0
    for decay in (0.0, 1.5, -0.1):
        with pytest.raises(ConfigError, match=f"^decay={decay} must be a number above 0 and at most 1$"):
            Recipe(decay=decay)
