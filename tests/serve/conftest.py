"""Servers of tiny models, each in a thread of its own, at a real port."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import orjson
import pytest

from bertie.serve.http import App
from bertie.serve.logs import Log
from bertie.serve.registry import Registry
from bertie.serve.workers import Server, bind_socket
from tests.cli.conftest import models, small_folder

__all__ = ["models", "small_folder"]


class Running:
    """A server that runs."""

    def __init__(self, made: App, written: io.StringIO) -> None:
        self.app, self._written = made, written
        self.socket = bind_socket("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready = threading.Event()
        self.server = Server(made, grace=0.0, shutdown_seconds=5.0, on_ready=ready.set)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        assert ready.wait(20)
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def said(self, path: str, body: Any, **options: Any) -> Any:
        """The reply to a good request."""
        reply = self.post(path, body, **options)
        assert reply.status_code == 200, reply.text
        return reply.json()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What was logged."""
        return [orjson.loads(line) for line in self._written.getvalue().splitlines()]

    @property
    def log(self) -> str:
        return self._written.getvalue()

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def registry(models: dict[str, str], small_folder: Any) -> Iterator[Registry]:
    """All tiny models; that with many heads comes first."""
    names = ("embed", "classify", "rerank", "nli", "fill", "tag", "answer")
    folders = {"small": str(small_folder / "bertie-small")} | {name: models[name] for name in names}
    made = Registry(folders, devices=["cpu"], budget=2048, max_wait=60)
    yield made
    made.close()


@pytest.fixture(scope="session")
def start(registry: Registry) -> Iterator[Start]:
    """Starts servers, all over the same models."""
    running: list[Running] = []

    def begin(*args: Any, **options: Any) -> Running:
        written = io.StringIO()
        over = options.pop("over", registry)
        made = App(over, *args, log=Log(written), **options)
        made.close = made.stop  # type: ignore[method-assign]  # the models are others', too
        running.append(Running(made, written))
        return running[-1]

    yield begin
    for one in running:
        one.stop()


@pytest.fixture(scope="session")
def server(start: Start) -> Running:
    """One with the usual settings."""
    return start()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.01)
