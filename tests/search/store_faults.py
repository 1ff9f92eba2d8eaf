"""Random schedules of writers that are killed, over each kind of vector store.

    python -m tests.search.store_faults [--schedules 30] [--seed S] [--store local|lance|postgres]

In each round of a schedule two processes add, replace and delete documents and compact the store; one
or both are killed at a random moment. Then the store must hold what was committed, each commit
completely or not at all: the documents, their embeddings to the bit, and a BM25 index of their texts.
Searches must give what they give in a new store with the same documents. Seeds are printed; the moments
of kills differ from run to run.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bertie.errors import InputError
from bertie.search import catalog_checksums
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import BM25Index, refresh_bm25
from bertie.search.records import Document, EmbeddedDocument, FloatArray, Passage
from bertie.search.vector_store import VectorStore
from tests.search.conftest import KINDS, Place

D = 8
ROOT = Path(__file__).parents[2]
WORDS = "ant bee cat dog elk fox gnu hen ibis jay kite lynx mole newt owl pig quail ram seal toad".split()
OWN, SHARED = 12, 6  # documents that one writer writes, and that both do
TIMEOUT = 120


class Violation(AssertionError):
    """A store that is not as it must be."""


# --- what writers do ---


def document(name: str, version: str, passages: int) -> EmbeddedDocument:
    """A document that follows from its name and version alone."""
    seed = zlib.crc32(f"{name} {version}".encode())
    draw = random.Random(seed)
    rows = np.random.default_rng(seed).normal(size=(passages, D)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    texts = [" ".join(draw.choices(WORDS, k=6)) for _ in range(passages)]
    cut = [Passage(name, 40 * i, 40 * i + len(text), text, ("Top", f"{i}")) for i, text in enumerate(texts)]
    return EmbeddedDocument(Document(name, "", {"version": version}, f"/{name}", version), cut, rows)


def operation(seed: int, writer: int, number: int) -> tuple[list[EmbeddedDocument], list[str]]:
    """What a writer's n-th commit puts and deletes. The document `marker` counts its commits."""
    draw = random.Random(f"{seed} {writer} {number}")
    names = [f"{writer}-{i}" for i in range(OWN)] + [f"shared-{i}" for i in range(SHARED)]
    chosen = draw.sample(names, draw.randrange(1, 9))
    cut = draw.randrange(len(chosen) + 1)
    version = f"{writer}.{number}"
    put = [document(name, version, draw.choice([0, 1, 1, 2, 5])) for name in chosen[:cut]]
    return [document(f"marker-{writer}", version, 1), *put], chosen[cut:]


def write(seed: int, writer: int, place: Place) -> None:
    """Commit until killed, and say so; now and then compact, and close and open again."""
    module: Any = importlib.import_module(f"bertie.search.{'local' if place.kind == 'embedded' else place.kind}_store")
    if place.kind == "embedded":
        module.SEGMENT_ROWS = 16
        catalog_checksums.CHECKPOINT_FRAMES = 15
    else:
        module.EXACT_SEARCH_PASSAGES = 20  # so that search indexes are built
    draw = random.Random()
    while True:
        try:
            store = place.open()
            number = committed(store).get(writer, 0)
            for _ in range(draw.randrange(1, 12)):
                number += 1
                store.commit(*operation(seed, writer, number))
                print(number, flush=True)
                if draw.random() < 0.25:
                    store.optimize(full=draw.random() < 0.3)
        except InputError as error:
            if "another process" not in str(error):
                raise
            time.sleep(0.005)
        finally:
            place.close()


def committed(store: VectorStore) -> dict[int, int]:
    """The number of commits of each writer."""
    versions = {id: version for id, _, version in store.documents() if id.startswith("marker-")}
    return {int(version.split(".")[0]): int(version.split(".")[1]) for version in versions.values()}


# --- what must be there ---


def last_states(seed: int, writer: int, commits: int) -> dict[str, EmbeddedDocument | None]:
    """What a writer alone left: each document that it wrote, or None if it deleted it."""
    states: dict[str, EmbeddedDocument | None] = {}
    for number in range(1, commits + 1):
        put, delete = operation(seed, writer, number)
        states |= dict.fromkeys(delete)
        states |= {embedded.document.id: embedded for embedded in put}
    return states


def check(place: Place, seed: int, acknowledged: Mapping[int, int]) -> dict[int, int]:
    """Compare a store with what was committed; return the number of commits of each writer."""
    store = place.open()
    settle(store)
    store.verify()
    counts = {writer: committed(store).get(writer, 0) for writer in (0, 1)}
    for writer, count in counts.items():
        if count not in (acknowledged[writer], acknowledged[writer] + 1):
            raise Violation(f"writer {writer} said {acknowledged[writer]} commits, the store has {count}")
    if store.generation != sum(counts.values()):
        raise Violation(f"generation {store.generation} after {counts} commits")
    held = read(store)
    states = [last_states(seed, writer, count) for writer, count in counts.items()]
    documents: list[EmbeddedDocument] = []
    for name in sorted({*states[0], *states[1], *held}):
        allowed = [writer[name] for writer in states if name in writer]
        matching = [embedded for embedded in allowed if held.get(name) == expected(embedded)]
        if not matching:
            raise Violation(f"document {name}: {held.get(name)} is none of {[expected(one) for one in allowed]}")
        documents += [embedded for embedded in matching[:1] if embedded is not None]
    check_search(store, documents, place)
    place.close()
    return counts


def expected(embedded: EmbeddedDocument | None) -> Any:
    """A document as `read` returns it."""
    if embedded is None:
        return None
    rows = zip(embedded.passages, embedded.embeddings, strict=True)
    return embedded.document.source, embedded.document.version, [(passage, row.tobytes()) for passage, row in rows]


def read(store: VectorStore) -> dict[str, Any]:
    """All documents, with their passages and the bits of the stored embeddings."""
    held: dict[str, Any] = {id: (source, version, []) for id, source, version in store.documents()}
    vectors = stored_vectors(store)
    keys = [key for key, _ in store.passage_texts()]
    if not keys == store.matching_keys(()).tolist() == sorted(vectors) or len(keys) != len(store):
        raise Violation(f"{len(keys)} texts, {len(vectors)} embeddings, {len(store)} passages")
    for found in store.fetch(keys):
        held[found.passage.document][2].append((found.passage, vectors[found.key].tobytes()))
    return held


def stored_vectors(store: Any) -> dict[int, FloatArray]:
    """The embeddings of all passages as they are stored."""
    if hasattr(store, "_session"):
        with store._session() as connection:
            rows = connection.execute("SELECT key, embedding::text FROM passages").fetchall()
        return {key: np.array(json.loads(text), np.float32) for key, text in rows}
    if hasattr(store, "_database"):
        rows = store._snapshot()[1].search().where("position >= 0").select(["key", "embedding"]).to_arrow()
        return dict(zip(rows["key"].to_pylist(), store._embeddings(rows), strict=True))
    snapshot = store._snapshot()
    blocks = [(segment.keys, segment.block) for segment in snapshot.segments.values()]
    blocks += [(snapshot.keys, snapshot.pending)] if snapshot.pending is not None else []
    vectors = {int(key): row for keys, block in blocks for key, row in zip(keys, block.dequantize(), strict=True)}
    return {key: vectors[key] for key in snapshot.live_keys().tolist()}


def check_search(store: VectorStore, documents: list[EmbeddedDocument], place: Place) -> None:
    """Searches find what a new store with the same documents would."""
    folder = getattr(store, "folder", None)
    _, bm25 = refresh_bm25(store, Analyzer(), None if folder is None else folder / "lexical", None)
    fresh = BM25Index.build(store.passage_texts(), Analyzer())
    for query in ("ant fox", "owl seal toad", "newt"):
        (keys, scores), (right_keys, right_scores) = bm25.search(query, 10), fresh.search(query, 10)
        if keys.tolist() != right_keys.tolist() or not np.allclose(scores, right_scores, atol=1e-6):
            raise Violation(f"BM25 of {query!r}: {keys.tolist()} instead of {right_keys.tolist()}")
    rows = [(p.document, p.start, v) for e in documents for p, v in zip(e.passages, e.embeddings, strict=True)]
    queries = np.random.default_rng(len(rows)).normal(size=(3, D)).astype(np.float32)
    for query, (found, values) in zip(queries, store.search(queries, 10), strict=True):
        exact = sorted(((float(v.astype(np.float64) @ query), name, start) for name, start, v in rows), reverse=True)
        hits = [(hit.passage.document, hit.passage.start) for hit in store.fetch(found.tolist())]
        if hits != [(name, start) for _, name, start in exact[:10]]:
            raise Violation(f"search finds {hits} instead of {exact[:10]}")
        np.testing.assert_allclose(values, [score for score, _, _ in exact[:10]], atol=1e-5)


def settle(store: VectorStore) -> None:
    """Wait until a server has seen that its clients are gone and dealt with what they had sent."""
    number, quiet = store.generation, 0
    while hasattr(store, "_session") and quiet < 3:
        time.sleep(0.1)
        quiet = quiet + 1 if store.generation == number else 0
        number = store.generation


# --- schedules ---


def run_schedule(place: Place, seed: int, rounds: int) -> int:
    """Kill writers again and again; return the number of commits, raise Violation."""
    draw = random.Random(seed)
    place.create(D, {"model": "toy"})
    place.close()
    counts = {0: 0, 1: 0}
    for _ in range(rounds):
        children = [start_writer(seed, writer, place) for writer in (0, 1)]
        try:
            first = [child.stdout.readline() for child in children]
            time.sleep(draw.choice([0.0, 0.02, 0.1, 0.3]) * draw.random() + 0.01 * draw.random())
            order = draw.sample(children, 2)
            order[0].kill()
            time.sleep(draw.choice([0.0, 0.0, 0.1]) * draw.random())
        finally:
            for child in children:
                child.kill()
        for writer, child in enumerate(children):
            said = [first[writer], *child.stdout.read().splitlines(keepends=True)]
            counts[writer] = max([counts[writer], *(int(line) for line in said if line.endswith(b"\n"))])
            if child.wait() != -9:
                raise Violation(f"writer {writer} ended by itself, with status {child.returncode}")
        counts = check(place, seed, counts)
    return sum(counts.values())


def start_writer(seed: int, writer: int, place: Place) -> subprocess.Popen[bytes]:
    code = "import sys; from tests.search.store_faults import write; from tests.search.conftest import Place; "
    code += "write(int(sys.argv[1]), int(sys.argv[2]), Place(*sys.argv[3:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, str(seed), str(writer), place.kind, place.at, place.name],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )


@contextmanager
def places(kinds: list[str]) -> Iterator[Iterator[Place]]:
    """New places of these kinds in turn."""
    from tests.search.conftest import start_postgres

    with tempfile.TemporaryDirectory(prefix="bertie-stores-") as folder, start_postgres() as url:
        yield (
            Place(kind, url if kind == "postgres" else f"{folder}/{number}", f"faults {number}")
            for number, kind in enumerate(itertools.cycle(kinds))
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=30, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--store", choices=KINDS, help="default: all in turn")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    failed = commits = 0
    with places([args.store] if args.store else list(KINDS)) as new:
        for number, place in zip(range(args.schedules), new, strict=False):
            try:
                commits += run_schedule(place, args.seed + number, rounds=3)
            except Exception as error:
                failed += 1
                print(f"{place.kind}, seed {args.seed + number}: {type(error).__name__}: {error}", flush=True)
    print(json.dumps({"seed": args.seed, "schedules": args.schedules, "failed": failed, "commits": commits}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
