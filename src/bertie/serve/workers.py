"""One server process: its socket, its signals, its graceful shutdown.

SIGTERM, SIGINT    /health answers 503 for the grace period, then the port closes, requests in flight finish; exit 0
SIGHUP             reload the API keys and the models; the old models answer until the new ones are loaded
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from bertie.errors import ConfigError
from bertie.serve.connections import SWEEP_SECONDS, Connections
from bertie.serve.protocol import LimitedProtocol
from bertie.serve.supervisor import WorkerInfo

if TYPE_CHECKING:
    from bertie.serve.http import App

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


class Server(uvicorn.Server):
    """uvicorn's server with a graceful shutdown: unready, then closed, then drained, with exit status 0."""

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
        config = uvicorn.Config(
            app,
            http=partial(LimitedProtocol, connections=self.open),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(shutdown_seconds) + 5,
        )
        super().__init__(config)
        app.metrics.add_collector(self._update_gauges)
        self._app, self._grace, self._on_ready = app, grace, on_ready
        self._worker = worker or WorkerInfo()
        self._heart: asyncio.Task[None] | None = None
        self._stop_at: float | None = None
        self._parent = os.getppid()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then call `on_ready`."""
        await super().startup(sockets=sockets)
        self._sweep()
        if self.started:
            if self._worker.socket is not None:
                self._heart = asyncio.create_task(self._run_heartbeat())
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, and finish the requests in flight."""
        for other in self._worker.other_sockets:
            other.close()
        self._worker.other_sockets.clear()
        await super().shutdown(sockets=sockets)

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
        return LimitedProtocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, connections=self.open
        )

    def _sweep(self) -> None:
        """Drop slow clients; also during the shutdown, which would wait for them."""
        self.open.sweep()
        asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)

    def _update_gauges(self) -> None:
        metrics, opened = self._app.metrics, self.open
        metrics.connections.set(opened.count)
        metrics.connection_bytes.set(opened.request_bytes, "request")
        metrics.connection_bytes.set(opened.reply_bytes, "reply")
        for reason, count in opened.dropped.copy().items():
            metrics.dropped.set(count, reason)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown; a second signal exits at once."""
        self._app.draining = True
        if self._stop_at is not None:
            self.force_exit = self.should_exit = True
        self._stop_at = time.monotonic() + (self._grace if sig == signal.SIGTERM else 0.0)

    async def on_tick(self, counter: int) -> bool:
        """Check for shutdown, ten times a second."""
        if self._stop_at is None and os.getppid() != self._parent and self._worker.socket is not None:
            self.handle_exit(signal.SIGTERM, None)  # the supervisor was killed: nothing else would stop this worker
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


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

    def reload(sig: int, frame: FrameType | None) -> None:
        Thread(target=app.reload, name="bertie-reload", daemon=True).start()

    signal.signal(signal.SIGHUP, reload)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[socket_]))
