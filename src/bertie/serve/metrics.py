"""Counters, gauges and histograms in the Prometheus text format.

Each worker process has its own. With several workers behind one port, each writes its values to a
file every second, and the worker that is scraped adds up all files, including those of dead
workers: counters must not decrease.
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
    from bertie.serve.embedding_cache import EmbeddingCache
    from bertie.serve.engine_stats import BatchStats

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0)

Labels = tuple[str, ...]
Kind = Literal["counter", "gauge", "histogram"]


class Metric:
    """A metric with one value per combination of label values."""

    def __init__(self, kind: Kind, help: str, labels: Labels = (), bounds: tuple[float, ...] = ()) -> None:
        self.kind, self.help, self.labels, self.bounds = kind, help, labels, bounds
        self.values: dict[Labels, list[float]] = {}  # a value; for a histogram, the bucket counts and the sum
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str) -> None:
        """Increase a counter by `value`, or observe it in a histogram."""
        with self._lock:
            row = self.values.setdefault(labels, [0.0] * (len(self.bounds) + 2 if self.bounds else 1))
            if self.bounds:
                row[bisect_left(self.bounds, value)] += 1
            row[-1] += value

    def set(self, value: float, *labels: str) -> None:
        """Set a gauge."""
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
        """`folder`: where worker processes share their values."""
        endpoint, task = ("endpoint",), ("task",)
        self.requests = Metric("counter", "Requests by status.", ("endpoint", "status"))
        self.request_seconds = Metric("histogram", "Time from receiving a request to its response.", endpoint, SECONDS)
        self.queue_seconds = Metric("histogram", "Time that a request waited for its first batch.", endpoint, SECONDS)
        self.device_seconds = Metric("histogram", "A task's share, by tokens, of the time of a batch.", task, SECONDS)
        self.batch_tokens = Metric("histogram", "Tokens per batch.", (), TOKENS)
        self.tokens = Metric("counter", "Tokens processed, including special tokens.", task)
        self.unknown = Metric("counter", "Tokens that the models' vocabularies do not cover.", endpoint)
        self.non_english = Metric("counter", "Tokens in non-English text, for models for English.", endpoint)
        self.padding = Metric("counter", "Tokens that padding each batch to its longest text would have added.")
        self.batches = Metric("counter", "Batches processed.")
        self.in_flight = Metric("gauge", "Requests in flight.")
        self.waiting = Metric("gauge", "Tokens waiting for a batch.", ("model",))
        self.budget = Metric("gauge", "Token budget of a batch, as measured at startup.", ("model",))
        self.cache_hits = Metric("counter", "Windows whose embedding was found in the cache.")
        self.cache_misses = Metric("counter", "Windows whose embedding was not found in the cache.")
        self.cache_bytes = Metric("gauge", "Bytes in the cache of embeddings.")
        self.memory = Metric("gauge", "Resident memory in bytes.")
        self.connections = Metric("gauge", "Open connections.")
        self.connection_bytes = Metric("gauge", "Bytes of requests received and of replies not sent.", ("direction",))
        self.dropped = Metric("counter", "Connections dropped for a limit.", ("reason",))
        self._names = {
            "bertie_requests_total": self.requests,
            "bertie_request_seconds": self.request_seconds,
            "bertie_queue_seconds": self.queue_seconds,
            "bertie_device_seconds": self.device_seconds,
            "bertie_batch_tokens": self.batch_tokens,
            "bertie_tokens_total": self.tokens,
            "bertie_unknown_tokens_total": self.unknown,
            "bertie_non_english_tokens_total": self.non_english,
            "bertie_padding_avoided_tokens_total": self.padding,
            "bertie_batches_total": self.batches,
            "bertie_requests_in_flight": self.in_flight,
            "bertie_queue_tokens": self.waiting,
            "bertie_batch_budget_tokens": self.budget,
            "bertie_cache_hits_total": self.cache_hits,
            "bertie_cache_misses_total": self.cache_misses,
            "bertie_cache_bytes": self.cache_bytes,
            "bertie_connections": self.connections,
            "bertie_connection_bytes": self.connection_bytes,
            "bertie_connections_dropped_total": self.dropped,
            "process_resident_memory_bytes": self.memory,
        }
        self._folder = folder
        self._collectors: list[Callable[[], None]] = []

    def count_batch(self, model: str, batch: BatchStats) -> None:
        """Count a batch; called by the engines."""
        self.batches.add(1)
        self.batch_tokens.add(batch.tokens)
        self.padding.add(batch.padding_avoided)
        for task, (tokens, seconds) in batch.tasks.items():
            self.tokens.add(tokens, task)
            self.device_seconds.add(seconds, task)

    def count_cache(self, cache: EmbeddingCache) -> None:
        """Show what a cache has counted."""
        self.cache_hits.set(cache.hits)
        self.cache_misses.set(cache.misses)
        self.cache_bytes.set(cache.bytes)

    def add_collector(self, collect: Callable[[], None]) -> None:
        """Call a function that updates gauges before each scrape."""
        self._collectors.append(collect)

    def save(self) -> None:
        """Write the values to a file for the other workers."""
        if self._folder is not None:
            file = self._folder / f"{os.getpid()}.json"
            temporary = file.with_suffix(".new")
            temporary.write_bytes(orjson.dumps(self._snapshot()))
            os.replace(temporary, file)

    def _snapshot(self) -> dict[str, list[tuple[Labels, list[float]]]]:
        for collect in self._collectors:
            collect()
        self.memory.set(_resident_bytes())
        return {
            name: [(labels, list(row)) for labels, row in metric.values.copy().items()]
            for name, metric in self._names.items()
        }

    def _other_workers(self) -> Iterator[dict[str, list[tuple[list[str], list[float]]]]]:
        if self._folder is None:
            return
        for file in self._folder.glob("*.json"):
            if file.stem != str(os.getpid()):
                values = orjson.loads(file.read_bytes())
                if not Path(f"/proc/{file.stem}").exists():  # a dead worker's counters stay, its gauges do not
                    values = {name: rows for name, rows in values.items() if self._names[name].kind != "gauge"}
                yield values

    def text(self) -> str:
        """All metrics in the text format, version 0.0.4."""
        total: dict[str, dict[Labels, list[float]]] = {name: {} for name in self._names}
        workers: Iterable[dict[str, Any]] = [self._snapshot(), *self._other_workers()]
        for values in workers:
            for name, rows in values.items():
                for labels, row in rows:
                    previous = total[name].setdefault(tuple(labels), [0.0] * len(row))
                    total[name][tuple(labels)] = [a + b for a, b in zip(previous, row, strict=True)]
        lines = []
        for name, metric in self._names.items():
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
            for labels, row in sorted(total[name].items()):
                lines += _format(name, metric, labels, row)
        return "\n".join(lines) + "\n"


def _format(name: str, metric: Metric, values: Labels, row: list[float]) -> Iterator[str]:
    labels = [f'{label}="{_escape(value)}"' for label, value in zip(metric.labels, values, strict=True)]
    label_set = f"{{{','.join(labels)}}}" if labels else ""
    if metric.kind != "histogram":
        yield f"{name}{label_set} {row[0]:.12g}"
        return
    count = 0.0
    for bound, in_bucket in zip((*(f"{bound:g}" for bound in metric.bounds), "+Inf"), row[:-1], strict=True):
        count += in_bucket
        edge = f'le="{bound}"'
        yield f"{name}_bucket{{{','.join([*labels, edge])}}} {count:.12g}"
    yield f"{name}_sum{label_set} {row[-1]:.12g}"
    yield f"{name}_count{label_set} {count:.12g}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _resident_bytes() -> float:
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0.0
