"""Index documents with the help of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from bertie.cluster import connection, ray_job
from bertie.cluster.connection import RayResources
from bertie.cluster.ray_job import EmbedderActor, JobConfig
from bertie.pipeline.reporting import report

if TYPE_CHECKING:
    from bertie.search.document_reader import Paths, ReadOptions
    from bertie.search.index import Index, IndexUpdate
    from bertie.search.records import Document, EmbeddedDocument


def index(
    target: Index,
    paths: Paths,
    *,
    address: str | None = None,
    device: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    **options: Unpack[ReadOptions],
) -> IndexUpdate:
    """Run `Index.refresh` with a Ray cluster that splits and embeds documents.

    >>> index(Index.open("my-index"), "docs/", address="auto")                              # doctest: +SKIP
    IndexUpdate(added=120, changed=0, unchanged=0, deleted=0, passages=913)

    Only the driver writes, so that commits survive a kill. `address`, `device`, `workers` and
    `threads` are those of `RayResources`. Files and model must have the same paths on every node;
    the index only on the driver.
    """
    from bertie.search.file_changes import FileChanges

    resources = RayResources(address=address, device=device, workers=workers, threads=threads)
    resources.check()
    on_skip = options.pop("on_skip", None)
    known = list(target.store.documents())
    roots = [paths] if isinstance(paths, str | os.PathLike) else paths
    paths = [os.path.abspath(path) for path in roots]  # tasks have another working directory
    FileChanges(paths, known, **options)  # rejects invalid options now
    model, model_options = _model_of(target)
    with connection.connect(address) as ray:
        actors, actor_threads = resources.allocate(ray)
        config = IndexJobConfig(
            model=ray_job.resolve_model(model),
            options=model_options,
            threads=actor_threads,
            config=dict(target.config),
            dimension=target.store.dimension,
        )
        summary = ReadSummary()

        def batches() -> Iterator[list[EmbeddedDocument]]:
            nonlocal summary
            inputs = [FilesToIndex(paths, known, options)]
            for result in ray_job.run_job(ray, inputs, read_groups, IndexActor, config, actors, ordered=True):
                if isinstance(result, ReadSummary):
                    summary = result
                else:
                    report(sum(len(embedded.passages) for embedded in result))
                    yield result

        with target.progress_bar():
            update = target.write(batches(), deleted=lambda: summary.deleted)
    for path, reason in summary.skipped:
        if on_skip is not None:
            on_skip(path, reason)
    return replace(update, added=summary.added, changed=summary.changed, unchanged=summary.unchanged)


def _model_of(target: Index) -> tuple[str, dict[str, Any]]:
    """Return the model of an index and the options to load it on the nodes."""
    if (embedder := target.loaded_embedder) is None:
        return target.config["model"], {}
    return embedder.checkpoint.source, {
        "overflow": embedder.overflow,
        "normalize": embedder.normalize,
        "dimension": embedder.truncate_dim,
        "precision": embedder.checkpoint.precision,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexJobConfig(JobConfig):
    """The configuration of an indexing job, with what embeddings of the index depend on."""

    config: dict[str, Any]
    dimension: int


@dataclass(frozen=True, slots=True)
class FilesToIndex:
    """Files to index, and what the index has of them."""

    paths: Paths
    known: list[tuple[str, str | None, str]]
    options: ReadOptions


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Documents that are split and embedded together."""

    name: str
    documents: list[Document]

    @property
    def description(self) -> str:
        """A description for error messages."""
        return f"documents {self.documents[0].id!r} to {self.documents[-1].id!r}"


@dataclass(frozen=True, slots=True)
class ReadSummary:
    """The last work item: what is known once all files have been read."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    deleted: Sequence[str] = ()
    skipped: Sequence[tuple[str, str]] = ()
    name: str = "summary"
    description: str = "the summary of the files"


def read_groups(files: FilesToIndex, config: IndexJobConfig) -> Iterator[DocumentGroup | ReadSummary]:
    """Read new and modified documents, in the same groups as on a single machine."""
    from bertie.search.document_input import group_documents
    from bertie.search.file_changes import FileChanges

    skipped: list[tuple[str, str]] = []
    options: ReadOptions = {**files.options, "on_skip": lambda *reason: skipped.append(reason)}
    changes = FileChanges(files.paths, files.known, **options)
    for number, documents in enumerate(group_documents(changes)):
        yield DocumentGroup(str(number), documents)
    yield ReadSummary(changes.added, changes.changed, changes.unchanged, changes.deleted, skipped)


class IndexActor(EmbedderActor[IndexJobConfig]):
    """Splits documents into passages and embeds these."""

    def process(self, item: DocumentGroup | ReadSummary) -> list[EmbeddedDocument] | ReadSummary:
        """Embed a group of documents; the summary passes through."""
        if isinstance(item, ReadSummary):
            return item
        return self._index.embed_documents(item.documents)

    @cached_property
    def _index(self) -> Index:
        from bertie.search.index import Index

        store: Any = self.config  # has what an index needs of its store to split and embed
        return Index(store, self.embedder)  # checks that the model is the same on this node
