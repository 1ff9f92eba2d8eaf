"""Load on an HTTP server: by wrk, or from here, where wrk is not at hand or requests shall come at a rate of their own.

Closed loop: each connection sends its next request when it has the reply to the last. Open loop: requests come at
random moments (Poisson) whatever the server does, and a reply's time counts from when its request was due, so that a
server which stalls cannot hide it.
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

PATIENCE = 20.0  # seconds after which a request counts as lost

_LUA = """
local bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local requests, at = {}, 0
local number = 0
function setup(thread) thread:set("number", number) number = number + 1 end
function init(args)
  wrk.headers["Content-Type"] = "application/json"
  for i, body in ipairs(bodies) do requests[i] = wrk.format("POST", nil, nil, body) end
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
class Load:
    """What came of it. Latencies are in seconds, those of good replies; refused ones apart."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)  # 429
    failed: dict[str, int] = field(default_factory=dict)  # by status, or what else went wrong

    def add(self, other: Load) -> None:
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
        def at(values: list[float], q: float) -> float | None:
            return round(float(np.percentile(values, q)) * 1000, 3) if values else None

        return {
            "seconds": round(self.seconds, 3),
            "answered": len(self.latencies),
            "rate": round(len(self.latencies) / self.seconds, 2),
            "refused": len(self.refused),
            "failed": self.failed,
            "p50_ms": at(self.latencies, 50),
            "p95_ms": at(self.latencies, 95),
            "p99_ms": at(self.latencies, 99),
            "refused_p50_ms": at(self.refused, 50),
            "refused_p99_ms": at(self.refused, 99),
        }


def wrk(url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float) -> dict[str, Any]:
    """A closed loop by wrk, whose one thread costs next to nothing."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not here: apt-get install wrk, or --generator python")
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder, "bodies"), Path(folder, "load.lua")
        file.write_bytes(b"\n".join(bodies) + b"\n")
        script.write_text(_LUA % file)
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:g}s",
            "--timeout",
            f"{PATIENCE:g}s",
            "-s",
            str(script),
        ]
        out = subprocess.run([*command, url + path], capture_output=True, text=True, check=True).stdout
    found = json.loads(out[out.index("JSON{") + 4 :].splitlines()[0])
    good = found["requests"] - found["errors"]["status"]
    failed = {name: count for name, count in found["errors"].items() if count}
    times = {f"{name}_ms": round(1000 * found[name], 3) for name in ("p50", "p95", "p99")}
    seconds = found["seconds"]
    return {"seconds": seconds, "answered": good, "rate": round(good / seconds, 2), "failed": failed, **times}


class Link(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.reply: asyncio.Future[str] | None = None
        self.closed = False
        self.head = self.body = b""  # of the last reply
        self.unasked = 0  # bytes that came though nothing was asked
        self._held = b""
        self._wanted = -1  # bytes of head and body together
        self._last = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[str]:
        self._held, self._wanted = b"", -1
        self.reply = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.reply

    def data_received(self, data: bytes) -> None:
        if self.reply is None:
            self.unasked += len(data)
            return
        self._held = self._held + data if self._held else data
        if self._wanted < 0:
            end = self._held.find(b"\r\n\r\n")
            if end < 0:
                return
            self.head = head = self._held[:end].lower()
            size = head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0] if b"content-length:" in head else b"0"
            self._wanted = end + 4 + int(size)
            self._last = b"\r\nconnection: close" in head
        if len(self._held) >= self._wanted:
            status = self._held[9:12].decode()
            self.body = self._held[len(self.head) + 4 : self._wanted]
            self.unasked += len(self._held) - self._wanted
            if self._last:
                self.closed = True
                self.transport.close()
            self._end(status)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._end("hung up")

    def _end(self, status: str) -> None:
        if self.reply is not None and not self.reply.done():
            self.reply.set_result(status)
        self.reply = None


def requests_of(url: str, path: str, bodies: Sequence[bytes]) -> tuple[str, int, list[bytes]]:
    """The host, the port, and requests as they go over the wire."""
    at = urlsplit(url)
    assert at.hostname is not None
    assert at.port is not None
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {at.hostname}:{at.port}\r\nContent-Type: application/json\r\nContent-Length: "
    )
    return at.hostname, at.port, [head.encode() + b"%d\r\n\r\n" % len(body) + body for body in bodies]


async def _exchange(link: Link, request: bytes) -> str:
    try:
        return await asyncio.wait_for(link.send(request), PATIENCE)
    except TimeoutError:
        link.closed = True
        link.transport.abort()
        return "timeout"


async def _connect(host: str, port: int) -> Link:
    _, link = await asyncio.get_running_loop().create_connection(Link, host, port)
    return link


async def _closed(url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float, seed: int) -> Load:
    host, port, requests = requests_of(url, path, bodies)
    load, draw = Load(seconds), random.Random(seed)
    begun = time.perf_counter()

    async def one() -> None:
        link: Link | None = None
        while time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            try:
                if link is None or link.closed:
                    link = await _connect(host, port)
                status = await _exchange(link, draw.choice(requests))
            except OSError:
                status = "no connection"
                await asyncio.sleep(0.05)
            load.count(status, time.perf_counter() - start)
        if link is not None:
            link.transport.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    load.seconds = time.perf_counter() - begun
    return load


async def _open(url: str, path: str, bodies: Sequence[bytes], rate: float, seconds: float, seed: int) -> Load:
    host, port, requests = requests_of(url, path, bodies)
    load, draw = Load(seconds), random.Random(seed)
    idle: list[Link] = []
    under_way: set[asyncio.Task[None]] = set()
    begun = time.perf_counter()

    async def one(due: float, request: bytes) -> None:
        try:
            while idle and idle[-1].closed:
                idle.pop()
            link = idle.pop() if idle else await _connect(host, port)
            status = await _exchange(link, request)
            if not link.closed:
                idle.append(link)
        except OSError:
            status = "no connection"
        load.count(status, time.perf_counter() - due)

    due = begun
    while (due := due + draw.expovariate(rate)) < begun + seconds:
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(due, draw.choice(requests)))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    load.seconds = max(seconds, time.perf_counter() - begun)  # what is answered late is no rate of its own
    for link in idle:
        link.transport.close()
    return load


def _run(kind: str, args: tuple[Any, ...]) -> Load:
    return asyncio.run(_closed(*args) if kind == "closed" else _open(*args))


def closed(
    url: str, path: str, bodies: Sequence[bytes], connections: int, seconds: float, processes: int = 1
) -> dict[str, Any]:
    """A closed loop from here, from several processes if one is too slow for the server."""
    each = max(1, connections // processes)
    return _several("closed", [(url, path, bodies, each, seconds, seed) for seed in range(processes)])


def opened(
    url: str, path: str, bodies: Sequence[bytes], rate: float, seconds: float, processes: int = 1
) -> dict[str, Any]:
    """An open loop."""
    found = _several("open", [(url, path, bodies, rate / processes, seconds, seed) for seed in range(processes)])
    return {"offered": rate, **found}


def _several(kind: str, jobs: list[tuple[Any, ...]]) -> dict[str, Any]:
    if len(jobs) == 1:
        return _run(kind, jobs[0]).summary()
    context = get_context("spawn")
    together = context.Barrier(len(jobs))  # or the first ones would have the server for themselves
    with ProcessPoolExecutor(len(jobs), mp_context=context, initializer=together.wait) as pool:
        first, *others = [one.result() for one in [pool.submit(_run, kind, job) for job in jobs]]
    for one in others:
        first.add(one)
    return first.summary()
