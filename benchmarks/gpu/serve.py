"""`bertie serve` on one GPU: everything that is reported about it, in one run of less than ten minutes.

    python -m benchmarks.gpu.serve prepare --data FOLDER           # where packages can be installed
    python -m benchmarks.gpu.serve run --packages .gpu-serve.tar.xz --json OUT.json    # on the machine with the GPU
    python -m benchmarks.gpu.serve run --tiny --json OUT.json      # a trial on a CPU

prepare writes an archive with the packages that `bertie serve` needs, for another version of Python,
with wrk, the tokenizers and the texts: the other machine may have no network. run uses what is there,
and otherwise texts and vocabularies of a novel, and load generators in Python.

embeddings    all-MiniLM-L6-v2 or its shape with random weights: one text per request, p99 at half of
              that load (open loop), 32 texts per request, and `Embedder.embed` offline from text.
classifier    the shape of DeBERTa-v3-large with random weights: requests of 16 tokens, one and 32 per
              request, and `Classifier.classify` offline.

The number of connections is tuned first. Measurements are interleaved and repeated; medians are
reported. `--limit` is the time for everything: what does not fit is skipped and named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = (
    *("greenlet", "httptools", "uvloop", "orjson"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"),
)
WRK_LIBRARIES = ("libluajit", "libssl", "libcrypto")
TOKENS = 16  # of a request to the classifier
CONNECTIONS = (64, 192, 448)  # to try with one text per request; `bertie serve` admits 512 requests by default
MANY_CONNECTIONS = (16, 48, 96)  # to try with several texts per request
PER_REQUEST = 32


# --- prepare ---


def prepare(args: argparse.Namespace) -> None:
    """Fill the folder that goes to the other machine."""
    from benchmarks.serve import real_texts
    from benchmarks.serve_models import copy_tokenizer
    from benchmarks.serve_servers import MODEL

    with tempfile.TemporaryDirectory() as temporary:
        folder, wheels = Path(temporary, "packed"), Path(temporary, "wheels")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        tags = ["--python-version", args.python_version, "--platform", "manylinux2014_x86_64"]
        tags += ["--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*command, *tags, "--dest", wheels, *PACKAGES], check=True)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder / "packages")
        prune(folder / "packages")
        copy_wrk(folder / "bin")
        model = Path(args.model or MODEL)
        if model.exists():
            copy_tokenizer(model, folder / "minilm")
            if args.data is not None:
                (folder / "texts.json").write_text(json.dumps(real_texts(args.data, str(model))))
        if args.deberta_tokenizer is not None:
            copy_tokenizer(args.deberta_tokenizer, folder / "deberta-v3")
        with tarfile.open(args.output, "w:xz") as archive:
            archive.add(folder, ".")
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB")


def prune(folder: Path) -> None:
    """Delete what is not needed to run, above all sources and symbols of extension modules."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".pyi", ".pyx", ".pxd", ".c", ".h"):
            path.unlink()
        elif path.suffix == ".so" and shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", path], check=True)


def copy_wrk(folder: Path) -> None:
    """Copy wrk and its libraries, with a script that finds them."""
    wrk = shutil.which("wrk")
    if wrk is None:
        print("wrk is not installed here: the other machine will use load generators in Python, unless it has wrk")
        return
    folder.mkdir(parents=True)
    shutil.copy(wrk, folder / "wrk.bin")
    for line in subprocess.run(["ldd", wrk], capture_output=True, text=True, check=True).stdout.splitlines():
        name, _, target = line.strip().partition(" => ")
        if name.startswith(WRK_LIBRARIES):
            shutil.copyfile(target.split()[0], folder / name)
    script = folder / "wrk"
    script.write_text('#!/bin/sh\nhere=$(dirname "$0")\nLD_LIBRARY_PATH="$here" exec "$here/wrk.bin" "$@"\n')
    script.chmod(0o755)


# --- run ---


@dataclass
class Run:
    """The results so far, and the time left."""

    args: argparse.Namespace
    results: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.until: float = time.monotonic() + self.args.limit

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so many seconds are left; if not, `what` is skipped."""
        left = self.until - time.monotonic()
        if left < seconds:
            self.skip(what, f"{left:.0f} s left")
        return left >= seconds

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(f"{what}: {why}")
        print(f"  skipped: {what}: {why}", flush=True)

    def record(self, name: str, value: dict[str, Any]) -> None:
        self.results.setdefault(name, []).append(value)
        print(f"  {name}: {json.dumps(value)}", flush=True)
        self.save()

    def medians(self) -> dict[str, dict[str, float]]:
        """The medians of each measurement's numbers."""
        return {name: medians(several) for name, several in self.results.items()}

    def save(self) -> None:
        if self.args.json is not None:
            machine = {"cores": os.cpu_count(), "python": platform.python_version(), "device": device_name()}
            state = {"machine": machine, "medians": self.medians(), "runs": self.results, "skipped": self.skipped}
            self.args.json.write_text(json.dumps(state, indent=1) + "\n")


def medians(several: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of each number.

    >>> medians([{"rate": 1.0, "failed": {}}, {"rate": 4.0, "failed": {}}, {"rate": 3.0, "failed": {}}])
    {'rate': 3.0}
    """
    numbers = [key for key, value in several[0].items() if isinstance(value, (int, float))]
    return {
        key: statistics.median(row[key] for row in several if row[key] is not None)
        for key in numbers
        if any(row[key] is not None for row in several)
    }


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def use_packages(folder: Path) -> None:
    """Put the prepared packages, and wrk where it runs, on the paths of this process and its children."""
    paths = [str(folder / "packages"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.path.insert(0, str(folder / "packages"))
    wrk = folder / "bin" / "wrk"
    if shutil.which("wrk") is None and wrk.exists():
        out = subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False)
        if out.stdout.startswith("wrk "):
            os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        else:
            print(f"the prepared wrk does not run here: {out.stderr[:200]}", flush=True)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    import torch

    if args.precision is None and torch.cuda.is_available() and args.device != "cpu":
        args.precision = "bf16"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.packages is not None:
            with tarfile.open(args.packages) as archive:
                archive.extractall(folder, filter="data")
            use_packages(folder)
        state = Run(args)
        print(f"{device_name()}, {os.cpu_count()} cores, load generator: {generator_name()}", flush=True)
        for name, part in (("embeddings", embeddings), ("classifier", classifier)):
            if name in args.parts.split(",") and state.has_time(60 if not args.tiny else 5, name):
                try:
                    part(state, folder)
                except (Exception, SystemExit) as error:  # the other part and the results so far are kept
                    state.skip(name, f"{type(error).__name__}: {error}"[-2000:])
    state.save()
    print_table(state)
    return state.results


def generator_name() -> str:
    return "wrk" if shutil.which("wrk") else "Python"


def embeddings(state: Run, folder: Path) -> None:
    """all-MiniLM-L6-v2: one text and 32 texts per request, latency at half load, offline."""
    from benchmarks.serve import offline
    from benchmarks.serve_load import open_loop
    from benchmarks.serve_models import book_texts, embedder
    from benchmarks.serve_servers import MODEL, request_bodies, server

    args = state.args
    model = Path(args.model or MODEL)
    if args.tiny or not (model / "modules.json").exists():
        model = embedder(folder / "minilm-random", cheap=args.tiny, tokenizer=folder / "minilm")
        print("random weights in the shape of all-MiniLM-L6-v2", flush=True)
    file = folder / "texts.json"
    texts: list[str] = json.loads(file.read_text()) if file.exists() else book_texts(2000)
    bodies = {count: request_bodies(texts, count) for count in (1, PER_REQUEST)}
    with server("bertie", str(model), server_arguments(args)) as up:
        best = {
            1: tune(state, up, "/embed", bodies[1], CONNECTIONS),
            PER_REQUEST: tune(state, up, "/embed", bodies[PER_REQUEST], MANY_CONNECTIONS),
        }
        for number in range(args.repeats):
            if not state.has_time(6 * args.seconds + (0 if args.tiny else 15), f"embeddings, round {number + 1}"):
                break
            for count in (1, PER_REQUEST):
                state.record(_label("embeddings", count), closed(up, "/embed", bodies[count], best[count], args, count))
            capacity = state.medians()["embeddings, 1 per request"]["requests"]
            half = open_loop(up.url, "/embed", bodies[1], capacity / 2, args.seconds, args.processes)
            state.record("embeddings, half load", half)
            state.record("embeddings, offline", offline(str(model), texts, args.seconds, args.device, args.precision))


def classifier(state: Run, folder: Path) -> None:
    """A classifier in the shape of DeBERTa-v3-large, 16 tokens per text."""
    from benchmarks.serve_models import deberta_classifier
    from benchmarks.serve_servers import request_bodies, server

    args = state.args
    model = deberta_classifier(folder / "deberta-random", tiny=args.tiny, tokenizer=folder / "deberta-v3")
    texts = texts_of_length(str(model), TOKENS, 1024)
    bodies = {count: request_bodies(texts, count, "/classify") for count in (1, PER_REQUEST)}
    with server("bertie", str(model), server_arguments(args), path="/classify") as up:
        best = {
            1: tune(state, up, "/classify", bodies[1], CONNECTIONS),
            PER_REQUEST: tune(state, up, "/classify", bodies[PER_REQUEST], MANY_CONNECTIONS),
        }
        for number in range(args.repeats):
            if not state.has_time(4 * args.seconds + (0 if args.tiny else 20), f"classifier, round {number + 1}"):
                break
            for count in (1, PER_REQUEST):
                result = closed(up, "/classify", bodies[count], best[count], args, count)
                state.record(_label("classifier", count), result)
    if state.has_time(2 * args.seconds + (0 if args.tiny else 25), "classifier, offline"):
        state.record("classifier, offline", offline_classifier(str(model), texts, args))


def server_arguments(args: argparse.Namespace) -> list[str]:
    chosen = {"--device": args.device, "--precision": args.precision}
    flags = [word for flag, value in chosen.items() if value is not None for word in (flag, value)]
    return [*flags, *args.serve_args.split()]


def _label(what: str, count: int) -> str:
    return f"{what}, {count} per request"


def texts_of_length(model: str, tokens: int, count: int) -> list[str]:
    """Excerpts of the novel that are exactly so many tokens long, special tokens included."""
    from benchmarks.serve_models import book_texts
    from bertie.checkpoints.checkpoint import Checkpoint

    tokenizer = Checkpoint.load(model, device="cpu").tokenizer
    assert tokenizer is not None
    texts: list[str] = []
    for words in range(tokens, 2, -1):  # of fewer words where words have several tokens
        candidates = book_texts(4 * count, words, seed=words)
        encodings = tokenizer.encode_batch(candidates)
        texts += [text for text, ids in zip(candidates, encodings, strict=True) if len(ids) == tokens]
        if len(texts) >= count:
            break
    return texts[:count]


def closed(
    up: Any, path: str, bodies: Sequence[bytes], connections: int, args: argparse.Namespace, per_request: int = 1
) -> dict[str, Any]:
    """Run a closed loop: the rate of texts, latency, and the server's CPU time."""
    from benchmarks.serve_load import closed_loop, wrk

    def load(seconds: float) -> dict[str, Any]:
        if shutil.which("wrk"):
            return wrk(up.url, path, bodies, connections, seconds, args.wrk_threads)
        return closed_loop(up.url, path, bodies, connections, seconds, args.processes)

    load(min(1.0, args.seconds))
    cpu = up.cpu_seconds()
    result = load(args.seconds)
    cpu = up.cpu_seconds() - cpu
    microseconds = 1e6 * cpu / max(1, result["answered"])
    rates = {"requests": result["rate"], "rate": result["rate"] * per_request, "connections": connections}
    return result | rates | {"cpu_us_per_request": round(microseconds, 1)}


def tune(state: Run, up: Any, path: str, bodies: Sequence[bytes], choices: Sequence[int]) -> int:
    """The number of connections with the highest rate."""
    rates = {}
    for connections in choices:
        result = closed(up, path, bodies, connections, state.args)
        rates[connections] = result["rate"]
        failed = f", failed: {result['failed']}" if result["failed"] else ""
        print(f"  {path}, {connections} connections: {result['rate']:,.0f} requests/s{failed}", flush=True)
    return max(rates, key=rates.__getitem__)


def offline_classifier(model: str, texts: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """`Classifier.classify` from text, in a process of its own."""
    from benchmarks.serve_servers import environment

    command = [sys.executable, "-m", "benchmarks.gpu.serve", "classify", "--model", model]
    command += [
        "--seconds",
        str(args.seconds),
        *server_arguments(argparse.Namespace(**vars(args) | {"serve_args": ""})),
    ]
    out = subprocess.run(
        command, input=json.dumps(list(texts)), env=environment(), capture_output=True, text=True, check=False
    )
    if out.returncode:
        raise RuntimeError(out.stderr[-2000:])
    result: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return result


def classify_here(args: argparse.Namespace) -> None:
    import torch

    from bertie.tasks import Classifier

    texts = json.load(sys.stdin)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = Classifier.load(args.model, device=device, precision=args.precision or "fp32")
    batch = texts if device == "cpu" else texts * 16
    model.classify(batch)
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        model.classify(batch)
        count += len(batch)
    print(json.dumps({"rate": round(count / (time.perf_counter() - started), 2)}))


def print_table(state: Run) -> None:
    """Print the medians, and each rate as a share of the offline rate."""
    table = state.medians()
    print("\n| | texts/s | share of offline | p50 ms | p99 ms | CPU µs per request |\n|" + "---|" * 6)
    for name, row in table.items():
        offline_rate = table.get(name.split(",")[0] + ", offline", {}).get("rate")
        share = f"{row['rate'] / offline_rate:.0%}" if offline_rate else ""
        p50, p99 = (f"{row[key]:.1f}" if key in row else "" for key in ("p50_ms", "p99_ms"))
        cpu = f"{row['cpu_us_per_request']:.0f}" if "cpu_us_per_request" in row else ""
        print(f"| {name} | {row['rate']:,.0f} | {share} | {p50} | {p99} | {cpu} |")
    for line in state.skipped:
        print(f"skipped: {line}")


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "classify"))
    parser.add_argument("--output", type=Path, default=Path(".gpu-serve.tar.xz"), help="the archive to prepare")
    parser.add_argument("--python-version", default="3.12", help="of the other machine")
    parser.add_argument("--data", type=Path, help="data sets whose texts are used, see benchmarks.serve")
    parser.add_argument("--deberta-tokenizer", type=Path, help="a folder with the tokenizer of DeBERTa-v3")
    parser.add_argument("--model", help="all-MiniLM-L6-v2 (default: .models/all-MiniLM-L6-v2, or random weights)")
    parser.add_argument("--packages", type=Path, help="the archive that prepare has written")
    parser.add_argument("--parts", default="embeddings,classifier")
    parser.add_argument("--device", help="(default: what `bertie serve` chooses)")
    parser.add_argument("--precision", help="of the server and offline (default: bf16 on a GPU, fp32 otherwise)")
    parser.add_argument("--serve-args", default="", help="further arguments of bertie serve")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--wrk-threads", type=int, default=2)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 8))
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a trial")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commands: dict[str, Callable[[argparse.Namespace], object]] = {
        "prepare": prepare,
        "run": run,
        "classify": classify_here,
    }
    commands[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
