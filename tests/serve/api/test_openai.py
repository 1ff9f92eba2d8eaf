"""OpenAI's own Python client on a real server."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from bertie.serve.auth import Keys
from bertie.serve.registry import Registry
from bertie.tasks import Embedder
from tests.serve.conftest import Running, Start

TEXTS = ["a cat sat", "the dog ran on the mat", " ".join(["the cat sat on the mat"] * 20)]


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def vectors(registry: Registry) -> Any:
    found = Embedder(registry["embed"].checkpoint).embed(TEXTS)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_embeddings(client: openai.OpenAI, vectors: Any) -> None:
    """The client requests base64 and decodes it."""
    found = client.embeddings.create(model="embed", input=TEXTS)
    assert [one.index for one in found.data] == [0, 1, 2]
    assert [one.object for one in found.data] == ["embedding"] * 3
    np.testing.assert_allclose([one.embedding for one in found.data], vectors, atol=1e-5)
    assert (found.model, found.object) == ("embed", "list")
    assert found.usage.prompt_tokens == found.usage.total_tokens == 3 + 6 + 120


def test_embeddings_as_floats_and_base64(client: openai.OpenAI, vectors: Any) -> None:
    floats = client.embeddings.create(model="embed", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(floats.data[0].embedding, vectors[0], atol=1e-5)
    packed = client.embeddings.create(model="embed", input=TEXTS[0], encoding_format="base64").data[0].embedding
    raw = np.frombuffer(base64.b64decode(packed), "<f4") if isinstance(packed, str) else np.array(packed)
    np.testing.assert_allclose(raw, vectors[0], atol=1e-5)


def test_dimensions(client: openai.OpenAI, vectors: Any) -> None:
    found = np.array([one.embedding for one in client.embeddings.create(model="embed", input=TEXTS, dimensions=5).data])
    wanted = vectors[:, :5] / np.linalg.norm(vectors[:, :5], axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions=17 must be at most 16"):
        client.embeddings.create(model="embed", input="a", dimensions=17)


def test_token_ids(client: openai.OpenAI, registry: Registry, vectors: Any) -> None:
    tokenizer = registry["embed"].checkpoint.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text).ids.tolist() for text in TEXTS]
    bare = [one[1:-1] for one in ids]  # with and without special tokens
    for given in (ids, bare):
        found = client.embeddings.create(model="embed", input=given).data
        np.testing.assert_allclose([one.embedding for one in found], vectors, atol=1e-5)
    (one,) = client.embeddings.create(model="embed", input=bare[0]).data
    np.testing.assert_allclose(one.embedding, vectors[0], atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="ids must be below 16"):
        client.embeddings.create(model="embed", input=[100000])


def test_texts_as_objects(server: Running, vectors: Any) -> None:
    """As Jina's clients send them, with its other fields."""
    for given in ([{"text": text} for text in TEXTS], [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]):
        body = {"model": "embed", "input": given, "task": "retrieval.query", "embedding_type": "float"}
        found = server.post_json("/v1/embeddings", body | {"normalized": True, "late_chunking": False})["data"]
        np.testing.assert_allclose([row["embedding"] for row in found], vectors, atol=1e-5)
    (single,) = server.post_json("/v1/embeddings", {"model": "embed", "input": {"text": TEXTS[0]}})["data"]
    np.testing.assert_allclose(single["embedding"], vectors[0], atol=1e-5)
    image = server.post("/v1/embeddings", {"input": [{"image": "https://a/b.png"}]})
    assert (image.status_code, image.json()["error"]["param"]) == (400, "input.0.text")
    late = server.post("/v1/embeddings", {"input": ["a"], "late_chunking": True})
    assert "late_chunking=true is not supported" in late.json()["error"]["message"]


def test_models(client: openai.OpenAI) -> None:
    names = [one.id for one in client.models.list()]
    assert names[:2] == ["small", "embed"]
    assert client.models.retrieve("embed").owned_by == "bertie"
    with pytest.raises(openai.NotFoundError, match="served are: small, embed"):
        client.models.retrieve("nope")


def test_errors_are_the_exceptions_of_the_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.embeddings.create(model="embed", input=[])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="embed", input="a", encoding_format="int8")  # type: ignore[arg-type]


def test_keys(start: Start, tmp_path: Any) -> None:
    import hashlib

    file = tmp_path / "keys"
    file.write_text(f"bob {hashlib.sha256(b'right').hexdigest()} requests=2\n")
    server = start(keys=Keys.read(file))
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong").models.list()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)
    for _ in range(2):
        assert len(client.embeddings.create(model="embed", input="a").data) == 1
    with pytest.raises(openai.RateLimitError) as limit:
        client.embeddings.create(model="embed", input="a")
    assert int(limit.value.response.headers["retry-after"]) > 0
