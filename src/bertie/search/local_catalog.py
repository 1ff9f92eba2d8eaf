"""The SQLite catalog of a local store: schema, transactions, documents and segments."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from bertie.errors import BertieError, CheckpointError, InputError, NotFoundError
from bertie.search.filters import MetadataFilter, value_type
from bertie.search.records import EmbeddedDocument, Keys, Passage, StoredPassage

FORMAT = 2
CACHED_FILTERS = 16

# `pending` holds embeddings that are not yet in a segment, `tombstones` the keys of deleted rows of
# segments.
SCHEMA = """
CREATE TABLE properties (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, source TEXT, version TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE metadata (
    document INTEGER NOT NULL, name TEXT NOT NULL, type TEXT NOT NULL, value NOT NULL, PRIMARY KEY (document, name)
) WITHOUT ROWID;
CREATE INDEX metadata_by_value ON metadata (name, type, value);
CREATE TABLE passages (
    key INTEGER PRIMARY KEY, document INTEGER NOT NULL, start INTEGER NOT NULL, stop INTEGER NOT NULL,
    text TEXT NOT NULL, headings TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE INDEX passages_by_document ON passages (document);
CREATE TABLE pending (key INTEGER PRIMARY KEY, codes BLOB NOT NULL, scale REAL);
CREATE INDEX pending_count ON pending (scale);
CREATE TABLE segments (number INTEGER PRIMARY KEY AUTOINCREMENT, effort INTEGER NOT NULL, checksums TEXT NOT NULL);
CREATE TABLE tombstones (key INTEGER PRIMARY KEY);
"""
COMPARISONS = {"=": "= ?", "<": "< ?", "<=": "<= ?", ">": "> ?", ">=": ">= ?"}


def connect(file: Path) -> sqlite3.Connection:
    """Open the database in autocommit mode."""
    db = sqlite3.connect(file, timeout=60, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = FULL")  # a commit that returned is on disk
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit on success, roll back on any error."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite may already have rolled back
            db.execute("ROLLBACK")
        raise


def lock_writer(folder: Path) -> int:
    """Acquire the writer lock, which the operating system releases when the process ends."""
    try:
        lock = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError:
        os.close(lock)
        raise InputError(f"{folder} is being written by another process; try again when that is done") from None
    return lock


def get_property(db: sqlite3.Connection, name: str) -> int:
    """Return a counter of the index."""
    (value,) = db.execute("SELECT value FROM properties WHERE name = ?", (name,)).fetchone()
    return int(value)


def is_empty(db: sqlite3.Connection, table: str) -> bool:
    """Return whether a table has no rows."""
    return db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is None


def insert_document(db: sqlite3.Connection, embedded: EmbeddedDocument, key: int) -> int:
    """Insert a document and its passages, with keys from `key` on; return the next free key."""
    document = embedded.document
    try:
        number = db.execute(
            "INSERT INTO documents (id, source, version, metadata) VALUES (?, ?, ?, ?)",
            (document.id, document.source, document.version, json.dumps(dict(document.metadata))),
        ).lastrowid
        db.executemany(
            "INSERT INTO metadata VALUES (?, ?, ?, ?)",
            ((number, name, value_type(value, name), value) for name, value in document.metadata.items()),
        )
        rows = []
        for passage_key, passage in enumerate(embedded.passages, key):
            headings = json.dumps(passage.headings, ensure_ascii=False)
            checksum = passage_checksum(passage.text, headings)
            rows.append((passage_key, number, passage.start, passage.end, passage.text, headings, checksum))
        db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    except UnicodeEncodeError as error:
        raise InputError(
            f"document {document.id!r} contains a lone surrogate, which cannot be stored: {error}"
        ) from None
    return key + len(rows)


def delete_document(db: sqlite3.Connection, id: str) -> None:
    """Delete a document, and leave tombstones for those of its passages that are in segments."""
    keys = "(SELECT key FROM passages WHERE document = ?)"
    in_segment = "NOT EXISTS (SELECT 1 FROM pending WHERE pending.key = passages.key)"
    for (number,) in db.execute("SELECT number FROM documents WHERE id = ?", (id,)).fetchall():
        db.execute(f"INSERT INTO tombstones SELECT key FROM passages WHERE document = ? AND {in_segment}", (number,))
        db.execute(f"DELETE FROM pending WHERE key IN {keys}", (number,))
        for table, column in (("passages", "document"), ("metadata", "document"), ("documents", "number")):
            db.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))


def replace_segments(db: sqlite3.Connection, new: Iterable[tuple[int, int, str]], old: Iterable[int]) -> None:
    """Register new segments and unregister old ones: until then a segment is invisible."""
    db.executemany("INSERT INTO segments VALUES (?, ?, ?)", new)
    db.executemany("DELETE FROM segments WHERE number = ?", ((number,) for number in old))
    db.execute("UPDATE properties SET value = value + 1 WHERE name = 'layout'")


def filter_sql(where: Sequence[MetadataFilter]) -> tuple[str, list[Any]]:
    """Translate filters into a WHERE clause on `document` and its parameters."""
    clauses, parameters = ["1"], []
    for condition in where:
        comparison = COMPARISONS.get(condition.op, "= ?")
        alternatives = " OR ".join([f"(type = ? AND value {comparison})"] * len(condition.values)) or "0"
        member = "NOT IN" if condition.op == "!=" else "IN"
        clauses.append(f"document {member} (SELECT document FROM metadata WHERE name = ? AND ({alternatives}))")
        typed = [(value_type(value, condition.name), value) for value in condition.values]
        parameters += [condition.name, *(parameter for pair in typed for parameter in pair)]
    return " AND ".join(clauses), parameters


def passage_checksum(text: str, headings: str) -> int:
    """Return the CRC-32 of a passage and its headings (as JSON)."""
    return zlib.crc32(f"{headings}{text}".encode())


class LocalCatalog:
    """A connection for reading: consistent snapshots of documents and passages.

    `folder` is only named in errors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "index.sqlite"
        self.lock = threading.RLock()
        self._filter_cache: tuple[int, dict[str, Keys]] = (-1, {})  # generation, and keys by filter
        if not self.file.is_file():
            if any((folder / "segments").glob("*")):
                raise self.corruption_error("it is missing")
            raise NotFoundError(f"{folder} contains no index; create one with `bertie index DIR -o {folder}`")
        with self.translate_errors():
            self._db = connect(self.file)

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a short read transaction."""
        with self.lock, self.translate_errors():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    def stream(self, query: str, parameters: Sequence[int] = ()) -> Iterator[Any]:
        """Iterate over the rows of a consistent snapshot, however long reading takes."""
        with self.translate_errors(), closing(connect(self.file)) as db:
            yield from db.execute(query, parameters)

    def properties(self) -> dict[str, Any]:
        """Return the properties of the index, whose format must be the current one."""
        with self.reading() as db:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'properties'").fetchone() is None:
                raise CheckpointError(f"{self.file} is not an index of this version of Bertie; rebuild it")
            properties = dict(db.execute("SELECT name, value FROM properties"))
        if properties.get("format") != FORMAT:
            raise CheckpointError(
                f"{self.file} has format {properties.get('format')!r}; this version of Bertie reads format {FORMAT}"
            )
        return properties

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Return passages in the order of `keys`, without those deleted meanwhile."""
        passages: dict[int, StoredPassage] = {}
        with self.reading() as db:
            for start in range(0, len(keys), 500):  # SQLite limits the parameters of a statement
                batch = keys[start : start + 500]
                for row in db.execute(
                    "SELECT key, id, start, stop, text, headings, checksum, metadata, source "
                    "FROM passages JOIN documents ON number = document "
                    f"WHERE key IN ({', '.join('?' * len(batch))})",
                    batch,
                ):
                    key, id, first, last, text, headings, checksum, metadata, source = row
                    if passage_checksum(text, headings) != checksum:
                        raise self.corruption_error(f"checksum mismatch in passage {key} of {id!r}")
                    passage = Passage(id, first, last, text, tuple(json.loads(headings)))
                    passages[key] = StoredPassage(key, passage, json.loads(metadata), source)
        return [passages[key] for key in keys if key in passages]

    def matching_keys(self, where: Sequence[MetadataFilter]) -> Keys:
        """Return the keys of all passages whose document matches the filters, ascending."""
        cache_key = repr(tuple(where))  # unlike ==, it tells 1 from True
        with self.reading() as db:
            generation = get_property(db, "generation")
            if self._filter_cache[0] != generation:
                self._filter_cache = (generation, {})
            cache = self._filter_cache[1]
            if cache_key not in cache:
                clause, parameters = filter_sql(where)
                rows = db.execute(f"SELECT key FROM passages WHERE {clause} ORDER BY key", parameters)
                cache[cache_key] = np.fromiter((key for (key,) in rows), np.int64)
                if len(cache) > CACHED_FILTERS:
                    del cache[next(iter(cache))]
            return cache[cache_key]

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Raise errors of SQLite as errors of Bertie."""
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise InputError(f"{self.folder}: {error}") from None
        except sqlite3.OperationalError as error:  # disk full, no permission
            raise BertieError(f"{self.file}: {error}; everything that was committed is safe") from None
        except sqlite3.DatabaseError as error:
            raise self.corruption_error(str(error)) from None

    def corruption_error(self, reason: str) -> CheckpointError:
        """Return the error for a corrupt catalog."""
        return CheckpointError(
            f"{self.file} is corrupt ({reason}); restore a backup of the file, or remove {self.folder} and rebuild the "
            "index from its documents"
        )
