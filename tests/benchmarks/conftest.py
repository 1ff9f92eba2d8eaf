"""Fixtures of the tests of serving benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.benchmarks.stub_server import Stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A server that refuses every third request and disconnects at every tenth, unless `plain` is set."""
    server = Stub()
    yield server
    server.stop()
