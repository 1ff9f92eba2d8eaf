"""Many machines, one line: the same work as elsewhere, as Ray Data jobs.

    embed   files ─► readers ─► shards of texts ─► workers ─► Parquet, a file a shard
    index   files ─► one reader ─► groups of documents ─► workers ─► passages and vectors ─► this process, which commits

Readers are Ray tasks, workers are Ray actors, one a device.

A shard is some rows of one file, and depends on that file alone. A worker gives a shard's file its name when all of it
is on the disk, so that it is there whole or not at all; a shard that is made twice, because a worker was lost, is the
same file. A few tens of shards are on their way at a time, however large the input is: readers wait for workers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from bertie._version import __version__
from bertie.data.progress import Progress
from bertie.data.readers import Format, Row, chunks, looks_like_data, open_table, text_of
from bertie.errors import BertieError, ConfigError, ExistsError, InputError, MissingPackageError, NotFoundError

if TYPE_CHECKING:
    from bertie.search.documents import Options, Paths
    from bertie.search.index import Changed, Index
    from bertie.search.passages import Document, Entry
    from bertie.tasks.embed import Embedding

ROWS_A_SHARD = 16_384
RETRIES = 3  # of a shard whose worker died, or could not write
SECONDS_TO_CONNECT, SECONDS_TO_JOIN = 10.0, 60.0
OBJECT_STORE = 1 << 30  # bytes, of a local cluster: room for some tens of shards on their way
THREADS = 4  # of a worker without a GPU: a small model gains little from more
MANIFEST, TEXTS, PART = "manifest.json", "texts.jsonl", ".part"
SHARD = re.compile(r"\d{5}-\d{6}\.parquet")
BEGUN = re.compile(rf"({MANIFEST}|{TEXTS}|{SHARD.pattern}\.[0-9a-f]{{32}}){PART}")


@dataclass(frozen=True, slots=True)
class Shards:
    """A folder of Parquet files, whose names are in the order of the input."""

    folder: Path
    rows: int
    shards: int


def embed(
    texts: Iterable[Path] | Iterable[str],
    out: str | Path,
    model: str | Path | None = None,
    *,
    address: str | None = None,
    column: str | None = None,
    format: Format | None = None,
    prompt: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    rows: int = ROWS_A_SHARD,
    device: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **options: Any,
) -> Shards:
    """Embed files, or texts, on a Ray cluster: into a folder of Parquet files of about `rows` rows each.

    >>> done = embed([Path("a.jsonl"), Path("b.csv.gz")], "vectors", column="review")       # doctest: +SKIP
    >>> polars.scan_parquet(done.folder / "*.parquet")                                      # doctest: +SKIP

    A `Path` is a file, a `str` is a text. The files, `out` and the model's folder must have the same names on every
    machine of the cluster. `options` are those of `Embedder.load` but for the device; vectors are the same as there.

    `address`: "local" or None starts a cluster of this machine alone; `host:port` or `auto` joins one that this machine
    belongs to; one that this process is connected to already is taken as it is. `workers`: one for each GPU of the
    cluster; if it has none, or `device` is "cpu", as many as its cores allow with `threads` each.

    `resume` goes on with a folder that was begun with the same settings: what is there is not made again.
    """
    _packages()
    _check_numbers(rows=rows, workers=workers, threads=threads)
    _check_device(device)

    from bertie.tasks.base import CHARACTERS_AT_ONCE, ITEMS_AT_ONCE

    model, dimension = _checked(model, prompt, options)
    with _Folder(Path(out), resume=resume, overwrite=overwrite) as folder:
        sources = folder.sources(texts, column, format)
        asked = {"bertie": __version__, "model": model, "model_files": _digest(model), "prompt": prompt, "rows": rows}
        asked |= options | {"dimension": dimension}
        if (done := folder.agree(asked | {"input": [asdict(source) for source in sources]})) is not None:
            return done
        with _cluster(address) as ray:
            workers, threads = _devices(ray, device, workers, threads)
            folder.begin()
            plan = _Plan(version=__version__, model=model, options=options, threads=threads, prompt=prompt, rows=rows)
            plan = replace(plan, folder=str(folder.path), chunk=(ITEMS_AT_ONCE, CHARACTERS_AT_ONCE))
            reports = _job(ray, sources, _shards, _Embed, plan, workers)
            return folder.end(reports, [source.size for source in sources])


def index(
    into: Index,
    paths: Paths,
    *,
    address: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **options: Unpack[Options],
) -> Changed:
    """As `Index.refresh`, with a Ray cluster to cut and embed: the same passages, vectors and order of commits.

    >>> index(Index.open("my-index"), "docs/", address="auto")                              # doctest: +SKIP
    Changed(added=120, changed=0, unchanged=0, deleted=0, passages=913)

    This process is the one that writes, so that a kill leaves what was committed. Cluster and workers are as in
    `embed`. Files and model must have the same names on every machine; where the index is matters to this one alone.
    """
    from bertie.search.documents import Changes
    from bertie.search.index import Index

    _packages()
    _check_numbers(workers=workers, threads=threads)
    _check_device(device)
    skipped = options.pop("skipped", None)
    known = list(into.store.documents())
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    paths = [os.path.abspath(path) for path in several]  # a worker is somewhere else
    Changes(paths, known, **options)  # what is wrong with the options is said now
    model, given = into.about["model"], {}
    if (task := into._embedder) is not None:
        model = task.checkpoint.source
        given = {"long": task.long, "normalize": task.normalize, "dimensions": task.dimensions}
    with _cluster(address) as ray:
        workers, threads = _devices(ray, device, workers, threads)
        plan = _Plan(version=__version__, model=_name(model), options=given, threads=threads)
        plan = replace(plan, about=dict(into.about), dimension=into.store.dimension)
        tail = _Tail()
        made: deque[Entry] = deque()

        class Here(Index):
            """One that finds its entries made."""

            progress = into.progress

            def _entries(self, documents: Sequence[Document]) -> list[Entry]:
                return [made.popleft() for _ in documents]

        def documents() -> Iterator[Document]:
            nonlocal tail
            for one in _job(ray, [_Files(paths, known, options)], _groups_of, _Cut, plan, workers, ordered=True):
                if isinstance(one, _Tail):
                    tail = one
                    continue
                made.extend(one)
                yield from [entry.document for entry in one]

        counts = Here(into.store)._put(documents(), {}, lambda: tail.gone)
    for path, reason in tail.skipped:
        if skipped is not None:
            skipped(path, reason)
    return replace(counts, added=tail.added, changed=tail.changed, unchanged=tail.unchanged)


# --- what the machines tell each other ---


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that is read."""

    number: int
    name: str
    size: int
    version: str  # another one if the file changes
    kind: Format | None
    column: str
    id: str | None  # whether ids are "int" or "str", in all files alike; None: no file has any


@dataclass(frozen=True, slots=True)
class _Plan:
    """What readers and workers are told."""

    version: str
    model: str
    options: dict[str, Any]
    threads: int | None  # None: on a GPU
    # To embed:
    prompt: str | None = None
    folder: str = ""
    rows: int = ROWS_A_SHARD
    chunk: tuple[int, int] = (0, 0)  # rows and characters, as elsewhere: the same batches give the same last bit
    # To index, of the index:
    about: dict[str, Any] = field(default_factory=dict)
    dimension: int = 0


@dataclass(frozen=True, slots=True)
class _Shard:
    """Some rows of a file, on their way to a worker; without texts if their vectors are there already."""

    source: _Source
    name: str
    first: int
    rows: int
    texts: list[str]
    ids: list[str | int | None]
    read: float | None  # what part of the file was read when these were

    @property
    def what(self) -> str:
        """As errors call it."""
        return f"{self.source.name}, rows {self.first} to {self.first + self.rows - 1}"


@dataclass(frozen=True, slots=True)
class _Report:
    """A shard is there."""

    source: int
    rows: int
    read: float | None


@dataclass(frozen=True, slots=True)
class _Files:
    """Files to index, and what the index has of them."""

    paths: Paths
    known: list[tuple[str, str | None, str]]
    options: Options


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents that are cut and embedded together."""

    name: str
    documents: list[Document]

    @property
    def what(self) -> str:
        """As errors call it."""
        return f"documents {self.documents[0].id!r} to {self.documents[-1].id!r}"


@dataclass(frozen=True, slots=True)
class _Tail:
    """All files were read: what a reader knows only then."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    gone: Sequence[str] = ()
    skipped: Sequence[tuple[str, str]] = ()
    name: str = "tail"
    what: str = "the end of the files"  # as errors call it


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of an index that is elsewhere, what its vectors depend on."""

    about: dict[str, Any]
    dimension: int


# --- the job ---


def _job(
    ray: Any,
    sources: Sequence[Any],
    read: Callable[[Any, _Plan], Iterator[Any]],
    worker: type[_Worker],
    plan: _Plan,
    workers: int,
    *,
    ordered: bool = False,
) -> Iterator[Any]:
    """What the workers make of what the readers read, as it comes, or in order."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # each shard is a block of its own, and a block is what a worker gets
    context.raise_original_map_exception = True
    context.actor_task_retry_on_errors = [OSError]
    context.max_consecutive_actor_init_deaths = RETRIES
    context.execution_options.preserve_order = ordered
    # Ray gives what a worker had when it died to the next one, however often that happens: so we count.
    tries = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Tries).remote()
    device = {"num_gpus": 1} if plan.threads is None else {"num_cpus": plan.threads}
    with ray.data.DataContext.current(context):
        rows = (
            ray.data.from_items([{"cell": pickle.dumps(one)} for one in sources], override_num_blocks=len(sources))
            .flat_map(
                _reading,
                fn_args=(read, plan),
                num_cpus=0,  # workers may have all of them
                compute=ray.data.TaskPoolStrategy(min(len(sources), workers + 1)),
            )
            .map(
                worker,
                fn_constructor_args=(plan, tries),
                # The second waits where the first is worked on, so that no worker waits for its next.
                compute=ray.data.ActorPoolStrategy(
                    min_size=1, max_size=workers, initial_size=workers, max_tasks_in_flight_per_actor=2
                ),
                **device,
            )
        )
        try:
            for row in rows.iter_rows():
                one = pickle.loads(row["cell"])
                if isinstance(one, BertieError):
                    raise one
                yield one
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            why = next(iter(str(cause).strip().splitlines()), "")
            raise BertieError(f"the Ray job failed: {type(cause).__name__}: {why}") from error
        finally:
            ray.kill(tries)


def _reading(row: dict[str, bytes], read: Callable[[Any, _Plan], Iterator[Any]], plan: _Plan) -> Iterator[Any]:
    """A reader: in one cell each, what it read, or the error that ended it."""
    try:
        if plan.version != __version__:
            raise ConfigError(
                f"the cluster has bertie {__version__}, and this machine {plan.version}; install the same"
            )
        for one in read(pickle.loads(row["cell"]), plan):
            yield {"cell": pickle.dumps(one)}
    except BertieError as error:
        yield {"cell": pickle.dumps(error)}


def _shards(source: _Source, plan: _Plan) -> Iterator[_Shard]:
    """A file, cut where chunks end: the chunks are those of one machine that reads all of it."""
    table = open_table(source.name, source.kind)
    extra = ["id"] if "id" in table.columns and source.column != "id" else []
    rows = enumerate(table.rows([source.column, *extra]), 1)
    items = ((number, row, text_of(table, number, row, source.column)) for number, row in rows)
    some: list[tuple[int, Row, Any]] = []
    count = 0

    def shard() -> _Shard:
        name = f"{source.number:05}-{count:06}.parquet"
        there = _is_whole(Path(plan.folder, name), len(some))
        return _Shard(
            source,
            name,
            some[0][0],
            len(some),
            [] if there else [text for _, _, text in some],
            [] if there or source.id is None else [row.get("id") for _, row, _ in some],
            table.fraction(),
        )

    for chunk in chunks(items, *plan.chunk):
        some += chunk
        if len(some) >= plan.rows:
            yield shard()
            some, count = [], count + 1
    if some:
        yield shard()


def _groups_of(files: _Files, plan: _Plan) -> Iterator[_Group | _Tail]:
    """What is new or has changed, in the groups that one machine would make."""
    from bertie.search.documents import Changes
    from bertie.search.index import _groups

    skipped: list[tuple[str, str]] = []
    options: Options = {**files.options, "skipped": lambda *why: skipped.append(why)}
    changes = Changes(files.paths, files.known, **options)
    for number, documents in enumerate(_groups(changes)):
        yield _Group(str(number), documents)
    yield _Tail(changes.added, changes.changed, changes.unchanged, changes.gone, skipped)


def _is_whole(path: Path, rows: int) -> bool:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return bool(parquet.read_metadata(path).num_rows == rows)
    except (OSError, pa.ArrowException):
        return False


class _Tries:
    """How often each shard was begun, all workers together."""

    def __init__(self) -> None:
        self._begun: dict[str, int] = {}

    def begin(self, name: str) -> int:
        self._begun[name] = self._begun.get(name, 0) + 1
        return self._begun[name]


class _Worker(ABC):
    """What was read in, what was made of it out; or the error of either, which tells more than a worker that died."""

    def __init__(self, plan: _Plan, tries: Any) -> None:
        import torch

        from bertie.tasks import Embedder

        self.plan, self._tries = plan, tries
        self._error: BertieError | None = None
        if plan.threads is not None:
            torch.set_num_threads(plan.threads)
        try:
            device = "cuda" if plan.threads is None else "cpu"
            self.task = Embedder.load(plan.model, device=device, **plan.options)
        except BertieError as error:
            self._error = error

    def __call__(self, row: dict[str, bytes]) -> dict[str, bytes]:
        one = pickle.loads(row["cell"])
        if isinstance(one, BertieError):
            return row
        try:
            if self._error is not None:
                raise self._error
            import ray

            if ray.get(self._tries.begin.remote(one.name)) > 1 + RETRIES:
                raise BertieError(
                    f"{one.what}: {1 + RETRIES} workers died or could not write; is there too little memory, or room "
                    "on the disk?"
                )
            found: object = self.work(one)
        except BertieError as error:
            found = error
        return {"cell": pickle.dumps(found)}

    @abstractmethod
    def work(self, one: Any) -> object:
        """Make something of it."""


class _Embed(_Worker):
    """A shard in, a Parquet file on the disk and a report out."""

    def work(self, one: _Shard) -> _Report:
        if one.texts:
            self._write(one)
        return _Report(one.source.number, one.rows, one.read)

    def _write(self, shard: _Shard) -> None:
        import numpy as np
        import pyarrow as pa
        from pyarrow import parquet

        found: list[Embedding] = []
        for chunk in chunks(((i, {}, text) for i, text in enumerate(shard.texts, shard.first)), *self.plan.chunk):
            try:
                found += self.task.embed_each([text for _, _, text in chunk], prompt=self.plan.prompt)
            except InputError as error:
                raise self._blamed(shard, chunk, error) from None
        vectors = pa.array(np.concatenate([one.vector for one in found]))  # (rows, dimension) -> flat
        columns = {
            "file": pa.array([shard.source.name] * shard.rows),
            "row": pa.array(range(shard.first, shard.first + shard.rows), pa.int64()),
            "id": _ids(shard),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, self.task.dimension),
            "tokens_total": pa.array([one.tokens_total for one in found], pa.int64()),
            "tokens_read": pa.array([one.tokens_read for one in found], pa.int64()),
            "windows": pa.array([one.windows for one in found], pa.int64()),
        }
        table = pa.table({name: column for name, column in columns.items() if column is not None})
        final = Path(self.plan.folder, shard.name)
        part = final.with_name(f"{shard.name}.{uuid.uuid4().hex}{PART}")
        # Numbers of vectors hardly ever repeat: neither compression nor a dictionary pays.
        parquet.write_table(table, part, compression="none", use_dictionary=["file"])
        _put(part, final)

    def _blamed(self, shard: _Shard, chunk: Sequence[tuple[int, Row, str]], error: InputError) -> InputError:
        """The same error with the row that it comes from."""
        for number, _, text in chunk:
            try:
                list(self.task.embed_each([text], prompt=self.plan.prompt))
            except InputError as own:
                return InputError(f"{shard.source.name}, row {number}: {str(own).replace('text 0', 'the text', 1)}")
        return error


class _Cut(_Worker):
    """Documents in, their passages and vectors out."""

    def work(self, one: _Group | _Tail) -> list[Entry] | _Tail:
        if isinstance(one, _Tail):
            return one
        return self._index._entries(one.documents)

    @cached_property
    def _index(self) -> Index:
        from bertie.search.index import Index

        facts: Any = _Facts(self.plan.about, self.plan.dimension)
        return Index(facts, self.task)  # which checks that the model is the same here


def _ids(shard: _Shard) -> Any:
    import pyarrow as pa

    kind = shard.source.id
    if kind is None:
        return None
    for number, value in enumerate(shard.ids, shard.first):
        if not isinstance(value, str | int | None) or (kind == "int" and isinstance(value, str)):
            wanted = "a whole number, as the first one" if kind == "int" else "text or a whole number"
            raise InputError(f"{shard.source.name}, row {number}: id {value!r:.40} must be {wanted}")
    if kind == "int":
        return pa.array(shard.ids, pa.int64())
    return pa.array([None if value is None else str(value) for value in shard.ids], pa.string())


def _put(part: Path, final: Path) -> None:
    """Give a file its name when it is on the disk."""
    _sync(part)
    os.replace(part, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- the folder ---


class _Folder:
    """Shards, and a manifest that says what was asked and, at the end, that all are there. One process at a time."""

    def __init__(self, path: Path, *, resume: bool, overwrite: bool) -> None:
        self.path, self._resume, self._overwrite = path.absolute(), resume, overwrite
        self._manifest = self.path / MANIFEST
        self._before: dict[str, Any] | None = None
        self._asked: dict[str, Any] = {}
        self._lock = -1
        self._new = not self.path.exists()

    def __enter__(self) -> Self:
        if self.path.exists() and not self.path.is_dir():
            raise ExistsError(f"{self.path} is a file; name a folder")
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InputError(f"{self.path} cannot be made: {error.strerror}") from None
        self._take()
        try:
            self._check()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._tidy()
        if self._new:
            with suppress(OSError):  # there is something in it
                self.path.rmdir()
        os.close(self._lock)

    def _take(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"{self.path} is being written by another process") from None

    def _check(self) -> None:
        try:
            self._before = json.loads(self._manifest.read_text("utf-8"))
            _ = self._before["asked"], self._before["shards"]
        except FileNotFoundError:
            names = [name for name in os.listdir(self.path) if name != TEXTS and not BEGUN.fullmatch(name)]
            if not all(map(SHARD.fullmatch, names)):
                raise ExistsError(f"{self.path} holds other files; name a new folder") from None
            if names and not self._overwrite:
                raise ExistsError(
                    f"{self.path} holds shards of no known run; pass overwrite=True, or another name"
                ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{self._manifest} is damaged ({error}); delete the folder to begin anew") from None
        if self._before is not None and not self._resume and not self._overwrite:
            if self._before["shards"] is not None:
                raise ExistsError(f"{self.path} is there already; pass overwrite=True, or another name")
            raise ExistsError(
                f"{self.path} holds a run that was stopped; pass resume=True to go on with it, or overwrite=True to "
                "begin anew"
            )

    def sources(self, texts: Iterable[Path] | Iterable[str], column: str | None, kind: Format | None) -> list[_Source]:
        """The files to read, each looked into; texts are put into one."""
        if isinstance(texts, str | bytes | Path):
            raise InputError(f"embed takes a list of files or of texts, not {type(texts).__name__}; put it into a list")
        given: list[Path] | list[str] = list(texts)  # type: ignore[assignment]
        if not given:
            raise InputError("no file and no text was given: there is nothing to do")
        if all(isinstance(one, Path) for one in given):
            return _looked_into([str(Path(one).resolve()) for one in given], column, kind)
        for one in given:
            if not isinstance(one, str):
                raise InputError(f"{one!r:.60} is neither a text nor a Path; give only texts, or only files as Path")
            if len(one) < 4096 and looks_like_data(one) and os.path.exists(one):
                raise InputError(f"{one!r} is a text here, and there is a file of this name; give it as Path({one!r})")
        part = self.path / f"{TEXTS}{PART}"
        digest = hashlib.sha256()
        with open(part, "w", encoding="utf-8") as file:
            for one in given:
                line = json.dumps({"text": one}) + "\n"
                digest.update(line.encode())
                file.write(line)
        size = part.stat().st_size
        return [_Source(0, str(self.path / TEXTS), size, digest.hexdigest()[:16], "jsonl", "text", None)]

    def agree(self, asked: dict[str, Any]) -> Shards | None:
        """Check that what is there, if it is gone on with, is what is asked for; and return it, if it is all of it."""
        self._asked = json.loads(json.dumps(asked))
        if self._before is None or not self._resume:
            return None
        before = self._before["asked"]
        for key in {**self._asked, **before}:
            if self._asked.get(key) != before.get(key):
                raise InputError(
                    f"{self.path} was made with {key}={before.get(key)!r:.200}, and now it is "
                    f"{self._asked.get(key)!r:.200}; ask for the same, or name another folder"
                )
        if self._before["shards"] is None:
            return None
        return Shards(self.path, self._before["rows"], self._before["shards"])

    def begin(self) -> None:
        """From here on it is the folder of what is asked."""
        if self._before is None or not self._resume:
            self._manifest.unlink(missing_ok=True)  # first: without it, what is left over belongs to no one
            for name in os.listdir(self.path):
                if SHARD.fullmatch(name):
                    (self.path / name).unlink()
        texts = self.path / f"{TEXTS}{PART}"
        if texts.exists():
            _put(texts, self.path / TEXTS)
        self._tidy()
        self._enter(None, None)

    def _tidy(self) -> None:
        """Away with what was begun and not ended."""
        for name in os.listdir(self.path):
            if BEGUN.fullmatch(name):
                (self.path / name).unlink(missing_ok=True)

    def end(self, reports: Iterable[_Report], sizes: Sequence[int]) -> Shards:
        """Wait until all is there."""
        read = [0.0] * len(sizes)
        rows = shards = 0
        try:
            with Progress("embed", lambda: sum(map(float.__mul__, read, map(float, sizes))) / sum(sizes)) as progress:
                for report in reports:
                    rows, shards = rows + report.rows, shards + 1
                    read[report.source] = max(read[report.source], report.read or 0.0)
                    progress.update(report.rows)
        except BaseException as error:
            if safe := self._count():
                error.add_note(f"{safe:,} shards are safe in {self.path}, resume=True goes on after them")
            raise
        if shards != self._count():
            raise BertieError(
                f"{shards} shards were made and {self._count()} are in {self.path}; do all machines see it?"
            )
        self._enter(rows, shards)
        return Shards(self.path, rows, shards)

    def _count(self) -> int:
        return sum(SHARD.fullmatch(name) is not None for name in os.listdir(self.path))

    def _enter(self, rows: int | None, shards: int | None) -> None:
        part = self._manifest.with_name(MANIFEST + PART)
        part.write_text(json.dumps({"asked": self._asked, "rows": rows, "shards": shards}, indent=1), "utf-8")
        _put(part, self._manifest)


def _looked_into(names: Sequence[str], column: str | None, kind: Format | None) -> list[_Source]:
    """Every file can be read and has the column: known before any work is done."""
    found = []
    for number, name in enumerate(names):
        table = open_table(name, kind)
        if table.size is None:
            raise InputError(f"{name} is no plain file; its rows could not be read again after a failure")
        text = table.column(["text"], column, "column=", only=True)
        ids = None
        if "id" in table.columns and text != "id":
            ids = "int" if isinstance(next(iter(table.rows(["id"])))["id"], int) else "str"
        version = str(os.stat(name).st_mtime_ns)
        found.append(_Source(number, name, table.size, version, kind, text, ids))
    kinds = {source.id for source in found} - {None}
    ids = "str" if "str" in kinds else next(iter(kinds), None)
    return [replace(one, id=ids) for one in found]


# --- the cluster ---


def _check_numbers(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")


def _check_device(device: str | None) -> None:
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device={device!r} must be cpu or cuda: which of several GPUs a worker gets is Ray's choice")


def _packages() -> Any:
    try:
        import pyarrow.parquet  # noqa: F401
        import ray
        import ray.data
    except ImportError as error:
        raise MissingPackageError(f"Ray jobs need the package {error.name}: pip install 'bertie[ray]'") from None
    return ray


@contextmanager
def _cluster(address: str | None) -> Iterator[Any]:
    """The cluster that there is, or is asked for; what was started or connected to here is left here."""
    ray = _packages()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    # What Ray's core says of its own doings: of every pool of workers, that they could perhaps not begin anew.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        if address in (None, "local"):
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE, **quiet)
        else:
            assert address is not None
            _reachable(address)
            ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, BertieError):
            raise
        raise _nobody(address or "local", next(iter(str(error).splitlines()), type(error).__name__)) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reachable(address: str) -> None:
    """Ray itself would try without end, and could not be stopped: so another process tries first."""
    if address.startswith("ray://"):
        raise InputError(
            f"address={address!r}: Ray Data does not run through Ray's client; run this on a machine of the cluster "
            "with auto or host:port, or hand it over with ray job submit"
        )
    if address != "auto":
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InputError(f"address={address!r} must be local, auto or host:port")
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            raise _nobody(address, str(error)) from None
    command = [sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_JOIN)
    except subprocess.TimeoutExpired:
        raise _nobody(address, f"no answer in {SECONDS_TO_JOIN:.0f} s") from None
    if done.returncode:
        why = next(iter(done.stderr.strip().splitlines()[-1:]), "it was refused")
        raise _nobody(address, f"{why}; if it asks for a token, set RAY_AUTH_MODE=token")


def _nobody(address: str, why: str) -> NotFoundError:
    return NotFoundError(
        f"no Ray cluster answers at {address!r} ({why}); start one with ray start --head, or use local"
    )


def _devices(ray: Any, device: str | None, workers: int | None, threads: int | None) -> tuple[int, int | None]:
    """How many workers there can be, and with how many threads each; None: each with a GPU."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device == "cuda" and not gpus:
        raise InputError("device='cuda': no machine of the cluster has a GPU; use cpu")
    if device != "cpu" and gpus:
        return min(workers or gpus, gpus), None
    cores = [int(node.get("CPU", 0)) for node in nodes]
    threads = threads or max(1, min(THREADS, *cores, max(cores)))
    most = sum(count // threads for count in cores)
    if not most:
        raise InputError(f"threads={threads}: the largest machine of the cluster has {max(cores)} cores")
    return min(workers or most, most), threads


# --- the model ---


def _checked(model: str | Path | None, prompt: str | None, options: dict[str, Any]) -> tuple[str, int]:
    """The model's name on all machines, and the length of its vectors; what is wrong with the options is said now."""
    from bertie.hub import Checkpoint
    from bertie.tasks import Embedder
    from bertie.tasks.base import default_model

    name = _name(default_model() if model is None else model)
    mine = {key: value for key, value in options.items() if key in ("long", "pooling", "normalize", "dimensions")}
    rest = {key: value for key, value in options.items() if key not in mine}
    task = Embedder(Checkpoint.inspect(name, **rest), **mine)
    list(task.embed_each([], prompt=prompt))
    return name, task.dimension


def _name(model: str | Path) -> str:
    """The same wherever a worker runs."""
    return str(Path(model).resolve()) if os.path.isdir(model) else str(model)


def _digest(model: str) -> str | None:
    """Of a folder: another one if what is in it changes."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".safetensors", ".bin", ".json", ".txt", ".model"):
            with open(file, "rb") as data:
                digest.update(
                    f"{file.relative_to(folder)} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode()
                )
    return digest.hexdigest()[:16]
