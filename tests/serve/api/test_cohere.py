"""The rerank API of Cohere and Jina, compared with the local reranker."""

from __future__ import annotations

from typing import Any

import pytest

from bertie.serve.registry import Registry
from bertie.tasks import Reranker
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
