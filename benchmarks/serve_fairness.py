"""What long requests cost short ones: the latency of short requests with and without long requests beside them.

    python -m benchmarks.serve_fairness
    python -m benchmarks.serve_fairness --scenario 20x2x200000 --rounds 5 --json OUT.json
    python -m benchmarks.serve_fairness --scenario 20x2x200000 --path /classify --source . --source ../other/checkout

A scenario is SHORTxLONGxCHARACTERS: that many clients send short texts, one request at a time each, beside that many
clients with texts of so many characters. Phases without and with the long clients alternate. Each round has one of
each, and the ratio of their p99; medians over the rounds are reported. With several --source (checkouts), one server
runs for each, and their phases alternate as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serve_load import Connection, encode_requests
from benchmarks.serve_servers import FIELDS, ROOT, server

WORDS = "the river rose after two days of rain and the old bridge near the station was closed to trains".split()
SCENARIOS = ("1x1x60000", "8x1x60000", "8x2x60000", "8x8x60000", "20x2x200000")
PATHS = ("/embed", "/classify", "/tag", "/fill")
TIMEOUT = 60.0  # seconds for one request


@dataclass
class Phase:
    """The requests of one kind in one phase."""

    latencies: list[float] = field(default_factory=list)  # seconds, of those answered
    others: dict[str, int] = field(default_factory=dict)  # by status

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
    name, shorts, longs = FIELDS[path], Phase(), Phase()
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


def measure(url: str, path: str, scenario: str, seconds: float) -> dict[str, Any]:
    """One round: a phase without the long clients and one with them, and the ratios of the short ones' latency."""
    numbers = [int(number) for number in scenario.split("x")]
    result: dict[str, Any] = {}
    for name, long in (("without", False), ("with", True)):
        shorts, longs = asyncio.run(run_phase(url, path, numbers, seconds, long=long))
        result[name] = shorts.summary()
        if long:
            result["long"] = longs.summary()
        time.sleep(0.3)
    for key in ("p50", "p99"):
        before, after = result["without"][f"{key}_ms"], result["with"][f"{key}_ms"]
        result[f"{key}_ratio"] = round((after or math.inf) / before, 3) if before else math.inf
    return result


def summarize(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians over several rounds; counts are added up."""
    result: dict[str, Any] = {
        key: statistics.median(measured[key] for measured in rounds) for key in ("p50_ratio", "p99_ratio")
    }
    for name in ("without", "with", "long"):
        phases = [measured[name] for measured in rounds]
        result[name] = {"answered": sum(phase["answered"] for phase in phases), "statuses": {}}
        for key in ("p50_ms", "p99_ms", "max_ms", "refused"):
            values = [phase[key] for phase in phases if phase[key] is not None]
            result[name][key] = statistics.median(values) if values else None
        for status, count in (item for phase in phases for item in phase["statuses"].items()):
            statuses = result[name]["statuses"]
            statuses[status] = statuses.get(status, 0) + count
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help=f"SHORTxLONGxCHARACTERS (default: {', '.join(SCENARIOS)})")
    parser.add_argument("--path", default="/embed", choices=PATHS)
    parser.add_argument("--seconds", type=float, default=5.0, help="per phase (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="of one phase without and one with (default: 3)")
    parser.add_argument("--model", default="bertie-small")
    parser.add_argument("--source", type=Path, action="append", help="checkout to serve from (default: this one)")
    parser.add_argument("--serve-args", default="", help="further arguments of bertie serve")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sources = args.source or [ROOT]
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        extra = ["--device", "cpu", *args.serve_args.split()]
        urls = {
            source: stack.enter_context(server("bertie", args.model, extra, path=args.path, source=source)).url
            for source in sources
        }
        print(
            "| source | clients | p50 ms without, with | p99 ms without, with | p99 ratio | refused | long answered |"
        )
        print("|" + "---|" * 7)
        for scenario in args.scenario or SCENARIOS:
            rounds: dict[Path, list[dict[str, Any]]] = {source: [] for source in sources}
            for _ in range(args.rounds):
                for source, url in urls.items():
                    rounds[source].append(measure(url, args.path, scenario, args.seconds))
            for source in sources:
                summary = summarize(rounds[source])
                results.append({"source": source.resolve().name, "scenario": scenario, "path": args.path, **summary})
                results[-1]["rounds"] = rounds[source]
                print(table_row(results[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def table_row(result: dict[str, Any]) -> str:
    """A row of the table that `main` prints."""
    p50, p99 = (
        ", ".join(f"{result[phase][key] or math.inf:.0f}" for phase in ("without", "with"))
        for key in ("p50_ms", "p99_ms")
    )
    long, ratio = result["long"], result["p99_ratio"]
    refused = f"{result['with']['refused'] or 0:.2%}"
    answered = f"{long['answered']} {long['statuses'] or ''}".strip()
    return f"| {result['source']} | {result['scenario']} | {p50} | {p99} | {ratio:.2f} | {refused} | {answered} |"


if __name__ == "__main__":
    sys.exit(main())
