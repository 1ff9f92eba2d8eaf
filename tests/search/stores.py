"""Helpers of the tests of vector stores."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from bertie.search.records import Document, EmbeddedDocument, FloatArray, MetadataValue, Passage
from bertie.search.vector_store import VectorStore

D = 8


def units(n: int, seed: int = 0, dimension: int = D) -> FloatArray:
    x = np.random.default_rng(seed).normal(size=(n, dimension)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def entry(
    id: str,
    passages: int = 1,
    *,
    metadata: Mapping[str, MetadataValue] | None = None,
    source: str | None = None,
    version: str = "1",
    seed: int | None = None,
) -> EmbeddedDocument:
    """A document of so many passages of six characters each."""
    pieces = [f"{version[:3]:>3}{i:3}" for i in range(passages)]
    document = Document(id, "".join(pieces), metadata or {}, source, version)
    cut = [Passage(id, 6 * i, 6 * i + 6, piece, ("Top", f"Part {i}")) for i, piece in enumerate(pieces)]
    return EmbeddedDocument(
        document, cut, units(passages, zlib.crc32(f"{id} {version}".encode()) if seed is None else seed)
    )


def everything(store: VectorStore) -> dict[str, tuple[str | None, str, list[str]]]:
    """Of each document its source, its version and the texts of its passages, in their order."""
    held: dict[str, tuple[str | None, str, list[str]]] = {id: (s, v, []) for id, s, v in store.documents()}
    for found in store.fetch([key for key, _ in store.passage_texts()]):
        held[found.passage.document][2].append(found.passage.text)
    return held


def expected(entries: Sequence[EmbeddedDocument]) -> dict[str, tuple[str | None, str, list[str]]]:
    return {e.document.id: (e.document.source, e.document.version, [p.text for p in e.passages]) for e in entries}


def brute(vectors: Mapping[int, FloatArray], query: FloatArray, k: int) -> tuple[list[int], FloatArray]:
    keys = sorted(vectors)
    scores = np.array([float(vectors[key].astype(np.float64) @ query.astype(np.float64)) for key in keys])
    order = np.argsort(-scores, kind="stable")[:k]
    return [keys[i] for i in order], scores[order]


def by_key(store: VectorStore, entries: Sequence[EmbeddedDocument]) -> dict[int, FloatArray]:
    """The vector of each passage that is there."""
    mine = {(e.document.id, p.start): e.embeddings[i] for e in entries for i, p in enumerate(e.passages)}
    found = store.fetch([key for key, _ in store.passage_texts()])
    return {f.key: mine[f.passage.document, f.passage.start] for f in found}
