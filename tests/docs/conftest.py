"""A server with the built-in model, for pages that use one."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from bertie.serve.http import App, ServerSettings
from bertie.serve.logs import Log
from bertie.serve.registry import Registry
from tests.serve.conftest import Running


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    registry, log = Registry(["bertie-small"], budget=2048), io.StringIO()
    running = Running(App(registry, ServerSettings(), log=Log(log)), log)
    yield running.url
    running.stop()
    registry.close()
