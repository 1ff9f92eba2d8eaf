"""`bertie serve` under load, beside FastAPI over sentence-transformers and beside the same model without a server.

    python -m benchmarks.serve saturate --data FOLDER [--seconds 10] [--repeats 3] [--json OUT.json]
    python -m benchmarks.serve latency --data FOLDER [--seconds 10] [--json OUT.json] [--svg OUT.svg]
    python -m benchmarks.serve start [--repeats 5]
    python -m benchmarks.serve saturate --servers bertie --device cuda --serve-args "--workers 8" --per-request 1,32 \\
        --generator python --processes 6 --connections 256 --texts TEXTS.json

saturate: requests of one text each from 64 connections, as fast as they are answered, against each server in turn; and
the same texts in one call of `Embedder.embed`, with nothing else on the machine. So the server has less of it: what wrk
uses (a few hundredths of a core) counts against the server. The peer's batches are tried in several sizes first, and
its best is used; also with a process a core. CPU time a text is given as well: it says more than the rate where
others use the same cores.

latency: requests that come at random moments, at 25, 50, 75, 100 and 200% of what `saturate` found or --rate says.

start: seconds from starting the process to the first answer, of /classify with the built-in model.

The texts are real ones of mixed lengths: questions, captions, news, paragraphs; none longer than the model reads at
once, as sentence-transformers would cut it. Without --data they are pieces of the tour's book, or what is in --texts.
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
    """Texts that the model reads at once, in an order of their own; or those of a file, a list in JSON, as they are."""
    if file is not None:
        kept: list[str] = json.loads(file.read_text())
        return kept
    from bertie.checkpoints.checkpoint import Checkpoint

    checkpoint = Checkpoint.load(model)
    assert checkpoint.tokenizer is not None
    draw = random.Random(0)
    found: list[str] = []
    if data is None:
        book = (ROOT / "src" / "bertie" / "cli" / "tour.txt").read_text()
        words = book.split()
        for _ in range(1000):
            size, start = int(draw.lognormvariate(3.2, 0.8)) + 2, draw.randrange(len(words))
            found.append(" ".join(words[start : start + size]))
    else:
        for name, (fields, count) in SOURCES.items():
            with gzip.open(data / name, "rt", encoding="utf-8") as lines:
                rows = [json.loads(line) for line in lines]
            texts = sorted({row[field] for row in rows for field in fields})
            found += draw.sample(texts, min(count, len(texts)))
    encoded = checkpoint.tokenizer.encode_batch(found)
    found = [text for text, one in zip(found, encoded, strict=True) if len(one) <= checkpoint.max_length]
    lengths = sorted(len(one) for one in encoded if len(one) <= checkpoint.max_length)
    draw.shuffle(found)
    say(
        f"{len(found)} texts of {lengths[0]} to {lengths[-1]} tokens, median {statistics.median(lengths):g}, "
        f"mean {statistics.mean(lengths):.1f}"
    )
    return found


def bodies_of(texts: Sequence[str], each: int = 1) -> list[bytes]:
    """Requests of one text, or of several."""
    some = texts if each == 1 else [texts[i : i + each] for i in range(0, len(texts) - each + 1, each)]
    return [json.dumps({"inputs": one}, ensure_ascii=False).encode() for one in some]


def say(line: str) -> None:
    print(line, flush=True)


# --- servers ---


@dataclass
class Running:
    """A server that is up."""

    name: str
    url: str
    process: subprocess.Popen[str]

    def cpu_seconds(self) -> float:
        """That it and its children have used."""
        pids, total, ticks = [self.process.pid], 0, os.sysconf("SC_CLK_TCK")
        while pids:
            pid = pids.pop()
            try:
                after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
            total += int(after[11]) + int(after[12])
        return total / ticks


def environment() -> dict[str, str]:
    """As usual, with all cores."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return kept | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def server(name: str, model: str, extra: Sequence[str] = ()) -> Iterator[Running]:
    """Start a server, wait until it answers, and stop it at the end."""
    if name == "bertie":
        command = ["-m", "bertie", "serve", f"model={model}", "--port", "0", *extra]
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
        while not post(url, PATH, {"inputs": "Are you there?"}):
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
        with urlopen(request, timeout=30) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


# --- what is measured ---


def offline(model: str, texts: Sequence[str], seconds: float, device: str | None) -> dict[str, Any]:
    """`Embedder.embed` of the same texts, in a process of its own."""
    args = [sys.executable, "-m", "benchmarks.serve", "offline", "--model", model, "--seconds", str(seconds)]
    args += [] if device is None else ["--device", device]
    out = subprocess.run(args, input=json.dumps(list(texts)), env=environment(), capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(out.stderr)
    found: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return found


def offline_here(model: str, seconds: float, device: str | None) -> None:
    import torch

    from bertie.tasks import Embedder

    texts = json.load(sys.stdin)
    embedder = Embedder.load(model, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = 512 if embedder.model.device.type == "cpu" else 16_384  # texts a call: a GPU wants to be asked for many
    embedder.embed(texts[:256] if size == 512 else texts)
    count, begun, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        some = [texts[i % len(texts)] for i in range(count, count + size)]
        embedder.embed(some)
        count += len(some)
    took = time.perf_counter() - begun
    cpu = 1000 * (time.process_time() - used) / count
    print(json.dumps({"rate": round(count / took, 2), "seconds": round(took, 3), "cpu_ms": round(cpu, 4)}))


def saturated(
    one: Running, bodies: Sequence[bytes], args: argparse.Namespace, seconds: float, each: int = 1
) -> dict[str, Any]:
    """A closed loop of requests with `each` texts, after a short one that does not count."""

    def run(length: float) -> dict[str, Any]:
        if args.generator == "wrk":
            return serve_load.wrk(one.url, PATH, bodies, args.connections, length)
        return serve_load.closed(one.url, PATH, bodies, args.connections, length, args.processes)

    run(min(2.0, seconds))
    used = one.cpu_seconds()
    found = run(seconds)
    used = one.cpu_seconds() - used
    texts = {"requests": found["rate"], "rate": found["rate"] * each}
    return found | texts | {"cpu_ms": round(1000 * used / max(1, found["answered"] * each), 4)}


def tuned(one: Running, bodies: Sequence[bytes], args: argparse.Namespace) -> dict[str, float]:
    """How many texts at once, in batches of which size, and the wait for more, with which the peer is fastest."""
    tried: list[tuple[float, dict[str, float]]] = []

    def attempt(most: int, batch: int, wait: float) -> None:
        how = {"most": most, "batch": batch, "wait_ms": wait}
        post(one.url, "/tune", how)
        found = saturated(one, bodies, args, max(8.0, args.seconds))  # all that it takes at once may take seconds
        tried.append((found["rate"], how))
        say(f"  {json.dumps(how)}: {found['rate']:.1f}/s, {found['cpu_ms']:.2f} CPU ms each")

    for most, batch in itertools.product(args.most, args.batches):
        if batch <= most:
            attempt(most, batch, 0.0)
    best = max(tried, key=lambda pair: pair[0])[1]
    for wait in args.waits:
        attempt(int(best["most"]), int(best["batch"]), wait)
    best = max(tried, key=lambda pair: pair[0])[1]
    post(one.url, "/tune", best)
    return best


def saturate(args: argparse.Namespace) -> dict[str, Any]:
    """All servers in turn, several times."""
    model = str(args.model)
    texts = real_texts(args.data, model, args.texts)
    bodies = {each: bodies_of(texts, each) for each in args.per_request}
    runs: dict[str, list[dict[str, Any]]] = {"offline": []}
    best = None
    device = [] if args.device is None else ["--device", args.device]
    with ExitStack() as stack:
        up = {}
        for name in args.servers:
            extra = [*device, *(args.serve_args.split() if name == "bertie" else [])]
            up[name] = stack.enter_context(server(name, model, extra))
        if "batched" in up:
            best = tuned(up["batched"], bodies_of(texts), args)
            if args.device is None:  # on a CPU, the same once more with a process a core
                flags = ["--most", best["most"], "--batch", best["batch"], "--wait-ms", best["wait_ms"]]
                name = f"batched in {os.cpu_count()} processes"
                extra = [*map(str, flags), "--processes", str(os.cpu_count())]
                up[name] = stack.enter_context(server(name, model, extra))
        for number in range(args.repeats):
            for name in ["offline", *up] if number % 2 == 0 else [*reversed(up), "offline"]:
                if name == "offline":
                    some = {name: offline(model, texts, args.seconds, args.device)}
                else:
                    some = {
                        name if each == 1 else f"{name}, {each} a request": saturated(
                            up[name], bodies[each], args, args.seconds, each
                        )
                        for each in args.per_request
                    }
                for label, found in some.items():
                    runs.setdefault(label, []).append(found)
                    say(f"  {number + 1}/{args.repeats} {label}: {json.dumps(found)}")
    rate = {name: statistics.median(one["rate"] for one in some) for name, some in runs.items()}
    cpu = {name: statistics.median(one["cpu_ms"] for one in some) for name, some in runs.items()}
    say("\n| | texts/s | of offline | CPU ms a text | p50 ms | p99 ms | Bertie against it |\n|" + "---|" * 7)
    for name, several in runs.items():
        p50, p99 = (
            f"{statistics.median(one[key] for one in several):.0f}" if name != "offline" else ""
            for key in ("p50_ms", "p99_ms")
        )
        against = f"{rate['bertie'] / rate[name]:.2f}×" if "bertie" in rate and rate[name] else ""
        share = rate[name] / rate["offline"]
        say(f"| {name} | {rate[name]:.1f} | {share:.1%} | {cpu[name]:.2f} | {p50} | {p99} | {against} |")
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
    """One server at several shares of its capacity."""
    model, name = str(args.model), args.servers[0]
    bodies = bodies_of(real_texts(args.data, model, args.texts))
    device = [] if args.device is None else ["--device", args.device]
    rows: list[dict[str, Any]] = []
    with server(name, model, [*device, *(args.serve_args.split() if name == "bertie" else [])]) as up:
        capacity = args.rate or saturated(up, bodies, args, args.seconds)["rate"]
        say(f"capacity: {capacity:.1f} requests/s")
        for number in range(args.repeats):
            for share in SHARES:
                found = serve_load.opened(up.url, PATH, bodies, share * capacity, args.seconds, args.processes)
                rows.append({"share": share, **found})
                say(f"  {number + 1}/{args.repeats} {share:.0%}: {json.dumps(found)}")
    table = []
    say(
        "\n| load | offered/s | answered/s | refused | p50 ms | p95 ms | p99 ms | refused within (p99) |\n|"
        + "---|" * 8
    )
    for share in SHARES:
        some = [row for row in rows if row["share"] == share]
        one: dict[str, Any] = {"share": share}
        for key in ("offered", "rate", "p50_ms", "p95_ms", "p99_ms", "refused_p99_ms"):
            values = [row[key] for row in some if row[key] is not None]
            one[key] = statistics.median(values) if values else None
        total = sum(row["answered"] + row["refused"] + sum(row["failed"].values()) for row in some)
        one["refused"] = sum(row["refused"] for row in some) / total
        one["failed"] = sum(sum(row["failed"].values()) for row in some)
        table.append(one)
        within = "" if one["refused_p99_ms"] is None else f"{one['refused_p99_ms']:.0f} ms"
        times = " | ".join("" if one[key] is None else f"{one[key]:.0f}" for key in ("p50_ms", "p95_ms", "p99_ms"))
        say(f"| {share:.0%} | {one['offered']:.1f} | {one['rate']:.1f} | {one['refused']:.1%} | {times} | {within} |")
    if args.svg is not None:
        args.svg.write_text(plot(table, name))
    return {"what": "latency", "server": name, "capacity": capacity, "table": table, "runs": rows}


def start(args: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the first answer."""
    took = []
    for _ in range(args.repeats):
        begun = time.perf_counter()
        command = [sys.executable, "-m", "bertie", "serve", "--port", "0"]
        with subprocess.Popen(
            command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert post(url, "/classify", {"texts": "A delight from start to finish."})
            took.append(round(time.perf_counter() - begun, 3))
            process.terminate()
        say(f"  {took[-1]:.2f} s")
    say(f"\nmedian {statistics.median(took):.2f} s, {min(took):.2f} to {max(took):.2f}")
    return {"what": "start", "seconds": took}


_STYLE = """<style>
svg { background: #fff; } text { fill: #1c2024; font: 11px system-ui, sans-serif; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .name { fill: #667079; } .grid { stroke: #dde1e5; }
polyline { fill: none; stroke-width: 1.8; } line.a, line.b { stroke-width: 2; }
.a { stroke: #1f5fa8; } .b { stroke: #b8500b; } .faint { stroke: #8a949c; stroke-width: 1.4; }
circle.a { fill: #1f5fa8; } circle.b { fill: #b8500b; } circle.faint { fill: #8a949c; }
</style><rect width="640" height="300" fill="#fff"/>"""


def plot(table: Sequence[dict[str, Any]], name: str) -> str:
    """The times of answered requests by load, as a picture that stands alone."""
    from bertie.evaluation.plots import Line, lines

    series = [
        Line(
            key, [(100 * one["share"], one[f"{key}_ms"]) for one in table if one[f"{key}_ms"] is not None], style, True
        )
        for key, style in (("p50", "a"), ("p95", "b"), ("p99", "faint"))
    ]
    alt = f"{name}: milliseconds to an answer by load, of those that were not refused"
    svg = lines(alt, series, "load, % of capacity", "milliseconds")
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return svg.replace("</title>", "</title>" + _STYLE, 1) + "\n"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("saturate", "latency", "start", "offline"))
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--data", type=Path, help="a folder with " + ", ".join(SOURCES))
    parser.add_argument("--texts", type=Path, help="a list of texts in JSON, instead of --data")
    parser.add_argument("--per-request", default="1", help="texts a request; several numbers: one after the other")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--generator", choices=("wrk", "python"), default="wrk", help="of closed loops")
    parser.add_argument("--processes", type=int, default=1, help="of the generator in Python")
    parser.add_argument("--servers", default="bertie,plain,async,batched", help="of which latency takes the first")
    parser.add_argument("--serve-args", default="", help="more for bertie serve")
    parser.add_argument("--most", default="16,64", help="numbers of texts at once to try for the peer that batches")
    parser.add_argument("--batches", default="4,8,16,32", help="sizes of its batches to try")
    parser.add_argument(
        "--waits", default="5", help="milliseconds to try that it waits for more, with the best of them"
    )
    parser.add_argument("--rate", type=float, help="requests/s that count as the capacity (measured)")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.what == "offline":
        offline_here(str(args.model), args.seconds, args.device)
        return 0
    args.servers = args.servers.split(",")
    args.most = [int(one) for one in args.most.split(",")]
    args.batches = [int(one) for one in args.batches.split(",")]
    args.waits = [float(one) for one in args.waits.split(",")]
    args.per_request = [int(one) for one in args.per_request.split(",")]
    found = {"saturate": saturate, "latency": latency, "start": start}[args.what](args)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    if args.json is not None:
        args.json.write_text(json.dumps(found | {"machine": machine}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
