"""Pauses between retries."""

from __future__ import annotations

import email.utils
import time

from bertie.client.retries import FIRST_PAUSE, MAX_PAUSE, RetryState, retry_after


def test_pauses_grow_and_respect_retry_after() -> None:
    state = RetryState(6, "http://a")
    pauses = [state.after_failure(OSError()) for _ in range(5)]
    for i, pause in enumerate(pauses):
        assert 0.5 * FIRST_PAUSE * 2**i <= pause <= FIRST_PAUSE * 2**i
    assert 7.0 <= state._next_pause(7.0) < 7.0 + FIRST_PAUSE * 2**5
    state.pause = 100 * MAX_PAUSE
    state._next_pause(0.0)
    assert state.pause == MAX_PAUSE


def test_retry_after_as_a_number_and_as_a_date() -> None:
    assert retry_after(None) == 0.0
    assert retry_after("7") == 7.0
    assert retry_after("-1") == 0.0
    assert retry_after("soon") == 0.0
    assert 50 < retry_after(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60
