"""Worker processes behind one port: started, watched and restarted by a supervisor.

The supervisor binds one socket per worker, all to the same port (SO_REUSEPORT), and each worker
inherits all of them. It listens on its own; twice a second it also accepts what waits on the
others. So connections are spread evenly, and those that wait for a worker that has died, hangs or
is being started are answered by another one.

Each worker's event loop writes to a pipe four times a second. A worker that was stopped (SIGSTOP)
is continued at once; one without a heartbeat for `timeout` seconds is killed, so that its clients
get a connection reset rather than silence, and a new one takes its place.
"""

from __future__ import annotations

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
from typing import Any

from bertie.errors import BertieError
from bertie.serve.logs import Log

WORKER_VARIABLE = "BERTIE_WORKER"  # in a worker's environment: number:count:pipe:socket,socket,…:folder
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


class WorkerInfo:
    """Which worker this process is, of how many, and its connection to the supervisor.

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
    ) -> None:
        """`folder`: where workers share their metrics; `sockets`: one per worker; `pipe`: takes heartbeats."""
        self.number, self.count, self.folder = number, count, folder
        self.socket = sockets[number] if sockets else None
        self.other_sockets = [other for index, other in enumerate(sockets) if index != number]
        self._pipe = pipe

    @classmethod
    def from_environment(cls) -> WorkerInfo:
        """Read the environment; without a variable there, this is the only process."""
        if WORKER_VARIABLE not in os.environ:
            return cls()
        number, count, pipe, sockets, folder = os.environ[WORKER_VARIABLE].split(":", 4)
        inherited = [socket.socket(fileno=int(descriptor)) for descriptor in sockets.split(",")]
        for listener in inherited:
            listener.setblocking(False)
        return cls(int(number), int(count), Path(folder), inherited, int(pipe))

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

    `command` starts a worker. `sockets` are bound to the same port, one per worker, and are closed
    when the supervisor stops. `timeout`: seconds without a heartbeat; 0: wait forever.
    """

    def __init__(
        self,
        command: Sequence[str],
        sockets: Sequence[socket.socket],
        *,
        shutdown_seconds: float,
        on_ready: Callable[[], None],
        timeout: float = WORKER_TIMEOUT,
        log: Log | None = None,
    ) -> None:
        self._command, self._sockets, self._on_ready = list(command), list(sockets), on_ready
        self._shutdown_seconds, self._timeout, self._log = shutdown_seconds, timeout, log or Log()
        self._workers: dict[int, _Worker] = {}
        self._ready: set[int] = set()  # workers that have been ready once
        self._failures: dict[int, int] = {}  # failed starts in a row, by worker
        self._restart_at: dict[int, float] = {}  # when to start workers that have failed
        self._stop_at: float | None = None  # when workers that still run are killed

    def run(self) -> None:
        """Run until a signal stops it, or workers cannot be started."""
        with TemporaryDirectory(prefix="bertie-serve-") as folder:
            for sig in (signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, self._handle_stop)
            signal.signal(signal.SIGHUP, lambda sig, frame: self._send_signal(signal.SIGHUP))
            reported = False
            for number in range(len(self._sockets)):
                self._start(number, folder)
            checked = time.monotonic()
            try:
                while self._workers or self._restart_at:
                    time.sleep(POLL_SECONDS)
                    now = time.monotonic()
                    self._check_workers(folder, now - checked)
                    checked = now
                    if not reported and len(self._ready) == len(self._sockets):
                        reported = True
                        self._on_ready()
            finally:
                self._stop_workers()

    def _start(self, number: int, folder: str) -> None:
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        descriptors = [listener.fileno() for listener in self._sockets]
        names = ",".join(map(str, descriptors))
        variable = f"{number}:{len(self._sockets)}:{writing}:{names}:{folder}"
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
        self._workers[number] = _Worker(process, reading)

    def _check_workers(self, folder: str, seconds: float) -> None:
        """Continue workers that were stopped, kill those that hang, restart those that have died."""
        for number, restart_at in list(self._restart_at.items()):
            if time.monotonic() >= restart_at and self._restart_at.pop(number, None) is not None:
                self._start(number, folder)
        for number, worker in list(self._workers.items()):
            status = worker.process.poll()
            if status is not None:
                self._replace(number, worker, status, folder)
                continue
            worker.read_heartbeats(seconds)
            if worker.silence is not None:
                self._ready.add(number)
            if time.monotonic() - worker.started > STARTUP_SECONDS:
                self._failures.pop(number, None)
            if worker.was_stopped() and self._timeout:
                worker.process.send_signal(signal.SIGCONT)
                self._log("worker continued", worker=number, reason="it was stopped by a signal")
            if self._timeout and (worker.silence or 0.0) > self._timeout:
                worker.process.kill()
                self._log("worker killed", worker=number, reason=f"no heartbeat for {self._timeout:g} seconds")
            elif self._stop_at is not None and time.monotonic() > self._stop_at:
                worker.process.kill()
                self._log("worker killed", worker=number, reason="it did not stop in time")

    def _replace(self, number: int, worker: _Worker, status: int, folder: str) -> None:
        """Start a new worker in place of one that has exited."""
        del self._workers[number]
        os.close(worker.pipe)
        if self._stop_at is not None:
            return
        # A positive status is an error; a negative one is a signal, which is no failure to start.
        failed = time.monotonic() - worker.started < STARTUP_SECONDS and status > 0
        failures = self._failures[number] = self._failures.get(number, 0) + 1 if failed else 0
        serving = any(other.silence is not None for other in self._workers.values())
        if (failures >= MAX_FAILURES and not serving) or number not in self._ready:
            self._stop_workers()
            raise BertieError(f"worker {number} cannot be started: it exited with status {status}")
        pause = min(2.0**failures / 2, MAX_PAUSE) if failures else 0.0  # perhaps its model is being replaced
        self._log("worker restarted", worker=number, status=status, pause=pause or None)
        self._restart_at[number] = time.monotonic() + pause

    def _handle_stop(self, sig: int, frame: Any) -> None:
        self._restart_at.clear()
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._shutdown_seconds + 10
            for listener in self._sockets:  # the workers have their own copies, and close them after the grace period
                listener.close()
        self._send_signal(signal.SIGTERM)

    def _send_signal(self, sig: int) -> None:
        for worker in self._workers.values():
            if worker.process.poll() is None:
                worker.process.send_signal(sig)

    def _stop_workers(self) -> None:
        self._handle_stop(signal.SIGTERM, None)
        assert self._stop_at is not None
        for worker in self._workers.values():
            try:
                worker.process.wait(max(0.0, self._stop_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
