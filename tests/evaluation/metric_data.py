"""Random predictions for the tests of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

LABELS = ["a", "b", "c", "d"]


def classified(n: int, labels: list[str], seed: int = 0) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(len(labels), 0.5), n)
    return [labels[rng.choice(len(labels), p=row)] for row in table], table


def values(result: dict[str, Any]) -> dict[str, float]:
    return {name: score.value for name, score in result.items()}


def tagged(tags: list[str], n: int = 120, seed: int = 0) -> tuple[list[list[str]], list[list[str]]]:
    rng = np.random.default_rng(seed)
    gold = [[tags[i] for i in rng.integers(0, len(tags), rng.integers(1, 12))] for _ in range(n)]
    return gold, [[tag if rng.random() < 0.8 else tags[rng.integers(len(tags))] for tag in one] for one in gold]
