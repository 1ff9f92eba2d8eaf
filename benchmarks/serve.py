"""`bertie serve` under load, compared with FastAPI + sentence-transformers and with the same model offline.

    python -m benchmarks.serve saturate --data FOLDER [--seconds 10] [--repeats 3] [--json OUT.json]
    python -m benchmarks.serve latency --data FOLDER [--seconds 10] [--json OUT.json] [--svg OUT.svg]
    python -m benchmarks.serve start [--repeats 5]
    python -m benchmarks.serve saturate --servers bertie --device cuda --serve-args "--workers 8" --per-request 1,32 \\
        --generator python --processes 6 --connections 256 --texts TEXTS.json

saturate: a closed loop of 64 connections with one text per request, against each server in turn,
and the same texts through `Embedder.embed` offline. The CPU time of the load generator (a few
percent of a core for wrk) counts against the server. The peer's batch sizes are tuned first and the
best are used, also with one process per core. CPU time per text is reported as well: it is the
better measure on a machine with other load.

latency: an open loop (Poisson arrivals) at 25, 50, 75, 100 and 200% of the capacity, measured or
given by --rate.

start: seconds from starting the process to the first response, of /classify with the built-in
model.

The texts are real and of mixed lengths: questions, captions, news, paragraphs; none is longer than
the model's maximum length, since sentence-transformers would truncate it. Without --data they are
excerpts of a novel, or those in --texts.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks import serve_load

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models" / "all-MiniLM-L6-v2"
PATH = "/embed"
SHARES = (0.25, 0.5, 0.75, 1.0, 2.0)
# Files of --data, the fields that hold texts, and how many texts of each.
SOURCES = {
    "quora_pairs/dev.jsonl.gz": (("text_a", "text_b"), 800),
    "stsb/dev.jsonl.gz": (("text_a", "text_b"), 400),
    "ag_news/test.jsonl.gz": (("text",), 500),
    "squad_v1/dev.jsonl.gz": (("context",), 300),
}


# --- texts ---


def real_texts(data: Path | None, model: str, file: Path | None = None) -> list[str]:
    """Texts within the model's maximum length, shuffled; or those of a JSON file, unchanged."""
    if file is not None:
        given: list[str] = json.loads(file.read_text())
        return given
    from bertie.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.load(model)
    assert checkpoint.tokenizer is not None
    draw = random.Random(0)
    texts: list[str] = []
    if data is None:
        words = (ROOT / "src" / "bertie" / "recipes" / "examples" / "book.txt").read_text().split()
        for _ in range(1000):
            size, start = int(draw.lognormvariate(3.2, 0.8)) + 2, draw.randrange(len(words))
            texts.append(" ".join(words[start : start + size]))
    else:
        for name, (fields, count) in SOURCES.items():
            with gzip.open(data / name, "rt", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            candidates = sorted({row[field] for row in rows for field in fields})
            texts += draw.sample(candidates, min(count, len(candidates)))
    encodings = checkpoint.tokenizer.encode_batch(texts)
    texts = [text for text, encoding in zip(texts, encodings, strict=True) if len(encoding) <= checkpoint.max_length]
    lengths = sorted(len(encoding) for encoding in encodings if len(encoding) <= checkpoint.max_length)
    draw.shuffle(texts)
    say(
        f"{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):g}, "
        f"mean {statistics.mean(lengths):.1f}"
    )
    return texts


def request_bodies(texts: Sequence[str], per_request: int = 1) -> list[bytes]:
    """Request bodies with `per_request` texts each."""
    starts = range(0, len(texts) - per_request + 1, per_request)
    inputs = texts if per_request == 1 else [texts[i : i + per_request] for i in starts]
    return [json.dumps({"inputs": item}, ensure_ascii=False).encode() for item in inputs]


def say(line: str) -> None:
    print(line, flush=True)


# --- servers ---


@dataclass
class Running:
    """A running server."""

    name: str
    url: str
    process: subprocess.Popen[str]

    def cpu_seconds(self) -> float:
        """The CPU time of the process and its children."""
        pids, total, ticks = [self.process.pid], 0, os.sysconf("SC_CLK_TCK")
        while pids:
            pid = pids.pop()
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
            total += int(fields[11]) + int(fields[12])
        return total / ticks


def environment() -> dict[str, str]:
    """The environment of servers: all cores."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return inherited | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def server(name: str, model: str, extra: Sequence[str] = ()) -> Iterator[Running]:
    """Start a server, wait until it answers, and stop it afterwards."""
    if name == "bertie":
        command = ["-P", "-m", "bertie", "serve", f"model={model}", "--port", "0", *extra]
        process = subprocess.Popen(
            [sys.executable, *command], env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        hit = re.search(r"http://\S+", line)
        if hit is None:
            raise SystemExit(f"bertie serve did not start: {line!r}")
        url = hit[0]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = ["-m", "benchmarks.serve_peers", name.split()[0], "--model", model, "--port", str(port), *extra]
        process = subprocess.Popen([sys.executable, *command], env=environment(), text=True)
    try:
        deadline = time.monotonic() + 120
        while not post(url, PATH, {"inputs": "warm-up"}):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start")
            time.sleep(0.1)
        yield Running(name, url, process)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


def post(url: str, path: str, body: Any) -> bool:
    request = Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


# --- measurements ---


def offline(model: str, texts: Sequence[str], seconds: float, device: str | None) -> dict[str, Any]:
    """Measure `Embedder.embed` on the same texts, in another process."""
    args = [sys.executable, "-m", "benchmarks.serve", "offline", "--model", model, "--seconds", str(seconds)]
    args += [] if device is None else ["--device", device]
    out = subprocess.run(args, input=json.dumps(list(texts)), env=environment(), capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def offline_here(model: str, seconds: float, device: str | None) -> None:
    import torch

    from bertie.tasks import Embedder

    texts = json.load(sys.stdin)
    embedder = Embedder.load(model, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = 512 if embedder.model.device.type == "cpu" else 16_384  # texts per call: a GPU needs many
    embedder.embed(texts[:256] if size == 512 else texts)
    count, started, cpu_start = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        embedder.embed([texts[i % len(texts)] for i in range(count, count + size)])
        count += size
    elapsed = time.perf_counter() - started
    cpu = 1000 * (time.process_time() - cpu_start) / count
    print(json.dumps({"rate": round(count / elapsed, 2), "seconds": round(elapsed, 3), "cpu_ms": round(cpu, 4)}))


def measure_saturation(
    target: Running, bodies: Sequence[bytes], args: argparse.Namespace, seconds: float, per_request: int = 1
) -> dict[str, Any]:
    """Run a closed loop of requests with `per_request` texts, after a short warm-up."""

    def run(length: float) -> dict[str, Any]:
        if args.generator == "wrk":
            return serve_load.wrk(target.url, PATH, bodies, args.connections, length)
        return serve_load.closed_loop(target.url, PATH, bodies, args.connections, length, args.processes)

    run(min(2.0, seconds))
    cpu_start = target.cpu_seconds()
    result = run(seconds)
    cpu = target.cpu_seconds() - cpu_start
    rates = {"requests": result["rate"], "rate": result["rate"] * per_request}
    return result | rates | {"cpu_ms": round(1000 * cpu / max(1, result["answered"] * per_request), 4)}


def tune_peer(peer: Running, bodies: Sequence[bytes], args: argparse.Namespace) -> dict[str, float]:
    """Find the maximum number of texts, the batch size and the wait with which the peer is fastest."""
    trials: list[tuple[float, dict[str, float]]] = []

    def attempt(max_texts: int, batch: int, wait: float) -> None:
        tuning = {"max_texts": max_texts, "batch": batch, "wait_ms": wait}
        post(peer.url, "/tune", tuning)
        result = measure_saturation(peer, bodies, args, max(8.0, args.seconds))  # one batch may take seconds
        trials.append((result["rate"], tuning))
        say(f"  {json.dumps(tuning)}: {result['rate']:.1f}/s, {result['cpu_ms']:.2f} CPU ms per text")

    for max_texts, batch in itertools.product(args.max_texts, args.batches):
        if batch <= max_texts:
            attempt(max_texts, batch, 0.0)
    best = max(trials, key=lambda pair: pair[0])[1]
    for wait in args.waits:
        attempt(int(best["max_texts"]), int(best["batch"]), wait)
    best = max(trials, key=lambda pair: pair[0])[1]
    post(peer.url, "/tune", best)
    return best


def saturate(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all servers in turn, several times."""
    model = str(args.model)
    texts = real_texts(args.data, model, args.texts)
    bodies = {count: request_bodies(texts, count) for count in args.per_request}
    runs: dict[str, list[dict[str, Any]]] = {"offline": []}
    best = None
    device = [] if args.device is None else ["--device", args.device]
    with ExitStack() as stack:
        up = {}
        for name in args.servers:
            extra = [*device, *(args.serve_args.split() if name == "bertie" else [])]
            up[name] = stack.enter_context(server(name, model, extra))
        if "batched" in up:
            best = tune_peer(up["batched"], request_bodies(texts), args)
            if args.device is None:  # on a CPU, also with one process per core
                flags = ["--max-texts", best["max_texts"], "--batch", best["batch"], "--wait-ms", best["wait_ms"]]
                name = f"batched in {os.cpu_count()} processes"
                extra = [*map(str, flags), "--processes", str(os.cpu_count())]
                up[name] = stack.enter_context(server(name, model, extra))
        for number in range(args.repeats):
            for name in ["offline", *up] if number % 2 == 0 else [*reversed(up), "offline"]:
                if name == "offline":
                    results = {name: offline(model, texts, args.seconds, args.device)}
                else:
                    results = {
                        name if count == 1 else f"{name}, {count} per request": measure_saturation(
                            up[name], bodies[count], args, args.seconds, count
                        )
                        for count in args.per_request
                    }
                for label, result in results.items():
                    runs.setdefault(label, []).append(result)
                    say(f"  {number + 1}/{args.repeats} {label}: {json.dumps(result)}")
    rate = {name: statistics.median(run["rate"] for run in several) for name, several in runs.items()}
    cpu = {name: statistics.median(run["cpu_ms"] for run in several) for name, several in runs.items()}
    say("\n| | texts/s | share of offline | CPU ms per text | p50 ms | p99 ms | Bertie vs. it |\n|" + "---|" * 7)
    for name, several in runs.items():
        p50, p99 = (
            f"{statistics.median(run[key] for run in several):.0f}" if name != "offline" else ""
            for key in ("p50_ms", "p99_ms")
        )
        ratio = f"{rate['bertie'] / rate[name]:.2f}×" if "bertie" in rate and rate[name] else ""
        share = rate[name] / rate["offline"]
        say(f"| {name} | {rate[name]:.1f} | {share:.1%} | {cpu[name]:.2f} | {p50} | {p99} | {ratio} |")
    return {
        "what": "saturate",
        "connections": args.connections,
        "generator": args.generator,
        "best_batching": best,
        "rate": rate,
        "cpu_ms": cpu,
        "runs": runs,
    }


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one server at several shares of its capacity."""
    model, name = str(args.model), args.servers[0]
    bodies = request_bodies(real_texts(args.data, model, args.texts))
    device = [] if args.device is None else ["--device", args.device]
    rows: list[dict[str, Any]] = []
    with server(name, model, [*device, *(args.serve_args.split() if name == "bertie" else [])]) as up:
        capacity = args.rate or measure_saturation(up, bodies, args, args.seconds)["rate"]
        say(f"capacity: {capacity:.1f} requests/s")
        for number in range(args.repeats):
            for share in SHARES:
                result = serve_load.open_loop(up.url, PATH, bodies, share * capacity, args.seconds, args.processes)
                rows.append({"share": share, **result})
                say(f"  {number + 1}/{args.repeats} {share:.0%}: {json.dumps(result)}")
    table = []
    say(
        "\n| load | offered/s | answered/s | refused | p50 ms | p95 ms | p99 ms | refused within (p99) |\n|"
        + "---|" * 8
    )
    for share in SHARES:
        group = [row for row in rows if row["share"] == share]
        summary: dict[str, Any] = {"share": share}
        for key in ("offered", "rate", "p50_ms", "p95_ms", "p99_ms", "refused_p99_ms"):
            values = [row[key] for row in group if row[key] is not None]
            summary[key] = statistics.median(values) if values else None
        total = sum(row["answered"] + row["refused"] + sum(row["failed"].values()) for row in group)
        summary["refused"] = sum(row["refused"] for row in group) / total
        summary["failed"] = sum(sum(row["failed"].values()) for row in group)
        table.append(summary)
        within = "" if summary["refused_p99_ms"] is None else f"{summary['refused_p99_ms']:.0f} ms"
        times = " | ".join(
            "" if summary[key] is None else f"{summary[key]:.0f}" for key in ("p50_ms", "p95_ms", "p99_ms")
        )
        rates = f"{summary['offered']:.1f} | {summary['rate']:.1f} | {summary['refused']:.1%}"
        say(f"| {share:.0%} | {rates} | {times} | {within} |")
    if args.svg is not None:
        args.svg.write_text(plot(table, name))
    return {"what": "latency", "server": name, "capacity": capacity, "table": table, "runs": rows}


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the time from starting the process to the first response."""
    times = []
    for _ in range(args.repeats):
        started = time.perf_counter()
        command = [sys.executable, "-P", "-m", "bertie", "serve", "--port", "0"]
        with subprocess.Popen(
            command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert post(url, "/classify", {"texts": "A delight from start to finish."})
            times.append(round(time.perf_counter() - started, 3))
            process.terminate()
        say(f"  {times[-1]:.2f} s")
    say(f"\nmedian {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f}")
    return {"what": "start", "seconds": times}


_STYLE = """<style>
svg { background: #fff; } text { fill: #1c2024; font: 11px system-ui, sans-serif; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .name { fill: #667079; } .grid { stroke: #dde1e5; }
polyline { fill: none; stroke-width: 1.8; } line.a, line.b { stroke-width: 2; }
.a { stroke: #1f5fa8; } .b { stroke: #b8500b; } .faint { stroke: #8a949c; stroke-width: 1.4; }
circle.a { fill: #1f5fa8; } circle.b { fill: #b8500b; } circle.faint { fill: #8a949c; }
</style><rect width="640" height="300" fill="#fff"/>"""


def plot(table: Sequence[dict[str, Any]], name: str) -> str:
    """Plot the latency of successful requests by load, as a self-contained SVG."""
    from bertie.evaluation.plots import Line, lines

    series = [
        Line(
            key, [(100 * row["share"], row[f"{key}_ms"]) for row in table if row[f"{key}_ms"] is not None], style, True
        )
        for key, style in (("p50", "a"), ("p95", "b"), ("p99", "faint"))
    ]
    alt = f"{name}: latency of successful requests by load"
    svg = lines(alt, series, "load, % of capacity", "milliseconds")
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace("</title>", "</title>" + _STYLE, 1) + "\n"


def main() -> int:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("saturate", "latency", "start", "offline"))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", type=Path, help="a folder with " + ", ".join(SOURCES))
    parser.add_argument("--texts", type=Path, help="a list of texts in JSON, instead of --data")
    parser.add_argument(
        "--per-request", default="1", help="texts per request; several numbers are measured one after the other"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--generator", choices=("wrk", "python"), default="wrk", help="load generator of closed loops")
    parser.add_argument("--processes", type=int, default=1, help="processes of the Python generator")
    parser.add_argument(
        "--servers", default="bertie,plain,async,batched", help="servers to compare; latency measures the first"
    )
    parser.add_argument("--serve-args", default="", help="further arguments of bertie serve")
    parser.add_argument("--max-texts", default="16,64", help="maximum numbers of texts to try for the batching peer")
    parser.add_argument("--batches", default="4,8,16,32", help="batch sizes to try for it")
    parser.add_argument("--waits", default="5", help="waits in milliseconds to try for it")
    parser.add_argument("--rate", type=float, help="capacity in requests per second (measured)")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.what == "offline":
        offline_here(str(args.model), args.seconds, args.device)
        return 0
    args.servers = args.servers.split(",")
    args.max_texts = [int(value) for value in args.max_texts.split(",")]
    args.batches = [int(value) for value in args.batches.split(",")]
    args.waits = [float(value) for value in args.waits.split(",")]
    args.per_request = [int(value) for value in args.per_request.split(",")]
    result = {"saturate": saturate, "latency": latency, "start": start}[args.what](args)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    if args.json is not None:
        args.json.write_text(json.dumps(result | {"machine": machine}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
