"""The records of an index: documents, passages, and embedded documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MetadataValue = str | int | float | bool
FloatArray = NDArray[np.float32]  # embeddings (n, D) or scores (n,)
Keys = NDArray[np.int64]  # (n,) integer keys that a store assigned to passages


@dataclass(frozen=True, slots=True)
class Document:
    """A text to index, with a unique id."""

    id: str
    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    source: str | None = None  # path of the file it was read from
    version: str = ""  # content hash: a different version means that the document has changed


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of a document: `text` is `document.text[start:end]`."""

    document: str  # document id
    start: int
    end: int
    text: str
    headings: tuple[str, ...] = ()  # section headings above the passage, outermost first


@dataclass(frozen=True, slots=True)
class EmbeddedDocument:
    """A document with its passages and their embeddings, ready to be committed to a store."""

    document: Document
    passages: Sequence[Passage]
    embeddings: FloatArray  # (passages, D), unit length


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage read from a store, with the metadata and source of its document."""

    key: int
    passage: Passage
    metadata: Mapping[str, MetadataValue]
    source: str | None


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """The numbers of documents added, changed, unchanged and deleted, and of passages embedded."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    deleted: int = 0
    passages: int = 0
