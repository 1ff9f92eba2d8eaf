"""Processes behind one port: one server, or several that a parent starts anew when they die.

SIGTERM, SIGINT    /health says 503 for the grace, then nothing more is taken in, what is under way is answered; 0
SIGHUP             models are loaded anew, beside those that still answer
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
from bertie.serve.limits import Protocol

if TYPE_CHECKING:
    from bertie.serve.http import App

PLACE = "BERTIE_WORKER"  # in a worker's environment: its number, how many there are, and where they meet
TRIES = 3  # starts in a row that may fail
YOUNG = 10.0  # seconds: a worker that dies younger has failed to start


class Place:
    """Which worker this process is.

    >>> Place.here().share
    1
    """

    def __init__(self, number: int = 0, share: int = 1, folder: Path | None = None) -> None:
        self.number, self.share, self.folder = number, share, folder

    @classmethod
    def here(cls) -> Place:
        """From the environment; the only one, if it says nothing."""
        if PLACE not in os.environ:
            return cls()
        number, share, folder = os.environ[PLACE].split(":", 2)
        return cls(int(number), int(share), Path(folder))

    def ready(self) -> None:
        """Tell the parent."""
        if self.folder is not None:
            (self.folder / f"ready-{self.number}").touch()


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket at an address, not listening yet. `shared`: others may bind to it as well."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    made = socket.socket(family, kind, number)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise ConfigError(f"cannot serve at {host}:{port}: {error.strerror}; name another --port") from None
    return made


class Server(uvicorn.Server):
    """uvicorn's server, which leaves in good order: not ready, then closed, then done, with status 0."""

    def __init__(self, app: App, *, grace: float, patience: float, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=65,
            timeout_graceful_shutdown=int(patience) + 5,
        )
        super().__init__(config)
        self._app, self._grace, self._on_ready = app, grace, on_ready
        self._leave: float | None = None
        self._parent = os.getppid()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to leave; asked twice, at once."""
        self._app.draining = True
        if self._leave is not None:
            self.force_exit = self.should_exit = True
        self._leave = time.monotonic() + (self._grace if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._leave is None and os.getppid() != self._parent and PLACE in os.environ:
            self.handle_exit(signal.SIGTERM, None)  # the parent was killed, and nobody would ever stop this
        if self._leave is not None and time.monotonic() >= self._leave:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(app: App, socket_: socket.socket, *, grace: float, patience: float, on_ready: Callable[[], None]) -> None:
    """Serve until a signal says to leave."""
    server = Server(app, grace=grace, patience=patience, on_ready=on_ready)

    def reload(sig: int, frame: FrameType | None) -> None:
        Thread(target=app.reload, name="bertie-reload", daemon=True).start()

    signal.signal(signal.SIGHUP, reload)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[socket_]))


class Parent:
    """Starts workers, starts those anew that die, and stops all."""

    def __init__(self, argv: Sequence[str], count: int, *, patience: float, on_ready: Callable[[], None]) -> None:
        self._argv, self._count, self._patience, self._on_ready = list(argv), count, patience, on_ready
        self._workers: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
        self._failures = 0
        self._leaving = False

    def run(self) -> None:
        """Until a signal says to stop, or workers cannot be started."""
        with TemporaryDirectory(prefix="bertie-serve-") as folder:
            for one in (signal.SIGTERM, signal.SIGINT):
                signal.signal(one, self._leave)
            signal.signal(signal.SIGHUP, lambda sig, frame: self._tell(signal.SIGHUP))
            said = False
            for number in range(self._count):
                self._start(number, folder)
            try:
                while self._workers:
                    time.sleep(0.05)
                    self._look(folder)
                    if not said and all((Path(folder) / f"ready-{i}").exists() for i in range(self._count)):
                        said = True
                        self._on_ready()
            finally:
                self._end()

    def _start(self, number: int, folder: str) -> None:
        environment = os.environ | {PLACE: f"{number}:{self._count}:{folder}"}
        command = [sys.executable, "-m", "bertie", *self._argv]
        self._workers[number] = (
            subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL),
            time.monotonic(),
        )

    def _look(self, folder: str) -> None:
        for number, (worker, begun) in list(self._workers.items()):
            status = worker.poll()
            if status is None:
                if time.monotonic() - begun > YOUNG:
                    self._failures = 0
                continue
            del self._workers[number]
            if self._leaving:
                continue
            self._failures += time.monotonic() - begun < YOUNG and status > 0  # killed is not failed
            if self._failures >= TRIES or not (Path(folder) / f"ready-{number}").exists():
                self._leaving = True
                self._end()
                raise BertieError(f"worker {number} cannot be started: it ended with status {status}")
            self._start(number, folder)

    def _leave(self, sig: int, frame: Any) -> None:
        self._leaving = True
        self._tell(signal.SIGTERM)

    def _tell(self, sig: int) -> None:
        for worker, _ in self._workers.values():
            if worker.poll() is None:
                worker.send_signal(sig)

    def _end(self) -> None:
        self._tell(signal.SIGTERM)
        until = time.monotonic() + self._patience + 10
        for worker, _ in self._workers.values():
            try:
                worker.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
