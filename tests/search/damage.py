"""Damage to the files of a local index, and what a reader then sees."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bertie.errors import CheckpointError
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import refresh_bm25
from bertie.search.filters import parse_filters
from bertie.search.index import Index
from bertie.search.local_store import LocalStore
from bertie.search.records import Document, EmbeddedDocument, FloatArray, Passage
from bertie.search.segments import IndexThresholds

D = 16
WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lynx mole newt owl pig quail ram seal toad".split()


def embeddings(n: int, seed: int) -> FloatArray:
    rows = np.random.default_rng(seed).normal(size=(n, D)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def document(name: str, passages: int, seed: int) -> EmbeddedDocument:
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=8)) for _ in range(passages)]
    cut = [Passage(name, 10 * i, 10 * i + 9, text, ("Animals", f"Part {i}")) for i, text in enumerate(texts)]
    metadata: dict[str, int | str] = {"year": 1990 + seed % 9, "kind": WORDS[seed % 5]}
    return EmbeddedDocument(Document(name, "", metadata, f"/{name}.txt", f"v{seed}"), cut, embeddings(passages, seed))


def build(folder: Path, *, offset: int = 0, close: bool = True) -> LocalStore:
    """An index with segments, an HNSW graph, deleted rows, rows that are in no segment yet, and a BM25 index."""
    store = LocalStore.create(folder, D, {"model": "toy"}, thresholds=IndexThresholds(flat=100))
    store.commit([document(f"a{i}", 12, offset + i) for i in range(12)])
    store.optimize(full=True)
    store.commit([document(f"b{i}", 8, offset + 20 + i) for i in range(8)])
    store.optimize(full=True)
    store.commit([document(f"c{i}", 6, offset + 40 + i) for i in range(5)], ["a3", "b2"])
    refresh_bm25(store, Analyzer(), folder / "lexical", None)
    if close:
        store.close()
    return store


def read_all(folder: Path, *, verify: bool = False) -> Any:
    """All that a reader can learn from an index."""
    with LocalStore.open(folder) as store:
        if verify:
            Index(store).verify()
        where = parse_filters({"year >=": 1993, "kind": ["ant", "cat"]})
        keys = [key for key, _ in store.passage_texts()]
        found: list[Any] = [len(store), store.generation, store.dimension, dict(store.config)]
        found += [list(store.documents()), list(store.passage_texts()), store.fetch(keys)]
        found += [store.matching_keys(()).tolist(), store.matching_keys(where).tolist()]
        for some in ((), where):
            for ranked, scores in store.search(embeddings(4, 99), 12, some):
                found.append((ranked.tolist(), scores.tobytes()))
        _, bm25 = refresh_bm25(store, Analyzer(), folder / "lexical", None)
        for query in ("fox and owl", "newt"):
            ranked, scores = bm25.search(query, 12)
            found.append((ranked.tolist(), scores.tobytes()))
        return found


def flip(file: Path, draw: random.Random) -> str:
    data = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit % 8} of byte {bit // 8}"


def index_files(folder: Path) -> list[Path]:
    """The files with contents that count: not the lock, and not the shared memory that SQLite makes anew."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.stat().st_size and not file.name.endswith("-shm")
    ]


def outcome(read: Callable[[], Any], reference: Any, file: Path) -> str:
    """Whether damage to a file was named, did not matter, or was not noticed."""
    try:
        found = read()
    except CheckpointError as error:
        return "named" if f"{file} " in str(error) else f"blamed on another file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same results" if found == reference else "wrong results"


def flip_bits(whole: Path, scratch: Path, flips: int, seed: int, *, verify: bool = False) -> Counter[str]:
    """Flip one bit in a copy of an index, again and again; count the outcomes."""
    draw = random.Random(seed)
    shutil.copytree(whole, scratch)
    reference = read_all(scratch, verify=verify)
    counts: Counter[str] = Counter()
    for _ in range(flips):
        file = draw.choice(index_files(whole))
        damaged = scratch / file.relative_to(whole)
        where = flip(damaged, draw)
        result = outcome(lambda: read_all(scratch, verify=verify), reference, damaged)
        counts[result if result in ("named", "same results") else f"{file.name}, {where}: {result}"] += 1
        if file.parent.parent.name == "lexical":  # which was rebuilt, or not
            shutil.rmtree(scratch / "lexical")
            shutil.copytree(whole / "lexical", scratch / "lexical")
        else:
            shutil.copy(file, damaged)
    return counts
