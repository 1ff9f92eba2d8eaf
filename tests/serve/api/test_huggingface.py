"""Hugging Face's InferenceClient at the base URL, compared with the local tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient

from bertie.serve.registry import Registry
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Tagger, ZeroShot
from tests.serve.api.test_tei import Tei, refused
from tests.serve.conftest import Running

TEXTS = ["a cat sat", "the dog ran on the mat"]
MASKED = "a [MASK] sat on the [MASK]"


@pytest.fixture(scope="module")
def client(server: Running) -> InferenceClient:
    return InferenceClient(server.url)


@pytest.fixture(scope="module")
def small(registry: Registry) -> Any:
    return registry["small"].checkpoint


def test_feature_extraction_and_similarity(client: InferenceClient, small: Any) -> None:
    vectors = Embedder(small, normalize=True).embed(TEXTS)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), vectors[:1], atol=1e-5)
    alike = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    np.testing.assert_allclose(alike, vectors @ vectors[0], atol=1e-5)


def test_fill_mask(client: InferenceClient, small: Any, server: Running) -> None:
    wanted = MaskedLM(small).fill(["a [MASK] sat"], top_k=3)[0].masks[0].candidates
    found = client.fill_mask("a [MASK] sat", top_k=3)
    assert [(row.token, row.token_str) for row in found] == [(one.id, one.text) for one in wanted]
    assert found[0].sequence == f"a {wanted[0].text} sat"
    assert {row.token_str for row in client.fill_mask("a [MASK] sat", targets=["cat", "dog"])} == {"cat", "dog"}
    several = server.post_json("/", {"inputs": [MASKED, "a [MASK]"], "parameters": {"top_k": 2}})
    assert [len(several), len(several[0]), len(several[0][0]), len(several[1])] == [2, 2, 2, 2]
    assert several[0][1][0]["sequence"].startswith("a [MASK] sat on the ")


def test_text_classification(client: InferenceClient, small: Any, server: Running) -> None:
    wanted = Classifier(small).classify(TEXTS[:1])[0]
    found = client.text_classification(TEXTS[0])
    assert {row.label: row.score for row in found} == pytest.approx(wanted.scores, abs=1e-5)
    (best,) = client.text_classification(TEXTS[0], top_k=1, function_to_apply="sigmoid")
    (logit,) = client.text_classification(TEXTS[0], top_k=1, function_to_apply="none")
    assert best.label == logit.label == wanted.label
    assert best.score == pytest.approx(1 / (1 + np.exp(-logit.score)), abs=1e-5)
    pair = {"text": TEXTS[0], "text_pair": TEXTS[1]}
    (row,) = server.post_json("/", {"inputs": pair, "head": "nli"})
    scores = Classifier(small, head="nli").classify([(TEXTS[0], TEXTS[1])])[0].scores
    assert {item["label"]: item["score"] for item in row} == pytest.approx(scores, abs=1e-5)


def test_token_classification(client: InferenceClient, small: Any, server: Running) -> None:
    wanted = Tagger(small).tag(TEXTS, aggregation_strategy="simple", ignore_labels=[])
    found = client.token_classification(TEXTS[0], aggregation_strategy="simple", ignore_labels=[])
    assert found
    assert [(row.entity_group, row.word) for row in found] == [(span.label, span.text) for span in wanted[0].spans]
    single = InferenceClient(f"{server.url}/pipeline/token-classification").token_classification(TEXTS[0])
    assert [row.start for row in single] == [span.start for span in Tagger(small).tag(TEXTS)[0].spans]
    body = {"inputs": TEXTS, "parameters": {"aggregation_strategy": "none", "ignore_labels": []}}
    rows = server.post_json("/", body)
    assert [len(row) for row in rows] == [3, 6]
    assert "entity" in rows[0][0]


def test_question_answering(client: InferenceClient, small: Any, server: Running) -> None:
    wanted = Reader(small).answer("find cat ?", TEXTS[1], top_k=3)
    found = client.question_answering("find cat ?", TEXTS[1])
    assert (found.answer, found.start) == (wanted.best.text, wanted.best.start)
    several = client.question_answering("find cat ?", TEXTS[1], top_k=3)
    assert [row.answer for row in several] == [answer.text for answer in wanted.answers]
    body = {"inputs": [{"question": "find cat ?", "context": text} for text in TEXTS]}
    assert server.post_json("/", body)[1]["answer"] == wanted.best.text
    maybe = body | {"parameters": {"handle_impossible_answer": True}}
    assert {"answer", "score", "start", "end"} == {*server.post_json("/", maybe)[0]}


def test_zero_shot_classification(client: InferenceClient, small: Any, server: Running) -> None:
    wanted = ZeroShot(small).classify(TEXTS, ["cat", "dog", "mat"])
    found = client.zero_shot_classification(TEXTS[0], ["cat", "dog", "mat"])
    assert {row.label: row.score for row in found} == pytest.approx(wanted[0].scores, abs=1e-5)
    assert found[0].label == wanted[0].label
    rows = server.post_json("/", {"inputs": TEXTS, "parameters": {"candidate_labels": "cat, dog, mat"}})
    assert [row[0]["label"] for row in rows] == [result.label for result in wanted]
    assert server.post("/", {"inputs": "a", "parameters": {"candidate_labels": []}}).status_code == 400


def test_parameters_without_a_hint_are_answered_by_the_heads_of_the_model(server: Running) -> None:
    def keys(model: str) -> Any:
        reply = server.post_json("/", {"inputs": "a cat sat", "parameters": {}, "model": model})
        first = reply[0][0] if reply and isinstance(reply[0], list) else reply
        return sorted(first) if isinstance(first, dict) else type(first)

    assert keys("classify") == keys("small") == ["label", "score"]
    assert keys("embed") is float
    tagged = server.post_json("/", {"inputs": "a cat sat", "parameters": {"ignore_labels": []}, "model": "tag"})
    assert "entity_group" in tagged[0]
    cut = server.post_json("/", {"inputs": "a cat sat", "parameters": {"dimensions": 4}})
    assert len(cut[0]) == 4


@pytest.mark.parametrize("path", ["/", "/invocations"])
def test_without_parameters_the_type_of_the_model_decides(server: Running, path: str) -> None:
    """As the router of text-embeddings-inference registers these two routes."""
    tei = Tei(server.url)
    assert tei(path, inputs=TEXTS, model="embed") == tei("/embed", inputs=TEXTS, model="embed")
    assert tei(path, inputs=TEXTS) == tei("/embed", inputs=TEXTS, model="small"), "the first model, if none is named"
    assert tei(path, inputs=TEXTS[0], model="classify") == tei("/predict", inputs=TEXTS[0], model="classify")
    ranking = {"query": "find cat", "texts": TEXTS, "model": "rerank", "raw_scores": True}
    assert tei(path, **ranking) == tei("/rerank", **ranking)
    status, message, kind = refused(tei, path, inputs=TEXTS, model="rerank")
    assert (status, kind) == (422, "Validation")
    assert message.startswith("query: ")
    assert refused(tei, path, inputs=3)[0] == 422
