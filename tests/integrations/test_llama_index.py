"""LlamaIndex's own index and query engine with Bertie's adapters, without a language model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bertie import Embedder, Reader, Reranker
from bertie.errors import InputError
from bertie.integrations.llama_index import BertieEmbedding, BertieRerank, BertieSynthesizer
from tests.integrations.conftest import CATS, EMMA

pytest.importorskip("llama_index.core")
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode


def test_embeddings(embedder: Embedder) -> None:
    adapter = BertieEmbedding(embedder, query_prompt="query: ")
    np.testing.assert_array_equal(np.array(adapter.get_text_embedding_batch(CATS), np.float32), embedder.embed(CATS))
    np.testing.assert_array_equal(
        np.array(adapter.get_query_embedding("cats"), np.float32), embedder.embed("query: cats")
    )
    vectors = asyncio.run(adapter.aget_text_embedding_batch(CATS))
    np.testing.assert_array_equal(np.array(vectors, np.float32), embedder.embed(CATS))
    assert adapter.model_name == embedder.checkpoint.source


def test_a_query_engine(embedder: Embedder, reranker: Reranker, reader: Reader) -> None:
    index = VectorStoreIndex([TextNode(text=text) for text in CATS + EMMA], embed_model=BertieEmbedding(embedder))
    assert index.as_retriever(similarity_top_k=1).retrieve("What do cats eat?")[0].node.get_content() in (
        CATS[1],
        EMMA[0],
    )
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=4),
        response_synthesizer=BertieSynthesizer(reader),
        node_postprocessors=[BertieRerank(reranker, top_n=2)],
    )
    response = engine.query("Who wrote Emma?")
    assert str(response) == "Jane Austen"
    assert len(response.source_nodes) == 2
    assert str(asyncio.run(engine.aquery("Who wrote Emma?"))) == "Jane Austen"


def test_rerank_and_refusals(reranker: Reranker, reader: Reader) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in CATS]
    ranked = BertieRerank(reranker, top_n=2).postprocess_nodes(nodes, query_str="What do cats eat?")
    expected = reranker.rerank("What do cats eat?", CATS, top_k=2)
    assert [(node.node.get_content(), node.score) for node in ranked] == [(item.text, item.score) for item in expected]
    assert BertieRerank(reranker).postprocess_nodes([], query_str="cats") == []
    with pytest.raises(InputError, match="needs the query"):
        BertieRerank(reranker).postprocess_nodes(nodes)
    with pytest.raises(InputError, match="top_n=0"):
        BertieRerank(reranker, top_n=0)
    refusing = BertieSynthesizer(reader, no_answer_threshold=0.0, empty_response="unknown")
    assert refusing.get_response("What is the capital of Peru?", EMMA) == "unknown"
    assert refusing.get_response("Who?", []) == "unknown"
