"""Schedules over the server: honest requests beside attackers, failing socket calls, clock steps and signals."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import pickle
import random
import re
import signal
import time
from collections.abc import Awaitable
from pathlib import Path

from benchmarks.soak import Soak
from benchmarks.soak_attackers import Attackers
from benchmarks.soak_cases import make_cases, make_short_cases

from tests.faults.processes import Command
from tests.faults.schedules import Bench, Violation

SECONDS = 2.0  # of load
START_SECONDS = 60.0


def save_cases(model: Path, file: Path) -> None:
    """Compute the expected responses offline."""
    file.write_bytes(pickle.dumps((make_cases(str(model), 6), make_short_cases(str(model), 6))))


def draw_faults(draw: random.Random) -> tuple[str, dict[str, object]]:
    """Faults of socket calls or of the clock, or none."""
    kind = draw.choice(["none", "accept", "short-send", "short-receive", "interrupted", "clock", "clock"])
    at = draw.randint(1, 40)
    if kind == "accept":
        number = draw.choice([errno.EMFILE, errno.ECONNABORTED, errno.EINTR])
        return kind, {"CALLS": "accept", "AT": at, "ERRNO": number, "TIMES": draw.choice([1, 5])}
    if kind == "short-send":
        return kind, {"CALLS": "send", "AT": at, "SHORT": 1, "TIMES": -1}
    if kind == "short-receive":
        return kind, {"CALLS": "recv", "AT": at, "SHORT": 1, "TIMES": -1}
    if kind == "interrupted":
        return kind, {"CALLS": "send,recv", "AT": at, "ERRNO": errno.EINTR, "TIMES": 3}
    if kind == "clock":
        step = draw.choice([-1, 1]) * draw.choice([5, 3700, 86400 * 400])
        return kind, {"CLOCK": step, "CLOCK_AFTER": draw.randint(0, 2500)}
    return kind, {}


def run_server_schedule(bench: Bench, draw: random.Random) -> str:
    """Start a server, send honest requests and attacks, and stop it; returns a description, raises Violation."""
    kind, faults = draw_faults(draw)
    folder = bench.folder / f"run-{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    cases, short = pickle.loads((bench.inputs / "cases").read_bytes())
    argv = ["serve", f"model={bench.inputs / 'models' / 'built-in' / 'small'}", "--port", "0"]
    argv += ["--read-timeout", "2", "--grace", "0.2", "--deadline", "20"]
    server = Command(argv, folder, bench.logs, faults)
    steps = [f"server {kind} {faults}"]
    try:
        soak = Soak("127.0.0.1", _port(server), cases, server.pid, time.monotonic() + SECONDS, short, read_timeout=2.0)
        if faults.get("ERRNO") == errno.EMFILE:  # libuv closes the connections that wait; clients retry
            soak.kills.append(math.inf)
        soak.draw, attackers = draw, Attackers(soak, draw)
        chosen = draw.sample(sorted(attackers.actions()), draw.randint(0, 3))
        reloads = draw.random() < 0.3
        steps.append(f"attackers {chosen}{', SIGHUP' if reloads else ''}")
        asyncio.run(_load(soak, attackers, chosen, reloads))
        stop = draw.choice([signal.SIGTERM, signal.SIGINT])
        late = asyncio.run(_stop_during_requests(soak, server, stop))
        steps.append(f"{stop.name} -> {late}")
        if not server.wait(40):
            raise Violation("does not stop")
        outcome = server.outcome()
        if outcome.status != 0:
            raise Violation(f"{stop.name} ends it with {outcome}")
        if '"error":"internal"' in outcome.err or "Traceback" in outcome.err:
            raise Violation(f"an internal error: {outcome}")
        if soak.errors:
            raise Violation(f"{dict(soak.errors.most_common(5))}: {outcome.err[-1500:]}")
        if not soak.counts["answered"]:
            raise Violation("nothing was answered")
    except Violation as violation:
        raise Violation(f"{'; '.join(steps)}: {violation} [{folder}]") from None
    finally:
        server.send(signal.SIGKILL)
        server.wait()
    return "; ".join(steps)


def _port(server: Command) -> int:
    """Wait until the server is ready."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (match := re.search(r"http://[\d.]+:(\d+) is ready", server.printed())) is not None:
            return int(match[1])
        if server.ended:
            raise Violation(f"the server does not start: {server.outcome()}")
        time.sleep(0.02)
    raise Violation(f"the server is not ready: {server.outcome()}")


async def _load(soak: Soak, attackers: Attackers, chosen: list[str], reloads: bool) -> None:
    actions = attackers.actions()
    loads: list[Awaitable[None]] = [
        *(soak.honest_client(number) for number in range(3)),
        soak.short_client(0),
        *(soak.every(min(0.5, actions[name][0]), actions[name][1], attack=True) for name in chosen),
    ]
    if reloads:
        loads.append(_reload(soak))
    await asyncio.gather(*loads)


async def _reload(soak: Soak) -> None:
    await asyncio.sleep(SECONDS / 3)
    os.kill(soak.parent, signal.SIGHUP)


async def _stop_during_requests(soak: Soak, server: Command, number: int) -> dict[str, int]:
    """Send requests, then the signal: each is answered rightly, refused, or disconnected before it was accepted."""
    before = dict(soak.counts)
    connections = [await soak.connect() for _ in range(4)]
    cases = [soak.draw.choice(soak.cases) for _ in connections]
    waiting = [
        connection.send(soak.request(case.path, case.body, f"last-{i}"))
        for i, (connection, case) in enumerate(zip(connections, cases, strict=True))
    ]
    await asyncio.sleep(soak.draw.choice([0.0, 0.01, 0.05]))
    server.send(number)
    statuses = await asyncio.wait_for(asyncio.gather(*waiting), 60)
    for i, (connection, case, status) in enumerate(zip(connections, cases, statuses, strict=True)):
        if status != "disconnected":
            soak.check_response(case, connection, status, f"last-{i}")
    return {name: count - before.get(name, 0) for name, count in soak.counts.items() if count != before.get(name, 0)}
