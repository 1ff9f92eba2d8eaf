"""What long requests cost short ones: the latency of short requests with and without long requests beside them.

    python -m benchmarks.serve_fairness
    python -m benchmarks.serve_fairness --scenario 20x2x200000 --path /classify --source ../other/checkout

A scenario is SHORTxLONGxCHARACTERS: that many clients send short texts, one request at a time each, beside that many
clients with texts of so many characters. Phases without and with the long clients alternate. With several --source
(checkouts), one server runs for each, and their phases alternate as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve_load import Connection, encode_requests

WORDS = "the river rose after two days of rain and the old bridge near the station was closed to trains".split()
SCENARIOS = ("1x1x60000", "8x1x60000", "8x2x60000", "8x8x60000", "20x2x200000")
FIELD = {"/embed": "inputs", "/classify": "texts", "/tag": "texts", "/fill": "texts"}  # of the texts in a request
TIMEOUT = 60.0  # seconds for one request


@dataclass
class Phase:
    """The requests of one kind in one phase."""

    latencies: list[float] = field(default_factory=list)  # seconds, of those answered
    others: dict[str, int] = field(default_factory=dict)  # by status

    def add(self, other: Phase) -> None:
        self.latencies += other.latencies
        for status, count in other.others.items():
            self.others[status] = self.others.get(status, 0) + count

    def summary(self) -> dict[str, Any]:
        def percentile(q: float) -> float | None:
            return round(1000 * float(np.percentile(self.latencies, q)), 1) if self.latencies else None

        total = len(self.latencies) + sum(self.others.values())
        return {
            "answered": len(self.latencies),
            "refused": round((total - len(self.latencies)) / max(1, total), 4),
            "statuses": self.others,
            "p50_ms": percentile(50),
            "p99_ms": percentile(99),
            "max_ms": percentile(100),
        }


def text_of(characters: int, seed: int) -> str:
    draw = random.Random(seed)
    words: list[str] = []
    size = 0
    while size < characters:
        words.append(draw.choice(WORDS))
        size += len(words[-1]) + 1
    return " ".join(words)[:characters]


async def run_client(url: str, path: str, bodies: Sequence[bytes], until: float, phase: Phase) -> None:
    """Send one request after the other; one that is refused is followed by a pause."""
    host, port, requests = encode_requests(url, path, bodies)
    connection: Connection | None = None
    number = 0
    while time.perf_counter() < until:
        start = time.perf_counter()
        try:
            if connection is None or connection.closed:
                _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port)
            status = await asyncio.wait_for(connection.send(requests[number % len(requests)]), TIMEOUT)
        except (OSError, TimeoutError) as error:
            status, connection = type(error).__name__, None
        number += 1
        if status == "200":
            phase.latencies.append(time.perf_counter() - start)
        else:
            phase.others[status] = phase.others.get(status, 0) + 1
            await asyncio.sleep(0.05)
    if connection is not None:
        connection.transport.close()


async def run_phase(url: str, path: str, scenario: Sequence[int], seconds: float, *, long: bool) -> tuple[Phase, Phase]:
    short_clients, long_clients, characters = scenario
    name, shorts, longs = FIELD[path], Phase(), Phase()
    mask = " [MASK]" if path == "/fill" else ""
    until = time.perf_counter() + seconds

    def bodies(characters: int, seeds: range) -> list[bytes]:
        return [json.dumps({name: text_of(characters, seed) + mask}).encode() for seed in seeds]

    clients = [
        run_client(url, path, bodies(60, range(100 * i, 100 * i + 20)), until, shorts) for i in range(short_clients)
    ]
    if long:
        clients += [
            run_client(url, path, bodies(characters, range(10**6 + i, 10**6 + i + 1)), until, longs)
            for i in range(long_clients)
        ]
    await asyncio.gather(*clients)
    return shorts, longs


@contextmanager
def serve(source: Path, extra: Sequence[str]) -> Iterator[str]:
    """The address of a server that runs from a checkout."""
    environment = os.environ | {"PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "bertie", "serve", "bertie-small", "--port", "0", "--device", "cpu", *extra]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if "http://" in line:
                    yield "http://" + line.split("http://")[1].split()[0].rstrip("/")
                    break
            else:
                raise SystemExit(f"the server from {source} did not start")
        finally:
            server.terminate()


def measure(url: str, path: str, scenario: str, seconds: float) -> dict[str, tuple[Phase, Phase]]:
    numbers = [int(number) for number in scenario.split("x")]
    phases = {}
    for name, long in (("without", False), ("with", True)):
        phases[name] = asyncio.run(run_phase(url, path, numbers, seconds, long=long))
        time.sleep(0.3)
    return phases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help=f"SHORTxLONGxCHARACTERS (default: {', '.join(SCENARIOS)})")
    parser.add_argument("--path", default="/embed", choices=list(FIELD))
    parser.add_argument("--seconds", type=float, default=5.0, help="per phase (default: 5)")
    parser.add_argument("--rounds", type=int, default=2, help="of one phase without and one with (default: 2)")
    parser.add_argument("--source", type=Path, action="append", help="checkout to serve from (default: this one)")
    parser.add_argument("--serve-option", action="append", default=[], help="option for `bertie serve`")
    parser.add_argument("--output", type=Path, help="JSON file")
    args = parser.parse_args()
    sources = args.source or [Path(__file__).resolve().parents[1]]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {str(source): stack.enter_context(serve(source, args.serve_option)) for source in sources}
        print(f"{'source':20} {'scenario':14} {'':8} {'p50 ms':>8} {'p99 ms':>8} {'refused':>8} {'long done':>10}")
        for scenario in args.scenario or SCENARIOS:
            total = {url: {"without": (Phase(), Phase()), "with": (Phase(), Phase())} for url in urls.values()}
            for _ in range(args.rounds):
                for url in urls.values():
                    for name, phases in measure(url, args.path, scenario, args.seconds).items():
                        for sum_, phase in zip(total[url][name], phases, strict=True):
                            sum_.add(phase)
            for source, url in urls.items():
                summaries = {name: [phase.summary() for phase in pair] for name, pair in total[url].items()}
                for name, (short, long) in summaries.items():
                    print(
                        f"{source[-20:]:20} {scenario:14} {name:8} {short['p50_ms'] or 0:8} {short['p99_ms'] or 0:8} "
                        f"{short['refused']:8.2%} {long['answered']:10} {long['statuses'] or ''}",
                        flush=True,
                    )
                ratio = (summaries["with"][0]["p99_ms"] or np.inf) / summaries["without"][0]["p99_ms"]
                print(f"{source[-20:]:20} {scenario:14} p99 ratio {ratio:.2f}", flush=True)
                results.append({"source": source, "scenario": scenario, "path": args.path, **summaries})
    if args.output is not None:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
