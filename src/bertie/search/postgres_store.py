"""A vector store in PostgreSQL with pgvector: one index for many machines."""

from __future__ import annotations

import json
import selectors
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from bertie.errors import BertieError, CheckpointError, ConfigError, ExistsError, InputError, NotFoundError
from bertie.search.filters import MetadataFilter
from bertie.search.postgres_sql import (
    SCHEMA,
    check_text,
    connect,
    copy_documents,
    describe_server,
    error_message,
    extension_schema,
    fetch_row,
    filtered_passages,
    import_psycopg,
)
from bertie.search.records import EmbeddedDocument, FloatArray, Keys, Passage, StoredPassage
from bertie.search.vector_store import check_documents, check_queries

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import SQL, Composed

FORMAT = 2
EXACT_SEARCH_PASSAGES = 10_000  # up to this number, search is exhaustive
MAX_HNSW_DIMENSION = 4000  # pgvector's limit for HNSW over fp16 (halfvec)
MAX_EF_SEARCH = 1000  # pgvector's limit


class PostgresStore:
    """Passages and embeddings in a schema of a PostgreSQL database with pgvector 0.8 or newer.

    A commit is one transaction; writers wait for each other, and readers never wait. Search is
    exhaustive up to 10,000 passages; beyond that it uses an HNSW index over fp16 embeddings, whose
    candidates are rescored in fp32. A server that builds large HNSW indexes needs a large
    `maintenance_work_mem`.

        store = PostgresStore.create("postgresql://me@localhost/texts", dimension=384, config={"model": "…"})
        store.commit([EmbeddedDocument(document, passages, embeddings)])
        PostgresStore.open("postgresql://me@localhost/texts").search(queries, k=10)
    """

    def __init__(self, url: str, name: str = "bertie") -> None:
        self._url, self._name = url, name
        self.id = name
        self._idle: list[Connection[Any]] = []
        self._closed = False
        self.dimension: int
        self.config: Mapping[str, Any]
        with self._session() as connection:
            (version,) = fetch_row(connection, "SELECT format FROM bertie_index")
            if version != FORMAT:
                raise ConfigError(f"the index {name!r} has format {version}; this version of Bertie reads {FORMAT}")
            self.dimension, self.config = fetch_row(connection, "SELECT dimension, config FROM bertie_index")

    @classmethod
    def create(cls, url: str, dimension: int, config: Mapping[str, Any], *, name: str = "bertie") -> PostgresStore:
        """Create an empty index in a new schema, and add pgvector to the database if needed."""
        if not 1 <= dimension <= 16_000:
            raise ConfigError(f"dimension={dimension} must be from 1 to 16000, the limit of pgvector")
        if not 1 <= len(name.encode()) <= 63:
            raise ConfigError(f"name={name!r} must have 1 to 63 bytes, as all names in PostgreSQL")
        psycopg = import_psycopg()
        from psycopg import sql

        with connect(url) as connection:
            extension = extension_schema(connection, create=True)
            statements = sql.SQL(SCHEMA).format(
                name=sql.Identifier(name), extension=sql.Identifier(extension), dimension=sql.Literal(dimension)
            )
            try:
                with connection.transaction():
                    connection.execute(statements)
                    connection.execute(
                        "INSERT INTO bertie_index VALUES (%s, %s, %s::jsonb, 0, 0, 0)",
                        (FORMAT, dimension, json.dumps(dict(config))),
                    )
            except psycopg.errors.DuplicateSchema:
                raise ExistsError(
                    f"{describe_server(url)} already has a schema {name!r}; open it if it is an index, or choose "
                    "another name"
                ) from None
            except psycopg.Error as error:  # missing privileges, a reserved name
                reason = error_message(error)
                raise ConfigError(f"{describe_server(url)} cannot hold an index {name!r}: {reason}") from None
        return cls(url, name)

    @classmethod
    def open(cls, url: str, *, name: str = "bertie") -> PostgresStore:
        """Open an existing index."""
        return cls(url, name)

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, in one atomic transaction."""
        check_documents(put, self.dimension)
        for document in put:
            check_text(document)
        ids = [*(document.document.id for document in put), *delete]
        with self._session() as connection, connection.transaction():
            # Other writers wait here until this transaction ends.
            next_key, count = fetch_row(connection, "SELECT next_key, passages FROM bertie_index FOR UPDATE")
            count -= connection.execute(
                "DELETE FROM passages USING documents WHERE document = number AND id = ANY(%s)", (ids,)
            ).rowcount
            connection.execute("DELETE FROM documents WHERE id = ANY(%s)", (ids,))
            numbers = []
            for document in put:  # one key for the document, and one for each of its passages
                numbers.append(next_key)
                next_key += 1 + len(document.passages)
                count += len(document.passages)
            copy_documents(connection, put, numbers)
            connection.execute(
                "UPDATE bertie_index SET generation = generation + 1, next_key = %s, passages = %s", (next_key, count)
            )

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Iterate over (id, source, version) of all documents."""
        from psycopg import sql

        yield from self._stream(sql.SQL("SELECT id, source, version FROM documents ORDER BY number"))

    def __len__(self) -> int:
        with self._session() as connection:
            return int(fetch_row(connection, "SELECT passages FROM bertie_index")[0])

    def search(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Return keys and inner products of the k nearest passages of each query, best first."""
        from psycopg import sql

        check_queries(queries, k, self.dimension)
        table, parameters = filtered_passages(where)
        exact = sql.SQL(
            "SELECT key, embedding <#> %s::vector AS distance FROM {table} ORDER BY distance, key LIMIT %s"
        ).format(table=table)
        approximate = sql.SQL(
            "WITH candidates AS MATERIALIZED ("
            "SELECT key, embedding <#> %s::vector AS distance FROM {table} ORDER BY {half} <#> %s::halfvec LIMIT %s"
            ") SELECT key, distance FROM candidates ORDER BY distance, key LIMIT %s"
        ).format(table=table, half=self._half_precision)
        results = []
        with self._session() as connection, connection.transaction():
            # Without sorting, the planner must use the HNSW index, which is the only ordered access
            # path. The iterative scan continues until enough rows have passed the filter, or 20,000
            # have been visited.
            (has_hnsw, *_) = fetch_row(
                connection,
                "SELECT to_regclass('passages_hnsw') IS NOT NULL, set_config('enable_sort', 'off', true),"
                " set_config('hnsw.iterative_scan', 'relaxed_order', true), set_config('hnsw.ef_search', %s, true)",
                (str(min(max(100, 2 * k), MAX_EF_SEARCH)),),
            )
            for query in queries:
                literal = "[" + ",".join(map(str, query.tolist())) + "]"
                rows: list[tuple[int, float]] = []
                if has_hnsw:
                    rows = connection.execute(approximate, (literal, *parameters, literal, 2 * k, k)).fetchall()
                if len(rows) < k:
                    rows = connection.execute(exact, (literal, *parameters, k)).fetchall()
                keys = np.array([key for key, _ in rows], np.int64)
                results.append((keys, -np.array([distance for _, distance in rows], np.float32)))
        return results

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Return passages in the order of `keys`, without those deleted meanwhile."""
        keys = [int(key) for key in keys]
        with self._session() as connection:
            rows = connection.execute(
                'SELECT key, id, start, "end", text, headings, metadata, source'
                " FROM passages JOIN documents ON number = document WHERE key = ANY(%s)",
                (keys,),
            ).fetchall()
        passages = {
            key: StoredPassage(key, Passage(document, start, end, text, tuple(headings)), metadata, source)
            for key, document, start, end, text, headings, metadata, source in rows
        }
        return [passages[key] for key in keys if key in passages]

    def matching_keys(self, where: Sequence[MetadataFilter]) -> Keys:
        """Return the keys of all passages whose document matches the filters, ascending."""
        from psycopg import sql

        table, parameters = filtered_passages(where)
        query = sql.SQL("SELECT key FROM {table} ORDER BY key").format(table=table)
        return np.fromiter((key for (key,) in self._stream(query, parameters)), np.int64)

    def passage_texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Iterate over (key, text) of all passages with keys above `after`, ascending."""
        from psycopg import sql

        yield from self._stream(sql.SQL("SELECT key, text FROM passages WHERE key > %s ORDER BY key"), (after,))

    def optimize(self, full: bool = False) -> None:
        """Build the HNSW index once it pays off, or rebuild it, and update the statistics.

        From then on commits keep the HNSW index up to date.
        """
        from psycopg import sql

        with self._session() as connection:
            (count,) = fetch_row(connection, "SELECT passages FROM bertie_index")
            if count > EXACT_SEARCH_PASSAGES and self.dimension <= MAX_HNSW_DIMENSION:
                with connection.transaction():
                    # Writers wait here. Readers use the old index until the new one is built.
                    (built,) = fetch_row(connection, "SELECT to_regclass('passages_hnsw') FROM bertie_index FOR UPDATE")
                    if full or built is None:
                        create = sql.SQL(
                            "CREATE INDEX passages_hnsw_new ON passages"
                            " USING hnsw ({half} halfvec_ip_ops) WITH (m = 16, ef_construction = 100)"
                        )
                        connection.execute(create.format(half=self._half_precision))
                        connection.execute("DROP INDEX IF EXISTS passages_hnsw")
                        connection.execute("ALTER INDEX passages_hnsw_new RENAME TO passages_hnsw")
            connection.execute(f"{'VACUUM (ANALYZE)' if full else 'ANALYZE'} documents, passages")

    def verify(self) -> None:
        """Check that documents and passages agree; the server has checksums of its own."""
        with self._session() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            expected, next_key = fetch_row(connection, "SELECT passages, next_key FROM bertie_index")
            actual, last = fetch_row(connection, "SELECT count(*), coalesce(max(key), -1) FROM passages")
            (lost,) = fetch_row(
                connection,
                "SELECT count(*) FROM passages WHERE NOT EXISTS (SELECT 1 FROM documents WHERE number = document)",
            )
        if (actual, lost) != (expected, 0) or last >= next_key:
            raise CheckpointError(
                f"the index {self._name!r} on {describe_server(self._url)} is corrupt: {actual:,} passages instead of "
                f"{expected:,}, {lost:,} without a document; restore a backup, or rebuild it from its documents"
            )

    @property
    def generation(self) -> int:
        """A counter that grows with each commit."""
        with self._session() as connection:
            return int(fetch_row(connection, "SELECT generation FROM bertie_index")[0])

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    @property
    def _half_precision(self) -> Composed:
        from psycopg import sql

        return sql.SQL("(embedding::halfvec({}))").format(sql.Literal(self.dimension))

    @contextmanager
    def _session(self) -> Iterator[Connection[Any]]:
        """Borrow a connection from the pool, so that threads can search concurrently."""
        if self._closed:
            raise InputError(f"the index {self._name!r} is closed")
        psycopg = import_psycopg()
        connection = self._idle_connection() or self._new_connection()
        try:
            yield connection
        except psycopg.Error as error:
            reason = error_message(error)
            if connection.broken:
                raise NotFoundError(f"lost the connection to {describe_server(self._url)}: {reason}") from None
            raise BertieError(f"{describe_server(self._url)} failed: {reason}") from error
        finally:
            if connection.closed or self._closed:
                connection.close()
            else:
                self._idle.append(connection)

    def _idle_connection(self) -> Connection[Any] | None:
        """Take a connection from the pool that the server has not closed meanwhile."""
        while True:
            try:
                connection = self._idle.pop()  # atomic, since threads share the list
            except IndexError:
                return None
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                if not selector.select(timeout=0):
                    return connection
            connection.close()  # unexpected data on an idle connection means that the server is closing it

    def _new_connection(self) -> Connection[Any]:
        connection = connect(self._url)
        try:
            extension = extension_schema(connection)
            schemas = connection.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'bertie_index'").fetchall()
            names = sorted(name for (name,) in schemas)
            if self._name not in names:
                known = f"it has {', '.join(map(repr, names))}" if names else "it has none at all"
                raise NotFoundError(f"{describe_server(self._url)} has no index {self._name!r}; {known}")
            connection.execute(
                "SELECT set_config('search_path', quote_ident(%s) || ',' || quote_ident(%s), false)",
                (self._name, extension),
            )
        except BaseException:
            connection.close()
            raise
        return connection

    def _stream(self, query: SQL | Composed, parameters: Sequence[Any] = ()) -> Iterator[Any]:
        """Iterate over the rows of a consistent snapshot with a server-side cursor."""
        with self._session() as connection, connection.transaction(), connection.cursor(name="stream") as cursor:
            cursor.itersize = 2000
            cursor.execute(query, parameters)
            yield from cursor
