"""LangChain's own vector store, retriever and runnables with Bertie's adapters."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bertie import Embedder, Reader, Reranker
from bertie.errors import InputError
from bertie.integrations.langchain import BertieEmbeddings, BertieReader, BertieReranker
from tests.integrations.conftest import CATS, EMMA

pytest.importorskip("langchain_core")
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore


def test_embeddings(embedder: Embedder) -> None:
    adapter = BertieEmbeddings(embedder, query_prompt="query: ")
    np.testing.assert_array_equal(np.array(adapter.embed_documents(CATS), np.float32), embedder.embed(CATS))
    np.testing.assert_array_equal(np.array(adapter.embed_query("cats"), np.float32), embedder.embed("query: cats"))
    np.testing.assert_array_equal(
        np.array(asyncio.run(adapter.aembed_query("cats")), np.float32), embedder.embed("query: cats")
    )
    assert adapter.embed_documents([]) == []


def test_a_vector_store_with_a_reranker(embedder: Embedder, reranker: Reranker) -> None:
    store = InMemoryVectorStore(BertieEmbeddings(embedder))
    store.add_texts(CATS, [{"row": row} for row in range(len(CATS))])
    found = store.similarity_search("What do cats eat?", k=3)
    assert found[0].page_content == CATS[1]
    compressor = BertieReranker(model=reranker, top_n=2)
    ranked = compressor.compress_documents(found, "What do cats eat?")
    expected = reranker.rerank("What do cats eat?", [document.page_content for document in found], top_k=2)
    assert [document.page_content for document in ranked] == [item.text for item in expected]
    assert [document.metadata["relevance_score"] for document in ranked] == [item.score for item in expected]
    assert ranked[0].metadata["row"] == 1
    assert "relevance_score" not in found[0].metadata  # the retrieved documents are left as they are
    assert list(compressor.compress_documents([], "cats")) == []
    with pytest.raises(ValueError, match="top_n"):
        BertieReranker(model=reranker, top_n=0)


def test_a_chain_that_answers(embedder: Embedder, reader: Reader) -> None:
    store = InMemoryVectorStore(BertieEmbeddings(embedder))
    store.add_documents([Document(page_content=text, metadata={"row": row}) for row, text in enumerate(EMMA)])
    chain = RunnableParallel(
        question=RunnablePassthrough(), documents=store.as_retriever(search_kwargs={"k": 2})
    ) | BertieReader(reader)
    (answer,) = chain.invoke("Who wrote Emma?")
    assert answer.page_content == "Jane Austen"
    assert EMMA[1][answer.metadata["start"] : answer.metadata["end"]] == "Jane Austen"
    assert (answer.metadata["row"], 0 < answer.metadata["score"] <= 1) == (1, True)
    assert asyncio.run(chain.ainvoke("Who wrote Emma?"))[0].page_content == "Jane Austen"
    assert (chain | RunnableLambda(len)).batch(["Who wrote Emma?"]) == [1]
    strict = BertieReader(reader, no_answer_threshold=0.0)
    assert strict.invoke({"question": "What is the capital of Peru?", "documents": EMMA}) == []
    assert strict.invoke({"question": "Who?", "documents": []}) == []
    with pytest.raises(InputError, match="'question' and 'documents'"):
        strict.invoke({"query": "Who?"})
