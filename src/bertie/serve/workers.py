"""Processes behind one port: a single server, or several workers that a supervisor restarts when they die.

SIGTERM, SIGINT    /health answers 503 for the grace period, then the port closes, requests in flight finish; exit 0
SIGHUP             reload the models; the old ones answer until the new ones are loaded
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from bertie.errors import BertieError, ConfigError
from bertie.serve.limits import LimitedProtocol

if TYPE_CHECKING:
    from bertie.serve.http import App

WORKER_VARIABLE = "BERTIE_WORKER"  # in a worker's environment: its number, the number of workers, their folder
MAX_FAILURES = 3  # failed starts in a row
STARTUP_SECONDS = 10.0  # a worker that dies within this time has failed to start


class WorkerInfo:
    """Which worker this process is, of how many.

    >>> WorkerInfo.from_environment().count
    1
    """

    def __init__(self, number: int = 0, count: int = 1, folder: Path | None = None) -> None:
        self.number, self.count, self.folder = number, count, folder

    @classmethod
    def from_environment(cls) -> WorkerInfo:
        """Read the environment; without a variable there, this is the only process."""
        if WORKER_VARIABLE not in os.environ:
            return cls()
        number, count, folder = os.environ[WORKER_VARIABLE].split(":", 2)
        return cls(int(number), int(count), Path(folder))

    def report_ready(self) -> None:
        """Tell the supervisor that this worker accepts requests."""
        if self.folder is not None:
            (self.folder / f"ready-{self.number}").touch()


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind a socket without listening. `shared`: other processes may bind to the same port."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    bound = socket.socket(family, kind, number)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot bind to {host}:{port}: {error.strerror}; choose another --port") from None
    return bound


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown: unready, then closed, then drained, with exit status 0."""

    def __init__(self, app: App, *, grace: float, shutdown_seconds: float, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=int(shutdown_seconds) + 5,
        )
        super().__init__(config)
        self._app, self._grace, self._on_ready = app, grace, on_ready
        self._stop_at: float | None = None
        self._parent = os.getppid()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `on_ready`."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown; a second signal exits at once."""
        self._app.draining = True
        if self._stop_at is not None:
            self.force_exit = self.should_exit = True
        self._stop_at = time.monotonic() + (self._grace if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Check for shutdown, ten times a second."""
        if self._stop_at is None and os.getppid() != self._parent and WORKER_VARIABLE in os.environ:
            self.handle_exit(signal.SIGTERM, None)  # the supervisor was killed: nothing else would stop this worker
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    app: App, socket_: socket.socket, *, grace: float, shutdown_seconds: float, on_ready: Callable[[], None]
) -> None:
    """Serve until a signal stops the process."""
    server = Server(app, grace=grace, shutdown_seconds=shutdown_seconds, on_ready=on_ready)

    def reload(sig: int, frame: FrameType | None) -> None:
        Thread(target=app.reload, name="bertie-reload", daemon=True).start()

    signal.signal(signal.SIGHUP, reload)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[socket_]))


class Supervisor:
    """Start worker processes, restart those that die, and stop them all."""

    def __init__(
        self, argv: Sequence[str], count: int, *, shutdown_seconds: float, on_ready: Callable[[], None]
    ) -> None:
        self._argv, self._count, self._on_ready = list(argv), count, on_ready
        self._shutdown_seconds = shutdown_seconds
        self._workers: dict[int, tuple[subprocess.Popen[bytes], float]] = {}  # processes with their start times
        self._failures = 0
        self._stopping = False

    def run(self) -> None:
        """Run until a signal stops it, or workers cannot be started."""
        with TemporaryDirectory(prefix="bertie-serve-") as folder:
            for sig in (signal.SIGTERM, signal.SIGINT):
                signal.signal(sig, self._handle_stop)
            signal.signal(signal.SIGHUP, lambda sig, frame: self._send_signal(signal.SIGHUP))
            ready = False
            for number in range(self._count):
                self._start(number, folder)
            try:
                while self._workers:
                    time.sleep(0.05)
                    self._check_workers(folder)
                    if not ready and all((Path(folder) / f"ready-{i}").exists() for i in range(self._count)):
                        ready = True
                        self._on_ready()
            finally:
                self._stop_workers()

    def _start(self, number: int, folder: str) -> None:
        environment = os.environ | {WORKER_VARIABLE: f"{number}:{self._count}:{folder}"}
        command = [sys.executable, "-m", "bertie", *self._argv]
        self._workers[number] = (
            subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL),
            time.monotonic(),
        )

    def _check_workers(self, folder: str) -> None:
        """Restart workers that have died."""
        for number, (worker, started) in list(self._workers.items()):
            status = worker.poll()
            if status is None:
                if time.monotonic() - started > STARTUP_SECONDS:
                    self._failures = 0
                continue
            del self._workers[number]
            if self._stopping:
                continue
            # A positive status is an error; a negative one is a signal, which is no failure to start.
            self._failures += time.monotonic() - started < STARTUP_SECONDS and status > 0
            if self._failures >= MAX_FAILURES or not (Path(folder) / f"ready-{number}").exists():
                self._stopping = True
                self._stop_workers()
                raise BertieError(f"worker {number} cannot be started: it exited with status {status}")
            self._start(number, folder)

    def _handle_stop(self, sig: int, frame: Any) -> None:
        self._stopping = True
        self._send_signal(signal.SIGTERM)

    def _send_signal(self, sig: int) -> None:
        for worker, _ in self._workers.values():
            if worker.poll() is None:
                worker.send_signal(sig)

    def _stop_workers(self) -> None:
        self._send_signal(signal.SIGTERM)
        until = time.monotonic() + self._shutdown_seconds + 10
        for worker, _ in self._workers.values():
            try:
                worker.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
