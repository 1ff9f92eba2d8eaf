"""Mixed load with faults on a real server with several workers; SOAK_MINUTES=30 runs the full test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.soak import soak


@pytest.mark.slow
def test_responses_are_correct_and_memory_is_stable(small_folder: Path) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "2"))
    seconds = 60 * minutes
    result = soak(
        minutes, str(small_folder / "bertie-small"), kill_every=min(300.0, seconds / 4), reload_every=seconds / 5
    )
    assert result["errors"] == {}
    assert result["counts"]["answered"] > 50 * minutes
    assert result["kills"] > 0
    assert result["reloads"] > 0
    for fault in (
        "early disconnect",
        "slow sender",
        "garbage",
        "stalled body",
        "mask bomb",
        "long text",
        "half-closed",
    ):
        assert result["counts"][fault] > 0
