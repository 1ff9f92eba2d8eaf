"""SQL of the PostgreSQL store: connections, schema, bulk inserts and filters."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertie.errors import ConfigError, InputError, MissingPackageError, NotFoundError
from bertie.search.filters import MetadataFilter, value_type
from bertie.search.records import EmbeddedDocument, MetadataValue

if TYPE_CHECKING:
    from types import ModuleType

    from psycopg import Connection
    from psycopg.sql import SQL, Composed

# The table `bertie_index` marks a schema as an index; a writer locks its single row.
SCHEMA = """
CREATE SCHEMA {name};
SET LOCAL search_path TO {name}, {extension};
CREATE TABLE bertie_index (
    format integer NOT NULL, dimension integer NOT NULL, config jsonb NOT NULL,
    generation bigint NOT NULL, next_key bigint NOT NULL, passages bigint NOT NULL);
CREATE TABLE documents (
    number bigint PRIMARY KEY, id text NOT NULL UNIQUE, source text, version text NOT NULL, metadata jsonb NOT NULL);
CREATE INDEX ON documents USING gin (metadata jsonb_path_ops);
CREATE TABLE passages (
    key bigint PRIMARY KEY, document bigint NOT NULL, start integer NOT NULL, "end" integer NOT NULL,
    headings text[] NOT NULL, text text NOT NULL, embedding vector({dimension}) NOT NULL);
CREATE INDEX ON passages (document);
"""


def import_psycopg() -> ModuleType:
    """Import psycopg."""
    try:
        import psycopg
    except ImportError:
        raise MissingPackageError("an index in PostgreSQL needs psycopg: pip install 'bertie[postgres]'") from None
    return psycopg


def connect(url: str) -> Connection[Any]:
    """Open a connection in autocommit mode."""
    psycopg = import_psycopg()
    server = describe_server(url)
    try:
        # No prepared statements: a generic plan for any filter and any k would not use the HNSW
        # index.
        connection: Connection[Any] = psycopg.connect(
            url, autocommit=True, prepare_threshold=None, client_encoding="utf8"
        )
    except psycopg.OperationalError as error:
        raise NotFoundError(
            f"{server} cannot be reached: {error_message(error)}. Is the server running, and are host, port, database, "
            "user and password right?"
        ) from None
    return connection


def describe_server(url: str) -> str:
    """Return host and database of a URL, without the password."""
    psycopg = import_psycopg()
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # its message may contain the password
        raise InputError("the address must look like postgresql://user:password@host:5432/database") from None
    return f"PostgreSQL at {parts.get('host', 'localhost')}, database {parts.get('dbname', 'by default')!r}"


def error_message(error: Exception) -> str:
    """Return the first line of an error of psycopg."""
    return str(error).strip().split("\n")[0]


def fetch_row(
    connection: Connection[Any], query: str | SQL | Composed, parameters: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """Return the only row of a result."""
    row = connection.execute(query, parameters).fetchone()
    assert row is not None
    return tuple(row)


def extension_schema(connection: Connection[Any], create: bool = False) -> str:
    """Return the schema of the pgvector extension, after checking its version."""
    psycopg = import_psycopg()
    hint = "Install it on the server (https://github.com/pgvector/pgvector), then: CREATE EXTENSION vector"
    try:
        if create:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        raise NotFoundError(
            f"the database has no pgvector, and it cannot be added: {error_message(error)}. {hint}"
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


# --- inserts ---


def check_text(embedded: EmbeddedDocument) -> None:
    """Reject characters that PostgreSQL cannot store: NUL and lone surrogates."""
    document = embedded.document
    texts = [document.id, document.source or "", document.version, *document.metadata]
    texts += [value for value in document.metadata.values() if isinstance(value, str)]
    texts += [text for passage in embedded.passages for text in (passage.text, *passage.headings)]
    for text in texts:
        match = re.search("[\0\ud800-\udfff]", text)
        if match:
            raise InputError(
                f"document {document.id!r}: {text[max(match.start() - 30, 0) :][:60]!r} contains "
                f"U+{ord(match[0]):04X}, which PostgreSQL cannot store"
            )


def copy_documents(connection: Connection[Any], documents: Sequence[EmbeddedDocument], numbers: Sequence[int]) -> None:
    """Insert documents and their passages with COPY."""
    cursor = connection.cursor()
    with cursor.copy("COPY documents (number, id, source, version, metadata) FROM STDIN") as copy:
        for embedded, number in zip(documents, numbers, strict=True):
            document = embedded.document
            copy.write_row((number, document.id, document.source, document.version, _json_object(document.metadata)))
    with cursor.copy(
        'COPY passages (key, document, start, "end", headings, text, embedding) FROM STDIN (FORMAT binary)'
    ) as copy:
        copy.set_types(["int8", "int8", "int4", "int4", "text[]", "text", "bytea"])
        for embedded, number in zip(documents, numbers, strict=True):
            embeddings = np.ascontiguousarray(embedded.embeddings, dtype=">f4")  # (passages, D)
            header = struct.pack(">HH", embeddings.shape[1], 0)  # of pgvector's binary format
            rows = zip(embedded.passages, embeddings, strict=True)
            for key, (passage, embedding) in enumerate(rows, number + 1):
                span = (passage.start, passage.end, list(passage.headings), passage.text)
                copy.write_row((key, number, *span, header + embedding.tobytes()))


# --- filters ---


def _json_object(metadata: Mapping[str, MetadataValue]) -> str:
    parts = (f"{json.dumps(name)}: {_json_scalar(value)}" for name, value in metadata.items())
    return "{" + ", ".join(parts) + "}"


def _json_scalar(value: MetadataValue) -> str:
    """Encode a value; jsonb would turn 1e16 into an integer without the decimal."""
    return f"{value:.1f}" if isinstance(value, float) and abs(value) >= 1e16 else json.dumps(value)


def filtered_passages(where: Sequence[MetadataFilter]) -> tuple[SQL | Composed, list[Any]]:
    """Return a FROM item of the passages whose documents match the filters, and its parameters."""
    from psycopg import sql

    if not where:
        return sql.SQL("passages"), []
    conditions = [_condition(condition) for condition in where]
    clause = sql.SQL(" AND ").join(condition for condition, _ in conditions)
    table = sql.SQL("passages JOIN documents ON number = document WHERE ") + clause
    return table, [parameter for _, parameters in conditions for parameter in parameters]


def _condition(condition: MetadataFilter) -> tuple[SQL | Composed, list[Any]]:
    from psycopg import sql

    name = condition.name
    if condition.op in ("=", "in"):  # uses the GIN index on metadata
        alternatives = sql.SQL(" OR ").join([sql.SQL("metadata @> %s::jsonb")] * len(condition.values))
        clause = sql.SQL("({})").format(alternatives) if condition.values else sql.SQL("false")
        return clause, [_json_object({name: value}) for value in condition.values]
    (value,) = condition.values
    if condition.op == "!=":
        return sql.SQL("metadata -> %s IS DISTINCT FROM %s::jsonb"), [name, _json_scalar(value)]
    op = sql.SQL(condition.op)
    if value_type(value, name) == "text":  # jsonb would compare by the collation of the database
        text = sql.SQL("(jsonb_typeof(metadata -> %s) = 'string' AND (metadata ->> %s) COLLATE \"C\" {} %s)")
        return text.format(op), [name, name, value]
    other = sql.SQL("(jsonb_typeof(metadata -> %s) = jsonb_typeof(%s::jsonb) AND metadata -> %s {} %s::jsonb)")
    return other.format(op), [name, _json_scalar(value), name, _json_scalar(value)]
