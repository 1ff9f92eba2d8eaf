"""Convert the inputs of `Index.add` (texts, rows, tables) to documents with ids, metadata and versions."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from typing import Any, TypeGuard

from bertie.errors import InputError
from bertie.search.records import Document, MetadataValue
from bertie.text.tokenizer import checked_text

GROUP_DOCUMENTS, GROUP_CHARACTERS = 1024, 1 << 20  # limits of a group that is split and embedded together
IDS = ("id", "_id")  # default id columns
_MISSING = ("NAType", "NaTType")  # types of pandas' missing values, which cannot be tested with ==


@dataclass(frozen=True, slots=True)
class DocumentColumns:
    """Columns of a table or keys of a row: text, id (None: "id" or "_id", if present), metadata (None: all others)."""

    text: str = "text"
    id: str | None = None
    metadata: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metadata, str):
            raise InputError(f"metadata={self.metadata!r} must be a list of columns")


def is_table(items: Any) -> bool:
    """Whether an object has columns: a pandas or polars DataFrame, or a pyarrow table."""
    return hasattr(items, "columns") or (hasattr(items, "column_names") and not isinstance(items, Mapping))


def count_documents(items: Any) -> int | None:
    """Return the number of documents, or None if it is unknown before they are read."""
    if isinstance(items, str | Document):
        return 1
    if isinstance(items, Mapping):
        return None
    return len(items) if hasattr(items, "__len__") else None


def read_input(items: Any, columns: DocumentColumns) -> Iterator[tuple[Document, bool]]:
    """Yield each document, and whether its id was given; otherwise its id is a hash of the content.

    >>> rows = [{"id": 7, "text": "The Rhine is long.", "year": 1999}, {"text": "So is the Elbe."}]
    >>> [(document.id, document.metadata, given) for document, given in read_input(rows, DocumentColumns())]
    [('7', {'year': 1999}, True), ('4e473bde07895062', {}, False)]
    """
    for number, item in enumerate(_items(items, columns)):
        if isinstance(item, str):
            yield _with_content_id(checked_text(item, f"document {number}"), {}), False
        elif isinstance(item, Document):
            yield _with_version(item), True
        elif isinstance(item, Mapping):
            yield _from_row(item, columns, f"document {number}")
        else:
            raise InputError(
                f"document {number} is {type(item).__name__}; add takes texts, dicts with a 'text' key, "
                f"bertie.search.Document objects and tables{_hint(item)}"
            )


def _hint(item: object) -> str:
    if isinstance(item, os.PathLike):
        return "; use refresh() for files"
    if isinstance(item, tuple | list):
        return '; pass an (id, text) pair as {"id": id, "text": text}'
    return "; leave out missing texts" if item is None or isinstance(item, float) else ""


def _items(items: Any, columns: DocumentColumns) -> Iterable[Any]:
    if isinstance(items, str):
        if _is_path(items):
            raise InputError(f"add takes texts, but {items!r} is a file or folder; use refresh() for files")
        return [items]
    if isinstance(items, Document):
        return [items]
    if isinstance(items, Mapping):
        return _of_mapping(items, columns)
    if is_table(items):
        return _rows(items, columns)
    if isinstance(items, bytes | os.PathLike) or not isinstance(items, Iterable):
        raise InputError(f"add takes a list of documents, not {type(items).__name__}{_hint(items)}")
    return items


def _is_path(text: str) -> bool:
    try:
        return len(text) < 1024 and "\n" not in text and os.path.exists(text)
    except (OSError, ValueError):
        return False


def _of_mapping(items: Mapping[Any, Any], columns: DocumentColumns) -> Iterable[Any]:
    """Return the rows of a dict: the dict itself, or the rows of a dict of columns."""
    if any(hasattr(part, "column_names") for part in items.values()):
        raise InputError(f"add takes one table, not several ({', '.join(map(str, items))}); add them one at a time")
    if columns.text not in items:
        raise InputError(
            f"the dict of a document needs the key {columns.text!r}, but this one has {_listed(items)}; pass documents "
            'by id as [{"id": id, "text": text} for id, text in documents.items()]'
        )
    return [items] if isinstance(items[columns.text], str) else _rows(items, columns)


def _rows(table: Any, columns: DocumentColumns) -> Iterator[dict[str, Any]]:
    """Return the rows of a table as dicts of the columns used."""
    names = list(table if isinstance(table, Mapping) else getattr(table, "column_names", None) or table.columns)
    if len(set(names)) < len(names):
        raise InputError(f"the table has duplicate column names: {_listed(names)}")
    text = columns.text
    if text not in names:
        if text != DocumentColumns().text or len(names) != 1:
            raise InputError(f"the table has no column {text!r}; pass text= with one of: {_listed(names)}")
        text = names[0]
    for name in (*(columns.metadata or ()), *([columns.id] if columns.id is not None else [])):
        if name not in names:
            raise InputError(f"the table has no column {name!r}, only: {_listed(names)}")
    if columns.metadata is not None:
        names = [name for name in names if name in (text, columns.id, *columns.metadata)]
    values = [_to_list(table[name]) for name in names]
    if len({len(column) for column in values}) > 1:
        counts = ", ".join(f"{name}: {len(column):,}" for name, column in zip(names, values, strict=True))
        raise InputError(f"the columns have different lengths: {counts}")
    keys = [columns.text if name == text else str(name) for name in names]
    return (dict(zip(keys, row, strict=True)) for row in zip(*values, strict=True))


def _to_list(column: Any) -> list[Any]:
    converters = [getattr(column, name) for name in ("to_list", "to_pylist", "tolist") if hasattr(column, name)]
    return list(converters[0]() if converters else column)


def _listed(names: Iterable[Any]) -> str:
    names = list(map(str, names))
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


def _from_row(row: Mapping[Any, Any], columns: DocumentColumns, where: str) -> tuple[Document, bool]:
    text = row.get(columns.text)
    if not isinstance(text, str):
        have = f"is {text!r:.40}" if columns.text in row else f"is missing among {_listed(row)}"
        raise InputError(f"{where}: {columns.text!r} {have}; it must be a string (text= selects another column)")
    checked_text(text, where)
    key = columns.id if columns.id is not None else next((name for name in IDS if name in row), None)
    metadata: dict[str, MetadataValue] = {}
    for name in row if columns.metadata is None else columns.metadata:
        value = to_scalar(row.get(name))
        if name not in (columns.text, key) and is_metadata(value):
            metadata[str(name)] = value
        elif value is not None and columns.metadata is not None and name not in (columns.text, key):
            raise InputError(f"{where}: {name!r} is {type(value).__name__}; metadata must be scalar values")
    if key is None:
        return _with_content_id(text, metadata), False
    id = to_scalar(row.get(key))
    if not isinstance(id, str | int) or isinstance(id, bool):
        raise InputError(f"{where}: the id {key!r} is {row.get(key)!r:.40}; it must be a string or an integer")
    return _with_version(Document(checked_text(str(id), f"{where}, {key!r}"), text, metadata)), True


def is_metadata(value: object) -> TypeGuard[MetadataValue]:
    """Whether a value can be stored with a document."""
    return isinstance(value, MetadataValue)


def to_scalar(value: Any) -> object:
    """Convert a cell to a metadata value: dates to ISO 8601, NumPy scalars to Python's, missing values to None."""
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value.isoformat() if isinstance(value, datetime | date | time) else value


def _with_content_id(text: str, metadata: Mapping[str, MetadataValue]) -> Document:
    content = text if not metadata else repr((text, sorted(metadata.items())))
    id = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Document(id, text, metadata, version=id)


def _with_version(document: Document) -> Document:
    """Return the document with a version, by default a content hash."""
    if document.version:
        return document
    data = repr((document.text, sorted(document.metadata.items()), document.source)).encode("utf-8", "surrogatepass")
    return replace(document, version=hashlib.sha256(data).hexdigest()[:32])


def group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents, large enough to batch texts of similar length and small enough for memory."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_CHARACTERS or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group
