"""One server process: its socket, its signals, its graceful shutdown.

SIGTERM, SIGINT    /health answers 503 for the grace period, then the port closes, requests in flight finish; exit 0
SIGHUP             reload the API keys and the models; the old models answer until the new ones are loaded
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread
from typing import TYPE_CHECKING, Any

from bertie.errors import ConfigError
from bertie.serve.connections import SWEEP_SECONDS, Connections
from bertie.serve.protocol import HttpProtocol
from bertie.serve.supervisor import WorkerInfo

if TYPE_CHECKING:
    from bertie.serve.http import App

# Whoever has bound a Unix socket removes its file. Other front ends may still listen when one of them stops.
_KEEP_FILE: dict[str, Any] = {} if sys.version_info < (3, 13) else {"cleanup_socket": False}
BACKLOG = 2048  # connections that wait to be accepted
TICK_SECONDS = 0.1  # between two looks at whether to stop
ENGINE_SECONDS = 10.0  # that a new front end waits for the engines
TRIM_SECONDS = 30  # between two calls of malloc_trim
HEARTBEAT_SECONDS = 0.25  # between two heartbeats of a worker, and two looks at what waits for the other workers


def bind_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind a socket without listening. `shared`: other processes may bind to the same port."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    bound = socket.socket(family, kind, number)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Replies that clients do not read stay in this process, where they are counted and limited.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 128 * 1024)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot bind to {host}:{port}: {error.strerror}; choose another --port") from None
    return bound


def bind_unix_socket(path: str) -> socket.socket:
    """Bind a Unix socket that only this user may connect to, without listening.

    A file that a server has left there is replaced; one that a server listens on is not.
    """
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"--unix {path}: there is a file that is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError as error:
                raise ConfigError(f"--unix {path}: {error.strerror or error}") from None
            else:
                raise ConfigError(f"--unix {path}: another server listens there")
    bound = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        bound.bind(path)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--unix {path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    return bound


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A bound Unix socket, whose file is removed at the end unless another server has replaced it."""
    bound = bind_unix_socket(path)
    own = _inode(path)
    try:
        with bound:
            yield bound
    finally:
        if _inode(path) == own:
            os.unlink(path)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Server:
    """One process's event loop with its connections, until `should_exit`: unready, then closed, then drained."""

    def __init__(
        self,
        app: App,
        *,
        grace: float,
        shutdown_seconds: float,
        on_ready: Callable[[], None],
        worker: WorkerInfo | None = None,
    ) -> None:
        self.open = Connections(app.settings.connections.fit_open_files())
        self.should_exit = self.force_exit = False
        app.metrics.add_collector(self._update_gauges)
        self._app, self._grace, self._on_ready = app, grace, on_ready
        self._shutdown_seconds = shutdown_seconds + 5
        self._worker = worker or WorkerInfo()
        self._stop_at: float | None = None
        self._parent = os.getppid()

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on bound sockets until a signal, or `should_exit`."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.serve(sockets))

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """The same on the running event loop."""
        loop = asyncio.get_running_loop()
        if current_thread() is main_thread():
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, self.handle_exit, sig)
        self._app.start(loop)
        await self._wait_for_engines()
        listeners = [await self._listen(bound) for bound in sockets]
        tasks = [asyncio.create_task(self._run_housekeeping())]
        self._sweep()
        if self._worker.socket is not None:
            tasks.append(asyncio.create_task(self._run_heartbeat()))
        self._on_ready()
        while not self.should_exit:
            await asyncio.sleep(TICK_SECONDS)
            self._tick()
        self._app.draining = True
        for listener in listeners:
            listener.close()
        await self._drain()
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(self._app.close)

    async def _wait_for_engines(self) -> None:
        """Listen only when requests can be answered, unless that takes long: then with 503."""
        until = time.monotonic() + ENGINE_SECONDS
        while not self._app.service.registry.ready and not self.should_exit and time.monotonic() < until:
            await asyncio.sleep(TICK_SECONDS / 10)

    async def _listen(self, bound: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        if bound.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._create_protocol, sock=bound, backlog=BACKLOG, **_KEEP_FILE)
        return await loop.create_server(self._create_protocol, sock=bound, backlog=BACKLOG)

    async def _drain(self) -> None:
        """Close the port, and finish the requests in flight."""
        for other in self._worker.other_sockets:
            other.close()
        self._worker.other_sockets.clear()
        for connection in self.open.all():
            connection.shutdown()
        until = time.monotonic() + self._shutdown_seconds
        while (self.open.all() or self._app.in_flight) and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(TICK_SECONDS / 2)

    async def _run_housekeeping(self) -> None:
        second = 0
        while True:
            await asyncio.to_thread(self._app.maintain, trim=second % TRIM_SECONDS == 0)
            await asyncio.sleep(1)
            second += 1

    async def _run_heartbeat(self) -> None:
        """Tell the supervisor that the event loop runs, and accept connections that other workers leave waiting."""
        while True:
            self._worker.beat()
            accepted = [await self._accept(other) for other in self._worker.other_sockets]
            await asyncio.sleep(HEARTBEAT_SECONDS / 5 if any(accepted) else HEARTBEAT_SECONDS)

    async def _accept(self, listener: socket.socket) -> bool:
        """Accept a few waiting connections; return whether there were any."""
        count = 0
        while count < 32:
            try:
                connection, _ = listener.accept()
            except OSError:  # none is waiting, or nobody listens yet
                break
            count += 1
            connection.setblocking(False)
            try:
                await asyncio.get_running_loop().connect_accepted_socket(self._create_protocol, connection)
            except OSError:  # the client has disconnected meanwhile
                connection.close()
            except Exception as error:  # without heartbeats this worker would be killed
                connection.close()
                self._app.log.error("connection not accepted", error)
        return count > 0

    def _create_protocol(self) -> asyncio.Protocol:
        return HttpProtocol(self._app, self.open)

    def _sweep(self) -> None:
        """Drop slow clients and expired requests; also during the shutdown, which would wait for them."""
        self.open.sweep()
        self._app.sweep()
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _update_gauges(self) -> None:
        metrics, opened = self._app.metrics, self.open
        metrics.connections.set(opened.count)
        metrics.connection_bytes.set(opened.request_bytes, "request")
        metrics.connection_bytes.set(opened.reply_bytes, "reply")
        for reason, count in opened.dropped.copy().items():
            metrics.dropped.set(count, reason)

    def handle_exit(self, sig: int) -> None:
        """Begin a graceful shutdown; a second signal exits at once."""
        self._app.draining = True
        if self._stop_at is not None:
            self.force_exit = self.should_exit = True
        self._stop_at = time.monotonic() + (self._grace if sig == signal.SIGTERM else 0.0)

    def _tick(self) -> None:
        """Check for shutdown, ten times a second."""
        if self._stop_at is None and os.getppid() != self._parent and self._worker.socket is not None:
            self.handle_exit(signal.SIGTERM)  # the supervisor was killed: nothing else would stop this worker
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop, where there is one."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def serve(
    app: App,
    socket_: socket.socket,
    *,
    grace: float,
    shutdown_seconds: float,
    on_ready: Callable[[], None],
    worker: WorkerInfo | None = None,
) -> None:
    """Serve until a signal stops the process."""
    server = Server(app, grace=grace, shutdown_seconds=shutdown_seconds, on_ready=on_ready, worker=worker)

    def reload(sig: int, frame: Any) -> None:
        Thread(target=app.reload, name="bertie-reload", daemon=True).start()

    signal.signal(signal.SIGHUP, reload)
    server.run([socket_])
