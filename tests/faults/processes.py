"""Commands in forks of this process, which has imported everything but run nothing."""

from __future__ import annotations

import importlib
import os
import pickle
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.faults import shim

TIMEOUT = 120.0  # seconds; a command that takes longer hangs
# So that a small input has many chunks, commits and shards.
SMALL: dict[str, dict[str, Any]] = {
    "bertie.cli.stream": {"CHUNK_ROWS": 24},
    "bertie.data.journal": {"COMMIT_INTERVAL": 0.0},
    "bertie.search.document_input": {"GROUP_CHARACTERS": 200, "GROUP_DOCUMENTS": 8},
    "bertie.search.index": {"COMMIT_PASSAGES": 8},
}


def import_everything() -> None:
    """Import all that commands use: a fork then starts at once."""
    import bertie

    for module in pkgutil.walk_packages(bertie.__path__, "bertie."):
        skipped = ("bertie.ops.triton", "bertie.ops.native._", "bertie.text._")
        if not module.name.startswith(skipped) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("pyarrow.parquet", "zstandard", "torch", "bm25s", "Stemmer", "safetensors.torch", "sqlite3"):
        importlib.import_module(name)
    for name, values in SMALL.items():
        module_object = importlib.import_module(name)
        for constant, value in values.items():
            assert hasattr(module_object, constant), f"{name}.{constant} has another name now"
            setattr(module_object, constant, value)


def import_training() -> None:
    """Import what torch loads when a parameter is first optimized."""
    import torch

    torch.optim.AdamW([torch.zeros(1)], fused=True).zero_grad()


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int | None  # the exit status; negative: the signal that ended it; None: it hung
    out: str
    err: str
    seconds: float
    injected: shim.ShimState

    def __str__(self) -> str:
        return f"status {self.status} after {self.seconds:.2f} s, {self.injected}, stderr {self.err[-1500:]!r}"


class Command:
    """`bertie ARGV` in a fork, in a folder, with faults."""

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        logs: Path,
        faults: dict[str, object],
        *,
        stdout: str | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._out, self._err = Path(stdout or logs / f"{time.monotonic_ns()}.out"), logs / f"{time.monotonic_ns()}.err"
        self._started = time.monotonic()
        self._status: int | None = None
        self._ended = False
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._child(argv, folder, faults, before)

    def _child(
        self, argv: Sequence[str], folder: Path, faults: dict[str, object], before: Callable[[], None] | None
    ) -> NoReturn:
        status = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setpgid(0, 0)
            for number, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
            os.chdir(folder)
            if before is not None:
                before()
            shim.arm(faults)
            status = run_main(argv)
        finally:
            os._exit(status)

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        if not self._ended:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended, self._status = True, os.waitstatus_to_exitcode(status)
        return self._ended

    def printed(self) -> str:
        """Its standard output so far."""
        return self._out.read_text(errors="replace") if self._out.is_file() else ""

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended:
            os.kill(self.pid, number)

    def wait(self, seconds: float = TIMEOUT) -> bool:
        """Wait for the end; False if it takes longer."""
        until = time.monotonic() + seconds
        while not self.ended:
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def outcome(self) -> Outcome:
        """Wait for the end, and kill what hangs."""
        hung = not self.wait()
        if hung:
            self.send(signal.SIGKILL)
            self.wait()
        err = self._err.read_text(errors="replace") if self._err.exists() else ""
        seconds = time.monotonic() - self._started
        return Outcome(None if hung else self._status, self.printed(), err, seconds, shim.state())


def run_main(argv: Sequence[str]) -> int:
    """Run the command line, and end as the interpreter would."""
    from bertie.cli import main

    try:
        status = main(list(argv))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored while flushing sys.stdout: {error}", file=sys.stderr)
        status = 120
    sys.stderr.flush()
    return status


def in_child(work: Callable[[], Any]) -> Any:
    """The result of a function that runs in a fork, so that this process starts no threads."""
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(source)
        try:
            result = (True, work())
        except BaseException:
            result = (False, traceback.format_exc())
        with os.fdopen(target, "wb") as file:
            pickle.dump(result, file)
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    ok, value = pickle.loads(data)
    if not ok:
        raise RuntimeError(value)
    return value
