"""The default store: a folder, written by one process at a time and read by any number.

    index.sqlite    documents, passages, metadata, the newest vectors, and which segments there are
    segments/7/     older vectors, as `bertie.search.segments` keeps them
    writer.lock     held by whoever writes

A commit is one transaction of SQLite. A segment is whole and on the disk before a transaction names it, and what no
transaction names is removed by the next who writes; so a kill at any moment leaves what was committed and nothing
else. Small commits gather in SQLite until they fill a segment, and segments of like size are joined by `optimize`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np

from bertie.data.atomic import fsync
from bertie.data.progress import Progress
from bertie.errors import BertieError, CheckpointError, ExistsError, InputError, NotFoundError
from bertie.search.records import (
    EmbeddedDocument,
    FloatArray,
    Keys,
    MetadataFilter,
    Passage,
    StoredPassage,
    check_documents,
    check_queries,
    value_type,
)
from bertie.search.segments import (
    AT_ONCE,
    EmbeddingPrecision,
    IndexThresholds,
    Mask,
    VectorBlock,
    VectorSegment,
    best,
    damaged,
    refuse,
    scan,
    stored,
    write,
)

FORMAT = 1
STORED = {"keys.npy", "vectors.npy", "scales.npy"}  # of a segment's files, those that the others are made from
FULL = 4096  # rows that make a segment
JOIN = 4  # segments of like size that are worth joining, each level being so many times as large as the one below
DEAD = 0.3  # of a segment, at which it is written anew

SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE documents (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, source TEXT, version TEXT NOT NULL,
    metadata TEXT NOT NULL
);
CREATE TABLE metadata (
    document INTEGER NOT NULL, name TEXT NOT NULL, kind TEXT NOT NULL, value NOT NULL, PRIMARY KEY (document, name)
) WITHOUT ROWID;
CREATE INDEX by_value ON metadata (name, kind, value);
CREATE TABLE passages (
    key INTEGER PRIMARY KEY, document INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    text TEXT NOT NULL, headings TEXT NOT NULL, checksum INTEGER NOT NULL
);
CREATE INDEX by_document ON passages (document);
CREATE TABLE newest (key INTEGER PRIMARY KEY, codes BLOB NOT NULL, scale REAL);
CREATE INDEX for_counting ON newest (scale);
CREATE TABLE segments (number INTEGER PRIMARY KEY AUTOINCREMENT, effort INTEGER NOT NULL, sums TEXT NOT NULL);
CREATE TABLE dead (key INTEGER PRIMARY KEY);
"""
COMPARISONS = {"=": "= ?", "<": "< ?", "<=": "<= ?", ">": "> ?", ">=": ">= ?"}


@dataclass(frozen=True, slots=True)
class _View:
    """What there is to search, as of one moment."""

    at: tuple[int, int]  # generation and layout
    segments: Mapping[int, VectorSegment]
    dead: Keys  # in segments, in order
    keys: Keys  # of the newest
    newest: VectorBlock | None


class LocalStore:
    """Passages and vectors in a folder.

    `vectors` says how these are kept: "fp32"; "int8", a byte a number; or "binary", where a bit a number finds and a
    byte a number scores. `limits` are the sizes from which they are searched by a graph and by inverted lists.

    >>> import tempfile
    >>> from bertie.search.records import Document
    >>> with tempfile.TemporaryDirectory() as folder, LocalStore.create(folder, 2, {"model": "toy"}) as store:
    ...     cat = Document("a", "A cat.")
    ...     store.commit([EmbeddedDocument(cat, [Passage("a", 0, 6, "A cat.")], np.array([[0.6, 0.8]], np.float32))])
    ...     keys, scores = store.nearest(np.array([[1, 0]], np.float32), k=1)[0]
    ...     store.fetch(keys.tolist())[0].passage.text, float(scores[0])
    ('A cat.', 0.6000000238418579)
    """

    progress = False  # whether long work shows how far it is

    def __init__(self, folder: Path, *, look: bool = True) -> None:
        self.folder = folder
        self._file = folder / "index.sqlite"
        self._guard = threading.RLock()
        self._writer = threading.RLock()
        self._pen: tuple[int, sqlite3.Connection] | None = None  # the writer's lock and connection
        self._next = 0  # number of the next segment
        self._done = 0.0
        self._sound: set[int] = set()  # segments that need no check_documents
        self._view: _View | None = None
        self._allowed: tuple[int, dict[str, Keys]] = (-1, {})
        if not self._file.is_file():
            if any((folder / "segments").glob("*")):
                raise self._broken("it is not there")
            raise NotFoundError(f"{folder} holds no index; `bertie index DIR --out {folder}` makes one")
        with self._blamed():
            self._db = _connect(self._file)
        with self._reading() as db:
            facts = dict(db.execute("SELECT name, value FROM facts"))
        if facts.get("format") != FORMAT:
            raise CheckpointError(f"{self._file} is of format {facts.get('format')!r}; this Bertie reads {FORMAT}")
        self.dimension: int = facts["dimension"]
        self.about: Mapping[str, Any] = json.loads(facts["about"])
        self.vectors: EmbeddingPrecision = facts["vectors"]
        self.limits = IndexThresholds(facts["flat"], facts["graph"])
        if look:
            self._look()

    @classmethod
    def create(
        cls,
        folder: str | Path,
        dimension: int,
        about: Mapping[str, Any],
        *,
        vectors: EmbeddingPrecision = "fp32",
        limits: IndexThresholds | None = None,
    ) -> Self:
        """Make an empty one. The folder must be empty, or not there."""
        folder, limits = Path(folder), limits or IndexThresholds()
        if vectors not in get_args(EmbeddingPrecision):
            raise InputError(f"vectors={vectors!r} must be one of {', '.join(get_args(EmbeddingPrecision))}")
        if dimension < 1 or (vectors == "binary" and dimension % 8):
            raise InputError(f"dimension={dimension} must be at least 1, and a multiple of 8 for vectors='binary'")
        if folder.is_file() or (folder.is_dir() and (folder / "index.sqlite").exists()):
            raise ExistsError(f"{folder} is there already; pass another name")
        if folder.is_dir() and any(not _ours(file) for file in folder.iterdir()):
            raise ExistsError(f"{folder} holds other files; an index needs a folder of its own")
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        fresh = folder / "index.sqlite.new"
        fresh.unlink(missing_ok=True)
        facts = {"format": FORMAT, "dimension": dimension, "about": json.dumps(dict(about)), "vectors": vectors}
        facts |= {"flat": limits.flat, "graph": limits.graph, "generation": 0, "layout": 0, "next": 1}
        with closing(_connect(fresh)) as db:
            db.execute("PRAGMA journal_mode = WAL")  # lets others read while one writes
            db.executescript(SCHEMA)
            db.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        os.rename(fresh, folder / "index.sqlite")
        fsync(folder)
        return cls(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """One that is there. Files that are not what they were when they were written are refused."""
        return cls(Path(folder))

    def close(self) -> None:
        """Give back what is held."""
        with self._writer, self._guard:
            self._db.close()
            self._view = None
            if self._pen is not None:
                lock, db = self._pen
                db.close()
                os.close(lock)
                self._pen = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- reading ---

    @property
    def generation(self) -> int:
        """Grows with each commit."""
        with self._reading() as db:
            return _fact(db, "generation")

    def __len__(self) -> int:
        with self._reading() as db:
            (count,) = db.execute("SELECT count(*) FROM passages").fetchone()
            return int(count)

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Id, source and version of each document."""
        yield from self._stream("SELECT id, source, version FROM documents ORDER BY number")

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Key and text of each passage, in the order of keys, of those above `after`."""
        yield from self._stream("SELECT key, text FROM passages WHERE key > ? ORDER BY key", (after,))

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Passages by their keys, in that order. Those that are gone are left out."""
        wanted = [int(key) for key in keys]
        found: dict[int, StoredPassage] = {}
        with self._reading() as db:
            for start in range(0, len(wanted), 500):  # variables of a statement are limited
                some = wanted[start : start + 500]
                for row in db.execute(
                    "SELECT key, id, first, last, text, headings, checksum, metadata, source "
                    "FROM passages JOIN documents ON number = document "
                    f"WHERE key IN ({', '.join('?' * len(some))})",
                    some,
                ):
                    key, id, first, last, text, headings, checksum, metadata, source = row
                    if _checksum(text, headings) != checksum:
                        raise self._broken(f"passage {key} of {id!r} is not what was written")
                    passage = Passage(id, first, last, text, tuple(json.loads(headings)))
                    found[key] = StoredPassage(key, passage, json.loads(metadata), source)
        return [found[key] for key in wanted if key in found]

    def allowed(self, where: Sequence[MetadataFilter]) -> Keys:
        """The keys of all passages whose document meets the conditions."""
        if not where:  # vectors tell, and are read already
            view = self._look()
            keys = np.concatenate([view.keys, *(segment.keys for segment in view.segments.values())])
            return np.setdiff1d(keys, view.dead, assume_unique=True)
        asked = repr(tuple(where))  # to Python, 1 and True are the same
        with self._reading() as db:
            generation = _fact(db, "generation")
            if self._allowed[0] != generation:
                self._allowed = (generation, {})
            known = self._allowed[1]
            if asked not in known:
                tests, values = _sql(where)
                rows = db.execute(f"SELECT key FROM passages WHERE {tests} ORDER BY key", values)
                known[asked] = np.fromiter((key for (key,) in rows), np.int64)
                if len(known) > 16:
                    del known[next(iter(known))]
            return known[asked]

    def nearest(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Of each query, the keys of its k nearest passages by inner product, best first, and how near they are."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_queries(queries, k, self.dimension)
        view = self._look()
        only = self.allowed(where) if where else None
        parts: list[list[tuple[Keys, FloatArray]]] = []
        for segment in view.segments.values():
            parts.append(segment.nearest(queries, k, _mask(segment, view.dead, only)))
        if view.newest is not None:
            mask = None if only is None else np.isin(view.keys, only)
            rows = scan(view.newest, queries, k, mask)
            parts.append([(view.keys[r], view.newest[r].scores(query)) for query, r in zip(queries, rows, strict=True)])
        none = (np.empty(0, np.int64), np.empty(0, np.float32))
        answers = []
        for number in range(len(queries)):
            mine = [part[number] for part in parts] or [none]
            keys, scores = (np.concatenate(some) for some in zip(*mine, strict=True))
            answers.append(best(keys, scores, k))
        return answers

    # --- writing ---

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, all at once or not at all."""
        check_documents(put, self.dimension)
        none = np.empty((0, self.dimension), np.float32)
        block = VectorBlock.of(np.concatenate([none, *(entry.vectors for entry in put)]), self.vectors)
        with self._writing() as db:
            first = _fact(db, "next")
            keys = np.arange(first, first + len(block))
            made = [self._write(keys, iter([block]))] if len(block) >= FULL else []
            with _transaction(db):
                for id in [*delete, *(entry.document.id for entry in put)]:
                    _remove(db, id)
                key = first
                for entry in put:
                    key = _insert(db, entry, key)
                if not made:
                    scales = [None] * len(block) if block.scales is None else block.scales.tolist()
                    rows = zip(keys.tolist(), (code.tobytes() for code in block.codes), scales, strict=True)
                    db.executemany("INSERT INTO newest VALUES (?, ?, ?)", rows)
                else:
                    _name(db, made, ())
                db.execute("UPDATE facts SET value = ? WHERE name = 'next'", (key,))
                db.execute("UPDATE facts SET value = value + 1 WHERE name = 'generation'")
                (waiting,) = db.execute("SELECT count(*) FROM newest").fetchone()
            if waiting >= FULL:
                self._settle(db)

    def optimize(self, whole: bool = False) -> None:
        """Join segments of like size, or all there are; drop what is dead. Answers stay the same."""
        with self._writing() as db:
            if whole:
                self._settle(db)
            elif db.execute("SELECT count(*) FROM segments").fetchone()[0] < JOIN and not _any(db, "dead"):
                return  # as after most small commits
            while chosen := self._worthwhile(whole):
                self._join(db, chosen)

    def repair(self, embed: Callable[[list[str]], FloatArray]) -> int:
        """Make damaged files anew. Returns how many passages had to be embedded again, by `embed`, from their texts."""
        with self._writing() as db:
            lost = {key for (key,) in db.execute("SELECT key FROM passages")}
            lost -= {key for (key,) in db.execute("SELECT key FROM newest")}
            old, made = [], []
            for number, sums in db.execute("SELECT number, sums FROM segments").fetchall():
                names = damaged(self._at(number), json.loads(sums))
                if names:
                    old.append(number)
                if STORED.isdisjoint(names):
                    keys, block = stored(self._at(number))
                    lost.difference_update(keys.tolist())
                    if names:  # what is made from these is damaged
                        parts = (block[start : start + AT_ONCE] for start in range(0, len(block), AT_ONCE))
                        made.append(self._write(keys, parts))
            order = sorted(lost)
            for start in range(0, len(order), AT_ONCE):
                some = order[start : start + AT_ONCE]
                texts = [found.passage.text for found in self.fetch(some)]
                made.append(self._write(np.array(some), iter([VectorBlock.of(embed(texts), self.vectors)])))
            if old:
                with _transaction(db):
                    _name(db, made, old)
                self._tidy(db)
            return len(order)

    def _write(self, keys: Keys, blocks: Iterator[VectorBlock]) -> tuple[int, int, str]:
        """A segment, on the disk and not yet named: its number, effort and checksums."""
        number = self._next
        self._next += 1
        with Progress("building the index", lambda: self._done) if self.progress else nullcontext() as progress:

            def say(rows: int) -> None:
                if progress is not None:
                    self._done = rows / len(keys)
                    progress.update(min(rows, AT_ONCE))

            effort, sums = write(self._at(number), keys, blocks, self.vectors, self.dimension, self.limits, say)
        self._sound.add(number)
        return number, effort, json.dumps(sums)

    def _settle(self, db: sqlite3.Connection) -> None:
        """Make the newest vectors a segment."""
        keys, block = self._newest(db)
        if block is None:
            return
        made = self._write(keys, iter([block]))
        with _transaction(db):
            _name(db, [made], ())
            db.execute("DELETE FROM newest")

    def _worthwhile(self, whole: bool) -> list[int]:
        """Segments that are better joined: enough of like size, or one with many dead."""
        view = self._look()
        dead = {number: len(segment.rows_of(view.dead)) for number, segment in view.segments.items()}
        if whole:
            return list(dead) if len(dead) > 1 or any(dead.values()) else []
        levels: dict[int, list[int]] = {}
        for number, segment in view.segments.items():
            if dead[number] > DEAD * len(segment):
                return [number]
            levels.setdefault(int(math.log(max(len(segment) / FULL, 1), JOIN)), []).append(number)
        return next((level for _, level in sorted(levels.items()) if len(level) >= JOIN), [])

    def _join(self, db: sqlite3.Connection, chosen: Sequence[int]) -> None:
        """One segment in place of several, without what is dead."""
        view = self._look()
        parts = [view.segments[number] for number in chosen]
        alive = [np.setdiff1d(np.arange(len(part)), part.rows_of(view.dead)) for part in parts]
        keys = np.concatenate([part.keys[rows] for part, rows in zip(parts, alive, strict=True)])
        where = np.concatenate([np.full(len(rows), number) for number, rows in enumerate(alive)])
        rows, order = np.concatenate(alive), np.argsort(keys)

        def blocks() -> Iterator[VectorBlock]:
            for start in range(0, len(order), AT_ONCE):
                some = order[start : start + AT_ONCE]
                codes = np.empty((len(some), self.dimension), parts[0].block.codes.dtype)
                scales = None if parts[0].block.scales is None else np.empty(len(some), np.float32)
                for number in np.unique(where[some]):
                    mine = np.flatnonzero(where[some] == number)
                    block = parts[number].block[rows[some[mine]]]
                    codes[mine] = block.codes
                    if scales is not None:
                        scales[mine] = block.scales
                yield VectorBlock(codes, scales)

        made = [self._write(keys[order], blocks())] if len(order) else []
        with _transaction(db):
            _name(db, made, chosen)
            dead = np.concatenate([part.keys[part.rows_of(view.dead)] for part in parts])
            db.executemany("DELETE FROM dead WHERE key = ?", ((key,) for key in dead.tolist()))
        self._tidy(db)

    # --- the folder ---

    def _at(self, number: int) -> Path:
        return self.folder / "segments" / str(number)

    def _look(self) -> _View:
        """What there is now."""
        with self._guard:
            while True:
                with self._reading() as db:
                    at = (_fact(db, "generation"), _fact(db, "layout"))
                    if self._view is not None and self._view.at == at:
                        return self._view
                    listed = db.execute("SELECT number, effort, sums FROM segments").fetchall()
                    dead = np.fromiter((key for (key,) in db.execute("SELECT key FROM dead ORDER BY key")), np.int64)
                    newest = self._newest(db, self._view)
                try:
                    segments = {number: self._segment(number, effort, sums) for number, effort, sums in listed}
                except (CheckpointError, OSError):
                    with self._reading() as db:
                        if _fact(db, "layout") != at[1]:  # it was joined with others, and removed
                            continue
                    raise
                self._view = _View(at, segments, dead, *newest)
                return self._view

    def _segment(self, number: int, effort: int, sums: str) -> VectorSegment:
        if self._view is not None and number in self._view.segments:
            return self._view.segments[number]
        if number not in self._sound and (names := damaged(self._at(number), json.loads(sums))):
            raise refuse(self._at(number), names)
        self._sound.add(number)
        return VectorSegment(self._at(number), effort, self.limits)

    def _newest(self, db: sqlite3.Connection, known: _View | None = None) -> tuple[Keys, VectorBlock | None]:
        """Those not yet in segments. Of `known` ones only the keys are read, to see which are left."""
        old, parts = np.empty(0, np.int64), []
        if known is not None and known.newest is not None:
            there = np.fromiter((key for (key,) in db.execute("SELECT key FROM newest")), np.int64)
            kept = np.isin(known.keys, there)
            old, parts = known.keys[kept], [known.newest[kept]]
        after = int(known.keys[-1]) if parts and known is not None else 0
        rows = db.execute("SELECT key, codes, scale FROM newest WHERE key > ? ORDER BY key", (after,)).fetchall()
        if rows:
            keys, codes, scales = zip(*rows, strict=True)
            plain = np.frombuffer(b"".join(codes), np.float32 if self.vectors == "fp32" else np.int8)
            own = None if self.vectors == "fp32" else np.array(scales, np.float32)
            old, parts = np.append(old, keys), [*parts, VectorBlock(plain.reshape(len(keys), self.dimension), own)]
        return old, VectorBlock.join(parts) if len(old) else None

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One moment's state, for a moment."""
        with self._guard, self._blamed():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                self._db.execute("ROLLBACK")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """As the one who writes, until the store is closed."""
        with self._writer, self._blamed():
            if self._pen is None:
                lock = _lock(self.folder)
                self._pen = lock, _connect(self._file)
                self._tidy(self._pen[1])
            yield self._pen[1]

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.ProgrammingError as error:
            raise InputError(f"{self.folder}: {error}") from None
        except sqlite3.OperationalError as error:  # no room, no permission
            raise BertieError(f"{self._file}: {error}; all that was committed is safe") from None
        except sqlite3.DatabaseError as error:
            raise self._broken(str(error)) from None

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file} is damaged ({why}); put back a copy of the file, or remove {self.folder} and make the index "
            "anew from its documents"
        )

    def _stream(self, query: str, values: Sequence[int] = ()) -> Iterator[Any]:
        """Rows of one moment, however long they take to read."""
        with self._blamed(), closing(_connect(self._file)) as db:
            yield from db.execute(query, values)

    def _tidy(self, db: sqlite3.Connection) -> None:
        """Remove what no transaction names: what a kill left, and what was joined."""
        named = {str(number) for (number,) in db.execute("SELECT number FROM segments")}
        (highest,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'segments'").fetchone()
        self._next = max(self._next, highest + 1)
        for one in (self.folder / "segments").iterdir():
            if one.name not in named:
                shutil.rmtree(one, ignore_errors=True)


# --- SQLite ---


def _connect(file: Path) -> sqlite3.Connection:
    db = sqlite3.connect(file, timeout=60, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA synchronous = FULL")  # what a commit returned from is on the disk
    return db


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
            db.execute("ROLLBACK")
        raise


def _fact(db: sqlite3.Connection, name: str) -> int:
    (value,) = db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return int(value)


def _any(db: sqlite3.Connection, table: str) -> bool:
    return db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() is not None


def _insert(db: sqlite3.Connection, entry: EmbeddedDocument, key: int) -> int:
    """A document and its passages, from `key` on; the key after them."""
    document = entry.document
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
        for at, one in enumerate(entry.passages, key):
            headings = json.dumps(one.headings, ensure_ascii=False)
            rows.append((at, number, one.start, one.end, one.text, headings, _checksum(one.text, headings)))
        db.executemany("INSERT INTO passages VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    except UnicodeEncodeError as error:
        raise InputError(f"document {document.id!r} holds half a character, which cannot be stored: {error}") from None
    return key + len(rows)


def _remove(db: sqlite3.Connection, id: str) -> None:
    mine = "(SELECT key FROM passages WHERE document = ?)"
    for (number,) in db.execute("SELECT number FROM documents WHERE id = ?", (id,)).fetchall():
        old = "NOT EXISTS (SELECT 1 FROM newest WHERE newest.key = passages.key)"
        db.execute(f"INSERT INTO dead SELECT key FROM passages WHERE document = ? AND {old}", (number,))
        db.execute(f"DELETE FROM newest WHERE key IN {mine}", (number,))
        for table, column in (("passages", "document"), ("metadata", "document"), ("documents", "number")):
            db.execute(f"DELETE FROM {table} WHERE {column} = ?", (number,))


def _name(db: sqlite3.Connection, made: Iterable[tuple[int, int, str]], old: Iterable[int]) -> None:
    """Let segments be seen, and others not."""
    db.executemany("INSERT INTO segments VALUES (?, ?, ?)", made)
    db.executemany("DELETE FROM segments WHERE number = ?", ((number,) for number in old))
    db.execute("UPDATE facts SET value = value + 1 WHERE name = 'layout'")


def _sql(where: Sequence[MetadataFilter]) -> tuple[str, list[Any]]:
    """The documents that meet the conditions; what is given only ever fills in the marks."""
    tests, values = ["1"], []
    for one in where:
        some = " OR ".join([f"(kind = ? AND value {COMPARISONS.get(one.op, '= ?')})"] * len(one.values)) or "0"
        member = "NOT IN" if one.op == "!=" else "IN"
        tests.append(f"document {member} (SELECT document FROM metadata WHERE name = ? AND ({some}))")
        values += [one.name, *(part for value in one.values for part in (value_type(value, one.name), value))]
    return " AND ".join(tests), values


def _checksum(text: str, headings: str) -> int:
    return zlib.crc32(f"{headings}{text}".encode())


def _mask(segment: VectorSegment, dead: Keys, only: Keys | None) -> Mask | None:
    """The rows that count, if not all do."""
    gone = segment.rows_of(dead)
    if only is None and not len(gone):
        return None
    mask = np.full(len(segment), only is None)
    if only is not None:
        mask[segment.rows_of(only)] = True
    mask[gone] = False
    return mask


def _ours(file: Path) -> bool:
    """Whether it may be left from making an index, when that was killed."""
    return file.name.startswith("index.sqlite.new") or (file.name == "segments" and not any(file.iterdir()))


def _lock(folder: Path) -> int:
    """Two processes must not write one index. The lock goes with the process, however that ends."""
    try:
        lock = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows
        pass
    except OSError:
        os.close(lock)
        raise InputError(f"{folder} is being written by another process; try again when that is done") from None
    return lock
