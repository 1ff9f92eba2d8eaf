"""The processes of a server: front ends behind one port, and the engines that run the models.

The supervisor starts, watches and restarts them. It binds one socket per front end, all to the same
port (SO_REUSEPORT), and each front end inherits all of them. It listens on its own; twice a second
it also accepts what waits on the others. So connections are spread evenly, and those that wait for a
front end that has died, hangs or is being started are answered by another one.

Front ends tokenize and talk HTTP; engines run forward passes for all of them (`engine_server`). A
front end that dies takes its own connections with it; while an engine is restarted, requests are
answered with 503.

Each process's event loop writes to a pipe four times a second. A process that was stopped (SIGSTOP)
is continued at once; one without a heartbeat for `timeout` seconds is killed, so that its clients
get a connection reset rather than silence, and a new one takes its place.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from bertie.errors import BertieError
from bertie.serve.logs import Log

WORKER_VARIABLE = "BERTIE_WORKER"  # in a process's environment: a JSON object
MAX_FAILURES = 3  # failed starts in a row, if no other worker serves
MAX_PAUSE = 30.0  # seconds between two failed starts
STARTUP_SECONDS = 10.0  # a worker that dies within this time has failed to start
WORKER_TIMEOUT = 30.0  # seconds without a heartbeat after which a worker is killed
POLL_SECONDS = 0.05
MAX_STEP = 0.5  # of the time that counts as silence: if everything was suspended, no worker is to blame
_MAIN = Path(__file__).parents[1] / "__main__.py"


def bertie_command(*args: str) -> list[str]:
    """The command line that runs this copy of Bertie in a new process.

    `python -m bertie` would import modules of the current folder: an `orjson.py` there would run.
    With -P neither that folder nor the script's is on the path.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", str(_MAIN), *args]


class ProcessId(NamedTuple):
    """A front end or an engine."""

    role: Literal["front-end", "engine"]
    number: int

    def __str__(self) -> str:
        return f"{self.role} {self.number}"


class WorkerInfo:
    """Which process this is, of how many front ends, and its connection to the supervisor.

    >>> WorkerInfo.from_environment().count
    1
    """

    def __init__(
        self,
        number: int = 0,
        count: int = 1,
        folder: Path | None = None,
        sockets: Sequence[socket.socket] = (),
        pipe: int | None = None,
        role: str = "front-end",
        engines: int = 0,
    ) -> None:
        """`folder`: for metrics and the engines' sockets; `sockets`: one per front end; `pipe`: takes heartbeats."""
        self.number, self.count, self.folder, self.role, self.engines = number, count, folder, role, engines
        self.socket = sockets[number] if sockets else None
        self.other_sockets = [other for index, other in enumerate(sockets) if index != number]
        self._pipe = pipe

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor has started this process."""
        return self.folder is not None

    def engine_path(self, number: int) -> str:
        """The path of an engine's socket."""
        assert self.folder is not None
        return str(self.folder / f"engine-{number}.sock")

    @classmethod
    def from_environment(cls) -> WorkerInfo:
        """Read the environment; without a variable there, this is the only process."""
        if WORKER_VARIABLE not in os.environ:
            return cls()
        values = json.loads(os.environ[WORKER_VARIABLE])
        inherited = [socket.socket(fileno=descriptor) for descriptor in values["sockets"]]
        for listener in inherited:
            listener.setblocking(False)
        return cls(
            values["number"],
            values["count"],
            Path(values["folder"]),
            inherited,
            values["pipe"],
            values["role"],
            values["engines"],
        )

    def beat(self) -> None:
        """Tell the supervisor that this worker answers requests."""
        if self._pipe is not None:
            try:
                os.write(self._pipe, b".")
            except BlockingIOError:  # the supervisor is suspended; it will read the earlier ones
                pass
            except OSError:  # it has exited
                self._pipe = None


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: int  # from which heartbeats are read
    started: float = field(default_factory=time.monotonic)
    silence: float | None = None  # seconds since the last heartbeat; None before the first

    def read_heartbeats(self, seconds: float) -> None:
        """Reset the silence, or add the time that has passed."""
        try:
            beats = len(os.read(self.pipe, 1 << 16))
        except BlockingIOError:
            beats = 0
        if beats:
            self.silence = 0.0
        elif self.silence is not None:
            self.silence += min(seconds, MAX_STEP)

    def was_stopped(self) -> bool:
        """Whether a signal has stopped the process since the last call."""
        return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is not None


class Supervisor:
    """Start worker processes, restart those that die or hang, and stop them all.

    `command` starts a process. `sockets` are bound to the same port, one per front end, and are
    closed when the supervisor stops. `engines`: how many there are; without any, the front ends run
    the models. `timeout`: seconds without a heartbeat; 0: wait forever.
    """

    def __init__(
        self,
        command: Sequence[str],
        sockets: Sequence[socket.socket],
        *,
        shutdown_seconds: float,
        on_ready: Callable[[], None],
        engines: int = 0,
        timeout: float = WORKER_TIMEOUT,
        log: Log | None = None,
    ) -> None:
        self._engines = engines
        self._processes: list[ProcessId] = [
            *(ProcessId("engine", number) for number in range(engines)),
            *(ProcessId("front-end", number) for number in range(len(sockets))),
        ]
        self._command, self._sockets, self._on_ready = list(command), list(sockets), on_ready
        self._shutdown_seconds, self._timeout, self._log = shutdown_seconds, timeout, log or Log()
        self._workers: dict[ProcessId, _Worker] = {}
        self._ready: set[ProcessId] = set()  # workers that have been ready once
        self._failures: dict[ProcessId, int] = {}  # failed starts in a row, by worker
        self._restart_at: dict[ProcessId, float] = {}  # when to start workers that have failed
        self._stop_requested = False  # by a signal
        self._stop_at: float | None = None  # when workers that still run are killed

    def run(self) -> None:
        """Run until a signal stops it, or workers cannot be started."""
        with TemporaryDirectory(prefix="bertie-serve-") as folder:
            for sig in (signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, self._request_stop)
            signal.signal(signal.SIGHUP, lambda sig, frame: self._send_signal(signal.SIGHUP))
            reported = False
            for process in self._processes:
                self._start(process, folder)
            checked = time.monotonic()
            try:
                while self._workers or self._restart_at:
                    time.sleep(POLL_SECONDS)
                    now = time.monotonic()
                    if self._stop_requested:
                        self._stop_requested = False
                        self._stop()
                    self._check_workers(folder, now - checked)
                    checked = now
                    if not reported and len(self._ready) == len(self._processes):
                        reported = True
                        self._on_ready()
            finally:
                self._stop_workers()

    def _start(self, id: ProcessId, folder: str) -> None:
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        descriptors = [] if id.role == "engine" else [listener.fileno() for listener in self._sockets]
        variable = json.dumps(
            {
                "role": id.role,
                "number": id.number,
                "count": len(self._sockets),
                "engines": self._engines,
                "sockets": descriptors,
                "pipe": writing,
                "folder": folder,
            }
        )
        try:
            process = subprocess.Popen(
                self._command,
                env=os.environ | {WORKER_VARIABLE: variable},
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                pass_fds=[*descriptors, writing],
            )
        finally:
            os.close(writing)
        self._workers[id] = _Worker(process, reading)

    def _check_workers(self, folder: str, seconds: float) -> None:
        """Continue workers that were stopped, kill those that hang, restart those that have died."""
        for id, restart_at in list(self._restart_at.items()):
            if time.monotonic() >= restart_at and self._restart_at.pop(id, None) is not None:
                self._start(id, folder)
        self._stop_engines()
        for id, worker in list(self._workers.items()):
            status = worker.process.poll()
            if status is not None:
                self._replace(id, worker, status)
                continue
            worker.read_heartbeats(seconds)
            if worker.silence is not None:
                self._ready.add(id)
            if time.monotonic() - worker.started > STARTUP_SECONDS:
                self._failures.pop(id, None)
            if worker.was_stopped() and self._timeout:
                worker.process.send_signal(signal.SIGCONT)
                self._log("process continued", process=str(id), reason="it was stopped by a signal")
            if self._timeout and (worker.silence or 0.0) > self._timeout:
                worker.process.kill()
                self._log("process killed", process=str(id), reason=f"no heartbeat for {self._timeout:g} seconds")
            elif self._stop_at is not None and time.monotonic() > self._stop_at:
                worker.process.kill()
                self._log("process killed", process=str(id), reason="it did not stop in time")

    def _replace(self, id: ProcessId, worker: _Worker, status: int) -> None:
        """Start a new worker in place of one that has exited."""
        del self._workers[id]
        os.close(worker.pipe)
        if self._stop_at is not None:
            return
        # A positive status is an error; a negative one is a signal, which is no failure to start.
        failed = time.monotonic() - worker.started < STARTUP_SECONDS and status > 0
        failures = self._failures[id] = self._failures.get(id, 0) + 1 if failed else 0
        serving = any(other.silence is not None for key, other in self._workers.items() if key.role == id.role)
        if (failures >= MAX_FAILURES and not serving) or id not in self._ready:
            self._stop_workers()
            raise BertieError(f"{id} cannot be started: it exited with status {status}")
        pause = min(2.0**failures / 2, MAX_PAUSE) if failures else 0.0  # perhaps its model is being replaced
        self._log("process restarted", process=str(id), status=status, pause=pause or None)
        self._restart_at[id] = time.monotonic() + pause

    def _request_stop(self, sig: int, frame: Any) -> None:
        self._stop_requested = True  # no more here: a worker may just be being started

    def _stop(self) -> None:
        self._restart_at.clear()
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._shutdown_seconds + 10
            for listener in self._sockets:  # the workers have their own copies, and close them after the grace period
                listener.close()
        self._send_signal(signal.SIGTERM, "front-end")  # the engines answer their requests, and stop after them

    def _send_signal(self, sig: int, role: str | None = None) -> None:
        for id, worker in self._workers.items():
            if role in (None, id.role) and worker.process.poll() is None:
                worker.process.send_signal(sig)

    def _stop_engines(self) -> None:
        """Stop the engines once there are no front ends."""
        if self._stop_at is not None and not any(id.role == "front-end" for id in self._workers):
            self._send_signal(signal.SIGTERM, "engine")

    def _stop_workers(self) -> None:
        self._stop()
        assert self._stop_at is not None
        for role in ("front-end", "engine"):
            self._send_signal(signal.SIGTERM, role)
            for worker in [worker for id, worker in self._workers.items() if id.role == role]:
                try:
                    worker.process.wait(max(0.0, self._stop_at - time.monotonic()))
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                    worker.process.wait()
