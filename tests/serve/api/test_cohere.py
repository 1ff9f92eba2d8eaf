"""The APIs of Cohere and Jina, compared with the local reranker and embedder."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from bertie.serve.registry import Registry
from bertie.tasks import Embedder, Reranker
from tests.serve.conftest import Running

DOCUMENTS = ["a cat sat", "the dog ran on the mat", "find a cat : the dog"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("as_objects", [False, True])
def test_documents_are_ranked_as_by_the_local_reranker(
    server: Running, registry: Registry, path: str, as_objects: bool
) -> None:
    wanted = Reranker(registry["rerank"].checkpoint).rerank("find cat", DOCUMENTS)
    documents: Any = [{"text": text} for text in DOCUMENTS] if as_objects else DOCUMENTS
    body = {"query": "find cat", "documents": documents, "model": "rerank", "return_documents": True, "top_n": 2}
    reply = server.post_json(path, body, headers={"x-request-id": "ranking"})
    assert [row["index"] for row in reply["results"]] == [document.index for document in wanted[:2]]
    scores = [document.score for document in wanted[:2]]
    assert [row["relevance_score"] for row in reply["results"]] == pytest.approx(scores, abs=1e-5)
    assert [row["document"]["text"] for row in reply["results"]] == [document.text for document in wanted[:2]]
    assert (reply["id"], reply["model"], reply["object"]) == ("ranking", "rerank", "list")
    assert reply["usage"]["total_tokens"] == sum(document.tokens_total for document in wanted)


def test_errors_have_the_format_of_cohere_and_jina(server: Running) -> None:
    reply = server.post("/v1/rerank", {"query": "a", "documents": []})
    assert (reply.status_code, reply.json()["message"]) == (400, "`documents` cannot be empty")
    assert reply.json()["detail"] == reply.json()["message"]
    assert server.post("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}).status_code == 422


def test_embeddings_by_type(server: Running, registry: Registry) -> None:
    vectors = Embedder(registry["embed"].checkpoint, normalize=True).embed(DOCUMENTS)
    body = {"texts": DOCUMENTS, "model": "embed", "input_type": "search_document", "embedding_types": ["float"]}
    reply = server.post_json("/v2/embed", body, headers={"x-request-id": "texts"})
    np.testing.assert_allclose(reply["embeddings"]["float"], vectors, atol=1e-5)
    assert (reply["id"], reply["texts"], reply["response_type"]) == ("texts", DOCUMENTS, "embeddings_by_type")
    assert reply["meta"]["billed_units"]["input_tokens"] > 0
    kinds = ["base64", "binary", "ubinary"]
    other = server.post_json("/v1/embed", body | {"embedding_types": kinds})["embeddings"]
    assert sorted(other) == kinds
    first = np.frombuffer(base64.b64decode(other["base64"][0]), "<f4")
    np.testing.assert_allclose(first, vectors[0], atol=1e-5)
    bits = np.unpackbits(np.array(other["ubinary"], np.uint8), axis=1)
    assert (bits == (vectors > 0)).all()
    assert (np.array(other["binary"]) + 128 == other["ubinary"]).all()


def test_embeddings_of_the_first_version_inputs_and_dimensions(server: Running) -> None:
    floats = server.post_json("/v1/embed", {"texts": DOCUMENTS, "model": "embed"})
    assert floats["response_type"] == "embeddings_floats"
    contents = [{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS]
    reply = server.post_json("/v2/embed", {"inputs": contents, "model": "embed"})
    assert reply["embeddings"]["float"] == floats["embeddings"]
    cut = server.post_json("/v2/embed", {"texts": DOCUMENTS, "model": "embed", "output_dimension": 4})
    assert np.array(cut["embeddings"]["float"]).shape == (3, 4)


def test_what_embed_refuses(server: Running) -> None:
    def message(**body: Any) -> str:
        reply = server.post("/v2/embed", {"model": "embed"} | body)
        assert reply.status_code in (400, 422)
        return str(reply.json()["message"])

    assert message() == "texts: Field required, or `inputs`"
    assert message(texts=[]) == "`texts` cannot be empty"
    assert "'float', 'base64', 'binary' or 'ubinary'" in message(texts=["a"], embedding_types=["int8"])
    assert "truncate=START is not supported" in message(texts=["a"], truncate="START")
    long = "a cat " * 100
    assert "text 0 has 202 tokens" in message(texts=[long], truncate="NONE")
    assert server.post_json("/v2/embed", {"texts": [long], "model": "embed", "truncate": "END"})
    assert message(inputs=[{"content": [{"type": "image_url", "image_url": {}}]}]).startswith("inputs.0.content.0")


def test_prompts_by_input_type() -> None:
    from bertie.serve.api.base import prompt_for

    prompts = {"query": "q: ", "passage": "p: ", "clustering": "c: "}
    purposes = ("search_query", "retrieval.query", "search_document", "retrieval.passage", "document", "clustering")
    assert [prompt_for(prompts, name) for name in purposes] == ["query"] * 2 + ["passage"] * 3 + ["clustering"]
    assert prompt_for(prompts, "classification") is prompt_for(prompts, None) is None
