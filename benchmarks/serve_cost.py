"""CPU microseconds per request of `bertie serve` apart from the model, by process, thread and stage.

    python -m benchmarks.serve_cost [--seconds 4] [--repeats 3] [--serve-args "--workers 2"] [--json OUT.json]
    python -m benchmarks.serve_cost --profile        # where the time goes: py-spy, or cProfile without it
    python -m benchmarks.serve_cost --source . --source ../other    # several checkouts, interleaved

The model has random weights and next to no cost: one layer of width 64, with a dense layer to 384
dimensions, so that replies have the real size. wrk keeps 64 connections busy with short texts. CPU time
is user and system time of the server's processes, divided by the requests answered; the load
generator's is not included.

Stages:

HTTP            GET /health
tokenization    offline, in batches of 64 texts
forward pass    `Embedder.embed` offline, in batches of 64 texts, less tokenization
rest of /embed  POST /embed less all of these: JSON, queue, engine, waking threads and processes, reply
"""

from __future__ import annotations

import argparse
import json
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import serve_load, serve_models
from benchmarks.serve_servers import MODEL, ROOT, Running, request_bodies, server

TOKENS = 16  # of a text
ENDPOINTS = ("/health", "/embed", "/embeddings", "/embeddings base64")
MAX_THREADS = 8  # listed, those with the most CPU time


def bodies_of(endpoint: str, texts: Sequence[str]) -> list[bytes]:
    """Requests to an endpoint; none for GET."""
    if endpoint == "/health":
        return []
    bodies = request_bodies(texts, path=endpoint.split()[0])
    if endpoint.endswith("base64"):
        bodies = [json.dumps(json.loads(body) | {"encoding_format": "base64"}).encode() for body in bodies]
    return bodies


def measure(up: Running, endpoint: str, bodies: Sequence[bytes], connections: int, seconds: float) -> dict[str, Any]:
    """The rate and the CPU time per request, in all and of each process and thread."""
    path = endpoint.split()[0]
    serve_load.wrk(up.url, path, bodies, connections, min(1.0, seconds))
    processes, threads = up.cpu_by_process(), up.cpu_by_thread()
    result = serve_load.wrk(up.url, path, bodies, connections, seconds)
    answered = max(1, result["answered"])
    spent = {pid: 1e6 * (now - processes.get(pid, 0.0)) / answered for pid, now in up.cpu_by_process().items()}
    by_thread = {ids: 1e6 * (now - threads.get(ids, 0.0)) / answered for ids, now in up.cpu_by_thread().items()}
    total = sum(spent.values())
    return {
        "rate": result["rate"],
        "failed": result["failed"],
        "p50_ms": result["p50_ms"],
        "cpu_us": total,
        "processes": list(spent.values()),
        "threads": [
            {"process": list(spent).index(pid), "main": pid == thread, "cpu_us": microseconds}
            for (pid, thread), microseconds in by_thread.items()
            if pid in spent
        ],
    }


def offline(model: str, texts: Sequence[str], seconds: float) -> dict[str, float]:
    """CPU microseconds per text of the tokenizer and of `Embedder.embed`, in batches of 64."""
    from bertie.tasks import Embedder

    embedder = Embedder.load(model, device="cpu")
    batch = [texts[i % len(texts)] for i in range(64)]
    calls: dict[str, Callable[[], object]] = {
        "tokenize": lambda: embedder.tokenizer.encode_batch(batch),
        "embed": lambda: embedder.embed(batch),
    }
    costs = {}
    for name, call in calls.items():
        call()
        count, started, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < seconds:
            call()
            count += len(batch)
        costs[name] = 1e6 * (time.process_time() - cpu) / count
    return costs


def stages(cpu: dict[str, float], offline_cpu: dict[str, float]) -> dict[str, float]:
    """CPU microseconds per request by stage.

    >>> stages({"/health": 50.0, "/embed": 200.0}, {"tokenize": 10.0, "embed": 60.0})
    {'HTTP': 50.0, 'tokenization': 10.0, 'forward pass': 50.0, 'rest of /embed': 90.0}
    """
    return {
        "HTTP": cpu["/health"],
        "tokenization": offline_cpu["tokenize"],
        "forward pass": offline_cpu["embed"] - offline_cpu["tokenize"],
        "rest of /embed": cpu["/embed"] - offline_cpu["embed"] - cpu["/health"],
    }


# --- profiles ---


def profile(model: str, texts: Sequence[str], args: argparse.Namespace, source: Path) -> None:
    """Print where the time of /embed goes: with py-spy, of threads that hold the interpreter lock."""
    bodies = bodies_of("/embed", texts)
    extra = ["--device", "cpu", *args.serve_args.split()]
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "profile")
        profiler = [] if tool else ["-m", "cProfile", "-o", str(output)]
        with server("bertie", model, extra, profiler=profiler, source=source) as up:
            serve_load.wrk(up.url, "/embed", bodies, args.connections, 1.0)
            load = threading.Thread(
                target=serve_load.wrk, args=(up.url, "/embed", bodies, args.connections, args.seconds + 1)
            )
            load.start()
            if tool:
                command = [tool, "record", "--pid", str(up.process.pid), "--subprocesses", "--gil", "--format", "raw"]
                command += ["--duration", f"{args.seconds:.0f}", "--rate", "500", "--output", str(output)]
                subprocess.run(command, check=True, capture_output=True)
            load.join()
        if tool:
            print_stacks(output.read_text())
        else:
            print("py-spy is not installed; cProfile covers the main thread of the first process.")
            pstats.Stats(str(output)).sort_stats("tottime").print_stats(30)


def print_stacks(text: str, most: int = 30) -> None:
    """Print functions by their own share of the samples, and by their share with what they call."""
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [frame for frame in stack.split(";") if not frame.startswith("process ")]
        if frames:
            own[frames[-1]] += int(count)
            inclusive.update(dict.fromkeys(frames, int(count)))
    total = max(1, sum(own.values()))
    for title, counter in (("self", own), ("with callees", inclusive)):
        print(f"\n{title:>14}  function")
        for frame, samples in counter.most_common(most):
            print(f"{samples / total:14.1%}  {frame}")


def main() -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: 4)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--endpoints", default=",".join(ENDPOINTS))
    parser.add_argument("--serve-args", default="", help="further arguments of bertie serve")
    parser.add_argument("--source", type=Path, action="append", help="checkout to serve from (default: this one)")
    parser.add_argument("--profile", action="store_true", help="also say where the time of /embed goes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts = serve_models.book_texts(256, TOKENS)
    endpoints, sources = args.endpoints.split(","), args.source or [ROOT]
    runs: dict[tuple[Path, str], list[dict[str, Any]]] = {}
    offline_runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(serve_models.embedder(Path(folder, "model"), cheap=True, tokenizer=MODEL))
        extra = ["--device", "cpu", *args.serve_args.split()]
        up = {source: stack.enter_context(server("bertie", model, extra, source=source)) for source in sources}
        for number in range(args.repeats):
            offline_runs.append(offline(model, texts, min(2.0, args.seconds)))
            for endpoint in endpoints if number % 2 == 0 else reversed(endpoints):
                for source in sources:
                    bodies = bodies_of(endpoint, texts)
                    result = measure(up[source], endpoint, bodies, args.connections, args.seconds)
                    runs.setdefault((source, endpoint), []).append(result)
        offline_cpu = {key: statistics.median(run[key] for run in offline_runs) for key in offline_runs[0]}
        results = [report(source, endpoints, runs, offline_cpu) for source in sources]
        if args.profile:
            for source in sources:
                profile(model, texts, args, source)
    if args.json is not None:
        args.json.write_text(json.dumps({"offline_cpu_us": offline_cpu, "sources": results}, indent=1) + "\n")
    return 0


def report(
    source: Path,
    endpoints: Sequence[str],
    runs: dict[tuple[Path, str], list[dict[str, Any]]],
    offline_cpu: dict[str, float],
) -> dict[str, Any]:
    """Print the tables of one checkout; the medians."""
    print(f"\n{source.resolve().name}\n")
    print("| endpoint | requests/s | p50 ms | CPU µs per request | by process |\n|" + "---|" * 5)
    cpu, rows = {}, {}
    for endpoint in endpoints:
        several = runs[source, endpoint]
        row = {key: statistics.median(run[key] for run in several) for key in ("rate", "p50_ms", "cpu_us")}
        parts = [statistics.median(values) for values in zip(*(run["processes"] for run in several), strict=False)]
        cpu[endpoint] = row["cpu_us"]
        rows[endpoint] = row | {"processes": parts, "threads": several[-1]["threads"], "runs": several}
        by_process = " + ".join(f"{part:.0f}" for part in parts)
        print(f"| {endpoint} | {row['rate']:,.0f} | {row['p50_ms']:.2f} | {row['cpu_us']:.0f} | {by_process} |")
    by_stage: dict[str, float] = {}
    if {"/health", "/embed"} <= set(cpu):
        by_stage = stages(cpu, offline_cpu)
        print("\n| stage | CPU µs per request |\n|---|---|")
        for stage, microseconds in by_stage.items():
            print(f"| {stage} | {microseconds:.0f} |")
    if "/embed" in rows:
        print("\n| thread, /embed | CPU µs per request |\n|---|---|")
        threads = sorted(rows["/embed"]["threads"], key=lambda thread: -float(thread["cpu_us"]))
        for thread in threads[:MAX_THREADS]:
            kind = "main thread" if thread["main"] else "another thread"
            print(f"| process {thread['process'] + 1}, {kind} | {thread['cpu_us']:.0f} |")
        rest = sum(thread["cpu_us"] for thread in threads[MAX_THREADS:])
        print(f"| {max(0, len(threads) - MAX_THREADS)} other threads | {rest:.0f} |")
    return {"source": source.resolve().name, "endpoints": rows, "stages": by_stage}


if __name__ == "__main__":
    sys.exit(main())
