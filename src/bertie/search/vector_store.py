"""The interface of a vector store, and the checks on its inputs that all stores share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bertie.errors import InputError
from bertie.search.filters import MetadataFilter, value_type
from bertie.search.records import EmbeddedDocument, FloatArray, Keys, StoredPassage


class VectorStore(Protocol):
    """Durable storage for passages and embeddings: commits survive a crash, nothing else does.

    Passage keys are ascending and never reused. One process can write at a time, any number can read.
    """

    id: str  # random, or the name of the index in a database
    dimension: int
    config: Mapping[str, Any]  # how the index was built: model, fingerprint, precisions, chunk size, …

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, in one atomic transaction."""

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Iterate over (id, source, version) of all documents."""

    def __len__(self) -> int:
        """Return the number of passages."""

    def search(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Return keys and inner products of the k nearest passages of each query, best first."""

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Return passages in the order of `keys`, without those deleted meanwhile."""

    def matching_keys(self, where: Sequence[MetadataFilter]) -> Keys:
        """Return the keys of all passages whose document matches the filters, ascending."""

    def passage_texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Iterate over (key, text) of passages with keys above `after`, ascending."""

    def optimize(self, full: bool = False) -> None:
        """Compact the store where it pays off, or completely if `full`; the stored data stays the same.

        Writers call it when they are done.
        """

    def verify(self) -> None:
        """Read everything, and raise an error that names what is corrupt."""

    @property
    def generation(self) -> int:
        """A counter that grows with each commit."""

    def close(self) -> None:
        """Release connections and files."""


def check_documents(documents: Sequence[EmbeddedDocument], dimension: int) -> None:
    """Reject documents that no store can hold, before anything is written."""
    seen = set()
    for embedded in documents:
        document = embedded.document
        if not document.id or "\0" in document.id:
            raise InputError(f"document id={document.id!r:.80} must not be empty or contain NUL characters")
        if document.id in seen:
            raise InputError(f"duplicate document id {document.id!r}; ids must be unique")
        seen.add(document.id)
        for name, value in document.metadata.items():
            value_type(value, f"document {document.id!r}: metadata: {name}")
        shape = embedded.embeddings.shape
        if shape != (len(embedded.passages), dimension):
            raise InputError(
                f"document {document.id!r}: embeddings of shape {shape} for {len(embedded.passages)} passages; "
                f"the dimension of this index is {dimension}"
            )
        with np.errstate(over="ignore"):  # a float64 beyond the range of float32 is stored as infinity
            stored = embedded.embeddings.astype(np.float32, copy=False)
        if not np.isfinite(stored).all():
            raise InputError(f"document {document.id!r}: its embeddings contain non-finite values")
        for passage in embedded.passages:
            if passage.document != document.id:
                raise InputError(f"document {document.id!r} has a passage of document {passage.document!r}")


def check_queries(queries: FloatArray, k: int, dimension: int) -> None:
    """Reject query embeddings that cannot be compared with those of a store."""
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise InputError(f"queries of shape {queries.shape}: the dimension of this index is {dimension}")
    if not np.isfinite(queries).all():
        raise InputError("queries contain non-finite values")
    if k < 1:
        raise InputError(f"k={k} must be at least 1")
