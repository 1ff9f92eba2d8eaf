"""The embedded store against brute force, against corrupt files, and against kills."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import BertieError, CheckpointError, ExistsError, InputError, NotFoundError
from bertie.search import local_store, segments
from bertie.search.filters import MetadataFilter, matches_filters, parse_filters
from bertie.search.local_store import LocalStore
from bertie.search.records import Document, EmbeddedDocument, FloatArray, Passage
from bertie.search.segments import IndexThresholds
from bertie.search.vector_block import EmbeddingPrecision, VectorBlock

D = 16


def vectors(n: int, seed: int = 0, dimension: int = D) -> FloatArray:
    """Unit vectors in bunches, as those of texts are."""
    draw = np.random.default_rng(seed)
    bunches = draw.normal(size=(40, dimension))
    found = bunches[draw.integers(0, 40, n)] + draw.normal(size=(n, dimension)) * 0.7
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def entry(name: str, rows: FloatArray, **metadata: Any) -> EmbeddedDocument:
    passages = [Passage(name, i, i + 4, f"{name}-{i}", ("Top", "Ünder")) for i in range(len(rows))]
    return EmbeddedDocument(Document(name, "text", metadata, f"/{name}.txt", "v1"), passages, rows)


def shrink(monkeypatch: pytest.MonkeyPatch, full: int = 64) -> None:
    monkeypatch.setattr(local_store, "SEGMENT_ROWS", full)
    monkeypatch.setattr(segments, "BUILD_ROWS", 50)


class Twin:
    """What a store should say, worked out plainly."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[EmbeddedDocument, FloatArray]] = {}

    def commit(
        self, put: list[EmbeddedDocument], delete: list[str] | tuple[str, ...] = (), kind: EmbeddingPrecision = "fp32"
    ) -> None:
        for name in delete:
            self.rows.pop(name, None)
        for one in put:
            self.rows[one.document.id] = (one, VectorBlock.quantize(one.embeddings, kind).dequantize())

    def search(self, query: FloatArray, k: int, where: tuple[MetadataFilter, ...] = ()) -> list[tuple[str, float]]:
        scored = [
            (passage.text, float(row.astype(np.float64) @ query.astype(np.float64)))
            for one, rows in self.rows.values()
            if matches_filters(one.document.metadata, where)
            for passage, row in zip(one.passages, rows, strict=True)
        ]
        return sorted(scored, key=lambda one: -one[1])[:k]


def said(store: LocalStore, query: FloatArray, k: int, where: Any = ()) -> list[tuple[str, float]]:
    keys, scores = store.search(query[None], k, where)[0]
    return [(one.passage.text, float(score)) for one, score in zip(store.fetch(keys.tolist()), scores, strict=True)]


def same(one: list[tuple[str, float]], two: list[tuple[str, float]]) -> None:
    assert [name for name, _ in one] == [name for name, _ in two]
    assert [score for _, score in one] == pytest.approx([score for _, score in two], abs=1e-7)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_random_commits_against_brute_force(
    kind: EmbeddingPrecision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    draw, twin = random.Random(1), Twin()
    store = LocalStore.create(tmp_path / "index", D, {"model": "toy"}, embedding_precision=kind)
    for step in range(40):
        names = [f"d{draw.randrange(40)}" for _ in range(draw.randrange(1, 4))]
        put = [
            entry(
                name, vectors(draw.choice([0, 1, 5, 90]), seed=step * 50 + i), year=draw.randrange(5), odd=step % 2 == 1
            )
            for i, name in enumerate(dict.fromkeys(names))
        ]
        delete = [f"d{draw.randrange(40)}" for _ in range(draw.randrange(3))]
        store.commit(put, delete)
        twin.commit(put, delete, kind)
        if step % 7 == 3:
            store.optimize()
        if step % 20 == 19:
            store.optimize(full=True)
        if step % 10 == 9:
            store.close()
            store = LocalStore.open(tmp_path / "index")
        assert store.generation == step + 1
        assert len(store) == sum(len(one.passages) for one, _ in twin.rows.values())
        query = vectors(1, seed=10_000 + step)[0]
        same(said(store, query, 10), twin.search(query, 10))
        where = parse_filters({"year >=": 2, "odd": True})
        same(said(store, query, 7, where), twin.search(query, 7, where))
    assert sorted(one for one, _, _ in store.documents()) == sorted(twin.rows)
    assert [text for _, text in store.passage_texts()] == [
        found.passage.text for found in store.fetch([k for k, _ in store.passage_texts()])
    ]


def test_batch_invariance(tmp_path: Path) -> None:
    store = LocalStore.create(tmp_path, D, {})
    rows = vectors(500)
    store.commit([entry("d", rows)])
    together = store.search(rows[:40], 10)
    for query, (keys, scores) in zip(rows[:40], together, strict=True):
        alone = store.search(query[None], 10)[0]
        assert keys.tolist() == alone[0].tolist()
        assert scores.tobytes() == alone[1].tobytes()


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        ("fp32", IndexThresholds(flat=500)),
        ("int8", IndexThresholds(flat=500)),
        ("binary", IndexThresholds(flat=500)),
        ("fp32", IndexThresholds(flat=200, hnsw=500)),
        ("binary", IndexThresholds(flat=200, hnsw=500)),
    ],
)
def test_recall_of_hnsw_binary_and_ivf(kind: EmbeddingPrecision, limits: IndexThresholds, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    n, dimension = 4000, 32
    rows, queries = vectors(n, dimension=dimension), vectors(50, seed=0, dimension=dimension)
    queries = queries + np.random.default_rng(5).normal(size=queries.shape).astype(np.float32) * 0.05
    store = LocalStore.create(tmp_path, dimension, {}, embedding_precision=kind, thresholds=limits)
    for part in range(4):
        mine = rows[part * 1000 : part * 1000 + 1000]
        store.commit([entry(f"d{part}-{i}", mine[i * 10 : i * 10 + 10], tenth=i % 10, part=part) for i in range(100)])
    store.optimize(full=True)
    store.close()
    store = LocalStore.open(tmp_path)
    (segment,) = store._snapshot().segments.values()
    by_bits = kind == "binary" and n <= limits.hnsw
    assert (segment.index is None, segment.bits is None) == (by_bits, not by_bits)
    exact = VectorBlock.quantize(rows, kind).dequantize().astype(np.float64)
    # Among all rows, half of them, a tenth, and a fortieth.
    for where in ({}, {"part": [0, 1]}, {"tenth": 3}, {"tenth": 3, "part": 2}):
        parts, tenths = np.arange(n) // 1000, np.arange(n) // 10 % 100 % 10
        ok = np.ones(n, bool)
        for name, value in where.items():
            ok &= np.isin({"part": parts, "tenth": tenths}[name], value)
        hits = 0
        for query, (keys, scores) in zip(queries, store.search(queries, 10, parse_filters(where)), strict=True):
            truth = np.where(ok, exact @ query.astype(np.float64), -np.inf)
            assert len(keys) == 10
            assert ok[keys - 1].all()
            assert scores == pytest.approx(truth[keys - 1], abs=1e-6)
            hits += len(set(keys - 1) & set(np.argsort(-truth)[:10]))
        assert hits / (10 * len(queries)) >= 0.95


def test_selective_filter_far_from_the_query(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    near, far = vectors(3000, 1), vectors(40, 2)
    query = near[0]
    far = far - np.outer(far @ query + np.linspace(0.2, 0.9, 40), query)  # none is on the query's side
    store = LocalStore.create(tmp_path, D, {}, thresholds=IndexThresholds(flat=100))
    store.commit([entry("near", near, lang="en"), entry("far", far.astype(np.float32), lang="de")])
    store.optimize(full=True)
    keys, _ = store.search(query[None], 10, parse_filters({"lang": "de"}))[0]
    assert keys.tolist() == (3001 + np.argsort(-(far.astype(np.float64) @ query))[:10]).tolist()


@pytest.mark.parametrize("op", ["=", "!=", "<", "<=", ">", ">="])
def test_filters_against_the_reference(op: str, tmp_path: Path) -> None:
    values = [None, "", "1", "2", "Ä", "'; DROP TABLE passages; --", 1, 2, 1.5, -3, 2**62, True, False, 0]
    store = LocalStore.create(tmp_path, D, {})
    rows = vectors(1)
    documents = {f"d{i}": {} if value is None else {"n'ame": value} for i, value in enumerate(values)}
    store.commit(
        [
            EmbeddedDocument(Document(name, "", data), [Passage(name, 0, 1, name)], rows)
            for name, data in documents.items()
        ]
    )
    for value in values[1:]:
        where = (MetadataFilter("n'ame", op, value),)  # type: ignore[arg-type]
        expected = {name for name, data in documents.items() if matches_filters(data, where)}
        assert {one.passage.document for one in store.fetch(store.matching_keys(where).tolist())} == expected
    for some in ((), (1, "1"), (True, 1.5, "Ä")):
        where = (MetadataFilter("n'ame", "in", some),)
        expected = {name for name, data in documents.items() if matches_filters(data, where)}
        assert {one.passage.document for one in store.fetch(store.matching_keys(where).tolist())} == expected


def test_fetch_returns_what_was_stored(tmp_path: Path) -> None:
    with LocalStore.create(tmp_path, D, {"model": "m", "chunk_size": 256}) as store:
        document = Document("a/ä'\".md", "Ein Text", {"year": 1999, "pi": 3.0, "ok": True, "t": "ü"}, None, "v7")
        passage = Passage(document.id, 3, 8, "T\n€xt", ("A", "B"))
        store.commit([EmbeddedDocument(document, [passage], vectors(1))])
    with LocalStore.open(tmp_path) as store:
        assert (store.dimension, store.config) == (D, {"model": "m", "chunk_size": 256})
        (found,) = store.fetch([1])
        assert (found.key, found.passage, found.metadata, found.source) == (1, passage, document.metadata, None)
        assert [type(value) for value in found.metadata.values()] == [int, float, bool, str]
        assert list(store.documents()) == [(document.id, None, "v7")]
        store.commit([], [document.id])
        assert (len(store), store.generation, store.fetch([1])) == (0, 2, [])
        store.commit([EmbeddedDocument(document, [passage], vectors(1))])
        assert next(store.passage_texts()) == (2, passage.text)  # keys are never used again


def test_empty_store(tmp_path: Path) -> None:
    store = LocalStore.create(tmp_path, D, {})
    keys, scores = store.search(vectors(1), 5)[0]
    assert (len(keys), len(scores), len(store)) == (0, 0, 0)
    store.optimize(full=True)


def test_invalid_input_changes_nothing(tmp_path: Path) -> None:
    store = LocalStore.create(tmp_path / "index", D, {})
    good = entry("good", vectors(2))
    bad = vectors(2).copy()
    bad[1, 0] = np.nan
    huge = vectors(2).astype(np.float64)
    huge[0, 1] = 1e300
    for put, message in (
        ([good, entry("bad", vectors(2, dimension=8))], "dimension of this index is 16"),
        ([good, entry("bad", bad)], "non-finite"),
        ([good, entry("bad", huge)], "non-finite"),  # type: ignore[arg-type]
        ([good, good], "duplicate document id"),
        ([good, entry("", vectors(1))], "id="),
        ([good, entry("x", vectors(1), tags=["a"])], "tags"),
        ([good, EmbeddedDocument(Document("x", ""), [Passage("x", 0, 1, "\ud800")], vectors(1))], "lone surrogate"),
        ([good, EmbeddedDocument(Document("x", ""), [Passage("y", 0, 1, "a")], vectors(1))], "'y'"),
    ):
        with pytest.raises(InputError, match=message):
            store.commit(put)
    assert (len(store), store.generation) == (0, 0)
    with pytest.raises(InputError, match="dimension of this index is 16"):
        store.search(vectors(1, dimension=8), 5)
    with pytest.raises(InputError, match="k=0"):
        store.search(vectors(1), 0)
    with pytest.raises(ExistsError, match="already exists"):
        LocalStore.create(tmp_path / "index", D, {})
    with pytest.raises(ExistsError, match="other files"):
        LocalStore.create(tmp_path, D, {})
    with pytest.raises(NotFoundError, match="no index"):
        LocalStore.open(tmp_path)
    with pytest.raises(InputError, match="multiple of 8"):
        LocalStore.create(tmp_path / "other", 12, {}, embedding_precision="binary")


def test_one_writer_and_many_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    writer = LocalStore.create(tmp_path, D, {})
    writer.commit([entry("a", vectors(3))])
    reader = LocalStore.open(tmp_path)
    with pytest.raises(InputError, match="another process"):
        reader.commit([entry("b", vectors(1))])
    stop, problems, seen = threading.Event(), [], [0]

    def read() -> None:
        try:
            while not stop.is_set():
                keys, _ = reader.search(vectors(1), 5)[0]
                assert len(keys) >= min(seen[0], 3)
                assert len(reader.fetch(keys.tolist())) >= 3
                seen[0] += 1
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(40):
        writer.commit([entry(f"d{step}", vectors(30, step))])
        writer.optimize()
    while seen[0] < 5 and not problems:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert not problems
    assert len(reader) == 3 + 40 * 30
    same(said(reader, vectors(1)[0], 10), said(writer, vectors(1)[0], 10))
    writer.close()
    reader.commit([entry("b", vectors(1))])
    assert len(reader) == 4 + 40 * 30


def test_opening_a_segment_during_a_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    writer = LocalStore.create(tmp_path, D, {})
    for i in range(3):
        writer.commit([entry(f"d{i}", vectors(70, i))])
    plain, calls = local_store.corrupt_files, []  # type: ignore[attr-defined]

    def slow(folder: Path, sums: Any) -> list[str]:
        calls.append(folder.name)
        if len(calls) == 2:
            writer.optimize(full=True)
        return plain(folder, sums)

    monkeypatch.setattr(local_store, "corrupt_files", slow)
    reader = LocalStore.open(tmp_path)
    assert calls == ["1", "2", "4"]
    same(said(reader, vectors(1)[0], 10), said(writer, vectors(1)[0], 10))


def test_small_commits_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "SEGMENT_ROWS", 8)
    store = LocalStore.create(tmp_path, D, {})
    for i in range(300):
        store.commit([entry(f"d{i}", vectors(1, i))])
        store.optimize()
    view = store._snapshot()
    assert sum(map(len, view.segments.values())) + len(view.keys) == 300
    assert len(view.segments) < 12
    assert len(list((tmp_path / "segments").iterdir())) == len(view.segments)
    store.optimize(full=True)
    assert [len(one) for one in store._snapshot().segments.values()] == [300]
    store.commit([], [f"d{i}" for i in range(200)])
    store.optimize()
    assert [len(one) for one in store._snapshot().segments.values()] == [100]


def filled(folder: Path) -> tuple[LocalStore, list[tuple[str, float]]]:
    store = LocalStore.create(folder, D, {}, embedding_precision="int8", thresholds=IndexThresholds(flat=100))
    store.commit([entry("a", vectors(200, 1)), entry("b", vectors(100, 2))])
    store.commit([entry("c", vectors(150, 3))])
    store.commit([entry("new", vectors(5, 4))], ["b"])
    return store, said(store, vectors(1, 9)[0], 12)


@pytest.mark.parametrize("file", ["vectors.npy", "keys.npy", "scales.npy", "index.faiss"])
@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "whole"])
def test_corrupt_segments_are_reported_and_repaired(
    file: str, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    shrink(monkeypatch)
    store, before = filled(tmp_path / "i")
    store.close()
    victim = sorted((tmp_path / "i" / "segments").iterdir())[0] / file
    data = bytearray(victim.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif harm == "cut":
        victim.write_bytes(data[:-3])
    elif harm == "lose":
        victim.unlink()
    else:
        for one in victim.parent.iterdir():
            one.unlink()
        victim.parent.rmdir()
    with pytest.raises(CheckpointError, match=r"is corrupt.*bertie index --rebuild") as caught:
        LocalStore.open(tmp_path / "i")
    assert str(victim.parent) in str(caught.value)
    store = LocalStore(tmp_path / "i", check_segments=False)
    by_text = {f"{n}-{i}": row for n, s, m in (("a", 1, 200), ("c", 3, 150)) for i, row in enumerate(vectors(m, s))}
    again = store.repair(lambda texts: np.stack([by_text[text] for text in texts]))
    assert again == (0 if file == "index.faiss" and harm != "whole" else 200)
    same(said(store, vectors(1, 9)[0], 12), before)
    store.close()
    with LocalStore.open(tmp_path / "i") as store:
        assert store.repair(lambda texts: np.empty((0, D), np.float32)) == 0
        same(said(store, vectors(1, 9)[0], 12), before)


def test_corrupt_catalog(tmp_path: Path) -> None:
    store = LocalStore.create(tmp_path, D, {})
    store.commit([entry("name", vectors(3))])
    store.close()
    file = tmp_path / "index.sqlite"
    whole = file.read_bytes()
    store = LocalStore.open(tmp_path)
    file.write_bytes(whole.replace(b"name-1", b"nbme-1"))  # while it is open
    with pytest.raises(CheckpointError, match="passage 2 of 'name'"):
        store.fetch([1, 2, 3])
    store.close()
    for broken in (file.read_bytes(), whole[: len(whole) // 2], b"nonsense" * 1000, b""):
        file.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"index\.sqlite is corrupt"):
            LocalStore.open(tmp_path)
    file.unlink()
    with pytest.raises(NotFoundError):  # as if a kill had left the folder
        LocalStore.open(tmp_path)
    (tmp_path / "segments" / "1").mkdir()
    with pytest.raises(CheckpointError, match="is missing"):
        LocalStore.open(tmp_path)


# --- full disks ---


@pytest.mark.parametrize("call", range(3))
def test_full_disk_while_a_segment_is_written(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old state stays, the message names the segment, and nothing is left of it."""
    shrink(monkeypatch)
    store = LocalStore.create(tmp_path / "i", D, {}, thresholds=IndexThresholds(flat=100))
    store.commit([entry("a", vectors(70, 1))])
    store.commit([entry("b", vectors(70, 2))])
    before, calls = said(store, vectors(1, 9)[0], 12), []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) > call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for act in (lambda: store.commit([entry("c", vectors(80, 3))], ["a"]), lambda: store.optimize(full=True)):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(segments, "fsync", full)
            with pytest.raises(BertieError, match=r"segments/\d+\.new: No space left on device.*committed is safe"):
                act()
        assert {file.name for file in (tmp_path / "i" / "segments").iterdir()} == {"1", "2"}
        same(said(store, vectors(1, 9)[0], 12), before)
    store.commit([entry("c", vectors(80, 3))], ["a"])
    store.optimize(full=True)
    after = said(store, vectors(1, 9)[0], 12)
    store.close()
    with LocalStore.open(tmp_path / "i") as store:
        store.verify()
        same(said(store, vectors(1, 9)[0], 12), after)


FULL_DISK = """
import subprocess, sys
from pathlib import Path
from tests.search.test_local_store import D, entry, vectors
from bertie.errors import BertieError
from bertie.search import local_store
from bertie.search.local_store import LocalStore
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder], check=True)
local_store.SEGMENT_ROWS = 1000
ballast = folder / "ballast"
ballast.write_bytes(bytes(1_500_000))
store, done = LocalStore.create(folder / "i", D, {}), 0
try:
    while True:
        store.commit([entry(f"d{done}", vectors(rows, done))])
        done += 1
except BertieError as error:
    print(error)
store.close()
ballast.unlink()
with LocalStore.open(folder / "i") as store:
    store.verify()
    assert len(store) == done * rows, (len(store), done)
    registered = {str(number) for number in store._snapshot().segments}
    store.commit([], ["d0"])
    assert {file.name for file in (folder / "i" / "segments").iterdir()} == registered
    store.optimize(full=True)
    store.verify()
    assert len(store) == max(done - 1, 0) * rows
print("intact", done)
"""


@pytest.mark.parametrize("rows", [20, 1500])
def test_really_full_disk(rows: int, tmp_path: Path) -> None:
    """Commits to the catalog, or to segments, until a small file system is full."""
    private = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*private, "mount", "-t", "tmpfs", "x", tmp_path]).returncode:
        pytest.skip("needs user namespaces")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [*private, sys.executable, "-c", FULL_DISK, str(tmp_path / "disk"), str(rows)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    message, end = done.stdout.splitlines()
    assert "everything that was committed is safe" in message
    assert "segments/" in message if rows >= 1000 else "index." in message
    assert end.startswith("intact")
