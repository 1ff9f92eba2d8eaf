"""The soak test detects the errors it looks for."""

from __future__ import annotations

import asyncio
import json
import time

import numpy as np
import pytest
from benchmarks.serve_load import Connection
from benchmarks.soak import MIN_GROWTH, WARM_UP, Soak
from benchmarks.soak_cases import Case, is_close

from bertie.tasks.results import TaggedSpan, TaggingResult


def spans(score: float, label: str = "PER") -> list[TaggingResult]:
    return [TaggingResult((TaggedSpan(label, 0, 3, "Ada", score),), 5, 5, 1)]


def test_is_close() -> None:
    assert is_close(spans(0.5), spans(0.500001))
    assert not is_close(spans(0.5), spans(0.51))
    assert not is_close(spans(0.5), spans(0.5, "LOC"))
    assert not is_close(spans(0.5), [])
    assert not is_close({"a": 1.0}, {"b": 1.0})
    assert is_close([np.ones(3)], [np.ones(3) + 1e-6])
    assert not is_close([np.ones(3)], [np.ones(4)])


CASE = Case("/embed", b"{}", list, [1.0, 2.0])
GOOD = b"http/1.1 200 ok\r\nx-request-id: a"


def new_soak() -> Soak:
    return Soak("127.0.0.1", 1, [CASE], 0, time.monotonic() + 60)


def received(body: object, head: bytes = GOOD, unexpected: int = 0) -> Connection:
    connection = Connection()
    connection.head, connection.body, connection.unexpected = head, json.dumps(body).encode(), unexpected
    return connection


def test_a_correct_response_is_counted() -> None:
    state = new_soak()
    assert state.check_response(CASE, received([1.0, 2.000001]), "200", "a")
    assert state.counts["answered"] == 1
    assert not state.errors


@pytest.mark.parametrize(
    ("connection", "status", "words"),
    [
        (received([1.0, 2.1]), "200", "is not"),
        (received([1.0]), "200", "is not"),
        (received(None), "200", "unreadable"),
        (received([1.0, 2.0], GOOD, 3), "200", "answered twice"),
        (received([1.0, 2.0], b"http/1.1 200 ok\r\nx-request-id: b"), "200", "another request"),
        (received({"error": "x"}), "500", "status 500"),
        (received({"error": "x"}), "429", "status 429"),  # without Retry-After
        (received({"error": "x"}), "422", "status 422"),
        (None, "disconnected", "no worker was killed"),
    ],
)
def test_errors_are_detected(connection: Connection | None, status: str, words: str) -> None:
    state = new_soak()
    state.check_response(CASE, connection, status, "a")
    assert any(words in error for error in state.errors)


def test_refusals_and_killed_workers_are_retried() -> None:
    state = new_soak()
    assert not state.check_response(CASE, received({}, GOOD + b"\r\nretry-after: 1"), "429", "a")
    state.kills.append(time.monotonic())
    assert not state.check_response(CASE, None, "disconnected", "a")
    assert not state.errors
    assert state.counts == {"refused with 429": 1, "retried after a kill": 1}


def test_faults_may_be_disconnected_but_not_crash_the_server() -> None:
    state = new_soak()
    for status in ("400", "413", "200", "refused", "disconnected"):
        state.check_fault("garbage", status)
    assert not state.errors
    for status in ("500", "timeout", "503", "504"):
        state.check_fault("garbage", status)
    assert len(state.errors) == 4


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (b"HTTP/1.1 422 No\r\na: b\r\n\r\n", "422"),
        (b"HTTP/1.1 503 Later\r\nretry-after: 1\r\n\r\n", "refused"),
        (b"HTTP/1.1 503 Later\r\na: b\r\n\r\n", "503"),
        (b"", "disconnected"),
    ],
)
def test_a_refusal_has_retry_after(reply: bytes, status: str) -> None:
    async def read() -> str:
        reader = asyncio.StreamReader()
        reader.feed_data(reply)
        reader.feed_eof()
        return await new_soak().read_status(reader, 5)

    assert asyncio.run(read()) == status


def test_memory_is_compared_after_the_warm_up() -> None:
    state = new_soak()
    state.memory = [(float(i), MIN_GROWTH if i <= WARM_UP else MIN_GROWTH * i) for i in range(160)]
    first, last = state.memory_thirds()
    assert 60 * MIN_GROWTH < first < 100 * MIN_GROWTH
    assert last > 120 * MIN_GROWTH


def test_phases_alternate() -> None:
    state = new_soak()
    assert state.attacking  # all the time
    state.phase_seconds = 10.0
    state.started = time.monotonic() - 5
    assert not state.attacking
    assert state.settled
    state.started = time.monotonic() - 11
    assert state.attacking
    assert not state.settled
    state.started = time.monotonic() - 15
    assert state.settled
    state.disturbed.append(time.monotonic())
    assert not state.settled


@pytest.mark.parametrize(("factor", "fails"), [(1.5, False), (3.0, True)])
def test_latency_with_attackers_is_limited(factor: float, fails: bool) -> None:
    state = new_soak()
    state.phase_seconds = 10.0
    state.latencies[False] = [0.01] * 200
    state.latencies[True] = [0.01 * factor] * 200
    summary = state.check_latency()
    assert summary["p99_ratio"] == pytest.approx(factor)
    assert bool(state.errors) == fails


def test_kills_are_known_to_the_process_of_the_attackers() -> None:
    class Shared:
        value = 0.0

    state = new_soak()
    state.last_kill = Shared()
    assert not state.after_kill
    state.last_kill.value = time.monotonic()
    assert state.after_kill
