"""Nearest neighbours by blocks, and by FAISS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bertie.tasks import neighbours as module
from bertie.tasks.neighbours import SearchMethod, neighbours, to_unit


def vectors(count: int, groups: int, width: int = 16) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(groups, width))
    return to_unit(centres[draw.integers(groups, size=count)] + 0.5 * draw.normal(size=(count, width)))  # type: ignore[arg-type]


def found(unit: np.ndarray[Any, Any], k: int, threshold: float, method: SearchMethod) -> dict[tuple[int, int], float]:
    blocks = list(neighbours(unit, k, threshold, method))
    return {
        (row, other): score
        for block in blocks
        for row, other, score in zip(*(array.tolist() for array in block), strict=True)
    }


def one_by_one(unit: np.ndarray[Any, Any], k: int, threshold: float) -> dict[tuple[int, int], float]:
    pairs = {}
    for i, row in enumerate(unit):
        scores = unit @ row
        scores[i] = -2
        for j in np.argsort(-scores)[:k].tolist():
            if scores[j] >= threshold:
                pairs[i, j] = float(scores[j])
    return pairs


@pytest.mark.parametrize("threshold", [0.7, -1.0])
@pytest.mark.parametrize(("rows", "tile"), [(7, 13), (1024, 16384)])
def test_blocks_give_the_same_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, tile: int, threshold: float
) -> None:
    monkeypatch.setattr(module, "ROWS", rows)
    monkeypatch.setattr(module, "TILE", tile)
    unit = vectors(90, 10)
    expected = one_by_one(unit, 3, threshold)
    result = found(unit, 3, threshold, "exact")
    assert result.keys() == expected.keys()
    assert len(result) > 100
    for pair, score in result.items():
        assert score == pytest.approx(expected[pair], abs=1e-5)


def test_an_index_finds_most_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(module, "PROBES", 8)
    unit = vectors(3000, 60)
    exact = found(unit, 5, 0.8, "exact")
    approximate = found(unit, 5, 0.8, "approximate")
    assert len(exact) > 1000
    assert len(exact.keys() & approximate.keys()) > 0.9 * len(exact)
    for pair in exact.keys() & approximate.keys():
        assert approximate[pair] == pytest.approx(exact[pair], abs=1e-5)  # compared exactly at the end
    monkeypatch.setattr(module, "MAX_EXACT", 2000)
    assert found(unit, 5, 0.8, "auto") == approximate
