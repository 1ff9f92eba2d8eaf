"""Counters and histograms in Prometheus' text format.

Each worker keeps its own. Where there are several behind one port, each writes them to a file a second, and whoever is
asked adds up all files: those of workers that were killed, too, as counters may not go back.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import orjson

if TYPE_CHECKING:
    from bertie.serve.engine import Ran

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "histogram"]


class Family:
    """One metric, with a value for each of its labels' values."""

    def __init__(self, kind: Kind, help: str, labels: Labels = (), bounds: tuple[float, ...] = ()) -> None:
        self.kind, self.help, self.labels, self.bounds = kind, help, labels, bounds
        self.values: dict[Labels, list[float]] = {}  # a number; of a histogram: those of its buckets, and the sum
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str) -> None:
        """Count so much more; of a histogram: one that is so large."""
        with self._lock:
            found = self.values.setdefault(labels, [0.0] * (len(self.bounds) + 2 if self.bounds else 1))
            if self.bounds:
                found[bisect_left(self.bounds, value)] += 1
            found[-1] += value

    def set(self, value: float, *labels: str) -> None:
        """So much it is now."""
        with self._lock:
            self.values[labels] = [value]


class Metrics:
    """All metrics of a server.

    >>> metrics = Metrics()
    >>> metrics.requests.add(1, "/embed", "200")
    >>> "bertie_requests_total{endpoint=\\"/embed\\",status=\\"200\\"} 1" in metrics.text()
    True
    """

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where several workers put what they count."""
        end, task = ("endpoint",), ("task",)
        self.requests = Family("counter", "Requests by status.", ("endpoint", "status"))
        self.request_seconds = Family("histogram", "From the first byte of a request to its reply.", end, SECONDS)
        self.queue_seconds = Family("histogram", "How long a request waited for its first batch.", end, SECONDS)
        self.device_seconds = Family("histogram", "A task's part, by tokens, of a batch's time.", task, SECONDS)
        self.batch_tokens = Family("histogram", "Tokens of a batch.", (), TOKENS)
        self.tokens = Family("counter", "Tokens that were read, special ones included.", task)
        self.padding = Family("counter", "Tokens that padding every batch to its longest text would have added.")
        self.batches = Family("counter", "Batches that were computed.")
        self.in_flight = Family("gauge", "Requests that are under way.")
        self.waiting = Family("gauge", "Tokens that wait for a batch.", ("model",))
        self.budget = Family("gauge", "Tokens a batch, as measured at the start.", ("model",))
        self.memory = Family("gauge", "Resident memory in bytes.")
        self._names = {
            "bertie_requests_total": self.requests,
            "bertie_request_seconds": self.request_seconds,
            "bertie_queue_seconds": self.queue_seconds,
            "bertie_device_seconds": self.device_seconds,
            "bertie_batch_tokens": self.batch_tokens,
            "bertie_tokens_total": self.tokens,
            "bertie_padding_avoided_tokens_total": self.padding,
            "bertie_batches_total": self.batches,
            "bertie_requests_in_flight": self.in_flight,
            "bertie_queue_tokens": self.waiting,
            "bertie_batch_budget_tokens": self.budget,
            "process_resident_memory_bytes": self.memory,
        }
        self._folder = folder
        self._look: list[Callable[[], None]] = []

    def watch(self, model: str, ran: Ran) -> None:
        """Count a batch; engines call this."""
        self.batches.add(1)
        self.batch_tokens.add(ran.tokens)
        self.padding.add(ran.padding_avoided)
        for task, (tokens, seconds) in ran.tasks.items():
            self.tokens.add(tokens, task)
            self.device_seconds.add(seconds, task)

    def before(self, look: Callable[[], None]) -> None:
        """Have something looked up each time the metrics are asked for."""
        self._look.append(look)

    def save(self) -> None:
        """Let the other workers know."""
        if self._folder is not None:
            file = self._folder / f"{os.getpid()}.json"
            fresh = file.with_suffix(".new")
            fresh.write_bytes(orjson.dumps(self._now()))
            os.replace(fresh, file)

    def _now(self) -> dict[str, list[tuple[Labels, list[float]]]]:
        for look in self._look:
            look()
        self.memory.set(_resident())
        return {name: [(key, list(row)) for key, row in one.values.copy().items()] for name, one in self._names.items()}

    def _others(self) -> Iterator[dict[str, list[tuple[list[str], list[float]]]]]:
        if self._folder is None:
            return
        for file in self._folder.glob("*.json"):
            if file.stem != str(os.getpid()):
                found = orjson.loads(file.read_bytes())
                if not Path(f"/proc/{file.stem}").exists():  # its counters stand; what it held is gone
                    found = {name: rows for name, rows in found.items() if self._names[name].kind != "gauge"}
                yield found

    def text(self) -> str:
        """The text format, version 0.0.4."""
        total: dict[str, dict[Labels, list[float]]] = {name: {} for name in self._names}
        both: Iterable[dict[str, Any]] = [self._now(), *self._others()]
        for one in both:
            for name, rows in one.items():
                for key, row in rows:
                    mine = total[name].setdefault(tuple(key), [0.0] * len(row))
                    total[name][tuple(key)] = [a + b for a, b in zip(mine, row, strict=True)]
        lines = []
        for name, family in self._names.items():
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            for key, row in sorted(total[name].items()):
                lines += _lines(name, family, key, row)
        return "\n".join(lines) + "\n"


def _lines(name: str, family: Family, key: Labels, row: list[float]) -> Iterator[str]:
    labels = [f'{label}="{_escaped(value)}"' for label, value in zip(family.labels, key, strict=True)]
    inside = f"{{{','.join(labels)}}}" if labels else ""
    if family.kind != "histogram":
        yield f"{name}{inside} {row[0]:.12g}"
        return
    count = 0.0
    for bound, some in zip((*(f"{one:g}" for one in family.bounds), "+Inf"), row[:-1], strict=True):
        count += some
        edge = f'le="{bound}"'
        yield f"{name}_bucket{{{','.join([*labels, edge])}}} {count:.12g}"
    yield f"{name}_sum{inside} {row[-1]:.12g}"
    yield f"{name}_count{inside} {count:.12g}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _resident() -> float:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0.0
