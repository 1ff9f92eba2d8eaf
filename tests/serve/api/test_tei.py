"""Clients of text-embeddings-inference: Hugging Face's own, and one written from the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient

from bertie.ops import disable
from bertie.serve.registry import Registry
from bertie.tasks import Classifier, Embedder, LateInteraction, Reranker
from tests.checkpoints.test_splade import splade_folder
from tests.serve.conftest import Running, Start

TEXTS = ["a cat sat", "the dog ran on the mat"]
LONG = " ".join(["the cat sat on the mat"] * 20)


class Tei:
    """A client for what https://huggingface.github.io/text-embeddings-inference documents."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=20)

    def __call__(self, path: str, **body: Any) -> Any:
        reply = self._client.post(path, json=body)
        if reply.status_code != 200:
            error = reply.json()
            raise RuntimeError(reply.status_code, error["error"], error["error_type"])
        return reply.json()

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path)


@pytest.fixture(scope="module")
def tei(server: Running) -> Tei:
    return Tei(server.url)


def unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def refused(tei: Tei, path: str, **body: Any) -> tuple[int, str, str]:
    with pytest.raises(RuntimeError) as error:
        tei(path, **body)
    return error.value.args


def test_inference_client(server: Running, registry: Registry) -> None:
    client = InferenceClient()
    vectors = unit(Embedder(registry["small"].checkpoint).embed(TEXTS))
    found = client.feature_extraction(TEXTS[0], model=f"{server.url}/embed")
    np.testing.assert_allclose(found, vectors[:1], atol=1e-5)
    found = client.feature_extraction(TEXTS[0], model=f"{server.url}/embed", normalize=False, truncate=True)
    np.testing.assert_allclose(unit(found), vectors[:1], atol=1e-5)
    alike = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS, model=f"{server.url}/similarity")
    np.testing.assert_allclose(alike, vectors @ vectors[0], atol=1e-5)


def test_embed_single_and_batch(tei: Tei, registry: Registry) -> None:
    vectors = unit(Embedder(registry["small"].checkpoint).embed(TEXTS))
    np.testing.assert_allclose(tei("/embed", inputs=TEXTS), vectors, atol=1e-5)
    np.testing.assert_allclose(tei("/embed", inputs=TEXTS[0]), vectors[:1], atol=1e-5)
    body = {"truncate": False, "truncation_direction": "Right", "normalize": True, "prompt_name": None}
    np.testing.assert_allclose(tei("/embed", inputs=TEXTS, **body), vectors, atol=1e-5)
    cut = tei("/embed", inputs=TEXTS, dimensions=4)
    np.testing.assert_allclose(cut, unit(vectors[:, :4]), atol=1e-5)


def test_literal_prompts(tei: Tei) -> None:
    for path in ("/embed", "/embed_all", "/tokenize"):
        assert tei(path, inputs=["cat sat"], prompt="the ") == tei(path, inputs=["the cat sat"]), path
    assert refused(tei, "/embed", inputs="a", prompt="the ", prompt_name="query")[0] == 422
    inputs = {"source_sentence": "cat", "sentences": ["a dog"]}
    other = {"source_sentence": "the cat", "sentences": ["the a dog"]}
    assert tei("/similarity", inputs=inputs, parameters={"prompt": "the "}) == tei("/similarity", inputs=other)


def test_ids_as_input(tei: Tei) -> None:
    tokens = tei("/tokenize", inputs=TEXTS[1])[0]
    ids = [one["id"] for one in tokens if not one["special"]]
    assert tei("/embed", inputs=ids) == tei("/embed", inputs=[ids]) == tei("/embed", inputs=TEXTS[1])


def test_embed_all_pooled_by_the_mean_equals_embed(tei: Tei) -> None:
    """The values themselves are compared with transformers in test_http.py."""
    (states,) = tei("/embed_all", inputs=TEXTS[1], model="embed")
    assert np.array(states).shape == (8, 16)
    np.testing.assert_allclose(
        [unit(np.mean(states, axis=0))], tei("/embed", inputs=TEXTS[1], model="embed"), atol=1e-5
    )


def test_ping_is_health(start: Start) -> None:
    server = start()
    assert (server.client.get("/ping").status_code, server.client.get("/ping").content) == (200, b"")
    server.app.draining = True
    assert server.client.get("/ping").status_code == 503


def test_embeddings_without_a_version_are_those_of_openai(server: Running) -> None:
    body = {"input": TEXTS, "model": "embed"}
    assert server.post_json("/embeddings", body) == server.post_json("/v1/embeddings", body)
    assert server.post("/embeddings", {}).json()["error"]["type"] == "invalid_request_error"


def test_predict_single_pair_and_batch(tei: Tei, registry: Registry) -> None:
    classifier = Classifier(registry["classify"].checkpoint)
    one = tei("/predict", inputs=TEXTS[0], model="classify")
    wanted = classifier.classify(TEXTS[:1])[0].scores
    assert {row["label"]: row["score"] for row in one} == pytest.approx(wanted, abs=1e-5)
    assert [row["score"] for row in one] == sorted((row["score"] for row in one), reverse=True)
    assert sum(row["score"] for row in one) == pytest.approx(1, abs=1e-5)
    pair = tei("/predict", inputs=TEXTS, model="classify")  # two texts in a list are a pair
    wanted = classifier.classify([(TEXTS[0], TEXTS[1])])[0].scores
    assert {row["label"]: row["score"] for row in pair} == pytest.approx(wanted, abs=1e-5)
    batch = tei("/predict", inputs=[[TEXTS[0]], TEXTS], model="classify")
    assert [{row["label"] for row in rows} for rows in batch] == [set(wanted)] * 2
    assert batch[0] == one
    assert batch[1] == pair


def test_raw_scores_are_logits(tei: Tei) -> None:
    raw = tei("/predict", inputs=TEXTS[0], model="classify", raw_scores=True)
    usual = tei("/predict", inputs=TEXTS[0], model="classify")
    logits = np.array([row["score"] for row in raw])
    assert [row["label"] for row in raw] == [row["label"] for row in usual]
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(), [row["score"] for row in usual], atol=1e-5)
    (raw,) = tei("/predict", inputs=TEXTS, model="rerank", raw_scores=True)
    (usual,) = tei("/predict", inputs=TEXTS, model="rerank")
    assert usual["score"] == pytest.approx(1 / (1 + np.exp(-raw["score"])), abs=1e-5)


def test_rerank(tei: Tei, registry: Registry) -> None:
    texts = [*TEXTS, LONG]
    found = tei("/rerank", query="find cat", texts=texts, model="rerank")
    wanted = Reranker(registry["rerank"].checkpoint).rerank("find cat", texts)
    assert [set(row) for row in found] == [{"index", "score"}] * 3
    assert [row["index"] for row in found] == [one.index for one in wanted]
    assert [row["score"] for row in found] == pytest.approx([one.score for one in wanted], abs=1e-5)
    raw = tei("/rerank", query="find cat", texts=texts, model="rerank", raw_scores=True, return_text=True)
    assert [row["text"] for row in raw] == [texts[row["index"]] for row in found]
    assert [row["score"] for row in found] == pytest.approx([1 / (1 + np.exp(-row["score"])) for row in raw], abs=1e-5)


def test_similarity(tei: Tei, registry: Registry) -> None:
    vectors = unit(Embedder(registry["small"].checkpoint).embed(TEXTS))
    body = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    for parameters in (None, {}, {"truncate": True, "truncation_direction": "Right", "prompt_name": None}):
        found = tei("/similarity", inputs=body, parameters=parameters)
        np.testing.assert_allclose(found, vectors @ vectors[0], atol=1e-5)


def test_tokenize_and_decode(tei: Tei) -> None:
    (tokens,) = tei("/tokenize", inputs="a cat sat")
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert tokens[2] == {"id": 7, "text": "cat", "special": False, "start": 2, "stop": 5}
    bare = tei("/tokenize", inputs=["a cat", "dog"], add_special_tokens=False)
    assert [[one["text"] for one in text] for text in bare] == [["a", "cat"], ["dog"]]
    ids = [one["id"] for one in tokens]
    assert tei("/decode", ids=ids) == tei("/decode", ids=[ids]) == ["a cat sat"]
    assert tei("/decode", ids=ids, skip_special_tokens=False) == ["[CLS] a cat sat [SEP]"]


def test_info_has_the_fields_of_text_embeddings_inference(tei: Tei) -> None:
    found = tei.get("/info").json()
    wanted = "model_id model_sha model_dtype model_type max_concurrent_requests max_input_length max_batch_tokens"
    wanted += " max_batch_requests max_client_batch_size auto_truncate tokenization_workers version sha docker_label"
    assert set(wanted.split()) <= set(found)
    assert (found["model_id"], found["auto_truncate"]) == ("small", False)
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}


def test_info_has_the_dispatch_table_and_precision_of_each_model(tei: Tei, registry: Registry) -> None:
    found = tei.get("/info").json()
    assert found["precision"] == dict.fromkeys(registry, "fp32")
    assert found["cuda_graphs"] == dict.fromkeys(registry, False), "these are on the CPU"
    assert list(found["dispatch"]) == list(registry)
    rows = {(row["operation"], row["backend"]) for row in found["dispatch"]["embed"]}
    assert ("replay", "none") in rows
    with disable("native.encoder"):
        slow = {(row["operation"], row["backend"]) for row in tei.get("/info").json()["dispatch"]["embed"]}
    assert ("encoder", "native.encoder") not in slow


def test_health_and_metrics(tei: Tei) -> None:
    assert (tei.get("/health").status_code, tei.get("/health").content) == (200, b"")
    assert tei.get("/metrics").text.startswith("# HELP")


def test_errors(tei: Tei) -> None:
    assert refused(tei, "/embed", inputs=[]) == (400, "`inputs` cannot be empty", "Empty")
    status, message, kind = refused(tei, "/embed", inputs=["a"] * 1025)
    assert (status, message, kind) == (413, "batch size 1025 > maximum allowed batch size 1024", "Validation")
    assert refused(tei, "/rerank", query="a", texts=[]) == (400, "`texts` cannot be empty", "Empty")
    status, message, kind = refused(tei, "/rerank", query="a", texts=["b"], model="embed")
    assert (status, kind) == (424, "Backend")
    assert refused(tei, "/embed_sparse", inputs="a")[0] == 424
    assert refused(tei, "/embed", inputs=3)[0] == 422
    assert refused(tei, "/predict", inputs=["a", "b", "c"], model="classify")[0] == 422
    status, message, kind = refused(tei, "/embed", inputs="a", truncate=True, truncation_direction="Left")
    assert (status, kind) == (422, "Tokenizer")
    assert refused(tei, "/decode", ids=[10**6])[0] == 422


def test_nothing_is_truncated_by_default(tei: Tei) -> None:
    """text-embeddings-inference truncates or refuses long texts by default; here they are read in windows."""
    end = f"{LONG} dog dog dog dog"
    assert tei("/embed", inputs=LONG, model="embed") != tei("/embed", inputs=end, model="embed")
    cut = {"truncate": True, "model": "embed"}
    assert tei("/embed", inputs=LONG, **cut) == tei("/embed", inputs=end, **cut)


def test_sparse_embeddings(start: Start, tmp_path: Path) -> None:
    """As in sentence-transformers; for a long text, the maximum over its windows."""
    folder, theirs = splade_folder(tmp_path)
    registry = Registry({"splade": folder}, devices=["cpu"], budget=256)
    tei = Tei(start(over=registry).url)
    found = tei("/embed_sparse", inputs=TEXTS)
    assert tei("/", inputs=TEXTS) == tei("/invocations", inputs=TEXTS) == found
    assert tei.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
    for row, dense in zip(found, theirs.encode(TEXTS).to_dense().numpy(), strict=True):
        assert [one["index"] for one in row] == np.flatnonzero(dense).tolist()
        np.testing.assert_allclose([one["value"] for one in row], dense[dense != 0], atol=1e-5)
    long = {one["index"]: one["value"] for one in tei("/embed_sparse", inputs=LONG)[0]}
    cut = {one["index"]: one["value"] for one in tei("/embed_sparse", inputs=LONG, truncate=True)[0]}
    assert all(long[index] >= value - 1e-6 for index, value in cut.items())
    assert len(tei("/embed_sparse", inputs=TEXTS[0], prompt_name="query")) == 1
    assert refused(tei, "/embed_sparse", inputs="a", prompt_name="none")[0] == 422
    registry.close()


def test_late_interaction(start: Start, tmp_path: Path) -> None:
    """A ColBERT model reranks by MaxSim, the same numbers as in Python; dense embeddings of one are refused."""
    model = Path(__file__).parents[2] / "parity" / "pylate" / "model"
    late, texts = LateInteraction.load(model), ["The cat sat.", "London", "The old river, about the city. " * 9]
    registry = Registry({"colbert": model, "splade": splade_folder(tmp_path)[0]}, devices=["cpu"], budget=256)
    tei = Tei(start(over=registry).url)
    ranked = late.rerank("what do cats eat", texts)
    expected = [{"index": one.index, "score": one.score} for one in ranked]
    assert tei("/rerank", query="what do cats eat", texts=texts) == expected
    assert tei("/rerank", query="what do cats eat", texts=texts, model="colbert", raw_scores=True) == expected
    found = tei("/v1/rerank", query="what do cats eat", documents=texts)["results"]
    assert [one["relevance_score"] for one in found] == [one.score for one in ranked]
    assert refused(tei, "/embed", inputs="a", model="splade")[1].endswith("is a SPLADE model: use /embed_sparse")
    assert refused(tei, "/embed", inputs="a", model="colbert")[1].endswith("is a late-interaction model: use /rerank")
    registry.close()
