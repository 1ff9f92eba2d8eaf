"""Fill an index with the help of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from bertie.cluster import connection, ray_job
from bertie.cluster.ray_job import EmbedderActor, JobConfig

if TYPE_CHECKING:
    from bertie.search.document_reader import Paths, ReadOptions
    from bertie.search.index import Index, IndexUpdate
    from bertie.search.records import Document, EmbeddedDocument


def index(
    into: Index,
    paths: Paths,
    *,
    address: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **options: Unpack[ReadOptions],
) -> IndexUpdate:
    """As `Index.refresh`, with a Ray cluster to cut and embed: the same passages, vectors and order of commits.

    >>> index(Index.open("my-index"), "docs/", address="auto")                              # doctest: +SKIP
    IndexUpdate(added=120, changed=0, unchanged=0, deleted=0, passages=913)

    This process is the one that writes, so that a kill leaves what was committed. Cluster and workers are as in
    `embed`. Files and model must have the same names on every machine; where the index is matters to this one alone.
    """
    from bertie.search.document_reader import FileChanges

    connection.check(device, workers=workers, threads=threads)
    skipped = options.pop("skipped", None)
    known = list(into.store.documents())
    several = [paths] if isinstance(paths, str | os.PathLike) else paths
    paths = [os.path.abspath(path) for path in several]  # a worker is somewhere else
    FileChanges(paths, known, **options)  # what is wrong with the options is said now
    model, given = into.about["model"], {}
    if (task := into.loaded) is not None:
        model = task.checkpoint.source
        given = {"long": task.overflow, "normalize": task.normalize, "dimensions": task.dimensions}
    with connection.connected(address) as ray:
        workers, threads = connection.devices(ray, device, workers, threads)
        plan = IndexPlan(
            model=ray_job.everywhere(model),
            options=given,
            threads=threads,
            about=dict(into.about),
            dimension=into.store.dimension,
        )
        tail = Tail()

        def made() -> Iterator[list[EmbeddedDocument]]:
            nonlocal tail
            for one in ray_job.run(ray, [Files(paths, known, options)], read, Cut, plan, workers, ordered=True):
                if isinstance(one, Tail):
                    tail = one
                else:
                    yield one

        counts = into.put(made(), gone=lambda: tail.gone)
    for path, reason in tail.skipped:
        if skipped is not None:
            skipped(path, reason)
    return replace(counts, added=tail.added, changed=tail.changed, unchanged=tail.unchanged)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlan(JobConfig):
    """As `JobConfig`, and of the index what its vectors depend on."""

    about: dict[str, Any]
    dimension: int


@dataclass(frozen=True, slots=True)
class Files:
    """Files to index, and what the index has of them."""

    paths: Paths
    known: list[tuple[str, str | None, str]]
    options: ReadOptions


@dataclass(frozen=True, slots=True)
class Group:
    """Documents that are cut and embedded together."""

    name: str
    documents: list[Document]

    @property
    def what(self) -> str:
        """As errors call it."""
        return f"documents {self.documents[0].id!r} to {self.documents[-1].id!r}"


@dataclass(frozen=True, slots=True)
class Tail:
    """All files were read: what a reader knows only then."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    gone: Sequence[str] = ()
    skipped: Sequence[tuple[str, str]] = ()
    name: str = "tail"
    what: str = "the end of the files"  # as errors call it


def read(files: Files, plan: IndexPlan) -> Iterator[Group | Tail]:
    """What is new or has changed, in the groups that one machine would make."""
    from bertie.search.document_reader import FileChanges
    from bertie.search.index import group_documents

    skipped: list[tuple[str, str]] = []
    options: ReadOptions = {**files.options, "skipped": lambda *why: skipped.append(why)}
    changes = FileChanges(files.paths, files.known, **options)
    for number, documents in enumerate(group_documents(changes)):
        yield Group(str(number), documents)
    yield Tail(changes.added, changes.changed, changes.unchanged, changes.gone, skipped)


class Cut(EmbedderActor[IndexPlan]):
    """Documents in, their passages and vectors out."""

    def work(self, one: Group | Tail) -> list[EmbeddedDocument] | Tail:
        """The tail passes through."""
        if isinstance(one, Tail):
            return one
        return self._index.entries(one.documents)

    @cached_property
    def _index(self) -> Index:
        from bertie.search.index import Index

        facts: Any = self.plan  # it has what an index asks of its store before it reads or writes
        return Index(facts, self.task)  # which checks that the model is the same here
