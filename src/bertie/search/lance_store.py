"""Passages in a folder of LanceDB's: for more of them than memory holds.

    index.json        what the index was made with, and which version of the table counts
    passages.lance    one table, a row a passage; LanceDB never changes a file of it, and keeps old versions
    writer.lock       held while somebody writes

A commit deletes and adds rows, each of which makes a version of the table that nobody looks at; then it replaces
index.json, and all is seen at once. Versions after the one that counts are what a kill left: the next writer goes back.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from bertie.data.atomic import atomic_rename, fsync
from bertie.errors import (
    BertieError,
    CheckpointError,
    ExistsError,
    InputError,
    MissingPackageError,
    NotFoundError,
)
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

FORMAT = 2  # of the folder
EXACT = 50_000  # passages, of all or of those that a filter leaves: up to here, every vector is looked at
STATE, LOCK, TABLE = "index.json", "writer.lock", "passages"
PROBES, REFINE = 128, 5  # lists that are looked into, and candidates for each passage that is asked for
FEW = 100  # commits: each makes files of its own, and after so many they are joined
KEEP, ALWAYS = timedelta(hours=1), timedelta(days=36_500)  # what no longer counts, for readers in the midst of it


@dataclass(frozen=True)
class _State:
    """What index.json holds."""

    format: int
    dimension: int
    about: Mapping[str, Any]
    version: int  # of the table
    generation: int
    next: int  # the key of the next row
    passages: int


class LanceStore:
    """An index in a folder of LanceDB's, which reads vectors and texts from the disk as it needs them.

    Up to 50,000 passages search is exact; from there on `optimize` builds an index of inverted lists with short
    codes, whose candidates are compared by their full vectors. Writers wait for each other, and readers for nobody.

        store = LanceStore.create("texts.lance", dimension=384, about={"model": "…"})
        store.commit([EmbeddedDocument(document, passages, vectors)])
        LanceStore.open("texts.lance").nearest(queries, k=10)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._opened: tuple[_State, Any] | None = None
        self._closed = False
        _read(self.folder)  # before LanceDB, which would make the folder
        self._database = _packages()[0].connect(self.folder)
        state, _ = self._look()
        self.dimension: int = state.dimension
        self.about: Mapping[str, Any] = state.about

    @classmethod
    def create(cls, folder: str | Path, dimension: int, about: Mapping[str, Any]) -> LanceStore:
        """Make an empty one. The folder must be empty, or not there."""
        lancedb, _ = _packages()
        folder = Path(folder)
        if dimension < 1:
            raise InputError(f"dimension={dimension} must be at least 1")
        if folder.is_file() or (folder / STATE).exists():
            raise ExistsError(f"{folder} is there already; pass another name")
        ours = {LOCK, f"{TABLE}.lance", f"{STATE}.new"}  # what a kill may have left
        if folder.is_dir() and any(file.name not in ours for file in folder.iterdir()):
            raise ExistsError(f"{folder} holds other files; an index needs a folder of its own")
        _refuse_orphans(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder} cannot be made: {error.strerror}") from None
        with _lock(folder), _blamed(folder):
            shutil.rmtree(folder / f"{TABLE}.lance", ignore_errors=True)
            table = lancedb.connect(folder).create_table(TABLE, schema=_schema(dimension))
            _publish(folder, _State(FORMAT, dimension, dict(about), table.version, 0, 1, 0), time.time())
        return cls(folder)

    @classmethod
    def open(cls, folder: str | Path) -> LanceStore:
        """One that is there."""
        return cls(folder)

    def close(self) -> None:
        """Give back what is held."""
        self._opened, self._closed = None, True

    # --- reading ---

    @property
    def generation(self) -> int:
        """Grows with each commit."""
        return self._look()[0].generation

    def __len__(self) -> int:
        return self._look()[0].passages

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Id, source and version of each document."""
        _, table = self._look()
        names = ["document", "source", "version"]
        with _blamed(self.folder):
            for batch in table.search().where("place <= 0").select(names).to_batches(batch_size=2000):
                yield from zip(*(batch[name].to_pylist() for name in names), strict=True)

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Key and text of each passage, in the order of keys, of those above `after`."""
        _, table = self._look()
        keys = self._keys(table, f"place >= 0 AND key > {after}")
        with _blamed(self.folder):
            for start in range(0, len(keys), 20_000):  # rows may lie in any order
                some = keys[start : start + 20_000]
                rows = table.search().where(f"key BETWEEN {some[0]} AND {some[-1]} AND place >= 0")
                rows = rows.select(["key", "text"]).to_arrow().sort_by("key")
                yield from zip(rows["key"].to_pylist(), rows["text"].to_pylist(), strict=True)

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Passages by their keys, in that order. Those that are gone, as while others write, are left out."""
        wanted = [int(key) for key in keys]
        if not wanted:
            return []
        _, table = self._look()
        names = ["key", "document", "start", "end", "text", "headings", "metadata", "source", "checksum"]
        with _blamed(self.folder):
            among = ", ".join(map(str, set(wanted)))
            rows = table.search().where(f"key IN ({among}) AND place >= 0").select([*names, "vector"]).to_arrow()
        found = {}
        for row, vector in zip(rows.select(names).to_pylist(), self._vectors(rows), strict=True):
            passage = Passage(row["document"], row["start"], row["end"], row["text"], tuple(row["headings"]))
            if _row_sum(passage, vector) != row["checksum"]:  # LanceDB has none
                raise CheckpointError(
                    f"the index in {self.folder} is damaged: a passage of {passage.document!r} is not what was "
                    "written; put back a copy of the folder, or make it anew from its documents"
                )
            found[row["key"]] = StoredPassage(row["key"], passage, json.loads(row["metadata"]), row["source"])
        return [found[key] for key in wanted if key in found]

    def allowed(self, where: Sequence[MetadataFilter]) -> Keys:
        """The keys of all passages whose document meets the conditions."""
        return self._keys(self._look()[1], _sql(where))

    def nearest(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Of each query, the keys of its k nearest passages by inner product, best first, and how near they are."""
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_queries(queries, k, self.dimension)
        state, table = self._look()
        condition = _sql(where) if where else None
        with _blamed(self.folder):
            count = table.count_rows(condition) if where else state.passages
            return [self._nearest(table, query, min(k, count), condition, count <= EXACT) for query in queries]

    def _nearest(
        self, table: Any, query: FloatArray, k: int, condition: str | None, exact: bool
    ) -> tuple[Keys, FloatArray]:
        if not k:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        search = table.search(query, vector_column_name="vector").distance_type("dot")
        search = search.select(["key", "vector", "_distance"]).limit(k)
        search = search.where(condition, prefilter=True) if condition else search
        search = search.bypass_vector_index() if exact else search.nprobes(PROBES).refine_factor(REFINE)
        rows = search.to_arrow()
        if len(rows) < k and not exact:  # the lists that were looked into hold too few that are allowed
            return self._nearest(table, query, k, condition, exact=True)
        keys = rows["key"].to_numpy()
        scores = self._vectors(rows) @ query
        order = np.lexsort((keys, -scores))
        return keys[order], scores[order]

    def _vectors(self, rows: Any) -> FloatArray:
        """(n, D) of a result."""
        flat: FloatArray = rows["vector"].combine_chunks().flatten().to_numpy()
        return flat.reshape(len(rows), self.dimension)

    def _keys(self, table: Any, condition: str) -> Keys:
        with _blamed(self.folder):
            return np.sort(table.search().where(condition).select(["key"]).to_arrow()["key"].to_numpy())

    def _look(self) -> tuple[_State, Any]:
        """The table as of the last commit: one that stays as it is, however many follow."""
        if self._closed:
            raise InputError(f"the index in {self.folder} has been closed")
        state = _read(self.folder)
        opened = self._opened
        if opened is None or opened[0] != state:
            with _blamed(self.folder):
                table = self._database.open_table(TABLE)
                table.checkout(state.version)
            self._opened = opened = state, table
        return opened

    # --- writing ---

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, all at once or not at all."""
        check_documents(put, self.dimension)
        ids = [*(entry.document.id for entry in put), *delete]
        with self._writing() as (state, table):
            since = time.time()
            rows = _rows(put, state.next, self.dimension)
            removed = 0
            if ids:
                old = f"document IN ({', '.join(map(_quoted, ids))})"
                places = table.search().where(old).select(["place"]).to_arrow()["place"].to_numpy()
                removed = int((places >= 0).sum())
                if len(places):
                    table.delete(old)
            if put:
                table.add(rows)
            state = replace(
                state,
                version=table.version,
                generation=state.generation + 1,
                next=state.next + len(rows),
                passages=state.passages - removed + sum(len(entry.passages) for entry in put),
            )
            _publish(self.folder, state, since)
            if state.generation % FEW == 0:
                self._join(state, table)

    def optimize(self, whole: bool = False) -> None:
        """Join small files, and build what search goes through, or build it anew."""
        from lancedb.index import BTree

        with self._writing() as (state, table):
            since = time.time()
            built = {index.name for index in table.list_indices()}
            if state.passages > EXACT:
                for name in ("key", "document"):
                    if f"{name}_idx" not in built:
                        table.create_index(name, config=BTree())
                if whole or "vector_idx" not in built:
                    table.create_index("vector", config=_lists(state.passages, self.dimension))
                state = replace(state, version=table.version)
                _publish(self.folder, state, since)
            self._join(state, table)

    def _join(self, state: _State, table: Any) -> None:
        """Fewer and larger files; new rows go into what search goes through."""
        since, now = time.time(), datetime.now()
        table.optimize(cleanup_older_than=ALWAYS)
        state = replace(state, version=table.version)
        _publish(self.folder, state, since)
        # Only now, when the new version counts, may others go: those before the one that counted an hour ago.
        if old := [one["timestamp"] for one in table.list_versions() if now - one["timestamp"] > KEEP]:
            table.optimize(cleanup_older_than=now - max(old) + KEEP)
            _publish(self.folder, replace(state, version=table.version), since)

    @contextmanager
    def _writing(self) -> Iterator[tuple[_State, Any]]:
        """As the only one who writes."""
        self._look()
        with _lock(self.folder), _blamed(self.folder):
            state = _read(self.folder)
            table = self._database.open_table(TABLE)
            if table.version != state.version:
                table.checkout(state.version)
                table.restore()
            yield state, table


def _packages() -> tuple[Any, Any]:
    try:
        import lancedb
        import pyarrow
    except ImportError:
        raise MissingPackageError("an index of LanceDB's needs lancedb: pip install 'bertie[lance]'") from None
    return lancedb, pyarrow


# --- the folder ---


def _read(folder: Path) -> _State:
    try:
        values = json.loads((folder / STATE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        _refuse_orphans(folder)
        raise NotFoundError(f"{folder} holds no index of LanceDB's; LanceStore.create makes one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} cannot be read: {error}; put back a copy of it") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else values
        raise CheckpointError(f"{folder / STATE} is of format {found!r:.80}; this Bertie reads {FORMAT}")
    if values.pop("checksum", None) != _checksum(values):
        raise CheckpointError(f"{folder / STATE} is not what was written; put back a copy of it")
    try:
        return _State(**values)
    except TypeError as error:
        raise CheckpointError(f"{folder / STATE} is damaged: {error}; put back a copy of it") from None


def _refuse_orphans(folder: Path) -> None:
    """A table that has passages is not to be taken for what a kill left of making one."""
    if any((folder / f"{TABLE}.lance" / "data").glob("*")):
        raise CheckpointError(
            f"{folder / STATE} is not there, which says what counts of {TABLE}.lance; put back a copy of it, or remove "
            f"{folder} and make the index anew from its documents"
        )


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def _publish(folder: Path, state: _State, since: float) -> None:
    """Make a version of the table the one that counts, once all that was written for it is on the disk."""
    for file in (folder / f"{TABLE}.lance").rglob("*"):
        if file.stat().st_mtime >= since - 2:
            fsync(file)
    fresh = folder / f"{STATE}.new"
    values = asdict(state)
    fresh.write_text(json.dumps(values | {"checksum": _checksum(values)}))
    atomic_rename(fresh, folder / STATE)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until nobody else writes. The lock goes with the process, however that ends."""
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
def _blamed(folder: Path) -> Iterator[None]:
    try:
        yield
    except BertieError:
        raise
    except Exception as error:  # LanceDB raises all kinds, and for its panics one that is no other's
        why = re.sub(r", /\S+\.rs:\d+:\d+", "", (str(error) or type(error).__name__).splitlines()[0])[:300]
        raise CheckpointError(
            f"the index in {folder} fails: {why}; all that was committed is safe unless "
            "its files were changed. If they were, make it anew from its documents"
        ) from error


# --- rows ---


def _schema(dimension: int) -> Any:
    _, pa = _packages()
    columns = {
        "key": pa.int64(),
        "document": pa.string(),
        "place": pa.int32(),  # of the passage in its document, from 0 on; -1 for a document that has no passage
        "start": pa.int64(),
        "end": pa.int64(),
        "text": pa.string(),
        "headings": pa.list_(pa.string()),
        "source": pa.string(),
        "version": pa.string(),
        "metadata": pa.string(),  # as JSON
        "facts": pa.json_(),  # the same for filters, as `_fact` writes it
        "checksum": pa.int64(),  # of passage and vector
        "vector": pa.list_(pa.float32(), dimension),
    }
    return pa.schema(list(columns.items()))


def _lists(passages: int, dimension: int) -> Any:
    """How vectors are indexed: as many lists as each of them has rows, and codes of 4 bits a number."""
    from lancedb.index import IvfFlat, IvfRq

    lists: dict[str, Any] = {"distance_type": "dot", "num_partitions": math.isqrt(passages), "sample_rate": 64}
    return IvfRq(num_bits=4, **lists) if dimension % 8 == 0 else IvfFlat(**lists)  # codes go by the byte


def _rows(put: Sequence[EmbeddedDocument], key: int, dimension: int) -> Any:
    """New rows as a table, with keys from `key` on."""
    _, pa = _packages()
    rows: list[tuple[Any, ...]] = []
    for entry in put:
        document = entry.document
        metadata = json.dumps(dict(document.metadata))
        facts = json.dumps({name: _fact(value) for name, value in document.metadata.items()})
        none = (-1, Passage(document.id, 0, 0, ""))
        for place, passage in enumerate(entry.passages) if entry.passages else [none]:
            span = (passage.start, passage.end, passage.text, passage.headings)
            total = _row_sum(passage, entry.vectors[place]) if place >= 0 else 0
            rows.append((document.id, place, *span, document.source, document.version, metadata, facts, total))
    schema = _schema(dimension)
    blank = np.zeros((1, dimension), np.float32)
    vectors = np.concatenate([blank[:0], *(entry.vectors if entry.passages else blank for entry in put)])  # (rows, D)
    empty = np.array([row[1] < 0 for row in rows], bool)
    columns = [range(key, key + len(rows)), *(zip(*rows, strict=True) if rows else [()] * 11)]
    types = schema.types[:-1]  # vectors come last, and are no lists of Python's
    try:
        arrays = [pa.array(list(column), type) for column, type in zip(columns, types, strict=True)]
    except UnicodeEncodeError as error:
        raise InputError(f"a document holds half a character, which cannot be stored: {error}") from None
    flat = pa.array(vectors.ravel().astype(np.float32, copy=False))
    arrays.append(pa.FixedSizeListArray.from_arrays(flat, dimension, mask=pa.array(empty)))
    return pa.Table.from_arrays(arrays, schema=schema)


def _row_sum(passage: Passage, vector: FloatArray) -> int:
    words = repr((passage.text, passage.headings)).encode("utf-8", "surrogatepass")
    return zlib.crc32(np.asarray(vector, np.float32).tobytes(), zlib.crc32(words))


# --- metadata ---


def _fact(value: MetadataValue) -> str:
    """As text that has the order of values, after a letter that is its kind's."""
    this = value_type(value, "")
    if this == "text":
        return f"t{value}"
    if this == "truth":
        return f"b{int(value)}"
    (bits,) = struct.unpack(">Q", struct.pack(">d", float(value) + 0.0))  # + 0.0 makes -0.0 the same as 0.0
    bits = bits ^ 0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else bits | 1 << 63  # the order of floats as that of integers
    rest = value - int(float(value)) if isinstance(value, int) else 0  # of an integer that no float equals
    return f"n{bits:016x}{rest + 0x8000:04x}"


def _quoted(text: str) -> str:
    """A literal of SQL: LanceDB takes no values beside it. A quote is the only character with a meaning in it."""
    return "'" + text.replace("'", "''") + "'"


def _sql(where: Sequence[MetadataFilter]) -> str:
    """The passages whose documents meet the conditions."""
    return " AND ".join(["place >= 0", *map(_condition, where)])


def _condition(one: MetadataFilter) -> str:
    fact = f"json_get_string(facts, {_quoted(one.name)})"
    values = [_quoted(_fact(value)) for value in one.values]
    if one.op in ("=", "in"):
        return f"{fact} IN ({', '.join(values)})" if values else "false"
    if one.op == "!=":
        return f"({fact} IS NULL OR {fact} != {values[0]})"
    letter = values[0][1]
    other = f"< '{chr(ord(letter) + 1)}'" if one.op in (">", ">=") else f">= '{letter}'"  # where its kind ends
    return f"({fact} {one.op} {values[0]} AND {fact} {other})"
