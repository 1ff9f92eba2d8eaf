"""Mixed load with faults on a real server of several workers: `SOAK_MINUTES=30` for as long as the real test is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.soak import soak


@pytest.mark.slow
def test_all_are_answered_rightly_and_memory_stays_flat(small_folder: Path) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "2"))
    seconds = 60 * minutes
    found = soak(
        minutes, str(small_folder / "bertie-small"), kill_every=min(300.0, seconds / 4), reload_every=seconds / 5
    )
    assert found["problems"] == {}
    assert found["counts"]["answered"] > 50 * minutes
    assert found["kills"] > 0
    assert found["reloads"] > 0
    for fault in ("hung up", "slow sender", "garbage", "oversized", "poisoned"):
        assert found["counts"][fault] > 0
