"""Soak test: `bertie serve` under mixed load with faults.

    python -m benchmarks.soak --minutes 30 [--model FOLDER] [--json OUT.json]

Well-behaved clients use every task of the model, and every response is compared with that of the
local task object. At the same time others disconnect, send slowly, send garbage, send too much, and
send pathological texts; workers are killed and models reloaded at intervals. The test checks that

- every accepted request is answered once, and correctly; clients of a killed worker retry;
- refusals have status 429 or 503 and a Retry-After header; there is no other 5xx;
- malformed requests get a 4xx or are disconnected, in time;
- the memory of the worker that is never killed grows by less than a tenth from the first to the last third;
- SIGTERM stops the server with exit status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serve import environment
from benchmarks.serve_load import Connection
from benchmarks.soak_cases import GARBAGE, POISON, Case, make_cases

KILL_WINDOW = 3.0  # seconds after a kill within which connections may break
READ_TIMEOUT = 5.0  # of the server, for slow senders
MAX_BODY = 1 << 20
WARM_UP = 60.0  # seconds in which memory may grow: threads start, allocators fill
MAX_GROWTH = 1.10  # of memory, from the first to the last third
MIN_GROWTH = 24 << 20  # bytes; less is ignored


# --- the load ---


@dataclass
class Soak:
    """The state of a soak test."""

    host: str
    port: int
    cases: Sequence[Case]
    parent: int
    until: float
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    reloads: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # of the worker that is never killed
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def add_error(self, message: str) -> None:
        self.errors[message] += 1

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def after_kill(self) -> bool:
        return any(time.monotonic() - KILL_WINDOW < kill for kill in self.kills)

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        return connection

    def request(self, path: str, body: bytes, name: str = "") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: {name or 'x'}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def good_client(self, number: int) -> None:
        """Send one request after the other and check the responses."""
        connection: Connection | None = None
        sent = 0
        while not self.over:
            case = self.draw.choice(self.cases)
            answered = False
            while not answered:
                sent += 1
                name = f"good-{number}-{sent}"
                try:
                    if connection is None or connection.closed:
                        connection = await self.connect()
                    status = await asyncio.wait_for(connection.send(self.request(case.path, case.body, name)), 60)
                except TimeoutError:
                    self.add_error(f"{case.path}: no response within 60 seconds")
                    connection = None
                    break
                except OSError:
                    status = "disconnected"
                answered = self.check_response(case, connection, status, name)
                if not answered:
                    await asyncio.sleep(self.draw.uniform(0.1, 0.5))
            await asyncio.sleep(self.draw.uniform(0.0, 0.02))

    def check_response(self, case: Case, connection: Connection | None, status: str, name: str) -> bool:
        """Check a response. Returns whether the request is done; otherwise it is retried."""
        if status == "disconnected":
            if not self.after_kill:
                self.add_error(f"{case.path}: disconnected, and no worker was killed")
            self.counts["retried after a kill"] += 1
            return False
        assert connection is not None
        if f"x-request-id: {name}".encode() not in connection.head:
            self.add_error(f"{case.path}: a response to another request")
        if connection.unexpected:
            self.add_error(f"{case.path}: answered twice")
        if status == "200":
            self.counts["answered"] += 1
            if (error := case.find_error(connection.body)) is not None:
                self.add_error(error)
            return True
        if status in ("429", "503") and b"\r\nretry-after: " in connection.head:
            self.counts[f"refused with {status}"] += 1
            return False
        self.add_error(f"{case.path}: status {status}, {connection.body[:200]!r}")
        return True

    async def send_raw(self, data: bytes, timeout: float = 30.0) -> str:
        """Send bytes and return the status of the response, "refused" or "disconnected"."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(data)
            status = await self.read_status(reader, timeout)
            writer.close()
        except OSError:
            return "disconnected"
        return status

    async def read_status(self, reader: asyncio.StreamReader, timeout: float) -> str:
        """The status of a response; "refused" with a Retry-After header, "disconnected" without a response."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), timeout)
        except asyncio.IncompleteReadError as broken:
            head = broken.partial
        except TimeoutError:
            return "timeout"
        has_retry_after = head[9:12] in (b"429", b"503") and b"\r\nretry-after: " in head
        return "refused" if has_retry_after else head[9:12].decode("latin-1") or "disconnected"

    def check_fault(self, fault: str, status: str) -> None:
        """Check the response to a fault: 2xx, 4xx, refused or disconnected."""
        self.counts[fault] += 1
        if not (re.fullmatch("[24]..", status) or status in ("refused", "disconnected")):
            self.add_error(f"{fault}: {status}")

    async def disconnect(self) -> None:
        """Disconnect before the response, or in the middle of the request."""
        case = self.draw.choice(self.cases)
        data = self.request(case.path, case.body)
        with suppress(OSError):
            _, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(data if self.draw.random() < 0.7 else data[: len(data) // 2])
            await asyncio.sleep(self.draw.choice([0, 0.001, 0.01, 0.1]))
            writer.transport.abort()
        self.counts["early disconnect"] += 1

    async def slow_sender(self) -> None:
        """Send slowly, and half of the time never finish."""
        case = self.draw.choice(self.cases)
        data = self.request(case.path, case.body)
        endless, started = self.draw.random() < 0.5, time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            if endless:  # the body is shorter than announced
                writer.write(data[:-1])
            else:
                step = -(-len(data) // 10)
                for i in range(0, len(data), step):
                    writer.write(data[i : i + step])
                    await asyncio.sleep(0.2)
            status = await self.read_status(reader, 60)
            writer.close()
        except OSError:
            status = "disconnected"
        self.check_fault("slow sender", status)
        if endless and status == "200":
            self.add_error("slow sender: answered an incomplete request")
        if endless and time.monotonic() - started > READ_TIMEOUT + 20:
            self.add_error(f"slow sender: kept for {time.monotonic() - started:.0f} s")

    async def garbage(self) -> None:
        """Send bytes that are no valid request."""
        data = self.draw.choice([*GARBAGE, self.draw.randbytes(200) + b"\r\n\r\n"])
        self.check_fault("garbage", await self.send_raw(data))

    async def oversized(self) -> None:
        """Announce or send a body over the limit."""
        head = b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if self.draw.random() < 0.5:
            status = await self.send_raw(head + b"Content-Length: 10000000000\r\n\r\n" + b"x" * 1000)
        else:
            chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
            status = await self.send_raw(
                head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (2 * MAX_BODY // 0x10000)
            )
        self.check_fault("oversized", status)
        if status == "200":
            self.add_error("oversized: accepted")

    async def poisoned(self) -> None:
        """Send a pathological text."""
        path = self.draw.choice(["/embed", "/classify", "/tag", "/fill"])
        body = self.draw.choice(POISON)
        body = body.replace(b'"texts"', b'"inputs"') if path == "/embed" else body
        self.check_fault("poisoned", await self.send_raw(self.request(path, body), 60))

    async def every(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Repeat an action, without waiting for the previous one."""
        in_flight: set[asyncio.Future[None]] = set()
        while not self.over:
            pause = seconds * self.draw.uniform(0.7, 1.3)
            await asyncio.sleep(max(0.0, min(pause, self.until - time.monotonic())))
            if self.over:
                break
            task = asyncio.ensure_future(action())
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.gather(*in_flight)

    def workers(self) -> list[int]:
        """Process ids of the workers, oldest first."""
        with suppress(OSError):
            children = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()
            return sorted(map(int, children))
        return []

    async def kill(self) -> None:
        """Kill the youngest worker: the oldest lives to the end."""
        workers = self.workers()
        if len(workers) > 1:
            self.kills.append(time.monotonic())
            os.kill(workers[-1], signal.SIGKILL)

    async def reload(self) -> None:
        os.kill(self.parent, signal.SIGHUP)
        self.reloads += 1

    async def record_memory(self) -> None:
        workers = self.workers()
        if workers:
            with suppress(OSError):
                pages = int(Path(f"/proc/{workers[0]}/statm").read_text().split()[1])
                self.memory.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    async def run(self, clients: int, kill_every: float, reload_every: float) -> None:
        """Run all clients and faults until the time is over."""
        await asyncio.gather(
            *(self.good_client(number) for number in range(clients)),
            self.every(0.5, self.disconnect),
            self.every(1.5, self.slow_sender),
            self.every(0.7, self.garbage),
            self.every(2.0, self.oversized),
            self.every(1.0, self.poisoned),
            self.every(1.0, self.record_memory),
            self.every(kill_every, self.kill),
            self.every(reload_every, self.reload),
        )

    def memory_thirds(self) -> tuple[float, float]:
        """Median memory of the first and the last third, after the warm-up."""
        if not self.memory:
            return 0.0, 0.0
        warm = self.memory[0][0] + WARM_UP
        sizes = [size for seconds, size in self.memory if seconds > warm] or [size for _, size in self.memory]
        third = max(1, len(sizes) // 3)
        return statistics.median(sizes[:third]), statistics.median(sizes[-third:])


def soak(
    minutes: float,
    model: str | None = None,
    *,
    clients: int = 8,
    workers: int = 2,
    kill_every: float = 300.0,
    reload_every: float = 240.0,
) -> dict[str, Any]:
    """Start a server, run the soak test and return what went wrong."""
    cases = make_cases(model)
    command = [sys.executable, "-m", "bertie", "serve", *([] if model is None else [f"model={model}"]), "--port", "0"]
    command += ["--workers", str(workers), "--read-timeout", str(READ_TIMEOUT), "--max-body", str(MAX_BODY)]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        match = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
        if match is None:
            log.seek(0)
            raise SystemExit(f"bertie serve did not start: {log.read()[-2000:]}")
        started = time.monotonic()
        state = Soak(match[1], int(match[2]), cases, server.pid, started + 60 * minutes)
        try:
            asyncio.run(state.run(clients, kill_every, reload_every))
            seconds = time.monotonic() - started
            server.send_signal(signal.SIGTERM)
            status: int | None = server.wait(60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            server.kill()
        log.seek(0)
        lines = log.read().splitlines()
    if status != 0:
        state.add_error(f"SIGTERM stopped the server with status {status}")
    internal = [line for line in lines if '"error":"internal"' in line or "Traceback" in line]
    for line in internal[:5]:
        state.add_error(f"log: {line[:300]}")
    first, last = state.memory_thirds()
    if last > first * MAX_GROWTH and last - first > MIN_GROWTH:
        state.add_error(f"memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")
    if not state.counts["answered"]:
        state.add_error("nothing was answered")
    return {
        "minutes": round(seconds / 60, 2),
        "cases": len(cases),
        "counts": dict(state.counts),
        "kills": len(state.kills),
        "reloads": state.reloads,
        "memory_mib": [round(first / 2**20, 1), round(last / 2**20, 1)],
        "memory_mib_by_time": [round(size / 2**20) for _, size in state.memory[:: max(1, len(state.memory) // 60)]],
        "errors": dict(state.errors.most_common(50)),
    }


def main() -> int:
    """Run the soak test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", help="a folder (the built-in model)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--reload-every", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"clients": args.clients, "workers": args.workers}
    result = soak(args.minutes, args.model, kill_every=args.kill_every, reload_every=args.reload_every, **options)
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
