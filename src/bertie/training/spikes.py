"""Loss spikes: detection, without waiting for the device after each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from bertie.errors import ConfigError
from bertie.training.distributed import World

WARMUP = 50  # losses before the first spike can be detected
MIN_DEVIATION = 0.01  # lower bound of the median absolute deviation, relative to the median


class LossSpikeDetector:
    """Detects a loss that is far above the recent ones, or not finite.

    A spike exceeds the median of the last `window` losses by more than `factor` times their median
    absolute deviation. The deviation is at least 1% of the median, so that a very smooth curve
    raises no false alarm. The first 50 losses are spikes only if they are not finite. Spikes enter
    the window too: a level that lasts becomes the new normal. Save `state` in a checkpoint and pass
    it as `seen` on resume.

    >>> detector = LossSpikeDetector()
    >>> any(detector.update(2.0 + 0.01 * (i % 7)) for i in range(100)), detector.update(4.0), detector.update(2.0)
    (False, True, False)
    """

    def __init__(self, window: int = 200, factor: float = 10.0, seen: Sequence[float] = ()) -> None:
        if window < WARMUP:
            raise ConfigError(f"window={window} must be at least {WARMUP} losses")
        if not factor > 0:
            raise ConfigError(f"factor={factor} must be greater than 0")
        self.factor = factor
        self._losses = deque(seen, maxlen=window)

    def update(self, loss: float) -> bool:
        """Add the next loss; returns whether it is a spike."""
        loss = float(loss)  # numpy scalars are slow to sort
        if not math.isfinite(loss):
            return True
        early = len(self._losses) < WARMUP
        middle = 0.0 if early else median(self._losses)
        above = loss - middle
        # The second median is computed only where it matters.
        spike = not early and above > self.factor * MIN_DEVIATION * abs(middle)
        spike = spike and above > self.factor * median(abs(recent - middle) for recent in self._losses)
        self._losses.append(loss)
        return spike

    @property
    def state(self) -> list[float]:
        """The recent losses."""
        return list(self._losses)


class LossSpike(Exception):
    """A loss spike, or a loss that is not finite."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.step, self.loss = step, loss


class LossMonitor:
    """Collects losses on the device, and checks them together: reading each immediately would stall
    the device.

    Losses are compared with those of the same `kind`; without a kind they must only be finite, and so
    must those of small steps, which vary more: of at most a quarter of the largest weight, such as the
    last one of an epoch. `recent` holds the losses of a saved state.
    """

    def __init__(self, detect: bool, recent: Mapping[str, Sequence[float]] | None = None) -> None:
        self.detect = detect
        self._detectors = {kind: LossSpikeDetector(seen=losses) for kind, losses in (recent or {}).items()}
        self._losses: list[Tensor] = []
        self._kinds: list[tuple[str, float]] = []
        self._largest: dict[str, float] = {}  # weight of a step of each kind

    def add(self, loss: Tensor, kind: str, weight: float) -> None:
        """Add the summed loss of a step."""
        self._losses.append(loss)
        self._kinds.append((kind, weight))

    def check(self, world: World, last_step: int) -> float:
        """Sum the losses up to `last_step` since the last check; raises `LossSpike`."""
        if not self._losses:
            return 0.0
        first = last_step - len(self._losses) + 1
        losses, kinds = world.all_reduce(torch.stack(self._losses)).tolist(), list(self._kinds)
        self._losses.clear()
        self._kinds.clear()
        total = 0.0
        for step, (loss, (kind, weight)) in enumerate(zip(losses, kinds, strict=True), start=first):
            largest = self._largest[kind] = max(weight, self._largest.get(kind, 0.0))
            spike = self.detect and kind and weight > largest / 4
            if (spike and self._detector(kind).update(loss / weight)) or not math.isfinite(loss):
                raise LossSpike(step, loss / weight if weight else loss)
            total += loss
        return total

    def _detector(self, kind: str) -> LossSpikeDetector:
        return self._detectors.setdefault(kind, LossSpikeDetector())

    @property
    def recent(self) -> dict[str, list[float]]:
        """The recent losses of each kind, for a checkpoint."""
        return {kind: detector.state for kind, detector in self._detectors.items()}
