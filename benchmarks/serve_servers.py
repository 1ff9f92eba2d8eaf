"""Servers under test: how each is started, which endpoint it is measured at, and its CPU time.

A target is SERVER or SERVER:PATH, such as `bertie`, `bertie:/embeddings` or `infinity`. Targets of one
server share its process. Without a path, `infinity` is measured at /embeddings (OpenAI's API) and the
others at /embed (text-embeddings-inference's).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".models" / "all-MiniLM-L6-v2"
MODEL_NAME = "model"  # the name that each server serves the model under
INFINITY_PYTHON = ROOT / ".venv-infinity" / "bin" / "python"  # made by `python -m benchmarks.serve_infinity setup`
FIELDS = {"/embed": "inputs", "/embeddings": "input", "/v1/embeddings": "input"}  # the field of the texts
FIELDS |= dict.fromkeys(("/classify", "/tag", "/fill"), "texts")
START_SECONDS = 180  # a server that does not answer by then has failed


@dataclass(frozen=True)
class Target:
    """A server and the path of the endpoint that is measured."""

    server: str
    path: str

    @classmethod
    def parse(cls, name: str) -> Target:
        """
        >>> Target.parse("bertie:/embeddings"), str(Target.parse("infinity"))
        (Target(server='bertie', path='/embeddings'), 'infinity')
        """
        server, _, path = name.partition(":")
        target = cls(server, path or _default_path(server))
        if target.path not in FIELDS:
            raise SystemExit(f"{name}: the path must be one of {', '.join(FIELDS)}")
        return target

    def __str__(self) -> str:
        return self.server if self.path == _default_path(self.server) else f"{self.server}:{self.path}"


def _default_path(server: str) -> str:
    return "/embeddings" if server.startswith("infinity") else "/embed"


def request_body(texts: str | Sequence[str], path: str = "/embed") -> bytes:
    """The body of a request to `path`."""
    body = {FIELDS[path]: texts} | ({"model": MODEL_NAME} if FIELDS[path] == "input" else {})
    return json.dumps(body, ensure_ascii=False).encode()


def request_bodies(texts: Sequence[str], per_request: int = 1, path: str = "/embed") -> list[bytes]:
    """Request bodies with `per_request` texts each."""
    if per_request == 1:
        return [request_body(text, path) for text in texts]
    starts = range(0, len(texts) - per_request + 1, per_request)
    return [request_body(texts[start : start + per_request], path) for start in starts]


@dataclass
class Running:
    """A running server."""

    name: str
    url: str
    process: subprocess.Popen[str]

    def cpu_seconds(self) -> float:
        """The CPU time of the process and its children."""
        return sum(self.cpu_by_process().values())

    def cpu_by_process(self) -> dict[int, float]:
        """The CPU time of each process, by process id, in the order in which they were started."""
        times = {}
        for pid in self.pids():
            with suppress(OSError):
                times[pid] = _cpu_seconds(Path(f"/proc/{pid}/stat"))
        return times

    def cpu_by_thread(self) -> dict[tuple[int, int], float]:
        """The CPU time of each thread, by the ids of its process and its own."""
        times = {}
        for pid in self.pids():
            for folder in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    times[pid, int(folder.name)] = _cpu_seconds(folder / "stat")
        return dict(sorted(times.items()))

    def pids(self) -> list[int]:
        """The process and its descendants."""
        waiting, pids = [self.process.pid], []
        while waiting:
            pid = waiting.pop()
            pids.append(pid)
            for path in Path(f"/proc/{pid}/task").glob("*/children"):  # children belong to the thread that started them
                with suppress(OSError):
                    waiting += map(int, path.read_text().split())
        return sorted(pids)

    def resident_bytes(self) -> int:
        """The proportional set size of the process and its children: shared pages count once."""
        total = 0
        for pid in self.pids():
            with suppress(OSError):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += 1024 * int(rollup.split("Pss:")[1].split()[0])
        return total


def _cpu_seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(*, packages: bool = True, source: Path = ROOT) -> dict[str, str]:
    """The environment of servers: all cores. `packages`: with the folders of the inherited PYTHONPATH."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    folders = [
        str(ROOT),
        str(source.resolve() / "src"),
        *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []),
    ]
    path = os.pathsep.join(folders if packages else folders[:1])
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    return inherited | offline | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def post(url: str, path: str, body: Any) -> bool:
    """Whether a request is answered with 200."""
    request = Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=30) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def is_warming_up(url: str) -> bool:
    """Whether `bertie serve` answers, but still records CUDA graphs, which it does while there are no requests."""
    try:
        with urlopen(url + "/ready", timeout=30):
            return False
    except HTTPError as error:
        return error.code == 503
    except OSError:
        return True


@contextmanager
def server(
    name: str,
    model: str,
    extra: Sequence[str] = (),
    *,
    path: str | None = None,
    profiler: Sequence[str] = (),
    source: Path = ROOT,
) -> Iterator[Running]:
    """Start a server, wait until it answers and is warm, and stop it afterwards.

    Args:
        name: bertie, or a kind of `benchmarks.serve_peers`, with further words that are only a label.
        extra: arguments of `bertie serve` or of the peer.
        path: the endpoint that must answer (the one it is measured at by default).
        profiler: arguments of Python that run `bertie serve` under a profiler.
        source: the checkout to run `bertie serve` from.
    """
    kind = name.split()[0]
    process, url = (
        _start_bertie(model, extra, profiler, source) if kind == "bertie" else _start_peer(kind, model, extra)
    )
    path = path or _default_path(kind)
    try:
        deadline = time.monotonic() + START_SECONDS
        body = json.loads(request_body("warm-up [MASK]", path))
        while not post(url, path, body) or (kind == "bertie" and is_warming_up(url)):
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


def _start_bertie(
    model: str, extra: Sequence[str], profiler: Sequence[str], source: Path
) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-P", *profiler, "-m", "bertie", "serve", f"{MODEL_NAME}={model}", "--port", "0", *extra]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment(source=source), text=True, stdout=subprocess.PIPE, stderr=log
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        hit = re.search(r"http://\S+", line)
        if hit is None:
            process.kill()
            log.seek(0)
            raise SystemExit(f"bertie serve did not start: {line}{log.read()[-2000:]}")
    return process, hit[0].rstrip("/")


def _start_peer(kind: str, model: str, extra: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python = str(INFINITY_PYTHON) if kind == "infinity" else sys.executable
    if kind == "infinity" and not INFINITY_PYTHON.exists():
        raise SystemExit("infinity-emb is not installed: python -m benchmarks.serve_infinity setup")
    command = [python, "-m", "benchmarks.serve_peers", kind, "--model", model, "--port", str(port), *extra]
    process = subprocess.Popen(command, env=environment(packages=kind != "infinity"), text=True)
    return process, f"http://127.0.0.1:{port}"
