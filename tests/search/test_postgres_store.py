"""The PostgreSQL store: HNSW, connections, pgvector."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from bertie.errors import ConfigError, ExistsError, InputError, NotFoundError
from bertie.search import postgres_store
from bertie.search.filters import MetadataFilter, matches_filters
from bertie.search.records import Document, EmbeddedDocument, Passage
from tests.search.conftest import Place
from tests.search.stores import D, brute, by_key, entry, everything, expected, units


@pytest.fixture
def server(postgres_url: str) -> Any:
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_hnsw(place: Place, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.search.postgres_store.EXACT_SEARCH_PASSAGES", 100)
    store = place.create(D)
    entries = [entry(f"d{i}", 1, metadata={"i": i, "odd": i % 2 == 1}, seed=i) for i in range(1000)]
    store.commit(entries[:800])
    store.optimize()
    store.commit(entries[800:], delete=["d5"])  # the graph takes these in
    vectors = by_key(store, entries)
    documents = {f.key: int(f.passage.document[1:]) for f in store.fetch(sorted(vectors))}
    queries = units(30, 7)
    for where, least in (([], 0.95), ([MetadataFilter("odd", "=", True)], 0.95), ([MetadataFilter("i", "<", 3)], 1.0)):
        some = {
            key: vectors[key] for key in vectors if matches_filters(entries[documents[key]].document.metadata, where)
        }
        right = 0
        for query, (keys, scores) in zip(queries, store.search(queries, 10, where), strict=True):
            best, _ = brute(some, query, 10)
            assert len(keys) == len(best)
            assert set(keys.tolist()) <= some.keys()
            np.testing.assert_allclose(scores, [vectors[key] @ query for key in keys.tolist()], atol=1e-6)
            right += len({*keys.tolist()} & {*best})
        assert right >= least * len(queries) * len(best)
    place.close()  # which makes the server count what was used
    used = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'passages_hnsw' AND schemaname = %s"
    deadline = time.monotonic() + 30
    while server.execute(used, (place.name,)).fetchone()[0] < 60:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_failed_transaction(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:

    store = place.create(D)
    store.commit([entry("a", 2)])
    copy = postgres_store.copy_documents  # type: ignore[attr-defined]

    def fail(*given: Any) -> None:
        copy(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(postgres_store, "copy_documents", fail)
        with pytest.raises(KeyboardInterrupt):
            store.commit([entry("a", 1, version="2"), entry("b")])
    assert (everything(store), store.generation) == (expected([entry("a", 2)]), 1)
    store.commit([entry("b")])
    assert len(store) == 3


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_lost_connection(place: Place, server: Any) -> None:
    store = place.create(D)
    store.commit([entry("a")])
    end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname <> ''"
    server.execute(end)
    assert len(store) == 1
    texts = store.passage_texts()
    next(texts)
    server.execute(end)
    with pytest.raises(NotFoundError, match="lost the connection to"):
        list(texts)
    assert len(store) == 1


def test_connection_errors(postgres_url: str, server: Any) -> None:
    from bertie.search.postgres_store import PostgresStore

    with pytest.raises(NotFoundError, match="running") as refused:
        PostgresStore.open("postgresql://me:secret@127.0.0.1:1/texts")
    assert "secret" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)
    for nonsense in ("nowhere", "postgresql://me:sec ret@host/x"):
        with pytest.raises(InputError, match="postgresql://user") as wrong:
            PostgresStore.open(nonsense)
        assert "sec" not in str(wrong.value)
    PostgresStore.create(postgres_url, D, {}, name="Mine!").close()
    with pytest.raises(NotFoundError, match="'Mine!'"):
        PostgresStore.open(postgres_url, name="yours")
    for name in ("", "x" * 64, "pg_mine"):
        with pytest.raises(ConfigError, match=f"{name!r}"):
            PostgresStore.create(postgres_url, D, {}, name=name)
    with pytest.raises(ExistsError, match="public"):
        PostgresStore.create(postgres_url, D, {}, name="public")
    server.execute('UPDATE "Mine!".bertie_index SET format = 99')
    with pytest.raises(ConfigError, match="99"):
        PostgresStore.open(postgres_url, name="Mine!")


def test_a_database_without_pgvector(postgres_url: str, server: Any) -> None:
    from psycopg.conninfo import make_conninfo

    from bertie.search.postgres_store import PostgresStore

    server.execute("CREATE DATABASE bare")
    server.execute("CREATE ROLE guest LOGIN")
    bare = make_conninfo(postgres_url, dbname="bare", user="guest")
    with pytest.raises(NotFoundError, match="CREATE EXTENSION vector"):
        PostgresStore.open(bare)
    with pytest.raises(NotFoundError, match="CREATE EXTENSION vector"):
        PostgresStore.create(bare, D, {})
    owner = make_conninfo(postgres_url, dbname="bare")
    PostgresStore.create(owner, D, {}).close()  # adds it
    with pytest.raises(ConfigError, match="permission denied"):
        PostgresStore.create(bare, D, {}, name="other")


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_pgvector_in_another_schema(place: Place, server: Any) -> None:
    from psycopg.conninfo import make_conninfo

    server.execute("CREATE DATABASE elsewhere")
    place.at = make_conninfo(place.at, dbname="elsewhere")
    import psycopg

    with psycopg.connect(place.at, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "of, others"')
        connection.execute('CREATE EXTENSION vector SCHEMA "of, others"')
    store = place.create(D)
    store.commit([entry("a", 2)])
    assert len(store.search(units(1), 5)[0][0]) == 2


@pytest.mark.parametrize("place", ["postgres"], indirect=True)
def test_unstorable_characters(place: Place) -> None:
    store = place.create(D)
    with pytest.raises(InputError, match=r"U\+0000"):
        store.commit([EmbeddedDocument(Document("a", "x\0y"), [Passage("a", 0, 3, "x\0y")], units(1))])
    assert len(store) == 0
