"""Locations of indexes: a folder, `postgresql://…#NAME` or `lance://FOLDER`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bertie.errors import InputError
from bertie.search.local_store import LocalStore
from bertie.search.vector_block import EmbeddingPrecision
from bertie.search.vector_store import VectorStore

DEFAULT_NAME = "bertie"  # of an index in a database

# The packages of other stores are optional: their modules are imported when used.


def create_store(location: str | Path, dimension: int, config: Mapping[str, Any]) -> VectorStore:
    """Create an empty store; its precision is `config["embedding_precision"]`."""
    kind, address = parse_location(location)
    precision: EmbeddingPrecision = config["embedding_precision"]
    if kind != "folder" and precision != "fp32":
        raise InputError(f"embedding_precision={precision!r} is for an index in a folder; {location} stores fp32")
    if kind == "postgres":
        from bertie.search.postgres_store import PostgresStore

        url, _, name = address.partition("#")
        return PostgresStore.create(url, dimension, config, name=name or DEFAULT_NAME)
    if kind == "lance":
        from bertie.search.lance_store import LanceStore

        return LanceStore.create(address, dimension, config)
    return LocalStore.create(address, dimension, config, embedding_precision=precision)


def open_store(location: str | Path) -> VectorStore:
    """Open an existing store."""
    kind, address = parse_location(location)
    if kind == "postgres":
        from bertie.search.postgres_store import PostgresStore

        url, _, name = address.partition("#")
        return PostgresStore.open(url, name=name or DEFAULT_NAME)
    if kind == "lance":
        from bertie.search.lance_store import LanceStore

        return LanceStore.open(address)
    return LocalStore.open(address)


def parse_location(location: str | Path) -> tuple[Literal["folder", "postgres", "lance"], str]:
    """Return the kind of store, and its folder or URL.

    >>> parse_location("lance://papers")
    ('lance', 'papers')
    """
    text = str(location)
    if text.startswith(("postgresql://", "postgres://")):
        return "postgres", text
    if text.startswith("lance://"):
        return "lance", text.removeprefix("lance://")
    if "://" in text:
        raise InputError(f"{text!r}: an index is a folder, postgresql://… or lance://FOLDER")
    return "folder", text
