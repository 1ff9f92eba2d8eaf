"""Soak test: `bertie serve` under mixed load with attackers.

    python -m benchmarks.soak --minutes 30 [--model FOLDER] [--json OUT.json]

Honest clients use every task of the model, and every response is compared with that of the local
task object. Phases without and with attackers alternate. In the latter others stall with half a body,
never read their replies, ask for huge ones, send bodies that are wrong in a million places, long texts, garbage
and too much, and disconnect. Front ends and the engine are killed, front ends stopped (SIGSTOP), models and keys
reloaded (SIGHUP), and a key is deleted, at intervals in both. The test checks that

- every accepted request is answered once, and correctly; clients of a killed front end retry;
- refusals have status 429 or 503 and a Retry-After header; there is no other 5xx;
- malformed requests get a 4xx or are disconnected, in time;
- the 99th percentile of the latency of short honest requests with attackers is at most twice that without,
  including the time of refused attempts;
- a deleted key is refused;
- the memory of the front end that is never killed grows by less than a tenth from the first to the last third;
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

import numpy as np

from benchmarks.serve_load import Connection
from benchmarks.serve_servers import environment
from benchmarks.soak_attackers import AttackProcess
from benchmarks.soak_cases import Case, make_cases, make_short_cases

KILL_WINDOW = 3.0  # seconds after a kill within which connections may break
SETTLE = 10.0  # seconds after a phase, a kill or a reload whose latencies do not count
READ_TIMEOUT = 5.0  # of the server, for slow senders
MAX_BODY = 8 << 20
WARM_UP = 60.0  # seconds in which memory may grow: threads start, allocators fill
MAX_GROWTH = 1.10  # of memory, from the first to the last third
MIN_GROWTH = 24 << 20  # bytes; less is ignored
MAX_RATIO = 2.0  # of the p99 latency with attackers to that without
MIN_SAMPLES = 100  # of a p99
KEY_SECONDS = 20.0  # in which a changed key file takes effect


# --- the load ---


@dataclass
class Soak:
    """The state of a soak test."""

    host: str
    port: int
    cases: Sequence[Case]
    parent: int
    until: float
    short_cases: Sequence[Case] = ()
    key: str = ""  # of the honest clients
    attacker_key: str = ""
    phase_seconds: float = 0.0  # 0: attackers all the time
    read_timeout: float = READ_TIMEOUT
    max_body: int = MAX_BODY
    attackers: Sequence[str] = ()  # kinds of attacks; none: all
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    kills: list[float] = field(default_factory=list)
    last_kill: Any = None  # shared with another process
    disturbed: list[float] = field(default_factory=list)  # times of kills, stops and reloads
    latencies: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # by attackers
    reloads: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)  # of the worker that is never killed
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    started: float = field(default_factory=time.monotonic)

    def add_error(self, message: str) -> None:
        self.errors[message] += 1

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def after_kill(self) -> bool:
        kills = self.kills if self.last_kill is None else [*self.kills, self.last_kill.value]
        return any(time.monotonic() - KILL_WINDOW < kill for kill in kills)

    @property
    def attacking(self) -> bool:
        """Whether this is a phase with attackers: every second one."""
        return not self.phase_seconds or int((time.monotonic() - self.started) / self.phase_seconds) % 2 == 1

    @property
    def settled(self) -> bool:
        """Whether the last phase, kill and reload are long enough ago."""
        now = time.monotonic()
        in_phase = (now - self.started) % self.phase_seconds if self.phase_seconds else SETTLE
        return in_phase >= min(SETTLE, self.phase_seconds / 2) and all(now - SETTLE > at for at in self.disturbed[-5:])

    async def sleep_while_attacking(self, seconds: float) -> None:
        """Sleep, at most to the end of the phase."""
        until = time.monotonic() + seconds
        while self.attacking and not self.over and time.monotonic() < until:
            await asyncio.sleep(0.1)

    async def connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        return connection

    def request(self, path: str, body: bytes, name: str = "", key: str | None = None) -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if key := self.key if key is None else key:
            head += f"Authorization: Bearer {key}\r\n"
        head += f"X-Request-Id: {name or 'x'}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def honest_client(self, number: int) -> None:
        """Send one request after the other and check the responses."""
        connection: Connection | None = None
        while not self.over:
            connection = await self.ask(self.draw.choice(self.cases), connection, f"honest-{number}")
            await asyncio.sleep(self.draw.uniform(0.0, 0.02))

    async def short_client(self, number: int) -> None:
        """Send short requests, and measure the time until they are answered, refused attempts included."""
        connection: Connection | None = None
        while not self.over:
            begun, attacked, settled = time.monotonic(), self.attacking, self.settled
            connection = await self.ask(self.draw.choice(self.short_cases), connection, f"short-{number}")
            if settled and self.settled and attacked == self.attacking:
                self.latencies[attacked].append(time.monotonic() - begun)
            await asyncio.sleep(self.draw.uniform(0.02, 0.1))

    async def ask(self, case: Case, connection: Connection | None, client: str) -> Connection | None:
        """Send a request until it is answered. Returns the connection if it is still of use."""
        answered = False
        while not answered:
            self.counts["sent"] += 1
            name = f"{client}-{self.counts['sent']}"
            try:
                if connection is None or connection.closed:
                    connection = await self.connect()
                status = await asyncio.wait_for(connection.send(self.request(case.path, case.body, name)), 60)
            except TimeoutError:
                self.add_error(f"{case.path}: no response within 60 seconds")
                return None
            except OSError:
                status = "disconnected"
            answered = self.check_response(case, connection, status, name)
            if not answered:
                self.counts[f"repeated by {client.partition('-')[0]} clients"] += 1
                await asyncio.sleep(self.draw.uniform(0.1, 0.5))
        return connection

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

    async def every(self, seconds: float, action: Callable[[], Awaitable[None]], *, attack: bool = False) -> None:
        """Repeat an action, without waiting for the previous one; an attack only in phases with attackers."""
        in_flight: set[asyncio.Future[None]] = set()
        while not self.over:
            pause = seconds * self.draw.uniform(0.7, 1.3)
            await asyncio.sleep(max(0.0, min(pause, self.until - time.monotonic())))
            if self.over:
                break
            if attack and not self.attacking:
                continue
            task = asyncio.ensure_future(action())
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        await asyncio.gather(*in_flight)

    # --- disturbances ---

    def workers(self, role: str = "front-end") -> list[int]:
        """Process ids of the front ends, or of the engines, oldest first."""
        found = []
        with suppress(OSError):
            for pid in Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split():
                if f'"role": "{role}"' in Path(f"/proc/{pid}/environ").read_text():
                    found.append(int(pid))
        return sorted(found)

    async def kill(self) -> None:
        """Kill the youngest front end (the oldest lives to the end) or, every other time, the engine."""
        workers, engines = self.workers(), self.workers("engine")
        if len(workers) > 1:
            engine = bool(engines) and len(self.kills) % 2 == 1
            self.kills.append(time.monotonic())
            if self.last_kill is not None:
                self.last_kill.value = time.monotonic()
            self.disturbed.append(time.monotonic())
            self.counts["killed engine" if engine else "killed front end"] += 1
            os.kill(engines[-1] if engine else workers[-1], signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the youngest front end; the supervisor continues it."""
        workers = self.workers()
        if len(workers) > 1:
            self.disturbed.append(time.monotonic())
            os.kill(workers[-1], signal.SIGSTOP)
            self.counts["stopped worker"] += 1

    async def reload(self) -> None:
        self.disturbed.append(time.monotonic())
        os.kill(self.parent, signal.SIGHUP)
        self.reloads += 1

    async def record_memory(self) -> None:
        workers = self.workers()
        if workers:
            with suppress(OSError):
                pages = int(Path(f"/proc/{workers[0]}/statm").read_text().split()[1])
                self.memory.append((time.monotonic(), pages * os.sysconf("SC_PAGE_SIZE")))

    async def run(self, clients: int, *loads: Awaitable[None]) -> None:
        """Run the honest clients and other loads until the time is over."""
        await asyncio.gather(
            *(self.honest_client(number) for number in range(clients)),
            *(self.short_client(number) for number in range(3 if self.short_cases else 0)),
            self.every(1.0, self.record_memory),
            *loads,
        )

    def memory_thirds(self) -> tuple[float, float]:
        """Median memory of the first and the last third, after the warm-up."""
        if not self.memory:
            return 0.0, 0.0
        warm = self.memory[0][0] + WARM_UP
        sizes = [size for seconds, size in self.memory if seconds > warm] or [size for _, size in self.memory]
        third = max(1, len(sizes) // 3)
        return statistics.median(sizes[:third]), statistics.median(sizes[-third:])

    def check_memory(self) -> None:
        first, last = self.memory_thirds()
        if last > first * MAX_GROWTH and last - first > MIN_GROWTH:
            self.add_error(f"memory grew from {first / 2**20:.0f} to {last / 2**20:.0f} MiB")

    def check_latency(self) -> dict[str, Any]:
        """The latencies of short requests without and with attackers, and an error if they differ too much."""
        summary: dict[str, Any] = {}
        for attacked, name in ((False, "without attackers"), (True, "with attackers")):
            values = 1000 * np.array(self.latencies[attacked] or [np.nan])
            percentiles = {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 99)}
            summary[name] = {"requests": len(self.latencies[attacked]), **percentiles}
        ratio = summary["with attackers"]["p99"] / summary["without attackers"]["p99"]
        summary["p99_ratio"] = round(ratio, 2)
        enough = all(len(values) >= MIN_SAMPLES for values in self.latencies.values())
        if self.phase_seconds and enough and ratio > MAX_RATIO:
            self.add_error(f"attackers raise the p99 of short requests {ratio:.1f} times (at most {MAX_RATIO:g})")
        return summary


class KeyFile:
    """A key file, one of whose keys is deleted and added again."""

    def __init__(self, path: Path) -> None:
        from bertie.serve.auth import new_key

        self._path = path
        self.honest, self.attacker, self.deleted = (new_key(path, name) for name in ("honest", "attacker", "deleted"))
        self._lines = path.read_text().splitlines(keepends=True)
        self._changing = asyncio.Lock()

    async def change(self, soak: Soak) -> None:
        """Delete the key or add it again, and check that all workers follow."""
        async with self._changing:
            await self._change(soak)

    async def _change(self, soak: Soak) -> None:
        has_key = "deleted " in self._path.read_text()
        kept = [line for line in self._lines if not (has_key and line.startswith("deleted "))]
        draft = self._path.with_suffix(".new")
        draft.write_text("".join(kept))
        draft.replace(self._path)
        soak.counts["deleted key" if has_key else "added key"] += 1
        expected, until, agreed = "401" if has_key else "200", time.monotonic() + KEY_SECONDS, 0
        while agreed < 6:  # connections go to any worker
            status = await self._status(soak)
            agreed = agreed + 1 if status == expected else 0
            if time.monotonic() > until:
                soak.add_error(f"{'deleted' if has_key else 'added'} key: status {status} after {KEY_SECONDS:g} s")
                break
            await asyncio.sleep(0.1)

    async def _status(self, soak: Soak) -> str:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(soak.host, soak.port)
            writer.write(soak.request("/embed", b'{"inputs": "a"}', key=self.deleted))
            status = await soak.read_status(reader, 60)
            writer.transport.abort()
            return status
        return "disconnected"


def soak(
    minutes: float,
    model: str | None = None,
    *,
    clients: int = 4,
    workers: int = 2,
    kill_every: float = 300.0,
    reload_every: float = 240.0,
    attackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Start a server, run the soak test and return what went wrong."""
    cases, short = make_cases(model), make_short_cases(model)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        keys = KeyFile(Path(folder) / "keys")
        command = [sys.executable, "-m", "bertie", "serve", *([] if model is None else [f"model={model}"])]
        command += ["--port", "0", "--workers", str(workers), "--read-timeout", str(READ_TIMEOUT)]
        command += ["--max-body-bytes", str(MAX_BODY), "--api-key-file", str(Path(folder) / "keys")]
        server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=log, text=True)
        assert server.stdout is not None
        match = re.search(r"http://([\d.]+):(\d+)", server.stdout.readline())
        if match is None:
            log.seek(0)
            raise SystemExit(f"bertie serve did not start: {log.read()[-2000:]}")
        seconds = 60 * minutes
        state = Soak(match[1], int(match[2]), cases, server.pid, time.monotonic() + seconds, short)
        state.key, state.attacker_key, state.attackers = keys.honest, keys.attacker, attackers
        state.phase_seconds = max(5.0, min(30.0, seconds / 8))
        attack = AttackProcess(state)
        try:
            asyncio.run(
                state.run(
                    clients,
                    state.every(kill_every, state.kill),
                    state.every(reload_every, state.reload),
                    state.every(min(90.0, seconds / 5), state.stop),
                    state.every(min(60.0, seconds / 4), lambda: keys.change(state)),
                )
            )
            attack.join(state)
            seconds = time.monotonic() - state.started
            server.send_signal(signal.SIGTERM)
            status: int | None = server.wait(60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            attack.kill()
            server.kill()
        log.seek(0)
        lines = log.read().splitlines()
    return report(state, status, lines) | {"minutes": round(seconds / 60, 2)}


def report(state: Soak, status: int | None, log: Sequence[str]) -> dict[str, Any]:
    """Check the end of the run, and sum it up."""
    if status != 0:
        state.add_error(f"SIGTERM stopped the server with status {status}")
    internal = [line for line in log if '"error":"internal"' in line or "Traceback" in line]
    for line in internal[:5]:
        state.add_error(f"log: {line[:300]}")
    state.check_memory()
    if not state.counts["answered"]:
        state.add_error("nothing was answered")
    return {
        "cases": len(state.cases),
        "latency_ms": state.check_latency(),
        "counts": dict(state.counts),
        "kills": len(state.kills),
        "reloads": state.reloads,
        "memory_mib": [round(size / 2**20, 1) for size in state.memory_thirds()],
        "memory_mib_by_time": [round(size / 2**20) for _, size in state.memory[:: max(1, len(state.memory) // 60)]],
        "errors": dict(state.errors.most_common(50)),
    }


def summarize(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    latency, counts = result["latency_ms"], result["counts"]
    lines = [
        f"{result['minutes']} minutes: {counts['answered']:,} honest requests answered, "
        f"{counts.get('refused with 429', 0) + counts.get('refused with 503', 0):,} attempts refused",
    ]
    for name in ("without attackers", "with attackers"):
        values = latency[name]
        lines.append(f"short requests {name}: p50 {values['p50']} ms, p99 {values['p99']} ms ({values['requests']:,})")
    lines.append(f"p99 ratio {latency['p99_ratio']}; memory {' -> '.join(map(str, result['memory_mib']))} MiB")
    lines.append(f"kills {result['kills']}, stops {counts.get('stopped worker', 0)}, reloads {result['reloads']}")
    lines += [f"ERROR ({count}): {error}" for error, count in result["errors"].items()] or ["no errors"]
    return "\n".join(lines)


def main() -> int:
    """Run the soak test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", help="a folder (the built-in model)")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--reload-every", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--attackers", default="", metavar="A,B,…", help="only these kinds of attacks (default: all)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"clients": args.clients, "workers": args.workers}
    options |= {"attackers": [name for name in args.attackers.split(",") if name]}
    result = soak(args.minutes, args.model, kill_every=args.kill_every, reload_every=args.reload_every, **options)
    print(json.dumps(result, indent=1))
    print(summarize(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
