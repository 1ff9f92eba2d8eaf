"""The load generators report what a server did."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from benchmarks import serve, serve_load

BODIES = serve.request_bodies(["one", "two", "drei größer", "four"])


class Stub:
    """A server that refuses every third request and disconnects at every tenth."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.statuses: Counter[int] = Counter()
        self.plain = False
        self.delay = 0.005
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def begin() -> None:
            self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
            ready.set()

        self.loop.create_task(begin())
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        assert ready.wait(10)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                body = await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                self.seen[body] += 1
                number = sum(self.seen.values())
                await asyncio.sleep(self.delay)
                status = 200 if self.plain or number % 3 else 429
                if not self.plain and number % 10 == 0:
                    self.statuses[0] += 1
                    break
                self.statuses[status] += 1
                close = b"connection: close\r\n" if status == 429 else b""
                reply = b"HTTP/1.1 %d Fine\r\nContent-Length: 300\r\n%s\r\n" % (status, close)
                writer.write(reply + b"x" * 100)
                await asyncio.sleep(0)  # the rest in another packet
                writer.write(b"x" * 200)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def end(self) -> None:
        self.server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.stop()


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


def test_requests_of_several_texts() -> None:
    bodies = [json.loads(body) for body in serve.request_bodies(["a", "b", "c", "d", "e"], 2)]
    assert bodies == [{"inputs": ["a", "b"]}, {"inputs": ["c", "d"]}]


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


def test_no_server() -> None:
    found = serve_load.closed_loop("http://127.0.0.1:9", "/embed", BODIES, connections=2, seconds=0.2)
    assert found["answered"] == 0
    assert found["p50_ms"] is None
    assert set(found["failed"]) == {"no connection"}


def test_the_plot_shows_all_points() -> None:
    table = [
        {"share": share, "p50_ms": 5.0, "p95_ms": 9.0, "p99_ms": None if share > 1 else 12.0} for share in (0.5, 2)
    ]
    svg = serve.plot(table, "bertie")
    assert svg.count("<circle") == 5
    assert "p99" in svg
    assert json.dumps(svg).isascii()
