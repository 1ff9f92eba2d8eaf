"""`bertie serve` under load, compared with infinity-emb, FastAPI + sentence-transformers and the same model offline.

    python -m benchmarks.serve saturate --data FOLDER [--seconds 10] [--repeats 3] [--json OUT.json]
    python -m benchmarks.serve latency --data FOLDER --servers bertie,infinity,batched [--svg OUT.svg]
    python -m benchmarks.serve single --data FOLDER --servers bertie,infinity
    python -m benchmarks.serve start [--repeats 5]
    python -m benchmarks.serve saturate --servers bertie --device cuda --per-request 1,32 \\
        --generator python --processes 6 --connections 256 --texts TEXTS.json

Servers are those of `benchmarks.serve_servers`: `bertie`, `bertie:/embeddings` (the same process,
through the endpoint that infinity-emb has), `infinity`, `plain`, `async` and `batched`. infinity-emb
is installed by `python -m benchmarks.serve_infinity setup`, and runs with the settings that
`python -m benchmarks.serve_infinity tune` found best; the other peers need fastapi and uvicorn.

saturate: a closed loop of 64 connections with one text per request, against each server in turn,
and the same texts through `Embedder.embed` offline. The CPU time of the load generator (a few
percent of a core for wrk) counts against the server. The batching peer's sizes are tuned first and the
best are used, also with one process per core. CPU time per text is reported as well: it is the
better measure on a machine with other load.

latency: an open loop (Poisson arrivals), each server at 25, 50, 75, 100 and 200% of its own capacity,
and all servers at the same absolute loads, up to the first beyond their capacity: --loads, or shares of
the highest capacity. Capacities are measured, or given by --rate.

single: one short query at a time on one keep-alive connection, and the same query through
`Embedder.embed([text])` in a process of its own, in interleaved blocks.

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
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import serve_infinity, serve_load
from benchmarks.serve_plot import latency_plot
from benchmarks.serve_servers import MODEL, ROOT, Running, Target, environment, post, request_bodies, server

SHARES = (0.25, 0.5, 0.75, 1.0, 2.0)  # of a server's own capacity
COMMON_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)  # of the highest capacity: the absolute loads
QUERY_WORDS = 12  # of a short query, at most
LEGEND = {
    "bertie": "bertie serve",
    "bertie:/embeddings": "bertie, /embeddings",
    "infinity": "infinity-emb",
    "plain": "FastAPI",
    "async": "FastAPI, async",
    "batched": "FastAPI, batching",
}
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


def say(line: str) -> None:
    print(line, flush=True)


# --- servers ---


def start_all(args: argparse.Namespace, stack: ExitStack) -> dict[str, Running]:
    """Start the servers of all targets, one process for each server."""
    device = [] if args.device is None else ["--device", args.device]
    up: dict[str, Running] = {}
    for target in args.servers:
        if target.server not in up:
            model, extra = str(args.model), [*device]
            if target.server == "bertie":
                extra += ["--precision", args.precision, *args.serve_args.split()]
            elif target.server == "infinity":
                model, extra = serve_infinity.BEST.model(model), [*extra, *args.infinity_args]
            up[target.server] = stack.enter_context(server(target.server, model, extra))
    return up


# --- measurements ---


def offline(
    model: str, texts: Sequence[str], seconds: float, device: str | None, precision: str | None = None
) -> dict[str, Any]:
    """Measure `Embedder.embed` on the same texts, in another process."""
    args = [sys.executable, "-m", "benchmarks.serve", "offline", "--model", model, "--seconds", str(seconds)]
    args += [] if device is None else ["--device", device]
    args += [] if precision is None else ["--precision", precision]
    out = subprocess.run(args, input=json.dumps(list(texts)), env=environment(), capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def offline_here(model: str, seconds: float, device: str | None, precision: Any) -> None:
    import torch

    from bertie.tasks import Embedder

    texts = json.load(sys.stdin)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    embedder = Embedder.load(model, device=device, precision=precision)
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
    target: Running, path: str, bodies: Sequence[bytes], args: argparse.Namespace, seconds: float, per_request: int = 1
) -> dict[str, Any]:
    """Run a closed loop of requests with `per_request` texts, after a short warm-up."""

    def run(length: float) -> dict[str, Any]:
        if args.generator == "wrk":
            return serve_load.wrk(target.url, path, bodies, args.connections, length)
        return serve_load.closed_loop(target.url, path, bodies, args.connections, length, args.processes)

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
        result = measure_saturation(peer, "/embed", bodies, args, max(8.0, args.seconds))  # one batch may take seconds
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
    runs: dict[str, list[dict[str, Any]]] = {"offline": []}
    best = None
    with ExitStack() as stack:
        up = start_all(args, stack)
        targets = {str(target): target for target in args.servers}
        if "batched" in up:
            best = tune_peer(up["batched"], request_bodies(texts), args)
            if args.device is None:  # on a CPU, also with one process per core
                flags = ["--max-texts", best["max_texts"], "--batch", best["batch"], "--wait-ms", best["wait_ms"]]
                name = f"batched in {os.cpu_count()} processes"
                extra = [*map(str, flags), "--processes", str(os.cpu_count())]
                up[name] = stack.enter_context(server(name, model, extra))
                targets[name] = Target(name, "/embed")
        for number in range(args.repeats):
            for name in ["offline", *targets] if number % 2 == 0 else [*reversed(targets), "offline"]:
                if name == "offline":
                    results = {name: offline(model, texts, args.seconds, args.device, args.precision)}
                else:
                    target = targets[name]
                    results = {
                        name if count == 1 else f"{name}, {count} per request": measure_saturation(
                            up[target.server],
                            target.path,
                            request_bodies(texts, count, target.path),
                            args,
                            args.seconds,
                            count,
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
    """Measure all servers at shares of their own capacity and at the same absolute loads."""
    texts = real_texts(args.data, str(args.model), args.texts)
    bodies = {str(target): request_bodies(texts, path=target.path) for target in args.servers}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        up = start_all(args, stack)
        capacity = {}
        for target in args.servers:
            name = str(target)
            given = args.rate.get(name)
            running = up[target.server]
            capacity[name] = given or measure_saturation(running, target.path, bodies[name], args, args.seconds)["rate"]
            say(f"{name}: capacity {capacity[name]:.1f} requests/s")
        points = plan_loads(capacity, args.loads)
        for number in range(args.repeats):
            for point in points if number % 2 == 0 else reversed(points):
                target = Target.parse(point["server"])
                url, offered = up[target.server].url, point["offered"]
                result = serve_load.open_loop(
                    url, target.path, bodies[point["server"]], offered, args.seconds, args.processes
                )
                rows.append(point | result)
                say(f"  {number + 1}/{args.repeats} {point['server']} {offered:.1f}/s: {json.dumps(result)}")
    table = [summarize([row for row in rows if all(row[key] == point[key] for key in point)]) for point in points]
    for kind in ("share", "absolute"):
        column = "load" if kind == "share" else "offered/s"
        say(f"\n| server | {column} | answered/s | refused | p50 ms | p95 ms | p99 ms |\n|" + "---|" * 7)
        for row in table:
            if row["kind"] == kind:
                load = f"{row['share']:.0%}" if kind == "share" else f"{row['offered']:.1f}"
                times = " | ".join(
                    "" if row[key] is None else f"{row[key]:.0f}" for key in ("p50_ms", "p95_ms", "p99_ms")
                )
                say(f"| {row['server']} | {load} | {row['rate']:.1f} | {row['refused']:.1%} | {times} |")
    if args.svg is not None:
        args.svg.write_text(latency_plot([row for row in table if row["kind"] == "absolute"], LEGEND))
    return {"what": "latency", "capacity": capacity, "table": table, "runs": rows}


def plan_loads(capacity: dict[str, float], loads: Sequence[float] = ()) -> list[dict[str, Any]]:
    """The loads to offer, so that servers alternate: shares of each capacity, and absolute loads.

    An absolute load is offered to a server up to the first that is beyond its capacity: a server that
    accepts more requests than it can answer only makes its queue longer.
    """
    absolute = sorted(loads) or [share * max(capacity.values()) for share in COMMON_SHARES]
    points: list[dict[str, Any]] = []
    for share in SHARES:
        for name, rate in capacity.items():
            points.append({"server": name, "kind": "share", "share": share, "offered": round(share * rate, 3)})
    for i, load in enumerate(absolute):
        for name, rate in capacity.items():
            if i == 0 or absolute[i - 1] <= rate:
                share = round(load / rate, 4)
                points.append({"server": name, "kind": "absolute", "share": share, "offered": round(load, 3)})
    return points


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several measurements of one load, and how much was refused or failed."""
    summary: dict[str, Any] = {key: rows[0][key] for key in ("server", "kind", "share", "offered")}
    for key in ("rate", "p50_ms", "p95_ms", "p99_ms", "refused_p99_ms"):
        values = [row[key] for row in rows if row[key] is not None]
        summary[key] = statistics.median(values) if values else None
    failed = sum(sum(row["failed"].values()) for row in rows)
    refused = sum(row["refused"] for row in rows)
    total = failed + refused + sum(row["answered"] for row in rows)
    return summary | {"refused": refused / max(1, total), "failed": failed / max(1, total)}


def single(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one short query at a time over HTTP and offline, in interleaved blocks."""
    model = str(args.model)
    texts = real_texts(args.data, model, args.texts)
    queries = [text for text in texts if len(text.split()) <= QUERY_WORDS][:64] or texts[:64]
    blocks: dict[str, list[list[float]]] = {"offline": [], **{str(target): [] for target in args.servers}}
    with ExitStack() as stack:
        up = start_all(args, stack)
        embed = stack.enter_context(offline_queries(model, queries, args.device, args.precision))
        clients = {
            str(target): stack.enter_context(
                keep_alive(up[target.server].url, target.path, request_bodies(queries, path=target.path))
            )
            for target in args.servers
        }
        for number in range(args.repeats + 1):
            names = list(blocks)
            for name in names if number % 2 == 0 else reversed(names):
                send = embed if name == "offline" else clients[name]
                times = send(args.queries)
                if number:  # the first block is the warm-up
                    blocks[name].append(times)
    medians = {name: [statistics.median(times) for times in several] for name, several in blocks.items()}
    result: dict[str, Any] = {}
    say("\n| | p50 ms | p99 ms | p50 above offline, ms |\n|" + "---|" * 4)
    for name, several in blocks.items():
        times = sorted(itertools.chain.from_iterable(several))
        above = [1000 * (here - there) for here, there in zip(medians[name], medians["offline"], strict=True)]
        row = {
            "p50_ms": 1000 * statistics.median(medians[name]),
            "p99_ms": 1000 * times[min(len(times) - 1, int(0.99 * len(times)))],
            "above_offline_ms": statistics.median(above),
        }
        result[name] = {key: round(value, 4) for key, value in row.items()}
        say(f"| {name} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {row['above_offline_ms']:+.2f} |")
    return {"what": "single", "queries": args.queries, "latency": result, "medians": medians}


@contextmanager
def keep_alive(url: str, path: str, bodies: Sequence[bytes]) -> Iterator[Any]:
    """A function that sends so many requests on one connection, and returns the seconds of each."""
    host, port, requests = serve_load.encode_requests(url, path, bodies)
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(count: int) -> list[float]:
            times = []
            for number in range(count):
                started = time.perf_counter()
                connection.sendall(requests[number % len(requests)])
                status = read_response(connection)
                times.append(time.perf_counter() - started)
                if status != b"200":
                    raise SystemExit(f"{url}{path}: status {status.decode()}")
            return times

        yield send


def read_response(connection: socket.socket) -> bytes:
    """Read one response with a Content-Length; its status."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _receive(connection)
    size = int(data[:end].lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
    while len(data) < end + 4 + size:
        data += _receive(connection)
    return data[9:12]


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise SystemExit("the server closed the connection")
    return data


@contextmanager
def offline_queries(model: str, texts: Sequence[str], device: str | None, precision: str) -> Iterator[Any]:
    """A function that embeds so many texts one at a time, in a process of its own; the seconds of each."""
    command = [sys.executable, "-m", "benchmarks.serve", "offline-queries", "--model", model, "--precision", precision]
    command += [] if device is None else ["--device", device]
    process = subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None

    def send(count: int) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        times: list[float] = json.loads(process.stdout.readline())
        return times

    with process:
        process.stdin.write(json.dumps(list(texts)) + "\n")
        yield send
        process.stdin.close()


def offline_queries_here(model: str, device: str | None, precision: Any) -> None:
    from bertie.tasks import Embedder

    texts = json.loads(sys.stdin.readline())
    embedder = Embedder.load(model, device=device or "cpu", precision=precision)
    for line in sys.stdin:
        times = []
        for number in range(int(line)):
            started = time.perf_counter()
            embedder.embed([texts[number % len(texts)]])
            times.append(time.perf_counter() - started)
        print(json.dumps(times), flush=True)


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


def main() -> int:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("saturate", "latency", "single", "start", "offline", "offline-queries"))
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
    parser.add_argument("--servers", default="bertie,bertie:/embeddings,infinity,batched", help="servers to compare")
    parser.add_argument("--serve-args", default="", help="further arguments of bertie serve")
    parser.add_argument(
        "--infinity-settings", type=Path, help="JSON of `benchmarks.serve_infinity tune`; by default its best here"
    )
    parser.add_argument("--max-texts", default="16,64", help="maximum numbers of texts to try for the batching peer")
    parser.add_argument("--batches", default="4,8,16,32", help="batch sizes to try for it")
    parser.add_argument("--waits", default="5", help="waits in milliseconds to try for it")
    parser.add_argument("--rate", default="", help="capacities, such as bertie=180,infinity=60 (default: measured)")
    parser.add_argument("--loads", default="", help="absolute loads of latency, in requests per second")
    parser.add_argument("--queries", type=int, default=200, help="queries in each block of single")
    parser.add_argument("--device")
    parser.add_argument("--precision", default="fp32", help="of bertie serve and offline (default: fp32)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.what == "offline":
        offline_here(str(args.model), args.seconds, args.device, args.precision)
        return 0
    if args.what == "offline-queries":
        offline_queries_here(str(args.model), args.device, args.precision)
        return 0
    args.servers = [Target.parse(name) for name in args.servers.split(",")]
    args.rate = {name: float(rate) for name, _, rate in (item.rpartition("=") for item in args.rate.split(",") if item)}
    args.loads = [float(value) for value in args.loads.split(",") if value]
    args.infinity_args = serve_infinity.BEST.arguments()
    if args.infinity_settings is not None:
        args.infinity_args = json.loads(args.infinity_settings.read_text())["best"]["arguments"]
    args.max_texts = [int(value) for value in args.max_texts.split(",")]
    args.batches = [int(value) for value in args.batches.split(",")]
    args.waits = [float(value) for value in args.waits.split(",")]
    args.per_request = [int(value) for value in args.per_request.split(",")]
    result = {"saturate": saturate, "latency": latency, "single": single, "start": start}[args.what](args)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    if args.json is not None:
        args.json.write_text(json.dumps(result | {"machine": machine}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
