"""A vector store in a LanceDB folder, for more passages than fit into memory.

    index.json        how the index was built, and the current version of the table
    passages.lance    one table with one row per passage; LanceDB never modifies files, and keeps old versions
    writer.lock       held by the writing process

A commit deletes and adds rows, each of which creates a table version that no reader sees; then it
atomically replaces index.json, which makes all changes visible at once. Versions after the current
one are leftovers of a kill: the next writer rolls them back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from bertie.data.atomic import atomic_rename, fsync
from bertie.errors import BertieError, CheckpointError, ExistsError, InputError, NotFoundError
from bertie.search.filters import MetadataFilter
from bertie.search.lance_table import (
    TABLE,
    import_lance,
    ivf_config,
    lance_filter,
    lance_rows,
    lance_schema,
    quote_sql,
    row_checksum,
)
from bertie.search.records import EmbeddedDocument, FloatArray, Keys, Passage, StoredPassage
from bertie.search.vector_store import check_documents, check_queries

FORMAT = 4
EXACT_SEARCH_PASSAGES = 50_000  # up to this number (of all, or of those that pass a filter) search is exhaustive
MANIFEST, LOCK = "index.json", "writer.lock"
NPROBES, REFINE_FACTOR = 128, 5
COMPACTION_INTERVAL = 100  # commits: each creates files, which are then compacted
KEEP_VERSIONS = timedelta(hours=1)  # for readers of a version that is no longer current
KEEP_ALL = timedelta(days=36_500)


@dataclass(frozen=True)
class _Manifest:
    """The contents of index.json."""

    format: int
    id: str
    dimension: int
    config: Mapping[str, Any]
    version: int  # of the table
    generation: int
    next_key: int
    passages: int


class LanceStore:
    """Passages and embeddings in a LanceDB folder, read from disk on demand.

    Search is exhaustive up to 50,000 passages; beyond that `optimize` builds an IVF index with
    quantized codes, whose candidates are rescored with the full embeddings. Writers wait for each
    other; readers never wait.

        store = LanceStore.create("texts.lance", dimension=384, config={"model": "…"})
        store.commit([EmbeddedDocument(document, passages, embeddings)])
        LanceStore.open("texts.lance").search(queries, k=10)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._current: tuple[_Manifest, Any] | None = None
        self._closed = False
        _read_manifest(self.folder)  # before LanceDB, which would create the folder
        self._database = import_lance()[0].connect(self.folder)
        manifest, _ = self._snapshot()
        self.id: str = manifest.id
        self.dimension: int = manifest.dimension
        self.config: Mapping[str, Any] = manifest.config

    @classmethod
    def create(cls, folder: str | Path, dimension: int, config: Mapping[str, Any]) -> LanceStore:
        """Create an empty store in a folder that is empty or does not exist."""
        lancedb, _ = import_lance()
        folder = Path(folder)
        if dimension < 1:
            raise InputError(f"dimension={dimension} must be at least 1")
        if folder.is_file() or (folder / MANIFEST).exists():
            raise ExistsError(f"{folder} already exists; choose another name")
        leftovers = {LOCK, f"{TABLE}.lance", f"{MANIFEST}.new"}  # of a `create` that was killed
        if folder.is_dir() and any(file.name not in leftovers for file in folder.iterdir()):
            raise ExistsError(f"{folder} contains other files; an index needs an empty folder")
        _check_no_orphan(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be created: {error.strerror}") from None
        with _lock(folder), _translate_errors(folder):
            shutil.rmtree(folder / f"{TABLE}.lance", ignore_errors=True)
            table = lancedb.connect(folder).create_table(TABLE, schema=lance_schema(dimension))
            manifest = _Manifest(FORMAT, uuid4().hex, dimension, dict(config), table.version, 0, 1, 0)
            _publish(folder, manifest, time.time())
        return cls(folder)

    @classmethod
    def open(cls, folder: str | Path) -> LanceStore:
        """Open an existing store."""
        return cls(folder)

    def close(self) -> None:
        """Close the table."""
        self._current, self._closed = None, True

    # --- reading ---

    @property
    def generation(self) -> int:
        """A counter that grows with each commit."""
        return self._snapshot()[0].generation

    def __len__(self) -> int:
        return self._snapshot()[0].passages

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Iterate over (id, source, version) of all documents."""
        _, table = self._snapshot()
        columns = ["document", "source", "version"]
        with _translate_errors(self.folder):
            for batch in table.search().where("position <= 0").select(columns).to_batches(batch_size=2000):
                yield from zip(*(batch[column].to_pylist() for column in columns), strict=True)

    def passage_texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Iterate over (key, text) of all passages with keys above `after`, ascending."""
        _, table = self._snapshot()
        keys = self._keys(table, f"position >= 0 AND key > {after}")
        with _translate_errors(self.folder):
            for start in range(0, len(keys), 20_000):  # LanceDB returns rows in any order
                batch = keys[start : start + 20_000]
                rows = table.search().where(f"key BETWEEN {batch[0]} AND {batch[-1]} AND position >= 0")
                rows = rows.select(["key", "text"]).to_arrow().sort_by("key")
                yield from zip(rows["key"].to_pylist(), rows["text"].to_pylist(), strict=True)

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Return passages in the order of `keys`, without those deleted meanwhile."""
        return self._fetch(self._snapshot()[1], [int(key) for key in keys])

    def _fetch(self, table: Any, keys: Sequence[int]) -> list[StoredPassage]:
        if not keys:
            return []
        columns = ["key", "document", "start", "end", "text", "headings", "metadata", "source", "checksum"]
        with _translate_errors(self.folder):
            condition = f"key IN ({', '.join(map(str, set(keys)))}) AND position >= 0"
            rows = table.search().where(condition).select([*columns, "embedding"]).to_arrow()
        passages = {}
        for row, embedding in zip(rows.select(columns).to_pylist(), self._embeddings(rows), strict=True):
            passage = Passage(row["document"], row["start"], row["end"], row["text"], tuple(row["headings"]))
            if row_checksum(passage, embedding) != row["checksum"]:  # LanceDB has no checksums
                raise CheckpointError(
                    f"the index in {self.folder} is corrupt: checksum mismatch in a passage of {passage.document!r}; "
                    "restore a backup of the folder, or rebuild it from its documents"
                )
            passages[row["key"]] = StoredPassage(row["key"], passage, json.loads(row["metadata"]), row["source"])
        return [passages[key] for key in keys if key in passages]

    def matching_keys(self, where: Sequence[MetadataFilter]) -> Keys:
        """Return the keys of all passages whose document matches the filters, ascending."""
        return self._keys(self._snapshot()[1], lance_filter(where))

    def search(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Return keys and inner products of the k nearest passages of each query, best first."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_queries(queries, k, self.dimension)
        manifest, table = self._snapshot()
        condition = lance_filter(where) if where else None
        with _translate_errors(self.folder):
            count = table.count_rows(condition) if where else manifest.passages
            exact = count <= EXACT_SEARCH_PASSAGES
            return [self._search_one(table, query, min(k, count), condition, exact) for query in queries]

    def _search_one(
        self, table: Any, query: FloatArray, k: int, condition: str | None, exact: bool
    ) -> tuple[Keys, FloatArray]:
        if not k:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        search = table.search(query, vector_column_name="embedding").distance_type("dot")
        search = search.select(["key", "embedding", "_distance"]).limit(k)
        search = search.where(condition, prefilter=True) if condition else search
        search = search.bypass_vector_index() if exact else search.nprobes(NPROBES).refine_factor(REFINE_FACTOR)
        rows = search.to_arrow()
        if len(rows) < k and not exact:  # the probed lists contain too few rows that pass the filter
            return self._search_one(table, query, k, condition, exact=True)
        keys = rows["key"].to_numpy()
        scores = self._embeddings(rows) @ query
        order = np.lexsort((keys, -scores))
        return keys[order], scores[order]

    def _embeddings(self, rows: Any) -> FloatArray:
        """Return the embeddings of a result, (n, D)."""
        flat: FloatArray = rows["embedding"].combine_chunks().flatten().to_numpy()
        return flat.reshape(len(rows), self.dimension)

    def _keys(self, table: Any, condition: str) -> Keys:
        with _translate_errors(self.folder):
            return np.sort(table.search().where(condition).select(["key"]).to_arrow()["key"].to_numpy())

    def _snapshot(self) -> tuple[_Manifest, Any]:
        """Return an immutable snapshot of the table as of the last commit."""
        if self._closed:
            raise InputError(f"the index in {self.folder} is closed")
        manifest = _read_manifest(self.folder)
        current = self._current
        if current is None or current[0] != manifest:
            with _translate_errors(self.folder):
                table = self._database.open_table(TABLE)
                table.checkout(manifest.version)
            self._current = current = manifest, table
        return current

    # --- writing ---

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, in one atomic transaction."""
        check_documents(put, self.dimension)
        ids = [*(document.document.id for document in put), *delete]
        with self._writing() as (manifest, table):
            started = time.time()
            rows = lance_rows(put, manifest.next_key, self.dimension)
            removed = 0
            if ids:
                condition = f"document IN ({', '.join(map(quote_sql, ids))})"
                positions = table.search().where(condition).select(["position"]).to_arrow()["position"].to_numpy()
                removed = int((positions >= 0).sum())
                if len(positions):
                    table.delete(condition)
            if put:
                table.add(rows)
            manifest = replace(
                manifest,
                version=table.version,
                generation=manifest.generation + 1,
                next_key=manifest.next_key + len(rows),
                passages=manifest.passages - removed + sum(len(document.passages) for document in put),
            )
            _publish(self.folder, manifest, started)
            if manifest.generation % COMPACTION_INTERVAL == 0:
                self._compact(manifest, table)

    def optimize(self, full: bool = False) -> None:
        """Compact small files and build the search indexes, or rebuild them."""
        from lancedb.index import BTree

        with self._writing() as (manifest, table):
            started = time.time()
            built = {index.name for index in table.list_indices()}
            if manifest.passages > EXACT_SEARCH_PASSAGES:
                for column in ("key", "document"):
                    if f"{column}_idx" not in built:
                        table.create_index(column, config=BTree())
                if full or "embedding_idx" not in built:
                    table.create_index("embedding", config=ivf_config(manifest.passages, self.dimension))
                manifest = replace(manifest, version=table.version)
                _publish(self.folder, manifest, started)
            self._compact(manifest, table)

    def verify(self) -> None:
        """Read everything, and raise an error that names what is corrupt."""
        manifest, table = self._snapshot()
        keys = self._keys(table, "position >= 0")
        for start in range(0, len(keys), 2000):
            self._fetch(table, keys[start : start + 2000].tolist())
        if len(keys) != manifest.passages or len(np.unique(keys)) != len(keys):
            raise CheckpointError(
                f"the index in {self.folder} is corrupt: {len(keys):,} passages instead of {manifest.passages:,}; "
                "restore a backup of the folder, or rebuild it from its documents"
            )

    def _compact(self, manifest: _Manifest, table: Any) -> None:
        """Merge small files, and add new rows to the search indexes."""
        started, now = time.time(), datetime.now()
        table.optimize(cleanup_older_than=KEEP_ALL)
        manifest = replace(manifest, version=table.version)
        _publish(self.folder, manifest, started)
        # Only now that the new version is current may others be removed: those older than the one
        # current an hour ago.
        timestamps = [version["timestamp"] for version in table.list_versions()]
        if expired := [timestamp for timestamp in timestamps if now - timestamp > KEEP_VERSIONS]:
            table.optimize(cleanup_older_than=now - max(expired) + KEEP_VERSIONS)
            _publish(self.folder, replace(manifest, version=table.version), started)

    @contextmanager
    def _writing(self) -> Iterator[tuple[_Manifest, Any]]:
        """Acquire the writer lock, and roll back versions that a killed writer left."""
        self._snapshot()
        with _lock(self.folder), _translate_errors(self.folder):
            manifest = _read_manifest(self.folder)
            table = self._database.open_table(TABLE)
            if table.version != manifest.version:
                table.checkout(manifest.version)
                table.restore()
            yield manifest, table


# --- the manifest ---


def _read_manifest(folder: Path) -> _Manifest:
    file = folder / MANIFEST
    try:
        values = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        _check_no_orphan(folder)
        raise NotFoundError(f"{folder} contains no LanceDB index; create one with LanceStore.create") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; restore a backup of it") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        actual = values.get("format") if isinstance(values, dict) else values
        raise CheckpointError(f"{file} has format {actual!r:.80}; this version of Bertie reads format {FORMAT}")
    if values.pop("checksum", None) != _checksum(values):
        raise CheckpointError(f"{file} is corrupt: checksum mismatch; restore a backup of it")
    try:
        return _Manifest(**values)
    except TypeError as error:
        raise CheckpointError(f"{file} is corrupt: {error}; restore a backup of it") from None


def _check_no_orphan(folder: Path) -> None:
    """Reject a table with data but without a manifest, which no killed `create` leaves."""
    if any((folder / f"{TABLE}.lance" / "data").glob("*")):
        raise CheckpointError(
            f"{folder / MANIFEST} is missing, which has the current version of {TABLE}.lance; restore a backup of it, "
            f"or remove {folder} and rebuild the index from its documents"
        )


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _publish(folder: Path, manifest: _Manifest, started: float) -> None:
    """Make a table version current, once all files written since `started` are on disk."""
    for file in (folder / f"{TABLE}.lance").rglob("*"):
        if file.stat().st_mtime >= started - 2:
            fsync(file)
    temporary = folder / f"{MANIFEST}.new"
    values = asdict(manifest)
    temporary.write_text(json.dumps(values | {"checksum": _checksum(values)}))
    atomic_rename(temporary, folder / MANIFEST)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait for the writer lock, which the operating system releases when the process ends."""
    import fcntl

    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _translate_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except BertieError:
        raise
    except Exception as error:  # LanceDB raises exceptions of many types, and its panics have a class of their own
        reason = re.sub(r", /\S+\.rs:\d+:\d+", "", (str(error) or type(error).__name__).splitlines()[0])[:300]
        raise CheckpointError(
            f"the index in {folder} fails: {reason}; everything that was committed is safe unless its files were "
            "modified. If they were, rebuild it from its documents"
        ) from error
