"""mteb's own evaluators give Bertie's models the scores that they give to sentence-transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import InputError, MissingPackageError
from bertie.search.beir import RetrievalDataset
from bertie.tasks import Embedder, Reranker
from bertie.tasks.mteb import MTEBEmbedder, MTEBReranker
from tests.tasks import tiny

pytest.importorskip("mteb")
pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")

from benchmarks.mteb_tasks import retrieval_task, sts_task, through_mteb

RNG = np.random.default_rng(0)
TEXTS = tiny.sentences(60, seed=1)
LONG = tiny.document(30, seed=5)  # beyond the max_length of 48 tokens
COLLECTION = RetrievalDataset(
    {f"d{i}": text for i, text in enumerate([*TEXTS, LONG])},
    {f"q{i}": text for i, text in enumerate(tiny.sentences(12, seed=2))},
    {f"q{i}": {f"d{d}": int(RNG.integers(1, 4)) for d in RNG.permutation(61)[:6]} for i in range(12)},
)
PAIRS = [
    {"text_a": a, "text_b": b, "score": float(RNG.integers(0, 6))} for a, b in zip(TEXTS[:30], TEXTS[30:], strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Vectors, with prompts for queries and for documents."""
    top = tmp_path_factory.mktemp("models")
    embedder = Embedder.load(tiny.save(top / "bare", "wordpiece", ""))
    embedder.checkpoint.sentence = SentenceModules.create(32)
    embedder.checkpoint.sentence.prompts = {"query": "find ", "document": "the "}
    embedder.save(top / "sentence")
    return str(top / "sentence")


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> str:
    top = tmp_path_factory.mktemp("cross")
    return str(tiny.save(top / "cross", "wordpiece", "ForSequenceClassification", labels=["LABEL_0"], max_length=256))


def test_retrieval_and_similarity_are_those_of_sentence_transformers(folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    ours, theirs = MTEBEmbedder(folder, overflow="truncate"), SentenceTransformer(folder, device="cpu")
    for task in (retrieval_task("Tiny", COLLECTION), sts_task("TinySTS", PAIRS)):
        result, expected = through_mteb(ours, task), through_mteb(theirs, task)
        assert result == pytest.approx(expected, abs=1e-5)
        assert len(set(result.values())) > 1  # there is something to compare


def test_windows_differ_from_truncation(folder: str) -> None:
    (whole,), (cut,) = (
        MTEBEmbedder(folder, overflow=overflow).model.embed([LONG]) for overflow in ("window", "truncate")
    )
    assert not np.allclose(whole, cut, atol=1e-3)


def test_reranking_is_that_of_sentence_transformers(cross: str) -> None:
    import sentence_transformers

    candidates = {query: [f"d{d}" for d in RNG.permutation(60)[:20]] for query in COLLECTION.queries}
    for query, predictions in COLLECTION.qrels.items():
        candidates[query] = list(dict.fromkeys([*candidates[query], *predictions]))
    candidates = {query: [d for d in some if d != "d60"] for query, some in candidates.items()}
    ours, theirs = MTEBReranker(cross), sentence_transformers.CrossEncoder(cross, device="cpu")
    task = retrieval_task("TinyRerank", COLLECTION, candidates)
    result = through_mteb(ours, task)
    assert result == pytest.approx(through_mteb(theirs, task), abs=1e-5)
    assert 0 < result["ndcg_at_10"] < 1


def test_a_loaded_model_takes_no_options(folder: str, cross: str) -> None:
    embedder, reranker = Embedder.load(folder), Reranker.load(cross)
    assert MTEBEmbedder(embedder).model is embedder
    assert MTEBReranker(reranker).model is reranker
    with pytest.raises(InputError, match="already loaded"):
        MTEBEmbedder(embedder, overflow="truncate")


def test_model_metadata(folder: str, cross: str) -> None:
    from mteb.models import CrossEncoderProtocol, EncoderProtocol

    ours, other = MTEBEmbedder(folder), MTEBReranker(cross)
    assert isinstance(ours, EncoderProtocol)
    assert isinstance(other, CrossEncoderProtocol)
    assert not isinstance(ours, CrossEncoderProtocol)
    meta = ours.mteb_model_meta
    assert meta.name == "bertie/sentence"
    assert (meta.embed_dim, meta.max_tokens, meta.model_type) == (32, 48.0, ["dense"])
    assert meta.n_parameters == sum(one.numel() for one in ours.model.model.parameters())
    assert other.mteb_model_meta.model_type == ["cross-encoder"]


def test_similarities_take_arrays_and_tensors(folder: str) -> None:
    import torch

    ours = MTEBEmbedder(folder)
    a, b = np.random.default_rng(0).normal(size=(2, 5, 32)).astype(np.float32)
    table = ours.similarity(a, torch.from_numpy(b))
    assert table.shape == (5, 5)
    np.testing.assert_allclose(ours.similarity_pairwise(torch.from_numpy(a), b), np.diagonal(table), atol=1e-6)
    assert ours.similarity(a[0], b).shape == (1, 5)


def test_other_precisions_and_a_missing_package_are_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours: Any = MTEBEmbedder(folder)
    with pytest.raises(InputError, match="precision='int8'"):
        ours.encode([{"text": ["a"]}], task_metadata=None, precision="int8")
    monkeypatch.setitem(sys.modules, "mteb.models.abs_encoder", None)
    with pytest.raises(MissingPackageError, match="pip install mteb"):
        ours.encode([{"text": ["a"]}], task_metadata=None)


def test_the_package_imports_without_mteb() -> None:
    """The adapter's own file has the package's name."""
    import bertie.tasks.mteb as adapter

    assert Path(adapter.__file__).parent.name == "tasks"
    assert sys.modules["mteb"].__name__ == "mteb"
