"""Servers with tiny models, each in its own thread, on a real port."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from bertie.serve.connections import ConnectionLimits
from bertie.serve.engine_server import EngineServer
from bertie.serve.http import App, ServerSettings
from bertie.serve.limits import Limits
from bertie.serve.logs import Log
from bertie.serve.registry import Registry
from bertie.serve.workers import Server, bind_socket
from tests.cli.conftest import models, small_folder

__all__ = ["models", "small_folder"]


class Running:
    """A running server."""

    def __init__(self, app: App, log: io.StringIO) -> None:
        self.app, self._log = app, log
        self.socket = bind_socket("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready = threading.Event()
        self.server = Server(app, grace=0.0, shutdown_seconds=5.0, on_ready=ready.set)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        assert ready.wait(20)
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def post_json(self, path: str, body: Any, **options: Any) -> Any:
        """The JSON of a successful response."""
        response = self.post(path, body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The parsed lines of the log."""
        return [orjson.loads(line) for line in self._log.getvalue().splitlines()]

    @property
    def log(self) -> str:
        return self._log.getvalue()

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


class RunningEngine:
    """An engine server in a thread of its own; `stop` and `start` are a restart."""

    def __init__(self, registry: Registry, path: str) -> None:
        self.registry, self.path = registry, path
        self.start()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)

    async def _run(self, ready: threading.Event) -> None:
        Path(self.path).unlink(missing_ok=True)
        self.server, self._stop, self._loop = EngineServer(self.registry), asyncio.Event(), asyncio.get_running_loop()
        listener = await self.server.listen(self.path)
        ready.set()
        await self._stop.wait()
        listener.close()
        await self.server.drain(0)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def registry(models: dict[str, str], small_folder: Any) -> Iterator[Registry]:
    """All tiny models; the one with several heads comes first."""
    names = ("embed", "classify", "rerank", "nli", "fill", "tag", "answer", "choose", "detect-replaced")
    folders = {"small": str(small_folder / "bertie-small")} | {name: models[name] for name in names}
    registry = Registry(folders, devices=["cpu"], budget=2048, max_wait=60)
    yield registry
    registry.close()


@pytest.fixture(scope="session")
def start(registry: Registry) -> Iterator[Start]:
    """A function that starts servers, by default with the same models."""
    running: list[Running] = []

    def begin(*args: Any, **options: Any) -> Running:
        log = io.StringIO()
        app = App(options.pop("over", registry), *args, log=Log(log), **options)
        app.close = app.stop  # the models are shared
        running.append(Running(app, log))
        return running[-1]

    yield begin
    for server in running:
        server.stop()


@pytest.fixture(scope="session")
def server(start: Start) -> Running:
    """A server with default settings."""
    return start()


@pytest.fixture(scope="session")
def strict(start: Start) -> Running:
    """A server with low limits."""
    low = Limits(body=2000, items=3, tokens=60, requests=2)
    quick = ConnectionLimits(header_seconds=0.5, read_seconds=0.5)
    return start(ServerSettings(limits=low, deadline=5.0, connections=quick))


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timeout"
        time.sleep(0.01)


def raw_headers(path: str, *headers: str) -> bytes:
    """The head of a POST request."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


class BlockedQueue:
    """A queue's `put` that keeps jobs until it is released, or until their clients have disconnected."""

    def __init__(self, put: Callable[..., None]) -> None:
        self.release, self.tickets, self._put = threading.Event(), list[Any](), put

    def __call__(self, job: Any, *, notify: bool = True) -> None:
        self.tickets.append(job.ticket)
        threading.Thread(target=self._keep, args=(job,), daemon=True).start()

    def _keep(self, job: Any) -> None:
        while not self.release.wait(0.01) and not job.ticket.cancelled.is_set():
            pass
        self._put(job)


@pytest.fixture
def blocked(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> BlockedQueue:
    queue = registry["embed"].engine.queue
    put = BlockedQueue(queue.put)
    monkeypatch.setattr(queue, "put", put)
    return put
