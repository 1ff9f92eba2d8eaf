"""The LanceDB store: IVF, versions, corruption."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import CheckpointError, ExistsError
from bertie.search import lance_store
from bertie.search.filters import MetadataFilter, matches_filters
from bertie.search.records import Document, EmbeddedDocument, Passage
from tests.search.conftest import Place
from tests.search.stores import D, brute, by_key, entry, everything, expected, units


@pytest.mark.parametrize("place", ["lance"], indirect=True)
@pytest.mark.parametrize("dimension", [16, 6])
def test_ivf(place: Place, dimension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.search.lance_store.EXACT_SEARCH_PASSAGES", 100)
    vectors = units(1000, 1, dimension)
    store = place.create(dimension)
    entries = []
    for i, vector in enumerate(vectors):
        document = Document(f"d{i}", "", {"i": i, "odd": i % 2 == 1})
        entries.append(EmbeddedDocument(document, [Passage(f"d{i}", 0, 0, "")], vector[None]))
    store.commit(entries[:800])
    store.optimize()
    assert {index.name for index in store._snapshot()[1].list_indices()} >= {"embedding_idx", "key_idx", "document_idx"}  # type: ignore[attr-defined]
    store.commit([*entries[800:], entries[3]], delete=["d5"])  # searched without a list until the next time
    for joined in (False, True):
        held = by_key(store, entries)
        documents = {f.key: int(f.passage.document[1:]) for f in store.fetch(sorted(held))}
        assert sorted(documents.values()) == [i for i in range(1000) if i != 5]
        for where in ([], [MetadataFilter("odd", "=", True)], [MetadataFilter("i", "<", 3)]):
            some = {key: held[key] for key in held if matches_filters(entries[documents[key]].document.metadata, where)}
            right = 0
            queries = units(20, 7, dimension)
            for query, (keys, scores) in zip(queries, store.search(queries, 10, where), strict=True):
                best, _ = brute(some, query, 10)
                assert len(keys) == len(best)
                np.testing.assert_allclose(scores, [held[key] @ query for key in keys.tolist()], atol=1e-6)
                right += len({*keys.tolist()} & {*best})
            assert right >= 0.95 * len(queries) * len(best)
        if not joined:
            store.optimize()


@pytest.mark.parametrize("place", ["lance"], indirect=True)
def test_unpublished_versions_are_rolled_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:

    store = place.create(D)
    store.commit([entry("a", 2)])

    def fail(*given: Any) -> None:
        raise KeyboardInterrupt

    for act in (lambda: store.commit([entry("a", 1, version="2"), entry("b")]), store.optimize):
        with monkeypatch.context() as patch:
            patch.setattr(lance_store, "_publish", fail)
            with pytest.raises(KeyboardInterrupt):
                act()
        assert (everything(store), everything(place.open())) == (expected([entry("a", 2)]),) * 2
    store.commit([entry("c")])
    assert (everything(store), len(store)) == (expected([entry("a", 2), entry("c")]), 3)


@pytest.mark.parametrize("place", ["lance"], indirect=True)
def test_old_versions_outlive_the_publication_of_new_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(lance_store, "KEEP_VERSIONS", timedelta(0))
    monkeypatch.setattr(lance_store, "COMPACTION_INTERVAL", 3)
    store = place.create(D)
    publish, seen = lance_store._publish, []

    def look(folder: Path, *given: Any) -> None:
        """As somebody would who comes in before a new version counts."""
        if (folder / lance_store.MANIFEST).exists():
            seen.append(everything(lance_store.LanceStore.open(folder)))
        publish(folder, *given)

    monkeypatch.setattr(lance_store, "_publish", look)
    for i in range(7):
        store.commit([entry(f"d{i}", 2)], delete=[f"d{i - 2}"])
        assert len(store) == len(everything(store)) * 2 == min(i + 1, 2) * 2
    assert len(seen) == 7 + 2 * 2
    manifests = list((Path(place.at) / "passages.lance" / "_versions").iterdir())
    assert len(manifests) < 10, "old versions stay"
    assert not any(b"auto_cleanup" in file.read_bytes() for file in manifests), "LanceDB removes versions by itself"


@pytest.mark.parametrize("place", ["lance"], indirect=True)
def test_readers_of_an_old_version(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its age, a version that counted until now is not taken from those who read it."""

    monkeypatch.setattr(lance_store, "KEEP_VERSIONS", timedelta(seconds=1))
    store = place.create(D)
    store.commit([entry(f"d{i}") for i in range(30)])
    time.sleep(1.2)
    _, old = store._snapshot()  # type: ignore[attr-defined]
    store.commit([entry(f"d{i}", version="2") for i in range(30)])
    store.optimize()
    assert old.search().select(["text"]).to_arrow()["text"].to_pylist() == ["  1  0"] * 30


@pytest.mark.parametrize("place", ["lance"], indirect=True)
def test_corrupt_files(place: Place) -> None:
    store = place.create(D)
    store.commit([entry("a", 2)])
    place.close()
    state = Path(place.at) / "index.json"
    good = state.read_text()
    for text, message in (
        ("{", "index.json"),
        ("[]", "format"),
        ('{"format": 9}', "format"),
        ('{"format": 2}', "index.json"),
        (good.replace('"generation": 1', '"generation": 0'), "corrupt: checksum mismatch"),
    ):
        state.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            place.open()
    state.unlink()
    for attempt in (place.open, lambda: place.create(D)):  # which would begin with an empty table
        with pytest.raises(CheckpointError, match="restore a backup"):
            attempt()
    state.write_text(good)
    assert len(place.open()) == 2
    (file,) = (Path(place.at) / "passages.lance" / "data").iterdir()
    whole, vector = file.read_bytes(), entry("a", 2).embeddings[1].tobytes()
    for old, new in ((vector, vector[:-1] + bytes([vector[-1] ^ 1])), (b"  1  1", b"  1  2")):
        assert whole.count(old)
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(CheckpointError, match="checksum mismatch in a passage of 'a'"):
            everything(place.open())
    for file in (Path(place.at) / "passages.lance" / "data").iterdir():
        file.write_bytes(whole[:50])
    with pytest.raises(CheckpointError, match="rebuild"):
        everything(place.open())
    for file in (Path(place.at) / "passages.lance").rglob("*.manifest"):
        file.unlink()
    with pytest.raises(CheckpointError, match="rebuild"):
        place.open()
    with pytest.raises(ExistsError):
        place.create(D)
