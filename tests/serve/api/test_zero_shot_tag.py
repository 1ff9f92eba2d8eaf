"""POST /tag with labels, directly and through the client."""

from __future__ import annotations

from bertie import Client, ZeroShotTagger
from bertie.serve.registry import Registry
from tests.parity.gliner_reference import FOLDER, LABELS, TEXTS
from tests.serve.conftest import Start


def test_tag_with_labels(start: Start) -> None:
    """The same spans as from Python; texts of one request and of several share batches."""
    with_spans = Registry({"entities": str(FOLDER / "lstm")}, devices=["cpu"])
    try:
        server = start(over=with_spans)
        options = {"labels": LABELS[0], "threshold": 0.6}
        reply = server.post_json("/tag", {"texts": [*TEXTS, " ".join(TEXTS) * 4], **options})
        local = ZeroShotTagger.load(FOLDER / "lstm").tag([*TEXTS, " ".join(TEXTS) * 4], LABELS[0], threshold=0.6)
        assert reply["model"] == "entities"
        assert reply["head"] == "span"
        for result, expected in zip(reply["results"], local, strict=True):
            assert result["windows"] == expected.windows
            assert [span["text"] for span in result["spans"]] == [span.text for span in expected.spans]
        with Client(server.url) as client:
            found = client.zero_shot_tag(TEXTS, LABELS[0], threshold=0.6)
        assert [[span.text for span in result.spans] for result in found] == [
            [span.text for span in result.spans] for result in local[: len(TEXTS)]
        ]
        for body, message in (
            ({"labels": []}, "labels"),
            ({"flat": False}, "require `labels`"),
            ({"labels": ["a", "a"]}, "distinct"),
            ({"labels": ["a"], "threshold": 2}, "threshold"),
            ({}, "a token-classification head"),
        ):
            refused = server.post("/tag", {"texts": "a", **body})
            assert 400 <= refused.status_code < 500, refused.text
            assert message in refused.text
    finally:
        with_spans.close()


def test_models_without_a_span_head_say_so(start: Start) -> None:
    refused = start().post("/tag", {"texts": "a", "labels": ["person"]})
    assert refused.status_code in (400, 404, 422, 424, 501)
    assert "a span head, as GLiNER models have" in refused.text
