"""The default vector store: a folder, written by one process at a time and read by any number.

    index.sqlite    documents, passages, metadata, pending embeddings, and the list of segments
    index.checksums of the catalog, as in `bertie.search.catalog_checksums`
    segments/7/     embeddings, as in `bertie.search.segments`
    writer.lock     held by the writing process

A commit is one SQLite transaction. A segment is complete and on disk before a transaction registers
it, and the next writer removes unregistered ones; so a kill at any moment leaves what was committed
and nothing else. Small commits accumulate in SQLite until they fill a segment, and `optimize`
merges segments of similar size.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np

from bertie.data.progress import Progress
from bertie.errors import CheckpointError, ExistsError, InputError
from bertie.search.catalog_checksums import catalog_error
from bertie.search.checksums import corrupt_files
from bertie.search.compaction import FANOUT, choose_segments, merge_segments
from bertie.search.filters import MetadataFilter
from bertie.search.local_catalog import (
    CatalogWriter,
    LocalCatalog,
    create_catalog,
    delete_document,
    get_property,
    insert_document,
    is_empty,
    replace_segments,
)
from bertie.search.records import EmbeddedDocument, FloatArray, Keys, StoredPassage
from bertie.search.segments import (
    BUILD_ROWS,
    IndexThresholds,
    VectorSegment,
    corruption_error,
    load_vectors,
    write_segment,
)
from bertie.search.vector_block import EmbeddingPrecision, Mask, VectorBlock, scan, top_k
from bertie.search.vector_store import check_documents, check_queries

SOURCE_FILES = {"keys.npy", "vectors.npy", "scales.npy"}  # all other files of a segment are derived from these
SEGMENT_ROWS = 4096  # pending rows that are flushed into a segment


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A consistent state of the embeddings."""

    version: tuple[int, int]  # generation and layout
    segments: Mapping[int, VectorSegment]
    tombstones: Keys  # deleted rows of segments, ascending
    keys: Keys  # of pending embeddings
    pending: VectorBlock | None

    def live_keys(self) -> Keys:
        """Return the keys of all embeddings that are not deleted, ascending."""
        keys = np.concatenate([self.keys, *(segment.keys for segment in self.segments.values())])
        return np.sort(np.setdiff1d(keys, self.tombstones, assume_unique=True))


class LocalStore:
    """Passages and embeddings in a folder.

    `embedding_precision` is how embeddings are stored: "fp32"; "int8", one byte per dimension; or
    "binary", where one bit per dimension finds candidates and one byte per dimension scores them.
    `thresholds` are the numbers of rows from which HNSW and IVF-PQ are used.

    >>> import tempfile
    >>> from bertie.search.records import Document, Passage
    >>> with tempfile.TemporaryDirectory() as folder, LocalStore.create(folder, 2, {"model": "toy"}) as store:
    ...     cat = Document("a", "A cat.")
    ...     embeddings = np.array([[0.6, 0.8]], np.float32)
    ...     store.commit([EmbeddedDocument(cat, [Passage("a", 0, 6, "A cat.")], embeddings)])
    ...     keys, scores = store.search(np.array([[1, 0]], np.float32), k=1)[0]
    ...     store.fetch(keys.tolist())[0].passage.text, float(scores[0])
    ('A cat.', 0.6000000238418579)
    """

    progress = False  # whether to show progress bars

    def __init__(self, folder: Path, *, check_segments: bool = True) -> None:
        self.folder = folder
        self._catalog = LocalCatalog(folder)
        self._write_lock = threading.RLock()
        self._writer: CatalogWriter | None = None
        self._next_segment = 0
        self._built = 0.0  # fraction of the segment being built, for the progress bar
        self._verified: set[int] = set()  # segments whose checksums need no check
        self._latest: _Snapshot | None = None
        try:
            properties = self._catalog.properties()
            self.id: str = properties["id"]
            self.dimension: int = properties["dimension"]
            self.config: Mapping[str, Any] = json.loads(properties["config"])
            self.embedding_precision: EmbeddingPrecision = properties["embedding_precision"]
            self.thresholds = IndexThresholds(properties["flat"], properties["hnsw"])
            if check_segments:
                self._snapshot()
        except BaseException:
            self._catalog.close()
            raise

    @classmethod
    def create(
        cls,
        folder: str | Path,
        dimension: int,
        config: Mapping[str, Any],
        *,
        embedding_precision: EmbeddingPrecision = "fp32",
        thresholds: IndexThresholds | None = None,
    ) -> Self:
        """Create an empty store in a folder that is empty or does not exist."""
        folder, thresholds = Path(folder), thresholds or IndexThresholds()
        if embedding_precision not in get_args(EmbeddingPrecision):
            allowed = ", ".join(get_args(EmbeddingPrecision))
            raise InputError(f"embedding_precision={embedding_precision!r} must be one of {allowed}")
        if dimension < 1 or (embedding_precision == "binary" and dimension % 8):
            raise InputError(
                f"dimension={dimension} must be at least 1, and a multiple of 8 for embedding_precision='binary'"
            )
        if folder.is_file() or (folder.is_dir() and (folder / "index.sqlite").exists()):
            raise ExistsError(f"{folder} already exists; choose another name")
        if folder.is_dir() and any(not _is_leftover(file) for file in folder.iterdir()):
            raise ExistsError(f"{folder} contains other files; an index needs an empty folder")
        properties = {"dimension": dimension, "config": json.dumps(dict(config))}
        properties |= {"embedding_precision": embedding_precision, "flat": thresholds.flat, "hnsw": thresholds.hnsw}
        create_catalog(folder, properties)
        return cls(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open an existing store, and verify the checksums of its files."""
        return cls(Path(folder))

    def close(self) -> None:
        """Release connections, memory maps and the writer lock."""
        with self._write_lock, self._catalog.lock:
            self._latest = None
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- reading ---

    @property
    def generation(self) -> int:
        """A counter that grows with each commit."""
        with self._catalog.reading() as db:
            return get_property(db, "generation")

    def __len__(self) -> int:
        with self._catalog.reading() as db:
            (count,) = db.execute("SELECT count(*) FROM passages").fetchone()
            return int(count)

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Iterate over (id, source, version) of all documents."""
        yield from self._catalog.stream("SELECT id, source, version FROM documents ORDER BY number")

    def passage_texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Iterate over (key, text) of all passages with keys above `after`, ascending."""
        yield from self._catalog.stream("SELECT key, text FROM passages WHERE key > ? ORDER BY key", (after,))

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Return passages in the order of `keys`, without those deleted meanwhile."""
        return self._catalog.fetch([int(key) for key in keys])

    def matching_keys(self, where: Sequence[MetadataFilter]) -> Keys:
        """Return the keys of all passages whose document matches the filters, ascending."""
        if not where:  # the keys of all embeddings are in memory
            return self._snapshot().live_keys()
        return self._catalog.matching_keys(where)

    def search(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Return keys and inner products of the k nearest passages of each query, best first."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_queries(queries, k, self.dimension)
        snapshot = self._snapshot()
        allowed = self.matching_keys(where) if where else None
        partial: list[list[tuple[Keys, FloatArray]]] = []
        for segment in snapshot.segments.values():
            partial.append(segment.search(queries, k, _row_mask(segment, snapshot.tombstones, allowed)))
        if (block := snapshot.pending) is not None:
            mask = None if allowed is None else np.isin(snapshot.keys, allowed)
            candidates = zip(queries, scan(block, queries, k, mask), strict=True)
            partial.append([(snapshot.keys[rows], block[rows].exact_scores(query)) for query, rows in candidates])
        empty = (np.empty(0, np.int64), np.empty(0, np.float32))
        results = []
        for query in range(len(queries)):
            ranked = [ranking[query] for ranking in partial] or [empty]
            keys, scores = (np.concatenate(arrays) for arrays in zip(*ranked, strict=True))
            results.append(top_k(keys, scores, k))
        return results

    # --- writing ---

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, in one atomic transaction."""
        check_documents(put, self.dimension)
        empty = np.empty((0, self.dimension), np.float32)
        embeddings = np.concatenate([empty, *(document.embeddings for document in put)])
        block = VectorBlock.quantize(embeddings, self.embedding_precision)
        with self._writing() as writer:
            db = writer.db
            first_key = get_property(db, "next_key")
            keys = np.arange(first_key, first_key + len(block))
            written = [self._write_segment(keys, iter([block]))] if len(block) >= SEGMENT_ROWS else []
            with writer.transaction():
                for id in [*delete, *(document.document.id for document in put)]:
                    delete_document(db, id)
                next_key = first_key
                for document in put:
                    next_key = insert_document(db, document, next_key)
                if not written:
                    scales = [None] * len(block) if block.scales is None else block.scales.tolist()
                    rows = zip(keys.tolist(), (code.tobytes() for code in block.codes), scales, strict=True)
                    db.executemany("INSERT INTO pending VALUES (?, ?, ?)", rows)
                else:
                    replace_segments(db, written, ())
                db.execute("UPDATE properties SET value = ? WHERE name = 'next_key'", (next_key,))
                db.execute("UPDATE properties SET value = value + 1 WHERE name = 'generation'")
                (pending,) = db.execute("SELECT count(*) FROM pending").fetchone()
            if pending >= SEGMENT_ROWS:
                self._flush(writer)

    def optimize(self, full: bool = False) -> None:
        """Merge segments of similar size, or all, and drop deleted rows."""
        with self._writing() as writer:
            db = writer.db
            if full:
                self._flush(writer)
            elif db.execute("SELECT count(*) FROM segments").fetchone()[0] < FANOUT and is_empty(db, "tombstones"):
                return  # the usual case after a small commit
            while chosen := self._choose_segments(full):
                self._merge(writer, chosen)

    def verify(self) -> None:
        """Read everything, and raise an error that names what is corrupt."""
        with self._catalog.lock:
            while True:
                catalog = self._catalog.verify()
                folders = [(self._segment_folder(number), json.loads(sums)) for number, sums in catalog.segments]
                corrupt = [(folder, names) for folder, sums in folders if (names := corrupt_files(folder, sums))]
                snapshot = self._snapshot()
                if snapshot.version == catalog.version:  # otherwise segments may have been merged and removed
                    break
            if corrupt:
                raise corruption_error(*corrupt[0])
            if not np.array_equal(snapshot.live_keys(), catalog.keys):
                raise catalog_error(self._catalog.file, "passages and embeddings differ")

    def _choose_segments(self, full: bool) -> list[int]:
        snapshot = self._snapshot()
        return choose_segments(snapshot.segments, snapshot.tombstones, full=full, segment_rows=SEGMENT_ROWS)

    def repair(self, embed: Callable[[list[str]], FloatArray]) -> int:
        """Rebuild corrupt segments, and return how many passages were embedded again."""
        with self._writing() as writer:
            db = writer.db
            lost = {key for (key,) in db.execute("SELECT key FROM passages")}
            lost -= {key for (key,) in db.execute("SELECT key FROM pending")}
            old, new = [], []
            for number, checksums in db.execute("SELECT number, checksums FROM segments").fetchall():
                corrupt = corrupt_files(self._segment_folder(number), json.loads(checksums))
                if corrupt:
                    old.append(number)
                if SOURCE_FILES.isdisjoint(corrupt):
                    keys, block = load_vectors(self._segment_folder(number))
                    lost.difference_update(keys.tolist())
                    if corrupt:  # only derived files are
                        blocks = (block[start : start + BUILD_ROWS] for start in range(0, len(block), BUILD_ROWS))
                        new.append(self._write_segment(keys, blocks))
            missing = sorted(lost)
            for start in range(0, len(missing), BUILD_ROWS):
                batch = missing[start : start + BUILD_ROWS]
                embeddings = embed([stored.passage.text for stored in self.fetch(batch)])
                block = VectorBlock.quantize(embeddings, self.embedding_precision)
                new.append(self._write_segment(np.array(batch), iter([block])))
            if old:
                with writer.transaction():
                    replace_segments(db, new, old)
                self._remove_orphans(db)
            return len(missing)

    def _write_segment(self, keys: Keys, blocks: Iterator[VectorBlock]) -> tuple[int, int, str]:
        """Write a segment that is not registered yet; return its number, effort and checksums."""
        number = self._next_segment
        self._next_segment += 1
        with Progress("building the index", lambda: self._built) if self.progress else nullcontext() as progress:

            def report(rows: int) -> None:
                if progress is not None:
                    self._built = rows / len(keys)
                    progress.update(min(rows, BUILD_ROWS))

            effort, checksums = write_segment(
                self._segment_folder(number),
                keys,
                blocks,
                self.embedding_precision,
                self.dimension,
                self.thresholds,
                report,
            )
        self._verified.add(number)
        return number, effort, json.dumps(checksums)

    def _flush(self, writer: CatalogWriter) -> None:
        """Move pending embeddings into a segment."""
        keys, block = self._read_pending(writer.db)
        if block is None:
            return
        written = self._write_segment(keys, iter([block]))
        with writer.transaction():
            replace_segments(writer.db, [written], ())
            writer.db.execute("DELETE FROM pending")

    def _merge(self, writer: CatalogWriter, numbers: Sequence[int]) -> None:
        """Replace segments by a single one without deleted rows."""
        db = writer.db
        snapshot = self._snapshot()
        segments = [snapshot.segments[number] for number in numbers]
        keys, blocks = merge_segments(segments, snapshot.tombstones)
        written = [self._write_segment(keys, blocks)] if len(keys) else []
        with writer.transaction():
            replace_segments(db, written, numbers)
            deleted = np.concatenate([segment.keys[segment.rows_of(snapshot.tombstones)] for segment in segments])
            db.executemany("DELETE FROM tombstones WHERE key = ?", ((key,) for key in deleted.tolist()))
        self._remove_orphans(db)

    # --- the folder ---

    def _segment_folder(self, number: int) -> Path:
        return self.folder / "segments" / str(number)

    def _snapshot(self) -> _Snapshot:
        """Return the current state; unchanged segments stay open."""
        with self._catalog.lock:
            while True:
                with self._catalog.reading() as db:
                    version = (get_property(db, "generation"), get_property(db, "layout"))
                    if self._latest is not None and self._latest.version == version:
                        return self._latest
                    registered = db.execute("SELECT number, effort, checksums FROM segments").fetchall()
                    deleted = db.execute("SELECT key FROM tombstones ORDER BY key")
                    tombstones = np.fromiter((key for (key,) in deleted), np.int64)
                    pending = self._read_pending(db, self._latest)
                try:
                    segments = {row[0]: self._open_segment(*row) for row in registered}
                except (CheckpointError, OSError):
                    with self._catalog.reading() as db:
                        if get_property(db, "layout") != version[1]:  # merged and removed meanwhile
                            continue
                    raise
                self._latest = _Snapshot(version, segments, tombstones, *pending)
                return self._latest

    def _open_segment(self, number: int, effort: int, checksums: str) -> VectorSegment:
        if self._latest is not None and number in self._latest.segments:
            return self._latest.segments[number]
        folder = self._segment_folder(number)
        if number not in self._verified and (names := corrupt_files(folder, json.loads(checksums))):
            raise corruption_error(folder, names)
        self._verified.add(number)
        return VectorSegment(folder, effort, self.thresholds)

    def _read_pending(self, db: sqlite3.Connection, known: _Snapshot | None = None) -> tuple[Keys, VectorBlock | None]:
        """Read pending embeddings; only keys for those in the `known` snapshot."""
        keys, blocks = np.empty(0, np.int64), []
        if known is not None and known.pending is not None:
            current = np.fromiter((key for (key,) in db.execute("SELECT key FROM pending")), np.int64)
            kept = np.isin(known.keys, current)
            keys, blocks = known.keys[kept], [known.pending[kept]]
        after = int(known.keys[-1]) if blocks and known is not None else 0
        rows = db.execute("SELECT key, codes, scale FROM pending WHERE key > ? ORDER BY key", (after,)).fetchall()
        if rows:
            new_keys, codes, scales = zip(*rows, strict=True)
            is_fp32 = self.embedding_precision == "fp32"
            flat = np.frombuffer(b"".join(codes), np.float32 if is_fp32 else np.int8)
            row_scales = None if is_fp32 else np.array(scales, np.float32)
            blocks.append(VectorBlock(flat.reshape(len(new_keys), self.dimension), row_scales))
            keys = np.append(keys, new_keys)
        return keys, VectorBlock.concatenate(blocks) if len(keys) else None

    @contextmanager
    def _writing(self) -> Iterator[CatalogWriter]:
        """Acquire the writer lock, which is held until the store is closed."""
        with self._write_lock, self._catalog.translate_errors():
            if self._writer is None:
                self._writer = CatalogWriter(self._catalog)
                self._remove_orphans(self._writer.db)
            try:
                yield self._writer
            except BaseException:
                with suppress(sqlite3.Error, OSError):
                    self._remove_orphans(self._writer.db)  # segments that were not registered
                raise

    def _remove_orphans(self, db: sqlite3.Connection) -> None:
        """Remove unregistered segments: leftovers of a kill, and inputs of a merge."""
        registered = {str(number) for (number,) in db.execute("SELECT number FROM segments")}
        (highest,) = db.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'segments'").fetchone()
        self._next_segment = max(self._next_segment, highest + 1)
        for folder in (self.folder / "segments").iterdir():
            if folder.name not in registered:
                shutil.rmtree(folder, ignore_errors=True)


def _row_mask(segment: VectorSegment, tombstones: Keys, allowed: Keys | None) -> Mask | None:
    """Return which rows of a segment may be returned; None means all."""
    deleted = segment.rows_of(tombstones)
    if allowed is None and not len(deleted):
        return None
    mask = np.full(len(segment), allowed is None)
    if allowed is not None:
        mask[segment.rows_of(allowed)] = True
    mask[deleted] = False
    return mask


def _is_leftover(file: Path) -> bool:
    """Return whether a file may be left from a `create` that was killed."""
    names = ("index.sqlite.new", "index.checksums", "writer.lock")
    return file.name.startswith(names) or (file.name == "segments" and not any(file.iterdir()))
