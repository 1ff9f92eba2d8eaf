"""Load generators for HTTP servers: wrk, and one in Python for open-loop load or where wrk is missing.

Closed loop: each connection sends its next request when it has received the response to the last.
Open loop: requests arrive as a Poisson process whatever the server does, and latency counts from
when a request was due, so that a server that stalls cannot hide it (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

TIMEOUT = 20.0  # seconds after which a request counts as failed

_LUA = """
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local requests, at = {}, 0
local number = 0
function setup(thread) thread:set("number", number) number = number + 1 end
function init(args)
  wrk.headers["Content-Type"] = "application/json"
  for i, body in ipairs(bodies) do requests[i] = wrk.format("POST", nil, nil, body) end
  if #requests == 0 then requests[1] = wrk.format("GET") end
  at = number * 7919
end
function request() at = at + 1 return requests[at %% #requests + 1] end
function done(summary, latency, requests)
  local e = summary.errors
  print(string.format('JSON{"requests":%%d,"seconds":%%.6f,"p50":%%.6f,"p95":%%.6f,"p99":%%.6f,',
    summary.requests, summary.duration / 1e6,
    latency:percentile(50) / 1e6, latency:percentile(95) / 1e6, latency:percentile(99) / 1e6) ..
    string.format('"errors":{"status":%%d,"read":%%d,"write":%%d,"connect":%%d,"timeout":%%d}}',
    e.status, e.read, e.write, e.connect, e.timeout))
end
"""


@dataclass
class LoadResult:
    """The results of a load test. Latencies in seconds: of successful requests, and of refused ones."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # 429
    failed: dict[str, int] = field(default_factory=dict)  # by status or error

    def add(self, other: LoadResult) -> None:
        self.seconds = max(self.seconds, other.seconds)
        self.latencies += other.latencies
        self.refused += other.refused
        for name, count in other.failed.items():
            self.failed[name] = self.failed.get(name, 0) + count

    def count(self, status: str, latency: float) -> None:
        if status == "200":
            self.latencies.append(latency)
        elif status == "429":
            self.refused.append(latency)
        else:
            self.failed[status] = self.failed.get(status, 0) + 1

    def summary(self) -> dict[str, Any]:
        def percentile(values: list[float], q: float) -> float | None:
            return round(float(np.percentile(values, q)) * 1000, 3) if values else None

        return {
            "seconds": round(self.seconds, 3),
            "answered": len(self.latencies),
            "rate": round(len(self.latencies) / self.seconds, 2),
            "refused": len(self.refused),
            "failed": self.failed,
            "p50_ms": percentile(self.latencies, 50),
            "p95_ms": percentile(self.latencies, 95),
            "p99_ms": percentile(self.latencies, 99),
            "refused_p50_ms": percentile(self.refused, 50),
            "refused_p99_ms": percentile(self.refused, 99),
        }


def wrk(
    url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float, threads: int = 1
) -> dict[str, Any]:
    """Run a closed loop with wrk, whose single thread costs little CPU. Without bodies: GET requests."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk, or --generator python")
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder, "bodies"), Path(folder, "load.lua")
        file.write_bytes(b"".join(body + b"\n" for body in bodies))
        script.write_text(_LUA % file)
        command = [
            "wrk",
            f"-t{threads}",
            f"-c{max(threads, connections)}",
            f"-d{max(1, round(seconds))}s",  # wrk knows whole seconds only
            "--timeout",
            f"{TIMEOUT:g}s",
            "-s",
            str(script),
        ]
        out = subprocess.run([*command, url + path], capture_output=True, text=True, check=True).stdout
    result = json.loads(out[out.index("JSON{") + 4 :].splitlines()[0])
    answered = result["requests"] - result["errors"]["status"]
    failed = {name: count for name, count in result["errors"].items() if count}
    times = {f"{name}_ms": round(1000 * result[name], 3) for name in ("p50", "p95", "p99")}
    seconds = result["seconds"]
    return {"seconds": seconds, "answered": answered, "rate": round(answered / seconds, 2), "failed": failed, **times}


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.response: asyncio.Future[str] | None = None
        self.closed = False
        self.head = self.body = b""  # of the last response
        self.unexpected = 0  # bytes received without a request
        self._buffer = b""
        self._expected = -1  # bytes of headers and body
        self._close_after = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[str]:
        self._buffer, self._expected = b"", -1
        self.response = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.response

    def data_received(self, data: bytes) -> None:
        if self.response is None:
            self.unexpected += len(data)
            return
        self._buffer = self._buffer + data if self._buffer else data
        if self._expected < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self.head = head = self._buffer[:end].lower()
            size = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0] if b"content-length:" in head else b"0"
            self._expected = end + 4 + int(size)
            self._close_after = b"\r\nconnection: close" in head
        if len(self._buffer) >= self._expected:
            status = self._buffer[9:12].decode()
            self.body = self._buffer[len(self.head) + 4 : self._expected]
            self.unexpected += len(self._buffer) - self._expected
            if self._close_after:
                self.closed = True
                self.transport.close()
            self._finish(status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._finish("disconnected")

    def _finish(self, status: str) -> None:
        if self.response is not None and not self.response.done():
            self.response.set_result(status)
        self.response = None


def encode_requests(url: str, path: str, bodies: Sequence[bytes]) -> tuple[str, int, list[bytes]]:
    """The host, the port, and the raw requests."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    head = f"POST {path} HTTP/1.1\r\nHost: {address.hostname}:{address.port}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: "
    return address.hostname, address.port, [head.encode() + b"%d\r\n\r\n" % len(body) + body for body in bodies]


async def _exchange(connection: Connection, request: bytes) -> str:
    try:
        return await asyncio.wait_for(connection.send(request), TIMEOUT)
    except TimeoutError:
        connection.closed = True
        connection.transport.abort()
        return "timeout"


async def _connect(host: str, port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return connection


async def _closed_loop(
    url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float, seed: int
) -> LoadResult:
    host, port, requests = encode_requests(url, path, bodies)
    load, draw = LoadResult(seconds), random.Random(seed)
    started = time.perf_counter()

    async def run_connection() -> None:
        connection: Connection | None = None
        while time.perf_counter() - started < seconds:
            start = time.perf_counter()
            try:
                if connection is None or connection.closed:
                    connection = await _connect(host, port)
                status = await _exchange(connection, draw.choice(requests))
            except OSError:
                status = "no connection"
                await asyncio.sleep(0.05)
            load.count(status, time.perf_counter() - start)
        if connection is not None:
            connection.transport.close()

    await asyncio.gather(*(run_connection() for _ in range(connections)))
    load.seconds = time.perf_counter() - started
    return load


async def _open_loop(
    url: str, path: str, bodies: Sequence[bytes], rate: float, seconds: float, seed: int
) -> LoadResult:
    host, port, requests = encode_requests(url, path, bodies)
    load, draw = LoadResult(seconds), random.Random(seed)
    idle: list[Connection] = []
    in_flight: set[asyncio.Task[None]] = set()
    started = time.perf_counter()

    async def send(due: float, request: bytes) -> None:
        try:
            while idle and idle[-1].closed:
                idle.pop()
            connection = idle.pop() if idle else await _connect(host, port)
            status = await _exchange(connection, request)
            if not connection.closed:
                idle.append(connection)
        except OSError:
            status = "no connection"
        load.count(status, time.perf_counter() - due)

    due = started
    while (due := due + draw.expovariate(rate)) < started + seconds:
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(send(due, draw.choice(requests)))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
    await asyncio.gather(*in_flight)
    load.seconds = max(seconds, time.perf_counter() - started)  # late responses must not raise the rate
    for connection in idle:
        connection.transport.close()
    return load


def _run(kind: str, args: tuple[Any, ...]) -> LoadResult:
    return asyncio.run(_closed_loop(*args) if kind == "closed" else _open_loop(*args))


def closed_loop(
    url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float, processes: int = 1
) -> dict[str, Any]:
    """Run a closed loop in Python, in several processes if one cannot saturate the server."""
    per_process = max(1, connections // processes)
    return _run_processes("closed", [(url, path, bodies, per_process, seconds, seed) for seed in range(processes)])


def open_loop(
    url: str, path: str, bodies: Sequence[bytes], rate: float, seconds: float, processes: int = 1
) -> dict[str, Any]:
    """Run an open loop at `rate` requests per second."""
    result = _run_processes("open", [(url, path, bodies, rate / processes, seconds, seed) for seed in range(processes)])
    return {"offered": rate, **result}


def _run_processes(kind: str, jobs: list[tuple[Any, ...]]) -> dict[str, Any]:
    if len(jobs) == 1:
        return _run(kind, jobs[0]).summary()
    context = get_context("spawn")
    barrier = context.Barrier(len(jobs))  # so that no process has the server to itself at first
    with ProcessPoolExecutor(len(jobs), mp_context=context, initializer=barrier.wait) as pool:
        first, *others = [future.result() for future in [pool.submit(_run, kind, job) for job in jobs]]
    for other in others:
        first.add(other)
    return first.summary()
