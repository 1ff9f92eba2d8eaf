"""Sparse and token embeddings of an index: search, fusion, reranking, updates, merging and damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie import Checkpoint, Embedder, Index, LateInteraction, SparseEmbedder
from bertie.errors import CheckpointError, InputError, NotFoundError
from bertie.search import passage_embeddings
from tests.checkpoints.test_splade import splade_folder
from tests.tasks.test_late_interaction import stanford
from tests.tasks.tiny import save, sentences

TEXTS = list(dict.fromkeys(sentences(60)))
QUERY = "Emma wrote a beautiful letter"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": save(root / "dense", "wordpiece", ""),
        "splade": splade_folder(root / "sparse")[0],
        "colbert": stanford(root / "colbert"),
    }


@pytest.fixture
def index(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    monkeypatch.setattr(passage_embeddings, "SEGMENT_PASSAGES", 16)
    embedder = Embedder(Checkpoint.load(folders["dense"]))
    derived: dict[str, Any] = {"sparse": folders["splade"], "late_interaction": folders["colbert"]}
    with Index.create(tmp_path / "index", embedder, chunk_size=40, **derived) as made:
        made.add([{"id": str(i), "text": text} for i, text in enumerate(TEXTS)])
        yield made


def documents(results: Any) -> list[str]:
    return [hit.document for hit in results]


def test_sparse_search(index: Index, folders: dict[str, Path]) -> None:
    embedder = SparseEmbedder.load(folders["splade"])
    scores = embedder.similarity(QUERY, TEXTS)
    hits = index.search(QUERY, 5, mode="sparse")
    expected = np.argsort(-scores, kind="stable")[:5]
    assert documents(hits) == [str(i) for i in expected]
    np.testing.assert_allclose([hit.score for hit in hits], scores[expected], rtol=1e-5)
    some = index.search(QUERY, 3, mode="sparse", where={"id": ["3", "7"]})
    assert set(documents(some)) <= {"3", "7"}


def test_hybrid_search_fuses_all_three(index: Index) -> None:
    hit = index.search(QUERY, 3)[0]
    assert {"dense", "sparse", "fused"} <= set(hit.scores)
    weights = {"dense": 0.0, "lexical": 0.0, "sparse": 1.0}
    assert documents(index.search(QUERY, 3, weights=weights)) == documents(index.search(QUERY, 3, mode="sparse"))
    with pytest.raises(InputError, match="must be numbers of at least 0 for each of dense, lexical, sparse"):
        index.search(QUERY, weights={"dense": 1, "lexical": 1})


def test_late_interaction_reranks_from_stored_embeddings(
    index: Index, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateInteraction.load(folders["colbert"])
    index.load_token_embeddings()
    monkeypatch.setattr(LateInteraction, "embed_documents_each", None)  # nothing is embedded again
    hits = index.search(QUERY, 5, rerank=late)
    monkeypatch.undo()
    scores = late.similarity(QUERY, [hit.text for hit in hits])
    np.testing.assert_allclose([hit.score for hit in hits], scores, atol=0.02)  # stored in half precision
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    other = LateInteraction.load(folders["colbert"], overflow="truncate")  # not the model of the index
    assert not index.stores_tokens_of(other)
    again = index.search(QUERY, 5, rerank=other)
    np.testing.assert_allclose([hit.score for hit in again], other.similarity(QUERY, [hit.text for hit in again]))


def test_updates(index: Index, folders: dict[str, Path], tmp_path: Path) -> None:
    first = index.search(QUERY, 1, mode="sparse")[0].document
    index.delete([first])
    assert first not in documents(index.search(QUERY, len(TEXTS), mode="sparse"))
    index.add([{"id": "new", "text": QUERY}])
    assert index.search(QUERY, len(TEXTS), mode="sparse", rerank=index.late_interaction)[0].document == "new"
    embedded = index.load_sparse()
    texts = dict(index.store.passage_texts())
    fresh = SparseEmbedder.load(folders["splade"]).similarity(QUERY, list(texts.values()))
    keys, scores = passage_embeddings.search_sparse(embedded, index.embed_sparse([QUERY])[0], len(texts))
    by_key = dict(zip(texts, fresh.tolist(), strict=True))
    np.testing.assert_allclose(scores, [by_key[key] for key in keys.tolist()], rtol=1e-5)


@pytest.mark.parametrize("name", ["sparse", "tokens"])
def test_segments_are_merged_and_not_embedded_again(
    index: Index, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.refresh_derived()
    folder = tmp_path / "index" / name
    assert len(list(folder.iterdir())) == -(-len(TEXTS) // 16)
    before = documents(index.search(QUERY, 9, mode="sparse", rerank=index.late_interaction))
    monkeypatch.setattr(passage_embeddings, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(passage_embeddings, "MAX_DELETED", 0.1)
    gone = [id for id in map(str, range(20)) if id not in before]
    index.delete(gone)
    with Index.open(tmp_path / "index", index.embedder) as opened:
        monkeypatch.setattr(SparseEmbedder, "embed_each", _queries_only(SparseEmbedder.embed_each))
        monkeypatch.setattr(LateInteraction, "embed_documents_each", None)
        opened.refresh_derived()
        assert documents(opened.search(QUERY, 9, mode="sparse", rerank=opened.late_interaction)) == before
        assert len(list(folder.iterdir())) == 1
        opened.verify()
        stored = opened.load_sparse() if name == "sparse" else opened.load_token_embeddings()
        assert [len(segment) for segment in stored.segments] == [len(TEXTS) - len(gone)]


def _queries_only(embed: Any) -> Any:
    def checked(self: Any, texts: Any, **options: Any) -> Any:
        assert list(texts) == [QUERY]
        return embed(self, texts, **options)

    return checked


def test_an_interrupted_refresh_continues(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed, calls = SparseEmbedder.embed_each, list[int]()

    def failing(self: Any, texts: Any, **options: Any) -> Any:
        calls.append(len(list(texts)))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(self, texts, **options)

    monkeypatch.setattr(SparseEmbedder, "embed_each", failing)
    with pytest.raises(KeyboardInterrupt):
        index.load_sparse()
    assert len(list((tmp_path / "index" / "sparse").glob("[0-9]*"))) == 2
    with Index.open(tmp_path / "index") as opened:
        opened.load_sparse()
    assert sum(calls[3:]) == len(TEXTS) - 2 * 16


def test_damage_is_found_and_repaired(index: Index, tmp_path: Path) -> None:
    index.refresh_derived()
    before = documents(index.search(QUERY, 9, mode="sparse"))
    file = next((tmp_path / "index" / "sparse").glob("*/weights.npy"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with Index.open(tmp_path / "index") as opened:
        with pytest.raises(CheckpointError, match=r"weights\.npy is corrupt; the next search embeds its passages"):
            opened.verify()
        assert documents(opened.search(QUERY, 9, mode="sparse")) == before
        opened.verify()


def test_refusals(index: Index, folders: dict[str, Path], tmp_path: Path) -> None:
    with Index.create(tmp_path / "plain", Embedder.load(folders["dense"]), chunk_size=40) as plain:
        plain.add(TEXTS[:4])
        with pytest.raises(InputError, match="mode='sparse' needs an index with sparse embeddings"):
            plain.search(QUERY, mode="sparse")
        with pytest.raises(InputError, match="the index has no sparse model"):
            plain.load_sparse()
    with pytest.raises(InputError, match="stored in the folder of an index only"):
        Index.create(f"lance://{tmp_path}/lance", Embedder.load(folders["dense"]), sparse=folders["splade"])
    with pytest.raises(InputError, match=r"use bertie\.SparseEmbedder"):
        Index.create(tmp_path / "wrong", folders["splade"])
    with pytest.raises(NotFoundError, match="is no late-interaction"):
        Index.create(tmp_path / "wrong", folders["dense"], late_interaction=folders["dense"], chunk_size=40)


def test_another_model_in_the_same_place(index: Index, folders: dict[str, Path], tmp_path: Path) -> None:
    splade = SparseEmbedder.load(folders["splade"])
    splade.save(tmp_path / "moving")
    with Index.create(tmp_path / "other", index.embedder, chunk_size=40, sparse=tmp_path / "moving") as other:
        other.add(TEXTS[:4])
    weight = splade.checkpoint.model.heads["mlm"].bias
    weight.data += 1
    splade.save(tmp_path / "moving", overwrite=True)
    with Index.open(tmp_path / "other") as opened, pytest.raises(InputError, match="is another model than the sparse"):
        opened.search(QUERY, mode="sparse")
