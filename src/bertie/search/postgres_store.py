"""Passages in PostgreSQL, with their vectors in its pgvector: one index for many machines."""

from __future__ import annotations

import json
import re
import selectors
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bertie.errors import BertieError, ConfigError, ExistsError, InputError, MissingPackageError, NotFoundError
from bertie.search.records import (
    EmbeddedDocument,
    FloatArray,
    Keys,
    MetadataFilter,
    MetadataValue,
    Passage,
    StoredPassage,
    check_documents,
    check_queries,
    value_type,
)

if TYPE_CHECKING:
    from types import ModuleType

    from psycopg import Connection
    from psycopg.sql import SQL, Composed

FORMAT = 1  # of the tables below
EXACT = 10_000  # passages: up to here, every vector is looked at
HALF = 4000  # dimensions: pgvector builds graphs up to here, of numbers of 16 bits

# `bertie_index` tells a schema of ours from others, and its one row is what a writer locks.
TABLES = """
CREATE SCHEMA {name};
SET LOCAL search_path TO {name}, {extension};
CREATE TABLE bertie_index (
    format integer NOT NULL, dimension integer NOT NULL, about jsonb NOT NULL,
    generation bigint NOT NULL, next bigint NOT NULL, passages bigint NOT NULL);
CREATE TABLE documents (
    number bigint PRIMARY KEY, id text NOT NULL UNIQUE, source text, version text NOT NULL, metadata jsonb NOT NULL);
CREATE INDEX ON documents USING gin (metadata jsonb_path_ops);
CREATE TABLE passages (
    key bigint PRIMARY KEY, document bigint NOT NULL, start integer NOT NULL, "end" integer NOT NULL,
    headings text[] NOT NULL, text text NOT NULL, vector vector({dimension}) NOT NULL);
CREATE INDEX ON passages (document);
"""


class PostgresStore:
    """An index in a PostgreSQL database that has pgvector 0.8 or newer, in a schema of its own.

    A commit is one transaction; writers wait for each other, and readers for nobody. Up to 10,000 passages search is
    exact; from there on it goes through an HNSW graph. The graph holds numbers of 16 bits and only proposes
    passages: they are compared by their vectors of 32 bits. A server that builds large graphs wants a large
    `maintenance_work_mem`.

        store = PostgresStore.create("postgresql://me@localhost/texts", dimension=384, about={"model": "…"})
        store.commit([EmbeddedDocument(document, passages, vectors)])
        PostgresStore.open("postgresql://me@localhost/texts").nearest(queries, k=10)
    """

    def __init__(self, url: str, name: str = "bertie") -> None:
        self._url, self._name = url, name
        self._idle: list[Connection[Any]] = []
        self._closed = False
        self.dimension: int
        self.about: Mapping[str, Any]
        with self._session() as connection:
            (number,) = _row(connection, "SELECT format FROM bertie_index")
            if number != FORMAT:
                raise ConfigError(f"the index {name!r} has format {number}; this Bertie reads format {FORMAT}")
            self.dimension, self.about = _row(connection, "SELECT dimension, about FROM bertie_index")

    @classmethod
    def create(cls, url: str, dimension: int, about: Mapping[str, Any], *, name: str = "bertie") -> PostgresStore:
        """A new, empty index. It becomes a schema of that name, and puts pgvector into the database if need be."""
        if not 1 <= dimension <= 16_000:
            raise ConfigError(f"dimension={dimension} must be from 1 to 16000, which is what pgvector holds")
        if not 1 <= len(name.encode()) <= 63:
            raise ConfigError(f"name={name!r} must have 1 to 63 bytes, as all names in PostgreSQL")
        psycopg = _psycopg()
        from psycopg import sql

        with _connect(url) as connection:
            extension = _extension(connection, create=True)
            tables = sql.SQL(TABLES).format(
                name=sql.Identifier(name), extension=sql.Identifier(extension), dimension=sql.Literal(dimension)
            )
            try:
                with connection.transaction():
                    connection.execute(tables)
                    connection.execute(
                        "INSERT INTO bertie_index VALUES (%s, %s, %s::jsonb, 0, 0, 0)",
                        (FORMAT, dimension, json.dumps(dict(about))),
                    )
            except psycopg.errors.DuplicateSchema:
                raise ExistsError(
                    f"{_place(url)} has a schema {name!r} already; open it if it is an index, or choose another name"
                ) from None
            except psycopg.Error as error:  # no right to create, a name that the server keeps for itself
                raise ConfigError(f"{_place(url)} cannot hold an index {name!r}: {_message(error)}") from None
        return cls(url, name)

    @classmethod
    def open(cls, url: str, *, name: str = "bertie") -> PostgresStore:
        """The index of that name."""
        return cls(url, name)

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, all at once or not at all."""
        check_documents(put, self.dimension)
        for entry in put:
            _check_text(entry)
        old = [*(entry.document.id for entry in put), *delete]
        with self._session() as connection, connection.transaction():
            # Whoever else writes waits here until this transaction ends.
            number, count = _row(connection, "SELECT next, passages FROM bertie_index FOR UPDATE")
            count -= connection.execute(
                "DELETE FROM passages USING documents WHERE document = number AND id = ANY(%s)", (old,)
            ).rowcount
            connection.execute("DELETE FROM documents WHERE id = ANY(%s)", (old,))
            numbers = []
            for entry in put:  # one for the document, and then one for each of its passages
                numbers.append(number)
                number += 1 + len(entry.passages)
                count += len(entry.passages)
            _copy(connection, put, numbers)
            connection.execute(
                "UPDATE bertie_index SET generation = generation + 1, next = %s, passages = %s", (number, count)
            )

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Id, source and version of each document."""
        from psycopg import sql

        yield from self._stream(sql.SQL("SELECT id, source, version FROM documents ORDER BY number"))

    def __len__(self) -> int:
        """How many passages there are."""
        with self._session() as connection:
            return int(_row(connection, "SELECT passages FROM bertie_index")[0])

    def nearest(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Of each query, the keys of its k nearest passages by inner product, best first, and how near they are."""
        from psycopg import sql

        check_queries(queries, k, self.dimension)
        table, values = _table(where)
        exact = sql.SQL("SELECT key, vector <#> %s::vector AS away FROM {table} ORDER BY away, key LIMIT %s").format(
            table=table
        )
        graph = sql.SQL(
            "WITH candidates AS MATERIALIZED ("
            "SELECT key, vector <#> %s::vector AS away FROM {table} ORDER BY {half} <#> %s::halfvec LIMIT %s"
            ") SELECT key, away FROM candidates ORDER BY away, key LIMIT %s"
        ).format(table=table, half=self._half)
        result = []
        with self._session() as connection, connection.transaction():
            # A planner that may not sort takes the graph, which alone gives an order. The graph goes on until as many
            # as were asked for have passed the filter, or 20,000 have been looked at.
            (approximate, *_) = _row(
                connection,
                "SELECT to_regclass('passages_graph') IS NOT NULL, set_config('enable_sort', 'off', true),"
                " set_config('hnsw.iterative_scan', 'relaxed_order', true), set_config('hnsw.ef_search', %s, true)",
                (str(min(max(100, 2 * k), 1000)),),  # 1000 is pgvector's limit
            )
            for query in queries:
                text = "[" + ",".join(map(str, query.tolist())) + "]"
                rows: list[tuple[int, float]] = []
                if approximate:
                    rows = connection.execute(graph, (text, *values, text, 2 * k, k)).fetchall()
                if len(rows) < k:
                    rows = connection.execute(exact, (text, *values, k)).fetchall()
                keys = np.array([key for key, _ in rows], np.int64)
                result.append((keys, -np.array([away for _, away in rows], np.float32)))
        return result

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Passages by their keys, in that order. Those that are gone, as while others write, are left out."""
        wanted = [int(key) for key in keys]
        with self._session() as connection:
            rows = connection.execute(
                'SELECT key, id, start, "end", text, headings, metadata, source'
                " FROM passages JOIN documents ON number = document WHERE key = ANY(%s)",
                (wanted,),
            ).fetchall()
        found = {
            key: StoredPassage(key, Passage(document, start, end, text, tuple(headings)), metadata, source)
            for key, document, start, end, text, headings, metadata, source in rows
        }
        return [found[key] for key in wanted if key in found]

    def allowed(self, where: Sequence[MetadataFilter]) -> Keys:
        """The keys of all passages whose document meets the conditions."""
        from psycopg import sql

        table, values = _table(where)
        query = sql.SQL("SELECT key FROM {table} ORDER BY key").format(table=table)
        return np.fromiter((key for (key,) in self._stream(query, values)), np.int64)

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Key and text of each passage, in the order of keys, of those above `after`."""
        from psycopg import sql

        yield from self._stream(sql.SQL("SELECT key, text FROM passages WHERE key > %s ORDER BY key"), (after,))

    def optimize(self, whole: bool = False) -> None:
        """Build the graph once there are enough passages for it, or build it anew; and tell the planner what is there.

        From then on commits keep the graph up to date themselves.
        """
        from psycopg import sql

        with self._session() as connection:
            (count,) = _row(connection, "SELECT passages FROM bertie_index")
            if count > EXACT and self.dimension <= HALF:
                with connection.transaction():
                    # Writers wait here. Readers have the old graph until the new one is built.
                    (built,) = _row(connection, "SELECT to_regclass('passages_graph') FROM bertie_index FOR UPDATE")
                    if whole or built is None:
                        new = sql.SQL(
                            "CREATE INDEX passages_graph_new ON passages"
                            " USING hnsw ({half} halfvec_ip_ops) WITH (m = 16, ef_construction = 100)"
                        )
                        connection.execute(new.format(half=self._half))
                        connection.execute("DROP INDEX IF EXISTS passages_graph")
                        connection.execute("ALTER INDEX passages_graph_new RENAME TO passages_graph")
            connection.execute(f"{'VACUUM (ANALYZE)' if whole else 'ANALYZE'} documents, passages")

    @property
    def generation(self) -> int:
        """Grows with each commit."""
        with self._session() as connection:
            return int(_row(connection, "SELECT generation FROM bertie_index")[0])

    def close(self) -> None:
        """Give back the connections."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    @property
    def _half(self) -> Composed:
        from psycopg import sql

        return sql.SQL("(vector::halfvec({}))").format(sql.Literal(self.dimension))

    @contextmanager
    def _session(self) -> Iterator[Connection[Any]]:
        """A connection that nobody else uses meanwhile: so threads can search at once, and a stream blocks nobody."""
        if self._closed:
            raise InputError(f"the index {self._name!r} has been closed")
        psycopg = _psycopg()
        connection = self._waiting() or self._connect()
        try:
            yield connection
        except psycopg.Error as error:
            if connection.broken:
                raise NotFoundError(f"{_place(self._url)} went away: {_message(error)}") from None
            raise BertieError(f"{_place(self._url)} refused: {_message(error)}") from error
        finally:
            if connection.closed or self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def _waiting(self) -> Connection[Any] | None:
        """A connection that was used before, if the server has not ended it since."""
        while True:
            try:
                connection = self._idle.pop()  # at once, since threads share the list
            except IndexError:
                return None
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                if not selector.select(timeout=0):
                    return connection
            connection.close()  # a server that speaks unasked says farewell

    def _connect(self) -> Connection[Any]:
        connection = _connect(self._url)
        try:
            schema = _extension(connection)
            indexes = connection.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'bertie_index'").fetchall()
            names = sorted(name for (name,) in indexes)
            if self._name not in names:
                there = f"those there: {', '.join(map(repr, names))}" if names else "there is none at all"
                raise NotFoundError(f"{_place(self._url)} has no index {self._name!r}; {there}")
            connection.execute(
                "SELECT set_config('search_path', quote_ident(%s) || ',' || quote_ident(%s), false)",
                (self._name, schema),
            )
        except BaseException:
            connection.close()
            raise
        return connection

    def _stream(self, query: SQL | Composed, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Rows, a few thousand at a time, all of one moment."""
        with self._session() as connection, connection.transaction(), connection.cursor(name="stream") as cursor:
            cursor.itersize = 2000
            cursor.execute(query, values)
            yield from cursor


def _psycopg() -> ModuleType:
    try:
        import psycopg
    except ImportError:
        raise MissingPackageError("an index in PostgreSQL needs psycopg: pip install 'bertie[postgres]'") from None
    return psycopg


def _connect(url: str) -> Connection[Any]:
    psycopg = _psycopg()
    place = _place(url)
    try:
        # Plans are made for the values at hand: one for any filter and any k would leave the graph aside.
        connection: Connection[Any] = psycopg.connect(
            url, autocommit=True, prepare_threshold=None, client_encoding="utf8"
        )
    except psycopg.OperationalError as error:
        raise NotFoundError(
            f"{place} cannot be reached: {_message(error)}. Is the server running, and are host, port, database, "
            "user and password right?"
        ) from None
    return connection


def _place(url: str) -> str:
    """Where the database is, without the password."""
    psycopg = _psycopg()
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # its message may show the password
        raise InputError("the address must look like postgresql://user:password@host:5432/database") from None
    return f"PostgreSQL at {parts.get('host', 'localhost')}, database {parts.get('dbname', 'by default')!r}"


def _message(error: Exception) -> str:
    """The first line of what psycopg says."""
    return str(error).strip().split("\n")[0]


def _row(connection: Connection[Any], query: str | SQL | Composed, values: Sequence[Any] = ()) -> tuple[Any, ...]:
    """The one row of a result that has one."""
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return tuple(row)


def _extension(connection: Connection[Any], create: bool = False) -> str:
    """The schema that pgvector is in."""
    psycopg = _psycopg()
    hint = "Install it on the server (https://github.com/pgvector/pgvector), then: CREATE EXTENSION vector"
    try:
        if create:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        raise NotFoundError(
            f"the database has no pgvector, and it cannot be added: {_message(error)}. {hint}"
        ) from None
    row = connection.execute(
        "SELECT nspname, extversion FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace"
        " WHERE extname = 'vector'"
    ).fetchone()
    if row is None:
        raise NotFoundError(f"the database has no pgvector. {hint}")
    if tuple(map(int, row[1].split(".")[:2])) < (0, 8):
        raise ConfigError(f"pgvector is {row[1]} and must be at least 0.8: ALTER EXTENSION vector UPDATE")
    return str(row[0])


def _check_text(entry: EmbeddedDocument) -> None:
    """Refuse characters that PostgreSQL has no place for: NUL, and halves of pairs."""
    document = entry.document
    texts = [document.id, document.source or "", document.version, *document.metadata]
    texts += [value for value in document.metadata.values() if isinstance(value, str)]
    texts += [text for passage in entry.passages for text in (passage.text, *passage.headings)]
    for text in texts:
        bad = re.search("[\0\ud800-\udfff]", text)
        if bad:
            raise InputError(
                f"document {document.id!r}: {text[max(bad.start() - 30, 0) :][:60]!r} holds U+{ord(bad[0]):04X}, "
                "which PostgreSQL cannot store"
            )


def _copy(connection: Connection[Any], put: Sequence[EmbeddedDocument], numbers: Sequence[int]) -> None:
    """Write new documents and their passages."""
    cursor = connection.cursor()
    with cursor.copy("COPY documents (number, id, source, version, metadata) FROM STDIN") as copy:
        for entry, number in zip(put, numbers, strict=True):
            document = entry.document
            copy.write_row((number, document.id, document.source, document.version, _object(document.metadata)))
    with cursor.copy(
        'COPY passages (key, document, start, "end", headings, text, vector) FROM STDIN (FORMAT binary)'
    ) as copy:
        copy.set_types(["int8", "int8", "int4", "int4", "text[]", "text", "bytea"])
        for entry, number in zip(put, numbers, strict=True):
            vectors = np.ascontiguousarray(entry.vectors, dtype=">f4")  # (passages, D)
            head = struct.pack(">HH", vectors.shape[1], 0)  # how pgvector begins a vector
            for i, (it, vector) in enumerate(zip(entry.passages, vectors, strict=True)):
                row = (number + 1 + i, number, it.start, it.end, list(it.headings), it.text, head + vector.tobytes())
                copy.write_row(row)


# --- metadata ---


def _object(metadata: Mapping[str, MetadataValue]) -> str:
    """As JSON that comes back as it was: jsonb writes 1e16 as an integer, unless it has a decimal place."""
    parts = (f"{json.dumps(name)}: {_scalar(value)}" for name, value in metadata.items())
    return "{" + ", ".join(parts) + "}"


def _scalar(value: MetadataValue) -> str:
    return f"{value:.1f}" if isinstance(value, float) and abs(value) >= 1e16 else json.dumps(value)


def _table(where: Sequence[MetadataFilter]) -> tuple[SQL | Composed, list[Any]]:
    """The passages whose documents meet the conditions, as what comes after FROM, and its values."""
    from psycopg import sql

    if not where:
        return sql.SQL("passages"), []
    made = [_condition(one) for one in where]
    conditions = sql.SQL(" AND ").join(condition for condition, _ in made)
    table = sql.SQL("passages JOIN documents ON number = document WHERE ") + conditions
    return table, [value for _, values in made for value in values]


def _condition(one: MetadataFilter) -> tuple[SQL | Composed, list[Any]]:
    from psycopg import sql

    if one.op in ("=", "in"):  # through the index on metadata
        each = sql.SQL(" OR ").join([sql.SQL("metadata @> %s::jsonb")] * len(one.values))
        condition = sql.SQL("({})").format(each) if one.values else sql.SQL("false")
        return condition, [_object({one.name: value}) for value in one.values]
    (value,) = one.values
    if one.op == "!=":
        return sql.SQL("metadata -> %s IS DISTINCT FROM %s::jsonb"), [one.name, _scalar(value)]
    op = sql.SQL(one.op)
    if value_type(value, one.name) == "text":  # jsonb would compare in the order of the database's language
        text = sql.SQL("(jsonb_typeof(metadata -> %s) = 'string' AND (metadata ->> %s) COLLATE \"C\" {} %s)")
        return text.format(op), [one.name, one.name, value]
    other = sql.SQL("(jsonb_typeof(metadata -> %s) = jsonb_typeof(%s::jsonb) AND metadata -> %s {} %s::jsonb)")
    return other.format(op), [one.name, _scalar(value), one.name, _scalar(value)]
