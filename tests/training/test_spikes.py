"""Detection of loss spikes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from bertie.errors import ConfigError
from bertie.training.distributed import World
from bertie.training.spikes import LossMonitor, LossSpike, LossSpikeDetector


def curve(seed: int, steps: int, noise: float = 0.04) -> np.ndarray[Any, Any]:
    """A loss that falls from 10 to 2, with noise in proportion."""
    level = 2 + 8 * np.exp(-np.arange(steps) / 400)
    return np.asarray(level * (1 + noise * np.random.default_rng(seed).standard_normal(steps)))


def test_a_falling_curve_has_no_spikes() -> None:
    for seed in range(20):
        spikes = LossSpikeDetector()
        assert not any(spikes.update(loss) for loss in curve(seed, 5000))


@pytest.mark.parametrize("at", [600, 2000, 4500])
def test_a_jump_is_a_spike(at: int) -> None:
    for seed in range(10):
        losses = curve(seed, at + 3)
        losses[at:] *= 2
        spikes = LossSpikeDetector()
        alarms = [i for i, loss in enumerate(losses) if spikes.update(loss)]
        assert alarms[0] in (at, at + 1, at + 2)


def test_a_lasting_level_becomes_normal() -> None:
    spikes = LossSpikeDetector(window=100)
    alarms = [i for i, loss in enumerate([2.0] * 200 + [4.0] * 200 + [2.1] * 200) if spikes.update(loss)]
    assert alarms[0] == 200
    assert 245 < alarms[-1] < 255
    assert len(alarms) == alarms[-1] - 199


def test_the_first_losses_are_no_spikes() -> None:
    spikes = LossSpikeDetector()
    assert not any(spikes.update(loss) for loss in [2.0] * 49 + [9.0])
    assert spikes.update(9.0)
    assert not spikes.update(2.19)  # 10% above a median without any spread
    assert spikes.update(2.21)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_and_is_not_stored(loss: float) -> None:
    spikes = LossSpikeDetector()
    assert spikes.update(loss)
    assert spikes.state == []


def test_a_detector_resumes_from_its_state() -> None:
    losses = curve(1, 1000, noise=0.3)  # noisy enough for some
    whole, part = LossSpikeDetector(100, 3.0), LossSpikeDetector(100, 3.0)
    wanted = [whole.update(loss) for loss in losses]
    assert 0 < sum(wanted) < 100
    found = [part.update(loss) for loss in losses[:437]]
    state = json.loads(json.dumps(part.state))
    part = LossSpikeDetector(100, 3.0, state)
    found += [part.update(loss) for loss in losses[437:]]
    assert found == wanted
    assert part.state == whole.state
    assert len(part.state) == 100


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="window=49"):
        LossSpikeDetector(window=49)
    with pytest.raises(ConfigError, match="factor=0"):
        LossSpikeDetector(factor=0)


def test_the_loss_of_a_small_step_is_no_spike() -> None:
    monitor, world = LossMonitor(detect=True), World.current(torch.device("cpu"))
    for step in range(1, 101):
        monitor.add(torch.tensor(200.0), "mlm", 100.0)
        assert monitor.check(world, step) == 200.0
    monitor.add(torch.tensor(9.0 * 20), "mlm", 20.0)  # the last step of an epoch
    monitor.check(world, 101)
    monitor.add(torch.tensor(9.0 * 90), "mlm", 90.0)
    with pytest.raises(LossSpike) as spike:
        monitor.check(world, 102)
    assert (spike.value.step, spike.value.loss) == (102, 9.0)
    monitor.add(torch.tensor(math.nan), "mlm", 1.0)
    with pytest.raises(LossSpike):
        monitor.check(world, 103)
