from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bertie import Embedder, Index, Reader
from bertie.serve.registry import Registry
from tests.serve.conftest import Start

pytest.importorskip("bm25s")


def test_ask(start: Start, registry: Registry, tmp_path: Any) -> None:
    """The same answers as from Python, with the passages but without the paths of files."""
    with Index.create(tmp_path / "index", Embedder(registry["embed"].checkpoint)) as index:
        index.add([{"id": f"d{i}", "text": text} for i, text in enumerate(("a cat sat on the mat", "the dog ran"))])
        reader = Reader(registry["small"].checkpoint)  # the first with a head for it
        local = [index.ask(question, 2, reader=reader, top_k=2) for question in ("the dog", "mat")]
        server = start(index=(index, "embed"))
        reply = server.post_json("/ask", {"questions": ["the dog", "mat"], "passages": 2, "top_k": 2})
        none = server.post_json("/ask", {"questions": "mat", "no_answer_threshold": 0})["results"][0]
        single = server.post_json("/ask", {"question": "mat", "no_answer_threshold": 0})["results"][0]
        assert single["answers"] == none["answers"]
        refused = server.post("/ask", {"questions": "mat", "passages": 0})
    assert (reply["model"], reply["passages"], len(reply["results"])) == ("embed", 2, 2)
    for result, expected in zip(reply["results"], local, strict=True):
        assert result["no_answer_score"] == pytest.approx(expected.no_answer_score, abs=1e-5)
        assert result["tokens_read"] == expected.tokens_read
        for answer, other in zip(result["answers"], map(asdict, expected.answers), strict=True):
            for name in ("text", "document", "start", "end"):
                assert answer[name] == other[name]
            assert answer["score"] == pytest.approx(other["score"], abs=1e-5)
            assert answer["passage"]["text"] == other["passage"]["text"]
            assert "source" not in answer["passage"]
    assert (none["answers"], none["question"]) == ([], "mat")
    assert refused.status_code == 422
