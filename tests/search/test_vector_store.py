"""All vector stores: transactions, snapshots, exact search, filters, kills."""

from __future__ import annotations

import itertools
import os
import random
import select
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import BertieError, ExistsError, InputError, NotFoundError
from bertie.search.bm25 import _BM25Segment
from bertie.search.filters import MetadataFilter, matches_filters
from bertie.search.index import Index
from bertie.search.local_store import LocalStore
from bertie.search.records import Document, EmbeddedDocument, MetadataValue, Passage
from tests.search import store_faults
from tests.search.conftest import Place
from tests.search.stores import D, brute, by_key, entry, everything, expected, units

# --- adding, replacing, deleting ---


def test_empty(place: Place) -> None:
    store = place.create(D)
    assert (len(store), store.generation, store.dimension) == (0, 0, D)
    assert list(store.documents()) == list(store.passage_texts()) == store.fetch([]) == store.fetch([1, 2]) == []
    assert len(store.matching_keys([])) == len(store.matching_keys([MetadataFilter("x", "!=", 1)])) == 0
    keys, scores = store.search(units(1), 5)[0]
    assert (keys.dtype, scores.dtype, len(keys), len(scores)) == (np.int64, np.float32, 0, 0)
    assert store.search(np.empty((0, D), np.float32), 5) == []
    store.optimize()
    store.commit([])
    assert (len(store), list(store.documents())) == (0, [])


def test_add_replace_delete(place: Place) -> None:
    store = place.create(D)
    first = [entry("a", 3, source="a.txt"), entry("b", 1), entry("c", 2)]
    store.commit(first)
    assert everything(store) == expected(first)
    assert len(store) == 6
    old = {key for key, _ in store.passage_texts()}
    again = [entry("b", 4, version="2"), entry("d", 1)]
    store.commit(again, delete=["c", "never was"])
    assert everything(store) == expected([first[0], *again])
    assert len(store) == 8
    new = {key for key, _ in store.passage_texts()} - old
    assert min(new) > max(old)
    assert store.fetch(sorted(old - {key for key, _ in store.passage_texts()})) == []
    store.commit([], delete=["a", "b", "d"])
    assert (len(store), everything(store)) == (0, {})
    store.commit([entry("a", 1)])
    assert {key for key, _ in store.passage_texts()}.isdisjoint(old | new), "a key was used again"


def test_roundtrip(place: Place) -> None:
    ids = [
        "it's",
        'say "hi"',
        "naïve 日本語 🎈",
        "back\\slash",
        "'; DROP TABLE documents; --",
        "%s %(a)s {} $1",
        "a\nb\tc",
    ]
    names = ["it's", 'a"b', "a.b", "$.x", "0", "日本", "back\\slash", " ", "", "[0]"]
    values: list[MetadataValue] = [
        "it's",
        'say "hi"',
        "",
        "🎈\n\t\\",
        0,
        -1,
        2**63 - 1,
        0.1,
        1e16,
        1e23,
        5e-324,
        True,
        False,
    ]
    entries = []
    for i, id in enumerate(ids):
        metadata = {name: values[(i + j) % len(values)] for j, name in enumerate(names)}
        text = f"{id} — {id}"
        passage = Passage(id, 0, len(text), text, (id, "{a,b}", 'x"', "", "NULL"))
        entries.append(EmbeddedDocument(Document(id, text, metadata, f"/tmp/{id}", id), [passage], units(1, i)))
    place.create(D, {"model": "it's", "a": {"b": [1, 2.5, None, True, "🎈"]}}).commit(entries)
    place.close()
    store = place.open()
    assert store.config == {"model": "it's", "a": {"b": [1, 2.5, None, True, "🎈"]}}
    assert list(store.documents()) == [(id, f"/tmp/{id}", id) for id in ids]
    for found, put in zip(store.fetch([key for key, _ in store.passage_texts()]), entries, strict=True):
        assert (found.passage, found.metadata, found.source) == (
            put.passages[0],
            put.document.metadata,
            put.document.source,
        )
        assert [type(found.metadata[name]) for name in names] == [type(put.document.metadata[name]) for name in names]
        for name, value in put.document.metadata.items():
            assert found.key in store.matching_keys([MetadataFilter(name, "=", value)])
    store.commit([], delete=ids)
    assert everything(store) == {}


def test_documents_without_passages(place: Place) -> None:
    store = place.create(D)
    empty = EmbeddedDocument(Document("empty", "", {"x": 1}), [], np.empty((0, D), np.float32))
    store.commit([empty, entry("a", 2)])
    assert (len(store), [id for id, _, _ in store.documents()]) == (2, ["empty", "a"])
    assert len(store.matching_keys([])) == len(list(store.passage_texts())) == len(store.search(units(1), 9)[0][0]) == 2
    assert len(store.matching_keys([MetadataFilter("x", "=", 1)])) == 0
    store.commit([entry("empty", 1)], delete=["a"])
    assert (len(store), [id for id, _, _ in store.documents()]) == (1, ["empty"])


def test_many_documents_at_once(place: Place) -> None:
    store = place.create(D)
    entries = [entry(f"d{i}", 1, seed=i) for i in range(3000)]
    store.commit(entries)
    store.commit(entries[:2000], delete=[e.document.id for e in entries[2500:]])
    assert len(store) == len(list(store.documents())) == 2500
    assert [text for _, text in store.passage_texts()] == [
        e.passages[0].text for e in entries[2000:2500] + entries[:2000]
    ]


def test_generation_grows(place: Place) -> None:
    store = place.create(D)
    seen = [store.generation]
    for put, delete in (([entry("a")], []), ([entry("a", 2)], []), ([], ["a"]), ([], ["a"])):
        store.commit(put, delete)
        seen.append(store.generation)
    assert all(a < b for a, b in itertools.pairwise(seen))
    place.close()
    assert place.open().generation == seen[-1]


def test_fetch_order_and_deleted_keys(place: Place) -> None:
    store = place.create(D)
    store.commit([entry("a", 5)])
    keys = [key for key, _ in store.passage_texts()]
    asked = [keys[3], 10**12, keys[0], keys[3], np.int64(keys[4])]
    assert [found.key for found in store.fetch(asked)] == [keys[3], keys[0], keys[3], keys[4]]  # type: ignore[arg-type]


def test_two_stores_are_independent(place: Place) -> None:
    place.create(D).commit([entry("a")])
    other = Place(place.kind, place.at if place.kind == "postgres" else place.at + "2", place.name + "2")
    second = other.create(4, {"model": "another"})
    assert (len(second), second.dimension, len(place.open())) == (0, 4, 1)
    other.close()


# --- all or nothing ---


def test_invalid_documents_change_nothing(place: Place) -> None:
    store = place.create(D)
    store.commit([entry("a", 2)])
    good = entry("b", 1)
    wrong = EmbeddedDocument(good.document, good.passages, units(1, dimension=D + 1))
    nan = EmbeddedDocument(good.document, good.passages, np.full((1, D), np.nan, np.float32))
    half = EmbeddedDocument(Document("b", "\ud800"), [Passage("b", 0, 1, "\ud800")], units(1))
    odd = EmbeddedDocument(Document("b", "x", {"list": [1]}), [], np.empty((0, D), np.float32))  # type: ignore[dict-item]
    for bad, message in ((wrong, f"dimension of this index is {D}"), (nan, "finite"), (half, "b"), (odd, "list")):
        with pytest.raises(InputError, match=message):
            store.commit([entry("a", 1, version="2"), entry("c"), bad], delete=["a"])
        assert everything(store) == expected([entry("a", 2)])
    assert store.generation == 1
    store.commit([good])
    assert len(store) == 3


def test_invalid_queries(place: Place) -> None:
    store = place.create(D)
    for queries, k in ((units(1, dimension=D + 1), 5), (units(1)[0], 5), (units(1), 0), (units(1) * np.nan, 5)):
        with pytest.raises(InputError):
            store.search(queries, k)


def test_two_writers_lose_nothing(place: Place) -> None:
    one, two = place.create(D), place.open()
    one.commit([entry("a")])
    done = ["a"]
    for store, id in ((two, "b"), (one, "c"), (two, "d")):
        try:
            store.commit([entry(id)])
            done.append(id)
        except InputError as error:  # a store may also refuse the second
            assert "another process" in str(error)  # noqa: PT017
    place.close()
    store = place.open()
    assert [id for id, _, _ in store.documents()] == done
    store.commit([entry("e")])
    assert len({key for key, _ in store.passage_texts()}) == len(store) == len(done) + 1


def test_snapshot_isolation(place: Place) -> None:
    writer, reader = place.create(D), place.open()
    writer.commit([entry(f"d{i}", 1) for i in range(50)])
    assert (len(reader), reader.generation) == (50, 1)
    texts, documents = reader.passage_texts(), reader.documents()
    before = [next(texts)], [next(documents)]
    writer.commit([entry(f"d{i}", 2, version="2") for i in range(40)], delete=["d45"])
    assert len([*before[0], *texts]) == len([*before[1], *documents]) == 50
    assert (len(reader), len(list(reader.documents()))) == (2 * 40 + 9, 49)


def test_threads(place: Place) -> None:
    store = place.create(D)
    store.commit([entry(f"d{i}") for i in range(20)])

    def read(seed: int) -> int:
        seen = 0
        for _ in range(10):
            ((keys, _),) = store.search(units(1, seed), 5)
            assert len(keys) == 5
            seen += len(store.fetch(keys.tolist()))  # fewer, when what was found has been replaced since
            assert len(list(store.passage_texts())) == 20
        return seen

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(read, seed) for seed in range(4)]
        for number in range(2, 7):
            store.commit([entry(f"d{i}", version=str(number)) for i in range(20)])
        assert all(one.result() > 0 for one in work)


def test_closed(place: Place) -> None:
    store = place.create(D)
    store.close()
    for act in (lambda: store.search(units(1), 1), lambda: store.fetch([1]), lambda: len(store)):
        with pytest.raises(InputError):
            act()


def test_create_and_open_errors(place: Place) -> None:
    with pytest.raises(NotFoundError):
        place.open()
    assert place.kind == "postgres" or not Path(place.at).exists()
    place.create(D, {"model": "mine"}).commit([entry("a")])
    with pytest.raises(ExistsError):
        place.create(D, {"model": "another"})
    store = place.open()
    assert (store.config, len(store)) == ({"model": "mine"}, 1)
    with pytest.raises(BertieError, match="dimension"):
        Place(place.kind, place.at + "3", "third").create(0)


def test_search_is_exact(place: Place) -> None:
    store = place.create(D)
    entries = [entry(f"d{i}", 5, metadata={"i": i, "even": i % 2 == 0}, seed=i) for i in range(100)]
    store.commit(entries[:60])
    store.commit(entries[60:])
    store.commit([], delete=["d7", "d8"])
    gone = entries[:7] + entries[9:]
    vectors = by_key(store, gone)
    queries = units(8, 77)
    for where in (
        [],
        [MetadataFilter("even", "=", True)],
        [MetadataFilter("i", "<", 3)],
        [MetadataFilter("even", "=", False), MetadataFilter("i", ">", 90)],
    ):
        left = {e.document.id for e in gone if matches_filters(e.document.metadata, where)}
        some = {f.key: vectors[f.key] for f in store.fetch(sorted(vectors)) if f.passage.document in left}
        assert store.matching_keys(where).tolist() == sorted(some)
        for k in (1, 10, 1000):
            for query, (keys, scores) in zip(queries, store.search(queries, k, where), strict=True):
                best, exact = brute(some, query, k)
                assert keys.tolist() == best
                np.testing.assert_allclose(scores, exact, atol=1e-6)
                assert (keys.dtype, scores.dtype) == (np.int64, np.float32)
    before = store.search(queries, 10)
    store.optimize()
    store.optimize(full=True)
    for old, new in zip(before, store.search(queries, 10), strict=True):
        assert old[0].tolist() == new[0].tolist()


VALUES: list[MetadataValue] = [
    0, 1, -1, 5, 5.0, 5.5, -0.0, 1e300, -1e300, 5e-324, 2**53, 2**53 + 1, float(2**53), -(2**53) - 1, 2**63 - 1,
    -(2**63), True, False, "", "0", "1", "5", "a", "A", "b", "ab", "ä", "z", "Z", "日本", "🎈", "\uffff", "true",
    "it's", 'a"b', "a\\b", "%",
]  # fmt: skip


def test_filters(place: Place) -> None:
    store = place.create(D)
    store.commit([entry(str(i), metadata={"x": value}, seed=i) for i, value in enumerate(VALUES)] + [entry("none")])
    keys = {f.passage.document: f.key for f in store.fetch([key for key, _ in store.passage_texts()])}
    rng = random.Random(0)
    for op in ("=", "!=", "<", "<=", ">", ">="):
        for value in VALUES:
            self_made = [i for i, mine in enumerate(VALUES) if holds(mine, op, value)]
            right = sorted(keys[str(i)] for i in self_made) + ([keys["none"]] if op == "!=" else [])
            assert store.matching_keys([MetadataFilter("x", op, value)]).tolist() == right, (op, value)
    for _ in range(10):
        some = tuple(rng.sample(VALUES, rng.randrange(4)))
        right = sorted(keys[str(i)] for i, mine in enumerate(VALUES) if any(holds(mine, "=", v) for v in some))
        assert store.matching_keys([MetadataFilter("x", "in", some)]).tolist() == right, some
    both = [MetadataFilter("x", ">=", 1), MetadataFilter("x", "<", 5.5), MetadataFilter("y", "!=", 0)]
    assert [f.metadata["x"] for f in store.fetch(store.matching_keys(both).tolist())] == [1, 5, 5.0]
    for op in ("=", "<", "in"):
        assert len(store.matching_keys([MetadataFilter("y", op, (1,) if op == "in" else 1)])) == 0


def holds(mine: MetadataValue, op: str, value: MetadataValue) -> bool:
    """Compare as Python does within a type; across types only != holds. Independent of `matches_filters`."""
    letters = [bool if isinstance(v, bool) else str if isinstance(v, str) else float for v in (mine, value)]
    if letters[0] is not letters[1]:
        return op == "!="
    signs: dict[str, Callable[[Any, Any], bool]] = {
        "=": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    }  # fmt: skip
    return signs[op](mine, value)


def test_sql_injection(place: Place) -> None:
    store = place.create(D)
    store.commit([entry("a", metadata={"x": "1"}), entry("b", metadata={"y' OR '1'='1": "z"})])
    for name, value in (("x", "' OR '1'='1"), ("x' OR '1'='1", "1"), ("x\\", "1"), ("x", "1'--"), ('x"', 'x"')):
        assert len(store.matching_keys([MetadataFilter(name, "=", value)])) == 0
    assert len(store.matching_keys([MetadataFilter("y' OR '1'='1", "=", "z")])) == 1
    assert len(store) == 2


# --- kills ---


def test_kills(place: Place) -> None:
    """Two writers at once, killed at random moments; `python -m tests.search.store_faults` does it for longer."""
    rounds = 1 if place.kind == "lance" else 2  # its processes start slowly
    assert store_faults.run_schedule(place, seed=1, rounds=rounds) > 0


@pytest.mark.slow
def test_many_kills(place: Place) -> None:
    assert store_faults.run_schedule(place, seed=2, rounds=25) > 50


# --- readers while another process writes ---


class FakeIndex(Index):
    """An index whose embeddings are random, and need no model."""

    @property
    def config(self) -> Mapping[str, Any]:
        return {**super().config, "query_prompt": ""}

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> Any:
        return np.concatenate([units(1, zlib.crc32(text.encode())) for text in texts])


def six_documents(number: int) -> list[EmbeddedDocument]:
    documents = []
    for i in range(6):
        passages = [Passage(f"d{i}", j, j + 9, f"cat {'dog ' * j}{i}") for j in range(2)]
        document = Document(f"d{i}", "", {"number": number}, None, str(number))
        documents.append(EmbeddedDocument(document, passages, units(2, 6 * number + i)))
    return documents


COMMITS = 8  # that the searches must have seen


def replace_all(kind: str, at: str, name: str) -> None:
    """Replace all documents in each commit, and compact, until standard input is closed."""
    store = Place(kind, at, name).open()
    number = 0
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        number += 1
        store.commit(six_documents(number))
        store.optimize(full=number % 3 == 0)
    store.close()


def test_searches_see_whole_commits(place: Place) -> None:
    """Each commit replaces all passages, so that a search never has fewer, or those of two commits."""
    place.create(D, {"language": None}).commit(six_documents(0))
    place.close()
    code = "import sys; from tests.search.test_vector_store import replace_all; replace_all(*sys.argv[1:])"
    child = subprocess.Popen(
        [sys.executable, "-c", code, place.kind, place.at, place.name],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
    )
    seen = set()
    try:
        with FakeIndex(place.open()) as index:
            while len(seen) < COMMITS and child.poll() is None:
                for mode in ("dense", "lexical", "hybrid"):
                    hits = index.search("cat", 12, mode=mode)
                    versions = {hit.metadata["number"] for hit in hits}
                    assert (len(hits), len(versions)) == (12, 1)
                    seen |= versions
            child.communicate()
            assert len(index) == 12
    finally:
        child.kill()
    assert child.wait() == 0
    assert len(seen) >= COMMITS


def test_a_search_outlasts_a_fast_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty commits in a row, each between two reads of a lexical search, do not leave it without hits."""
    with LocalStore.create(tmp_path / "index", D, {"language": None}) as writer:
        writer.commit(six_documents(0))
        number, read = 0, LocalStore.passage_texts

        def replaced_before(store: LocalStore, after: int = 0) -> Any:
            nonlocal number
            if number < 20:
                number += 1
                writer.commit(six_documents(number))
            return read(store, after)

        monkeypatch.setattr(LocalStore, "passage_texts", replaced_before)
        with FakeIndex(LocalStore.open(tmp_path / "index")) as index:
            hits = index.search("cat", 12, mode="lexical")
    assert [hit.metadata["number"] for hit in hits] == [20] * 12


def test_a_search_outlasts_commits_while_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the BM25 index to disk may take longer than the next commit."""
    with LocalStore.create(tmp_path / "index", D, {"language": None}) as writer:
        writer.commit(six_documents(0))
        number, save = 0, _BM25Segment.save

        def replaced_after(segment: _BM25Segment, folder: Path, index: str) -> None:
            nonlocal number
            save(segment, folder, index)
            number += 1
            writer.commit(six_documents(number))

        monkeypatch.setattr(_BM25Segment, "save", replaced_after)
        with FakeIndex(LocalStore.open(tmp_path / "index")) as index:
            for mode in ("lexical", "hybrid"):
                hits = index.search("cat", 12, mode=mode)
                assert [hit.metadata["number"] for hit in hits] == [number] * 12
    assert number == 2  # once for each search
