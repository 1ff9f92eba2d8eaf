"""The LanceDB table of passages: schema, rows, vector index and filters."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertie.errors import InputError, MissingPackageError
from bertie.search.filters import MetadataFilter, value_type
from bertie.search.records import EmbeddedDocument, FloatArray, MetadataValue, Passage

TABLE = "passages"


def import_lance() -> tuple[Any, Any]:
    """Import lancedb and pyarrow."""
    try:
        import lancedb
        import pyarrow
    except ImportError:
        raise MissingPackageError("a LanceDB index needs the package lancedb: pip install 'bertie[lance]'") from None
    return lancedb, pyarrow


def lance_schema(dimension: int) -> Any:
    """Return the Arrow schema of the table."""
    _, pa = import_lance()
    columns = {
        "key": pa.int64(),
        "document": pa.string(),
        "position": pa.int32(),  # of the passage in its document, from 0; -1 for a document without passages
        "start": pa.int64(),
        "end": pa.int64(),
        "text": pa.string(),
        "headings": pa.list_(pa.string()),
        "source": pa.string(),
        "version": pa.string(),
        "metadata": pa.string(),  # JSON
        "filterable": pa.json_(),  # metadata with the values of `_sortable`
        "checksum": pa.int64(),  # of the passage and its embedding
        "embedding": pa.list_(pa.float32(), dimension),
    }
    return pa.schema(list(columns.items()))


def ivf_config(passages: int, dimension: int) -> Any:
    """Return the configuration of the vector index: √n partitions, 4-bit RaBitQ codes."""
    from lancedb.index import IvfFlat, IvfRq

    options: dict[str, Any] = {"distance_type": "dot", "num_partitions": math.isqrt(passages), "sample_rate": 64}
    return IvfRq(num_bits=4, **options) if dimension % 8 == 0 else IvfFlat(**options)  # codes need whole bytes


def lance_rows(documents: Sequence[EmbeddedDocument], key: int, dimension: int) -> Any:
    """Return an Arrow table of new rows, with keys from `key` on."""
    _, pa = import_lance()
    rows: list[tuple[Any, ...]] = []
    for embedded in documents:
        document = embedded.document
        metadata = json.dumps(dict(document.metadata))
        filterable = json.dumps({name: _sortable(value) for name, value in document.metadata.items()})
        no_passage = (-1, Passage(document.id, 0, 0, ""))
        for position, passage in enumerate(embedded.passages) if embedded.passages else [no_passage]:
            span = (passage.start, passage.end, passage.text, passage.headings)
            checksum = row_checksum(passage, embedded.embeddings[position]) if position >= 0 else 0
            origin = (document.source, document.version)
            rows.append((document.id, position, *span, *origin, metadata, filterable, checksum))
    schema = lance_schema(dimension)
    blank = np.zeros((1, dimension), np.float32)
    parts = (embedded.embeddings if embedded.passages else blank for embedded in documents)
    embeddings = np.concatenate([blank[:0], *parts])  # (rows, D)
    is_null = np.array([row[1] < 0 for row in rows], bool)
    columns = [range(key, key + len(rows)), *(zip(*rows, strict=True) if rows else [()] * 11)]
    types = schema.types[:-1]  # the embeddings come last, and are not Python lists
    try:
        arrays = [pa.array(list(column), type) for column, type in zip(columns, types, strict=True)]
    except UnicodeEncodeError as error:
        raise InputError(f"a document contains a lone surrogate, which cannot be stored: {error}") from None
    flat = pa.array(embeddings.ravel().astype(np.float32, copy=False))
    arrays.append(pa.FixedSizeListArray.from_arrays(flat, dimension, mask=pa.array(is_null)))
    return pa.Table.from_arrays(arrays, schema=schema)


def row_checksum(passage: Passage, embedding: FloatArray) -> int:
    """Return the CRC-32 of a passage and its embedding."""
    content = repr((passage.text, passage.headings)).encode("utf-8", "surrogatepass")
    return zlib.crc32(np.asarray(embedding, np.float32).tobytes(), zlib.crc32(content))


# --- filters ---


def _sortable(value: MetadataValue) -> str:
    """Encode a value as text with the same order, after a letter for its type."""
    kind = value_type(value, "")
    if kind == "text":
        return f"t{value}"
    if kind == "boolean":
        return f"b{int(value)}"
    (bits,) = struct.unpack(">Q", struct.pack(">d", float(value) + 0.0))  # + 0.0 turns -0.0 into 0.0
    bits = bits ^ 0xFFFF_FFFF_FFFF_FFFF if bits >> 63 else bits | 1 << 63  # unsigned integers in the order of floats
    rest = value - int(float(value)) if isinstance(value, int) else 0  # of an integer without an equal float
    return f"n{bits:016x}{rest + 0x8000:04x}"


def quote_sql(text: str) -> str:
    """Quote an SQL literal, since LanceDB takes no parameters."""
    return "'" + text.replace("'", "''") + "'"


def lance_filter(where: Sequence[MetadataFilter]) -> str:
    """Translate filters into an SQL condition on passages."""
    return " AND ".join(["position >= 0", *map(_condition, where)])


def _condition(condition: MetadataFilter) -> str:
    field = f"json_get_string(filterable, {quote_sql(condition.name)})"
    values = [quote_sql(_sortable(value)) for value in condition.values]
    if condition.op in ("=", "in"):
        return f"{field} IN ({', '.join(values)})" if values else "false"
    if condition.op == "!=":
        return f"({field} IS NULL OR {field} != {values[0]})"
    letter = values[0][1]
    # The other bound keeps the comparison within the type of the value.
    bound = f"< '{chr(ord(letter) + 1)}'" if condition.op in (">", ">=") else f">= '{letter}'"
    return f"({field} {condition.op} {values[0]} AND {field} {bound})"
