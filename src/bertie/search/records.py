"""What travels through a search: documents, their passages, and what was found; and what a store of them must do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError

MetadataValue = str | int | float | bool
FloatArray = NDArray[np.float32]  # (n, D)
Keys = NDArray[np.int64]  # (n,) passages, by the numbers that their store gave them
OPS = ("=", "!=", "<", "<=", ">", ">=", "in")


@dataclass(frozen=True, slots=True)
class Document:
    """A text that can be found, under a name that is its own."""

    id: str
    text: str
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)
    source: str | None = None  # the file it was read from
    version: str = ""  # of its content: another one means that it has changed


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of a document: `text` is `document.text[start:end]`."""

    document: str  # its id
    start: int
    end: int
    text: str
    headings: tuple[str, ...] = ()  # under which it stands, the outermost first


@dataclass(frozen=True, slots=True)
class EmbeddedDocument:
    """A document as it is put into a store: whole, with its passages and their vectors."""

    document: Document
    passages: Sequence[Passage]
    vectors: FloatArray  # (passages, D) of length 1


@dataclass(frozen=True, slots=True)
class StoredPassage:
    """A passage that a store gives back."""

    key: int
    passage: Passage
    metadata: Mapping[str, MetadataValue]
    source: str | None


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """A condition on a document's metadata: `name op value`, and all of several must hold.

    `op` is one of =, !=, <, <=, >, >=, in. A document without the name meets none but !=. Values are compared within
    their value_type, which is text (by code points), number or truth: "1", 1 and True differ, and none is below another.

    >>> matches_filters({"year": 1999}, [MetadataFilter("year", ">=", 1990), MetadataFilter("lang", "!=", "de")])
    True
    """

    name: str
    op: str
    value: MetadataValue | tuple[MetadataValue, ...]

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InputError(f"where: {self.name} {self.op!r}: the operator must be one of {', '.join(OPS)}")
        if isinstance(self.value, tuple) != (self.op == "in"):
            raise InputError(
                f"where: {self.name} {self.op} {self.value!r:.80}: several values go with in, one with all else"
            )
        for value in self.values:
            value_type(value, f"where: {self.name}")

    @property
    def values(self) -> tuple[MetadataValue, ...]:
        """One, or several of `in`."""
        return self.value if isinstance(self.value, tuple) else (self.value,)


def parse_filters(where: Mapping[str, Any] | Sequence[MetadataFilter]) -> tuple[MetadataFilter, ...]:
    """Conditions as people write them: a name, with an operator behind it if it is not =; several values are `in`.

    >>> [(one.name, one.op, one.value) for one in parse_filters({"year >=": 1990, "lang": ["en", "fr"]})]
    [('year', '>=', 1990), ('lang', 'in', ('en', 'fr'))]
    """
    if not isinstance(where, Mapping):
        return tuple(where)
    made = []
    for key, value in where.items():
        name, op = re.fullmatch(r"(.*?)\s*(!=|<=|>=|=|<|>)?", key.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        if isinstance(value, list | tuple | set | frozenset) and op in (None, "="):
            made.append(MetadataFilter(name, "in", tuple(value)))
        else:
            made.append(MetadataFilter(name, op or "=", value))
    return tuple(made)


def value_type(value: object, name: str) -> str:
    """Text, number or truth; whatever cannot be compared is refused."""
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, str):
        if "\0" in value:  # databases take none
            raise InputError(f"{name}={value!r:.80} holds a NUL character, which cannot be stored")
        return "text"
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name}={value} must be a finite number")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{name}={value} must fit 64 bits")
    if isinstance(value, int | float):
        return "number"
    raise InputError(f"{name}={value!r:.80} must be text, a number or a truth value, not {type(value).__name__}")


def matches_filters(metadata: Mapping[str, MetadataValue], where: Sequence[MetadataFilter]) -> bool:
    """Whether all conditions hold: what every store must agree with."""
    return all(_holds(metadata, one) for one in where)


def _holds(metadata: Mapping[str, MetadataValue], one: MetadataFilter) -> bool:
    mine = metadata.get(one.name)
    same = [value for value in one.values if mine is not None and value_type(mine, "") == value_type(value, "")]
    if one.op == "!=":
        return mine not in same
    if not same or mine is None:
        return False
    if one.op in ("=", "in"):
        return mine in same
    below, equal = mine < same[0], mine == same[0]  # type: ignore[operator]
    return {"<": below, "<=": below or equal, ">": not below and not equal, ">=": not below}[one.op]


def check_documents(put: Sequence[EmbeddedDocument], dimension: int) -> None:
    """Refuse, before anything is written, entries that a store cannot hold."""
    seen = set()
    for entry in put:
        document = entry.document
        if not document.id or "\0" in document.id:
            raise InputError(f"a document's id={document.id!r:.80} must be a name, without NUL characters")
        if document.id in seen:
            raise InputError(f"the document {document.id!r} is there twice; ids must differ")
        seen.add(document.id)
        for name, value in document.metadata.items():
            value_type(value, f"document {document.id!r}: metadata: {name}")
        if entry.vectors.shape != (len(entry.passages), dimension):
            raise InputError(
                f"document {document.id!r}: vectors of shape {entry.vectors.shape} for {len(entry.passages)} passages; "
                f"this index holds vectors of {dimension} numbers"
            )
        if not np.isfinite(entry.vectors).all():
            raise InputError(f"document {document.id!r}: its vectors hold numbers that are not finite")
        for passage in entry.passages:
            if passage.document != document.id:
                raise InputError(f"document {document.id!r} comes with a passage of {passage.document!r}")


def check_queries(queries: FloatArray, k: int, dimension: int) -> None:
    """Refuse queries that cannot be compared with what a store holds."""
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise InputError(f"queries of shape {queries.shape}: this index holds vectors of {dimension} numbers")
    if not np.isfinite(queries).all():
        raise InputError("queries hold numbers that are not finite")
    if k < 1:
        raise InputError(f"k={k} must be at least 1")


class VectorStore(Protocol):
    """Where passages and vectors lie. What `commit` returned from is there after a crash; nothing else is.

    Passages have numbers that grow and are never used again. One process writes, any number read.
    """

    dimension: int
    about: Mapping[str, Any]  # what the index was made with: the model, its fingerprint, how texts are cut

    def commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        """Add or replace documents and delete others by id, all at once or not at all."""

    def documents(self) -> Iterator[tuple[str, str | None, str]]:
        """Id, source and version of each document."""

    def __len__(self) -> int:
        """How many passages there are."""

    def nearest(
        self, queries: FloatArray, k: int, where: Sequence[MetadataFilter] = ()
    ) -> list[tuple[Keys, FloatArray]]:
        """Of each query, the keys of its k nearest passages by inner product, best first, and how near they are."""

    def fetch(self, keys: Sequence[int]) -> list[StoredPassage]:
        """Passages by their keys, in that order. Those that are gone, as while others write, are left out."""

    def allowed(self, where: Sequence[MetadataFilter]) -> Keys:
        """The keys of all passages whose document meets the conditions."""

    def texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        """Key and text of each passage above `after`, in the order of keys: what a lexical index is made from."""

    def optimize(self, whole: bool = False) -> None:
        """Put vectors in order for fast search, as far as that pays, or all of them: answers stay the same.

        For a writer to call at the end of its work.
        """

    @property
    def generation(self) -> int:
        """Grows with each commit."""

    def close(self) -> None:
        """Give back what is held."""
