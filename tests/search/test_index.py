"""The index over a tiny model: what is put in is found, by each way and by all together, and only what has changed
is embedded.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertie
from bertie.errors import CheckpointError, ExistsError, InputError, NotFoundError
from bertie.search import document_input, local_store
from bertie.search import index as module
from bertie.search.fusion import RERANK_WEIGHT, interpolate
from bertie.search.index import Index, IndexUpdate, model_fingerprint
from bertie.search.records import Document
from bertie.search.searcher import rerank_weight
from bertie.tasks.embed import Embedder
from bertie.tasks.rerank import Reranker
from tests.checkpoints.tiny_sentence import save_bert

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

TEXTS = {
    "cats": "the cat sat on the mat. a cat ran. the cat sat.",
    "dogs": "a dog ran on the mat. the dog sat. dogs find the cat.",
    "mats": "a mat on a mat. the mat sat on the dog.",
    "none": "Rivers flow to the sea, and zebras sleep.",
}
LONG = " ".join(f"the cat sat on mat {i}." for i in range(60))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def embedder(model: Path) -> Embedder:
    return Embedder.load(model)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Reranker:
    return Reranker.load(save_bert(tmp_path_factory.mktemp("model") / "pairs", labels=1))


@pytest.fixture
def index(tmp_path: Path, embedder: Embedder) -> Iterator[Index]:
    with Index.create(tmp_path / "index", embedder) as made:
        made.add(Document(name, text, {"letter": name[0], "n": i}) for i, (name, text) in enumerate(TEXTS.items()))
        yield made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is embedded."""
    seen: list[str] = []
    plain = Embedder.embed

    def embed(self: Embedder, texts: Any, **options: Any) -> Any:
        texts = list(texts)
        seen.extend(texts)
        return plain(self, texts, **options)

    monkeypatch.setattr(Embedder, "embed", embed)
    return seen


def unit(x: Any) -> Any:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_dense_scores_are_cosine_similarities(index: Index, embedder: Embedder) -> None:
    query = "find the dog"
    found = index.search(query, k=3, mode="dense")
    scores = unit(embedder.embed(list(TEXTS.values()))) @ unit(embedder.embed([query]))[0]
    order = np.argsort(-scores)[:3]
    assert [hit.document for hit in found] == [list(TEXTS)[i] for i in order]
    assert [hit.score for hit in found] == pytest.approx(scores[order].tolist(), abs=1e-6)
    assert [dict(hit.scores) for hit in found] == [{"dense": hit.score} for hit in found]
    hit = found[0]
    assert hit.text == TEXTS[hit.document][hit.start : hit.end]
    assert hit.metadata == {"letter": hit.document[0], "n": list(TEXTS).index(hit.document)}


def test_lexical_needs_no_model(index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    index.close()
    monkeypatch.setattr(Embedder, "load", never)
    with Index.open(tmp_path / "index") as again:
        found = again.search("Where do rivers flow?", mode="lexical")
        assert [hit.document for hit in found] == ["none"]
        assert [found[0].text[a:b] for a, b in found[0].highlights] == ["Rivers", "flow"]
        # Which ran over from the last time it was made.
        assert [one.name for one in (tmp_path / "index" / "lexical").iterdir()] == ["0-4"]


def test_hybrid_is_reciprocal_rank_fusion(index: Index) -> None:
    query = "the dogs ran"
    dense, lexical = (index.search(query, k=100, mode=mode) for mode in ("dense", "lexical"))
    ranks = [{hit.document: i for i, hit in enumerate(one, 1)} for one in (dense, lexical)]
    expected = {name: sum(1 / (60 + one[name]) for one in ranks if name in one) for name in TEXTS}
    found = index.search(query, k=4)
    assert {hit.document: hit.score for hit in found} == pytest.approx(expected)
    assert [hit.score for hit in found] == sorted(expected.values(), reverse=True)
    for hit in found:
        assert set(hit.scores) == {"dense", "fused"} | ({"lexical"} if hit.document in ranks[1] else set())
    assert set(found.timings) == {"encode", "dense", "load", "lexical", "fuse", "fetch", "highlight"}
    assert all(seconds >= 0 for seconds in found.timings.values())


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_reranking(mode: Any, index: Index, reranker: Reranker) -> None:
    query = "the cat sat"
    before = index.search(query, k=3, mode=mode)
    found = index.search(query, k=2, mode=mode, rerank=reranker, rerank_weight=1, depth=3)
    ranked = reranker.rerank(query, [hit.text for hit in before], top_k=2)
    assert [hit.text for hit in found] == [one.text for one in ranked]
    assert [hit.score for hit in found] == pytest.approx([one.score for one in ranked], abs=1e-5)
    assert all(hit.scores["rerank"] == hit.score for hit in found)
    assert all(
        hit.scores.items() >= dict(was.scores).items() for hit in found for was in before if was.text == hit.text
    )


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_the_weight_of_a_reranker(mode: Any, index: Index, reranker: Reranker) -> None:
    query, first = "the cat sat", "fused" if mode == "hybrid" else mode
    before = index.search(query, k=3, mode=mode)
    retrieved = {hit.text: hit.score for hit in before}
    scores = dict(zip(retrieved, reranker.predict([(query, text) for text in retrieved]).tolist(), strict=True))
    for weight in (0.0, 0.25):
        found = index.search(query, k=2, mode=mode, rerank=reranker, rerank_weight=weight, depth=3)
        wanted = interpolate(retrieved, scores, weight)[:2]
        assert [hit.score for hit in found] == pytest.approx([score for _, score in wanted], abs=1e-5)
        assert [hit.text for hit in found] == [text for text, _ in wanted]
        assert all(hit.scores["combined"] == hit.score and {first, "rerank"} <= set(hit.scores) for hit in found)
    assert [hit.text for hit in index.search(query, k=3, mode=mode, rerank=reranker, rerank_weight=0, depth=3)] == [
        hit.text for hit in before
    ]
    assert rerank_weight(reranker) == 1
    assert rerank_weight(Reranker.load("bertie-small")) == RERANK_WEIGHT
    for weight in (-0.1, 1.1):
        with pytest.raises(InputError, match=f"rerank_weight={weight} must be a number from 0 to 1"):
            index.search(query, rerank=reranker, rerank_weight=weight)
    with pytest.raises(InputError, match="leave out rerank_weight"):
        index.search(query, rerank=reranker, rerank_weight=0.5, weights={"dense": 1, "lexical": 1, "rerank": 1})


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_weights_with_a_reranker(mode: Any, index: Index, reranker: Reranker) -> None:
    query = "the cat sat"
    first = ["dense", "lexical"] if mode == "hybrid" else [mode]
    weights = dict(zip([*first, "rerank"], (0.5, 0.2, 1.5), strict=False))
    said = index.search(query, k=100, mode=mode, rerank=reranker)
    stages = {
        name: {hit.document: hit.scores[name] for hit in said if name in hit.scores} for name in [*first, "rerank"]
    }
    expected = dict.fromkeys((hit.document for hit in said), 0.0)
    for name, some in stages.items():
        low, high = min(some.values()), max(some.values())
        for document, score in some.items():
            expected[document] += weights[name] * ((score - low) / (high - low) if high > low else 1.0)
    found = index.search(query, k=100, mode=mode, rerank=reranker, weights=weights)
    assert {hit.document: hit.score for hit in found} == pytest.approx(expected, abs=1e-5)
    assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
    assert all(hit.scores["fused"] == hit.score for hit in found)


def test_weights_of_dense_and_lexical(index: Index) -> None:
    query = "the dogs ran"
    by_words = index.search(query, mode="lexical")
    found = index.search(query, weights={"dense": 0, "lexical": 1})
    assert [hit.document for hit in found][: len(by_words)] == [hit.document for hit in by_words]
    assert found[0].score == 1.0
    for wrong in ({"dense": 1}, {"dense": 1, "lexical": 1, "rerank": 1}, {"dense": 1, "lexical": -1}):
        with pytest.raises(InputError, match=r"weights=.* must be numbers of at least 0 for each of dense, lexical,"):
            index.search(query, weights=wrong)


@pytest.mark.parametrize("mode", ["hybrid", "dense", "lexical"])
def test_metadata_filters(mode: Any, index: Index) -> None:
    query = "the cat sat on the mat"
    assert {hit.document for hit in index.search(query, mode=mode, where={"letter": ["c", "m"]})} == {"cats", "mats"}
    assert {hit.document for hit in index.search(query, mode=mode, where={"n <=": 1, "letter !=": "c"})} == {"dogs"}
    assert list(index.search(query, mode=mode, where={"letter": "x"})) == []


def test_search_batch_equals_search(index: Index, reranker: Reranker) -> None:
    queries = ["the cat", "a dog ran", "rivers", "the cat", ""]
    weights = {"dense": 1, "lexical": 0.5, "rerank": 2}
    for options in (
        {},
        {"mode": "dense"},
        {"mode": "lexical"},
        {"rerank": reranker},
        {"rerank": reranker, "weights": weights},
    ):
        together = index.search_batch(queries, **options)
        assert [one.query for one in together] == queries
        for one in together:
            alone = index.search(one.query, **options)
            assert [hit.document for hit in one] == [hit.document for hit in alone]
            assert [hit.score for hit in one] == pytest.approx([hit.score for hit in alone], abs=1e-6)
    assert index.search_batch([]) == []


def test_long_documents_are_split(tmp_path: Path, embedder: Embedder) -> None:
    with Index.create(tmp_path / "i", embedder, chunk_size=20, chunk_overlap=4) as index:
        counts = index.add([Document("long", LONG), "the dog ran."])
        assert counts == IndexUpdate(added=2, passages=len(index))
        assert len(index) > 20
        hit = index.search("mat 37", mode="lexical", k=1)[0]
        assert "37" in hit.text
        assert hit.text == LONG[hit.start : hit.end]
        assert len(embedder.tokenizer.encode(hit.text)) <= 20


def test_add_updates_existing_documents(index: Index, counted: list[str]) -> None:
    same = Document("cats", TEXTS["cats"], {"letter": "c", "n": 0})
    assert index.add([same]) == IndexUpdate(unchanged=1)
    assert counted == []
    assert index.add([Document("cats", "a zebra."), "a text", "a text"]) == IndexUpdate(1, 1, 1, 0, 2)
    assert counted == ["a zebra.", "a text"]
    assert {hit.document for hit in index.search("zebras", mode="lexical")} == {"cats", "none"}
    assert "cats" not in {hit.document for hit in index.search("the cat sat", mode="lexical")}
    assert index.delete(["cats", "nobody"]) == IndexUpdate(deleted=1)
    assert {hit.document for hit in index.search("zebras")} >= {"none"}
    assert "cats" not in {hit.document for hit in index.search("zebras")}


ROWS = [
    {"key": "c", "body": TEXTS["cats"], "year": 1999, "day": datetime.date(2024, 5, 1), "tags": ["a"]},
    {"key": "d", "body": TEXTS["dogs"], "year": None, "day": datetime.date(2024, 5, 2), "tags": ["b"]},
]


def tables() -> dict[str, Any]:
    pandas, polars, pyarrow = map(pytest.importorskip, ("pandas", "polars", "pyarrow"))
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}  # type: ignore[attr-defined, index]
    return {
        "dicts": ROWS,
        "generator": iter(ROWS),
        "columns": columns,
        "pandas": pandas.DataFrame(ROWS),
        "polars": polars.DataFrame(ROWS),
        "pyarrow": pyarrow.table(columns),
        "datasets": pytest.importorskip("datasets").Dataset.from_list(ROWS),
    }


def test_add_reads_tables_with_their_metadata(tmp_path: Path, embedder: Embedder) -> None:
    for name, table in tables().items():
        with Index.create(tmp_path / name, embedder) as index:
            assert index.add(table, text="body", id="key") == IndexUpdate(added=2, passages=2), name
            hits = {hit.document: hit for hit in index.search("cat", mode="lexical")}
            assert set(hits) == {"c", "d"}
            assert hits["c"].text == TEXTS["cats"]
            assert hits["c"].metadata["year"] == 1999
            assert "year" not in hits["d"].metadata  # a missing value
            assert str(hits["d"].metadata["day"]).startswith("2024-05-02")
            assert "tags" not in hits["c"].metadata  # no scalar
            assert [hit.document for hit in index.search("cat", where={"year": 1999})] == ["c"]
            again = tables()[name]
            assert index.add(again, text="body", id="key") == IndexUpdate(unchanged=2)
            assert "passages=2" in repr(index)
            assert "<table>" in index._repr_html_()


def test_add_reads_single_texts_and_columns(tmp_path: Path, embedder: Embedder) -> None:
    pandas = pytest.importorskip("pandas")
    with Index.create(tmp_path / "index", embedder) as index:
        assert index.add("the cat sat on the mat").added == 1
        assert index.add(Document("x", "a dog ran")).added == 1
        assert index.add({"text": "a mat sat", "year": 7}).added == 1
        assert index.add({"text": "a mat sat", "year": 8}).added == 1  # other metadata: another document
        assert index.add(pandas.Series(["dogs find the cat", "the cat sat on the mat"])) == IndexUpdate(
            added=1, unchanged=1, passages=1
        )
        assert index.add(pandas.DataFrame({"comment": ["a cat ran"]})).added == 1  # the only column
        assert index.add(np.array(["a mat ran"])).added == 1
        results = index.search("mat", mode="lexical", where={"year >=": 7})
        assert sorted(hit.metadata["year"] for hit in results) == [7, 8]
        assert len(repr(results).splitlines()) == 3
        assert "a mat sat" in results._repr_html_()
        index.add("<b>a dog</b>")
        assert "<b>a dog" not in index.search("dog")._repr_html_()


def test_add_refuses_what_it_would_misread(tmp_path: Path, index: Index) -> None:
    pandas = pytest.importorskip("pandas")
    before = len(index)
    for documents, message in (
        (str(tmp_path), "is a file or folder; use refresh.. for files"),
        (tmp_path, "; use refresh.. for files"),
        ([tmp_path], "document 0 is .*; use refresh.. for files"),
        (b"bytes", "not bytes"),
        (None, "not NoneType"),
        (7, "not int"),
        ({"a": "the cat", "b": "the dog"}, "needs the key 'text', but this one has a, b; pass documents by id as "),
        ([("a", "the cat")], 'is tuple; .*pass an .id, text. pair as {"id": id'),
        (["a cat", None], "document 1 is NoneType; .*leave out missing texts"),
        (["a cat", float("nan")], "document 1 is float"),
        ([{"texts": "a cat"}], "'text' is missing among texts; .*text= selects another column"),
        ([{"text": 7}], "'text' is 7; it must be a string"),
        ([{"text": "a", "id": None}], "the id 'id' is None"),
        ([{"text": "a", "id": 1}, {"text": "b", "id": 1}], "duplicate document id '1'"),
        (pandas.DataFrame({"a": ["x"], "b": ["y"]}), "no column 'text'; pass text= with one of: a, b"),
        (pandas.DataFrame({"text": ["a cat", None]}), "document 1: 'text' is"),
        ({"text": ["a", "b"], "id": [1]}, "different lengths: text: 2, id: 1"),
    ):
        with pytest.raises(InputError, match=message):
            index.add(documents)
    assert len(index) == before
    with pytest.raises(InputError, match="'tags' is list; metadata must be scalar"):
        index.add(ROWS, text="body", id="key", metadata=["tags"])
    with pytest.raises(InputError, match="no column 'colour', only: a"):
        index.add(pandas.DataFrame({"a": ["x"]}), metadata=["colour"])
    with pytest.raises(InputError, match="metadata='year' must be a list"):
        index.add(ROWS, metadata="year")
    with pytest.raises(TypeError, match="has no argument 'batch_size'"):
        index.add(ROWS, batch_size=3)  # type: ignore[call-arg]


def test_refresh_embeds_changed_documents_only(tmp_path: Path, embedder: Embedder, counted: list[str]) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "rows.jsonl").write_text('{"text": "a dog", "year": 1999}\n{"text": "a cat", "year": 2001}\n')
    with Index.create(tmp_path / "i", embedder) as index:
        index.add([Document("elsewhere", "a mat ran")])
        assert index.refresh(folder) == IndexUpdate(added=6, passages=6)
        counted.clear()
        assert index.refresh(folder) == IndexUpdate(unchanged=6)
        assert counted == []
        (folder / "cats.txt").write_text("a lion.")
        (folder / "new.txt").write_text("a tiger.")
        (folder / "dogs.txt").unlink()
        (folder / "rows.jsonl").write_text('{"text": "a dog", "year": 1999}\n{"text": "a fox", "year": 2001}\n')
        assert index.refresh(folder) == IndexUpdate(1, 2, 3, 1, 3)
        assert sorted(counted) == ["a fox", "a lion.", "a tiger."]
        assert {one for one, _, _ in index.store.documents()} == {
            *("elsewhere", "cats.txt", "mats.txt", "none.txt", "new.txt", "rows.jsonl#1", "rows.jsonl#2"),
        }
        (hit,) = index.search("fox", mode="lexical", where={"year >": 2000})
        assert (hit.source, hit.text) == (str(folder / "rows.jsonl"), "a fox")


def test_an_interrupted_add_is_resumed(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch, counted: list[str]
) -> None:
    monkeypatch.setattr(module, "COMMIT_PASSAGES", 2)
    monkeypatch.setattr(document_input, "GROUP_DOCUMENTS", 2)
    documents = [Document(f"d{i}", f"the cat sat {i}") for i in range(9)]
    calls = 0
    plain = Index.embed_documents

    def entries(self: Index, some: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return plain(self, some)

    monkeypatch.setattr(Index, "embed_documents", entries)
    with Index.create(tmp_path / "i", embedder) as index:
        with pytest.raises(KeyboardInterrupt) as caught:
            index.add(documents)
        assert "6 documents are committed" in caught.value.__notes__[0]
        assert len(index) == 6
    counted.clear()
    with Index.open(tmp_path / "i", embedder) as index:
        assert index.add(documents) == IndexUpdate(added=3, unchanged=6, passages=3)
        assert len(counted) == 3


def test_documents_before_an_unreadable_file_are_committed(tmp_path: Path, embedder: Embedder) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat")
    (folder / "b.txt").write_bytes("the dög".encode("latin-1"))
    (folder / "c.txt").write_text("the mat")
    with Index.create(tmp_path / "i", embedder) as index:
        with pytest.raises(InputError, match=r"b\.txt"):
            index.refresh(folder)
        skipped: list[str] = []
        counts = index.refresh(folder, on_error="skip", on_skip=lambda path, _: skipped.append(Path(path).name))
        assert skipped == ["b.txt"]
        assert counts.added + counts.unchanged == 2
        assert index.refresh(folder, encoding="latin-1").added == 1


def test_another_model_is_rejected(tmp_path: Path, model: Path, index: Index) -> None:
    index.close()
    other = Embedder.load(model)
    with torch.no_grad():
        next(iter(other.model.parameters())).view(-1)[3] += 1e-3
    place = tmp_path / "index"
    for wrong in (other, Embedder.load(model, pooling="cls"), Embedder.load(model, dimension=8)):
        with pytest.raises(InputError, match="is another model"):
            Index.open(place, wrong)
    copy = tmp_path / "copy"
    Embedder.load(model).save(copy)
    for right in (Embedder.load(model), copy, None):
        with Index.open(place, right) as again:
            assert again.search("the cat", mode="dense")[0].score > 0


def test_model_fingerprint(model: Path, embedder: Embedder) -> None:
    assert model_fingerprint(embedder) == model_fingerprint(Embedder.load(model))
    assert model_fingerprint(embedder) != model_fingerprint(Embedder.load(model, overflow="truncate"))


@pytest.mark.parametrize(
    ("built", "searched"), [("fp32", "int8"), ("int8", "fp32"), ("fp32", "bf16"), ("bf16", "int8")]
)
@pytest.mark.parametrize("embedding_precision", ["fp32", "int8"])
def test_search_at_another_precision(
    built: Any, searched: Any, embedding_precision: Any, tmp_path: Path, model: Path
) -> None:
    """The index records both precisions, and accepts the same model in any other."""
    with Index.create(
        tmp_path / "i", Embedder.load(model, precision=built), embedding_precision=embedding_precision
    ) as index:
        index.add(Document(name, text) for name, text in TEXTS.items())
        before = index.search("the cat sat", mode="dense")
    with Index.open(tmp_path / "i", Embedder.load(model, precision=searched)) as index:
        assert index.config["model_precision"] == built
        assert index.config["embedding_precision"] == embedding_precision
        after = index.search("the cat sat", mode="dense")
    assert after[0].document == before[0].document
    assert [hit.score for hit in after] == pytest.approx([hit.score for hit in before], abs=0.05)


def test_a_trained_model_is_rejected_at_every_precision(tmp_path: Path, model: Path) -> None:
    """Weights that were changed and saved give another fingerprint, also when loaded in int8."""
    Index.create(tmp_path / "i", model).close()
    trained = Embedder.load(model)
    with torch.no_grad():
        next(iter(trained.model.parameters())).view(-1)[3] += 1e-3
    trained.save(tmp_path / "trained")
    for precision in ("fp32", "int8"):
        with pytest.raises(InputError, match="is another model"):
            Index.open(tmp_path / "i", Embedder.load(tmp_path / "trained", precision=precision))


def test_missing_model(tmp_path: Path, model: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    Index.create(tmp_path / "i", tmp_path / "model").close()
    shutil.rmtree(tmp_path / "model")
    with (
        Index.open(tmp_path / "i") as index,
        pytest.raises(NotFoundError, match=r"the model of the index, .*/model, was not found"),
    ):
        index.search("the cat")


def test_prompts(tmp_path: Path, model: Path, counted: list[str]) -> None:
    prompted = Embedder.load(model)
    from bertie.checkpoints.sentence_modules import SentenceModules

    prompted.modules = SentenceModules.create(16)
    prompted.modules.prompts = {"query": "find : ", "document": "the "}
    with Index.create(tmp_path / "i", prompted) as index:
        assert (index.config["query_prompt"], index.config["passage_prompt"]) == ("find : ", "the ")
        index.add(["cat sat"])
        hit = index.search("dog ran", mode="dense")[0]
        other = index.search("dog ran", mode="dense", prompt="a ")[0]
    plain = Embedder.load(model)
    one, two, three = unit(plain.embed(["find : dog ran", "the cat sat", "a dog ran"]))
    assert hit.score == pytest.approx(float(one @ two), abs=1e-6)
    assert other.score == pytest.approx(float(three @ two), abs=1e-6)


def test_literal_prompts_are_kept(tmp_path: Path, model: Path) -> None:
    with Index.create(tmp_path / "i", model, query_prompt="find : ", passage_prompt="the ") as index:
        index.add(["cat sat"])
    with Index.open(tmp_path / "i") as index:
        hit = index.search("dog ran", mode="dense")[0]
    one, two = unit(Embedder.load(model).embed(["find : dog ran", "the cat sat"]))
    assert hit.score == pytest.approx(float(one @ two), abs=1e-6)
    assert hit.text == "cat sat"


@pytest.mark.parametrize("kind", ["postgres", "lance"])
def test_all_stores_give_the_same_results(
    kind: str, tmp_path: Path, embedder: Embedder, index: Index, request: pytest.FixtureRequest
) -> None:
    if kind == "lance":
        pytest.importorskip("lancedb")
        place = f"lance://{tmp_path / 'lance'}"
    else:
        place = request.getfixturevalue("postgres_url") + "#by its name"
    documents = [Document(name, text, {"letter": name[0], "n": i}) for i, (name, text) in enumerate(TEXTS.items())]
    with Index.create(place, embedder) as other:
        assert other.add([*documents, Document("more", "the dog")]) == IndexUpdate(added=5, passages=5)
        assert other.delete(["more"]) == IndexUpdate(deleted=1)
    with Index.open(place) as other:
        assert dict(other.config) == dict(index.config)
        assert other.add(documents) == IndexUpdate(unchanged=4)
        for query in ("the cat sat", "dogs ran", "rivers"):
            for options in ({}, {"mode": "dense"}, {"mode": "lexical"}, {"where": {"n >=": 1, "letter": ["d", "n"]}}):
                one, two = (each.search(query, **options) for each in (other, index))
                assert [hit.document for hit in one] == [hit.document for hit in two]
                assert [hit.score for hit in one] == pytest.approx([hit.score for hit in two], abs=1e-6)
                assert [hit.metadata for hit in one] == [hit.metadata for hit in two]
    with pytest.raises(ExistsError):
        Index.create(place, embedder)


@pytest.mark.parametrize("vectors", ["int8", "binary"])
def test_quantized_embeddings(vectors: Any, tmp_path: Path, embedder: Embedder, index: Index) -> None:
    with Index.create(tmp_path / "small", embedder, embedding_precision=vectors) as small:
        small.add(Document(name, text) for name, text in TEXTS.items())
        for query in ("the cat sat", "dogs"):
            one, two = (each.search(query, mode="dense") for each in (small, index))
            assert [hit.score for hit in one] == pytest.approx([hit.score for hit in two], abs=0.02)


def test_rebuild(tmp_path: Path, embedder: Embedder, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(local_store, "SEGMENT_ROWS", 4)
    with Index.create(tmp_path / "i", embedder) as index:
        index.add(f"the cat sat on mat {i}" for i in range(8))
        before = index.search("mat 3")
    victim = next((tmp_path / "i" / "segments").glob("*/vectors.npy"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 64
    victim.write_bytes(data)
    with pytest.raises(CheckpointError, match="--rebuild"):
        Index.open(tmp_path / "i")
    counted.clear()
    assert Index.rebuild(tmp_path / "i", embedder) == len(counted) == 8
    with Index.open(tmp_path / "i", embedder) as index:
        assert [(hit.document, hit.score) for hit in index.search("mat 3")] == [(h.document, h.score) for h in before]


def test_invalid_arguments(tmp_path: Path, embedder: Embedder, index: Index) -> None:
    for call, message in (
        (lambda: index.search("a", k=0), "k=0"),
        (lambda: index.search("a", k="3"), "k='3' must be a whole number"),  # type: ignore[arg-type]
        (lambda: index.search("a", depth=0), "depth=0"),
        (lambda: index.search(["a"]), "search takes a query, a str, not list; use search_batch for several queries"),  # type: ignore[arg-type]
        (lambda: index.search(None), "search takes a query, a str, not NoneType$"),  # type: ignore[arg-type]
        (lambda: index.search("a", mode="exact"), "mode='exact'"),  # type: ignore[arg-type]
        (lambda: index.search_batch("a"), "list of queries"),
        (lambda: index.search("a", where={"n": None}), "where: n"),
        (lambda: index.search("a", where={"n <": [1]}), "where: n=.1."),
        (lambda: index.delete("cats"), "list of ids"),
        (lambda: index.add([Document("x", "a"), Document("x", "b")]), "duplicate document id"),
        (lambda: index.add([7]), "document 0 is int; add takes texts, dicts"),
        (lambda: Index.create(tmp_path / "x", embedder, chunk_size=5), "chunk_size=5"),
        (lambda: Index.create(tmp_path / "x", embedder, embedding_precision="fp8"), "embedding_precision='fp8'"),  # type: ignore[arg-type]
        (lambda: Index.create(tmp_path / "x", embedder, language="elvish"), "language='elvish'"),
        (lambda: Index.create("http://host/x", embedder), "postgresql://"),
        (lambda: Index.create("lance://x", embedder, embedding_precision="int8"), "stores fp32"),
    ):
        with pytest.raises(InputError, match=message):
            call()
    with pytest.raises(TypeError, match=r"create\(\) has no argument 'chunksize': did you mean chunk_size=\?"):
        Index.create(tmp_path / "x", embedder, chunksize=64)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"search\(\) has no argument 'top_k': use k="):
        index.search("a", top_k=3)  # type: ignore[call-arg]
    assert not (tmp_path / "x").exists()
    with pytest.raises(ExistsError):
        Index.create(tmp_path / "index", embedder)
    with pytest.raises(NotFoundError, match="no index"):
        Index.open(tmp_path / "nowhere")
    assert bertie.Index is Index


def test_empty_index(tmp_path: Path, embedder: Embedder, reranker: Reranker) -> None:
    with Index.create(tmp_path / "i", embedder) as index:
        for mode in ("hybrid", "dense", "lexical"):
            assert list(index.search("the cat", mode=mode, rerank=reranker)) == []
        index.add(["", "  "])
        assert (len(index), list(index.search("the cat"))) == (0, [])
