"""The load generators report what a server did."""

from __future__ import annotations

import shutil
import time

import pytest

from benchmarks import serve_load, serve_servers
from tests.benchmarks.stub_server import Stub

BODIES = serve_servers.request_bodies(["one", "two", "drei größer", "four"])


def test_closed_loop(stub: Stub) -> None:
    found = serve_load.closed_loop(stub.url, "/embed", BODIES, connections=4, seconds=0.5)
    assert found["answered"] == stub.statuses[200] > 20
    assert found["refused"] == stub.statuses[429] > 5
    assert found["failed"] == {"disconnected": stub.statuses[0]}
    assert found["p50_ms"] >= 5
    assert set(stub.seen) == set(BODIES)


def test_processes_start_together(stub: Stub) -> None:
    stub.plain = True
    found = serve_load.closed_loop(stub.url, "/embed", BODIES, connections=4, seconds=0.5, processes=2)
    assert found["answered"] == stub.statuses[200] >= 4
    assert found["seconds"] < 5, "of the load, without the start of the processes"


def test_open_loop_latency_counts_from_when_a_request_was_due(stub: Stub) -> None:
    stub.plain = True
    found = serve_load.open_loop(stub.url, "/embed", BODIES, rate=200, seconds=0.5)
    assert found["answered"] == sum(stub.seen.values())
    assert 50 < found["answered"] < 170  # 100 are expected
    assert found["failed"] == {}
    # A stalled server is late for all requests that were due meanwhile, not for one.
    stub.loop.call_soon_threadsafe(lambda: time.sleep(0.4))
    stalled = serve_load.open_loop(stub.url, "/embed", BODIES, rate=200, seconds=0.5)
    assert stalled["p50_ms"] > 50


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk(stub: Stub) -> None:
    stub.plain = True
    found = serve_load.wrk(stub.url, "/embed", BODIES, connections=4, seconds=1)
    assert 0 < found["answered"] <= sum(stub.seen.values())
    assert found["failed"] == {}
    assert found["p99_ms"] >= found["p50_ms"] >= 5
    assert set(stub.seen) == set(BODIES)
    stub.seen.clear()
    assert serve_load.wrk(stub.url, "/health", [], connections=4, seconds=1, threads=2)["answered"] > 0
    assert set(stub.seen) == {b""}, "GET requests"


def test_no_server() -> None:
    found = serve_load.closed_loop("http://127.0.0.1:9", "/embed", BODIES, connections=2, seconds=0.2)
    assert found["answered"] == 0
    assert found["p50_ms"] is None
    assert set(found["failed"]) == {"no connection"}
