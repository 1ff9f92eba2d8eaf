"""The SQLite catalog of a local store: schema, transactions, documents and segments."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import numpy as np

from bertie.data.atomic import fsync
from bertie.errors import BertieError, CheckpointError, ExistsError, InputError, NotFoundError
from bertie.search.catalog_checksums import (
    BUSY_TIMEOUT,
    PAGE,
    CatalogRecorder,
    SharedFile,
    catalog_error,
    checksums_file,
    read_checksums,
    seal_catalog,
    verify_catalog,
    verify_transactions,
)
from bertie.search.filters import MetadataFilter, value_type
from bertie.search.records import EmbeddedDocument, Keys, Passage, StoredPassage

FORMAT = 3
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


def connect(file: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open the database in autocommit mode; only `CatalogRecorder` may checkpoint."""
    uri = f"file:{quote(str(file.absolute()))}{'?mode=ro' if read_only else ''}"
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = FULL")  # a commit that returned is on disk
    db.execute("PRAGMA wal_autocheckpoint = 0")
    return db


def create_catalog(folder: Path, properties: Mapping[str, Any]) -> None:
    """Create an empty catalog in a folder."""
    catalog, temporary = folder / "index.sqlite", folder / "index.sqlite.new"
    id = uuid4()
    values = {"format": FORMAT, "id": id.hex, "generation": 0, "layout": 0, "next_key": 1, **properties}
    try:
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        lock = _lock_writer(folder)
        try:
            if catalog.exists():
                raise ExistsError(f"{folder} already exists; choose another name")
            temporary.unlink(missing_ok=True)
            with closing(connect(temporary)) as db:
                db.execute(f"PRAGMA page_size = {PAGE}")
                db.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not block each other
                db.executescript(SCHEMA)
                db.executemany("INSERT INTO properties VALUES (?, ?)", values.items())
            seal_catalog(temporary, id.bytes, 0, checksums_file(catalog))
            os.rename(temporary, catalog)
            fsync(folder)
        finally:
            os.close(lock)
    except (sqlite3.Error, OSError) as error:  # disk full, no permission
        raise InputError(f"{folder} cannot be created: {getattr(error, 'strerror', None) or error}") from None


def restore_checksums(folder: Path) -> None:
    """Compute the checksums of a catalog again if only they are corrupt."""
    catalog = folder / "index.sqlite"
    with suppress(CheckpointError):
        read_checksums(checksums_file(catalog))
        return
    if not catalog.is_file():
        return
    lock = _lock_writer(folder)
    try:
        with closing(SharedFile(catalog)):
            with closing(connect(catalog)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                (result,) = db.execute("PRAGMA integrity_check(1)").fetchone()
                if result != "ok":
                    raise catalog_error(catalog, result.splitlines()[-1])
                properties = dict(db.execute("SELECT name, value FROM properties"))
            id, transactions = bytes.fromhex(properties["id"]), properties["generation"] + properties["layout"]
            seal_catalog(catalog, id, transactions, checksums_file(catalog))
    except (sqlite3.Error, KeyError) as error:
        raise catalog_error(catalog, str(error)) from None
    finally:
        os.close(lock)


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


@dataclass(frozen=True, slots=True)
class CatalogContents:
    """The passages and segments of a version of the catalog."""

    version: tuple[int, int]  # generation and layout
    keys: Keys  # of all passages, ascending
    segments: Sequence[tuple[int, str]]  # numbers, and checksums as JSON


class LocalCatalog:
    """A connection for reading: consistent snapshots of documents and passages.

    `folder` is only named in errors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "index.sqlite"
        self.lock = threading.RLock()
        self._closed = False
        self._filter_cache: tuple[int, dict[str, Keys]] = (-1, {})  # generation, and keys by filter
        if not self.file.is_file():
            if any((folder / "segments").glob("*")):
                raise catalog_error(self.file, "it is missing")
            raise NotFoundError(f"{folder} contains no index; create one with `bertie index DIR -o {folder}`")
        self._raw = SharedFile(self.file)
        try:
            self._record = verify_catalog(self.file, self._raw)
            with self.translate_errors():
                self._db = connect(self.file, read_only=True)
        except BaseException:
            self._raw.close()
            raise

    def close(self) -> None:
        """Close the connection, and then the file."""
        if not self._closed:
            self._closed = True
            self._db.close()
            self._raw.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a short read transaction."""
        with self.lock, self.translate_errors():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                with suppress(sqlite3.Error):  # after an error SQLite may already have rolled back
                    self._db.execute("ROLLBACK")

    def stream(self, query: str, parameters: Sequence[int] = ()) -> Iterator[Any]:
        """Iterate over the rows of a consistent snapshot, however long reading takes."""
        with (
            self.translate_errors(),
            closing(SharedFile(self.file)),
            closing(connect(self.file, read_only=True)) as db,
        ):
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
        transactions = properties["generation"] + properties["layout"]
        verify_transactions(self.file, self._record, bytes.fromhex(properties["id"]), transactions)
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
                        raise catalog_error(self.file, f"checksum mismatch in passage {key} of {id!r}")
                    passage = Passage(id, first, last, text, tuple(json.loads(headings)))
                    passages[key] = StoredPassage(key, passage, json.loads(metadata), source)
        return [passages[key] for key in keys if key in passages]

    def verify(self) -> CatalogContents:
        """Check all pages and all rows, and return what the segments must have."""
        verify_catalog(self.file, self._raw, strict=True)
        with self.reading() as db:
            (result,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if result != "ok":
                raise catalog_error(self.file, result.splitlines()[-1])
            keys = []
            rows = db.execute("SELECT key, text, headings, checksum FROM passages ORDER BY key")
            for key, text, headings, checksum in rows:
                if passage_checksum(text, headings) != checksum:
                    raise catalog_error(self.file, f"checksum mismatch in passage {key}")
                keys.append(key)
            version = (get_property(db, "generation"), get_property(db, "layout"))
            segments = db.execute("SELECT number, checksums FROM segments").fetchall()
            return CatalogContents(version, np.array(keys, np.int64), segments)

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
            raise catalog_error(self.file, str(error)) from None


class CatalogWriter:
    """The connection for writing, with the writer lock of the index."""

    def __init__(self, catalog: LocalCatalog) -> None:
        self._catalog = catalog
        self._lock = _lock_writer(catalog.folder)
        try:
            self.db = connect(catalog.file)
            try:
                self._recorder = CatalogRecorder(catalog.file, self.db)
            except BaseException:
                self.db.close()
                raise
        except BaseException:
            os.close(self._lock)
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit on success, and update the checksums; roll back on any error."""
        self._recorder.begin()
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may already have rolled back
                self.db.execute("ROLLBACK")
            raise
        self._recorder.committed()

    def close(self) -> None:
        """Checkpoint, and close this connection and that for reading."""
        is_empty = self._recorder.checkpoint()
        self._recorder.close()
        # SQLite removes the log with the last connection, unless that is read-only. It must not
        # checkpoint a log that is not empty.
        for connection in (self._catalog, self.db) if is_empty else (self.db, self._catalog):
            connection.close()
        os.close(self._lock)


def _lock_writer(folder: Path) -> int:
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
