"""Runs that take fewer steps than planned."""

from __future__ import annotations

import time

import pytest

from bertie.training.callbacks import LOG_HEADER
from bertie.training.pace import Pace


def test_the_rest_of_the_schedule_is_compressed_again_and_again() -> None:
    pace = Pace(1000, epoch=100)
    pace.shorten(200, 600, "budget")
    assert [pace.position(step) for step in (200, 400, 600)] == [200, 600, 1000]
    pace.shorten(400, 500, "budget")
    assert [pace.position(step) for step in (400, 450, 500)] == [600, 800, 1000]
    pace.shorten(450, 900, "converged")  # never longer
    assert (pace.total, pace.reason) == (500, "budget")
    other = Pace(1000, epoch=100)
    other.restore(pace.state)
    assert (other.total, other.reason, other.position(450)) == (500, "budget", 800)
    assert Pace(10, epoch=5).state == []


def test_a_run_whose_steps_become_faster_is_lengthened_again() -> None:
    pace = Pace(1000, epoch=100)
    pace.fit(100, 1200)
    assert (pace.total, pace.reason) == (1000, "")
    pace.fit(200, 600)
    pace.fit(400, 800)
    assert [pace.position(step) for step in (400, 600, 800)] == [600, 800, 1000]
    pace.fit(500, 5000)  # never longer than planned
    assert pace.total == 1000
    assert pace.position(500) == 700
    assert pace.position(1000) == 1000
    for late in (400, 501):  # no time left: one more step, and none once the run is done
        pace.fit(500, late - 1)
        assert pace.total == 501
        pace.fit(501, late)
        assert pace.total == 501
    pace = Pace(1000, epoch=100)
    pace.fit(200, 900)
    pace.shorten(600, 700, "converged")
    pace.fit(650, 900)
    assert (pace.total, pace.reason) == (700, "converged")


def rows(*losses: float) -> list[str]:
    return [LOG_HEADER, *(f"{10 * (i + 1)},0.1,{loss},1e-4,99" for i, loss in enumerate(losses))]


def test_a_small_loss_for_an_epoch_ends_the_run_after_another() -> None:
    pace = Pace(400, epoch=40, stop_loss=0.01)
    pace.check_loss(50, rows(0.5, 0.02, 0.001, 0.001, 0.001))
    assert pace.total == 400  # only 30 of the last 40 steps
    pace.check_loss(60, rows(0.5, 0.02, 0.001, 0.001, 0.001, 0.002))
    assert (pace.total, pace.reason) == (100, "converged")
    never = Pace(400, epoch=40)
    never.check_loss(60, rows(0, 0, 0, 0, 0, 0))
    assert never.total == 400


def test_steps_are_dropped_to_end_before_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(1000, epoch=100, deadline=160.0)
    for step in (1, 2, 3, 4):
        now += 10 if step == 1 else 0.1  # the first step is slow, and does not count
        total = pace.total_in_time(step, (500,))
    assert total == pytest.approx(4 + 497, abs=1)
    pace.shorten(4, total, "budget")
    now += 20  # an evaluation
    pace.evaluated(20)
    assert pace.total_in_time(4, (4, 400)) == pytest.approx(4 + 97, abs=1)  # there will be another
    pace.fit(4, 50)
    assert pace.total_in_time(4, ()) == pytest.approx(4 + 297, abs=1)
    now = 170.0
    assert pace.total_in_time(5, ()) == 5


def test_the_speed_of_steps_that_differ_is_measured_over_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace(1000, epoch=100, deadline=160.0, warm_steps=10)
    totals = []
    for step in range(1, 20):
        now += 5 if step < 10 else 0.02 if step % 2 else 0.18  # slow at first
        totals.append(pace.total_in_time(step, ()))
    assert totals[:-1] == [1000] * 18
    assert totals[-1] == pytest.approx(19 + 14.02 / (0.82 / 9), abs=1)
