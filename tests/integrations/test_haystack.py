"""Haystack's own pipelines and document store with Bertie's components."""

from __future__ import annotations

import numpy as np
import pytest

from bertie import Embedder, Reader, Reranker
from bertie.errors import InputError
from bertie.integrations.haystack import (
    BertieDocumentEmbedder,
    BertieExtractiveReader,
    BertieRanker,
    BertieTextEmbedder,
)
from tests.integrations.conftest import CATS, EMMA

pytest.importorskip("haystack")
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore


def test_embedders(embedder: Embedder) -> None:
    documents = [Document(content=text, meta={"title": "News", "row": row}) for row, text in enumerate(CATS)]
    embedded = BertieDocumentEmbedder().run(documents)["documents"]
    np.testing.assert_array_equal(
        np.array([document.embedding for document in embedded], np.float32), embedder.embed(CATS)
    )
    assert [document.meta["row"] for document in embedded] == [0, 1, 2]
    assert documents[0].embedding is None  # they are left as they are
    titled = BertieDocumentEmbedder(meta_fields_to_embed=["title"], embedding_separator=": ").run(documents)
    expected = embedder.embed([f"News: {text}" for text in CATS])
    np.testing.assert_array_equal(
        np.array([document.embedding for document in titled["documents"]], np.float32), expected
    )
    query = BertieTextEmbedder(prompt="query: ").run("cats")["embedding"]
    np.testing.assert_array_equal(np.array(query, np.float32), embedder.embed("query: cats"))
    assert BertieDocumentEmbedder().run([])["documents"] == []


def test_a_pipeline_that_answers(reranker: Reranker, reader: Reader) -> None:
    store = InMemoryDocumentStore()
    store.write_documents(BertieDocumentEmbedder().run([Document(content=text) for text in CATS + EMMA])["documents"])
    pipeline = Pipeline()
    pipeline.add_component("embedder", BertieTextEmbedder())
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=4))
    pipeline.add_component("ranker", BertieRanker(top_k=2))
    pipeline.add_component("reader", BertieExtractiveReader())
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    pipeline.connect("ranker.documents", "reader.documents")
    question = "Who wrote Emma?"
    pipeline = Pipeline.loads(pipeline.dumps(), allowed_modules=["bertie.integrations.haystack"])  # as a saved one
    pipeline.get_component("retriever").document_store = store  # type: ignore[attr-defined]
    data = {"embedder": {"text": question}, "ranker": {"query": question}, "reader": {"query": question}}
    answers = pipeline.run(data)["reader"]["answers"]
    assert [answer.data for answer in answers] == ["Jane Austen", None]
    span = answers[0].document_offset
    assert answers[0].document.content[span.start : span.end] == "Jane Austen"
    assert answers[0].score > answers[1].score


def test_ranking_and_refusals(reranker: Reranker) -> None:
    documents = [Document(content=text) for text in CATS]
    ranked = BertieRanker().run("What do cats eat?", documents, top_k=2)["documents"]
    expected = reranker.rerank("What do cats eat?", CATS, top_k=2)
    assert [(document.content, document.score) for document in ranked] == [(item.text, item.score) for item in expected]
    assert BertieRanker().run("cats", [])["documents"] == []
    strict = BertieExtractiveReader(no_answer_threshold=0.0)
    answers = strict.run("What is the capital of Peru?", documents)["answers"]
    assert [answer.data for answer in answers] == [None]
    assert BertieExtractiveReader(no_answer=False).run("Who?", [])["answers"] == []
    with pytest.raises(InputError, match=r"documents\[0\] .* has no text content"):
        BertieRanker().run("cats", [Document(content=None)])
    with pytest.raises(InputError, match="top_k=0"):
        BertieRanker(top_k=0)


def test_serialization() -> None:
    for component in (
        BertieTextEmbedder(prompt="q: "),
        BertieDocumentEmbedder(meta_fields_to_embed=["title"], options={"dimension": 64}),
        BertieRanker(top_k=3),
        BertieExtractiveReader(top_k=2, no_answer_threshold=0.3),
    ):
        data = component.to_dict()
        assert type(component).from_dict(data).to_dict() == data
